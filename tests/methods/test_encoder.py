"""The method `encoder`: a feature network of others, its memory of positions, and its maps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from toys import pictures, toy_backbone, toy_encoder

import gepc
from gepc.calibration.joint import LevelMemory, farthest_first
from gepc.calibration.memory import LevelLocalMemory
from gepc.core.errors import BackboneError, OptionError


def detector(**options: object) -> gepc.Detector:
    """A detector that looks through the toy encoder at images of 16x16."""
    return gepc.create_detector(toy_backbone(image_size=None), "encoder", encoder=toy_encoder(), size=16, **options)


@pytest.mark.parametrize("positions", ["memory", "gaussian"])
def test_the_map_points_at_what_no_image_has(positions: str) -> None:
    """A bright square raises the map where it is, and the score by the map."""
    fitted = detector(positions=positions, score_from="map").fit(pictures(60, size=16))
    images = pictures(4, size=16, seed=1)
    usual = fitted.score(images)
    images[:, :, 8:12, 4:8] = 1.0
    maps = fitted.score_map(images)
    assert (maps[:, 8:12, 4:8].mean((1, 2)) > maps[:, :4, 8:].mean((1, 2))).all()
    assert (fitted.score(images) > usual).all()


def test_maps_are_compared_with_the_id_set() -> None:
    """A defect that fills the image raises its whole map: there is no median to hide behind."""
    fitted = detector(score_from="map").fit(pictures(60, size=16))
    images = pictures(4, size=16, seed=1)
    lighter = np.clip(images + 1.0, -0.9, 1.0)
    lighter[:, :, 0, 0] = -0.9
    assert (np.median(fitted.score_map(lighter), axis=(1, 2)) > np.median(fitted.score_map(images), axis=(1, 2))).all()


def test_no_pass_of_the_diffusion_network_is_made() -> None:
    backbone = toy_backbone(image_size=None)
    fitted = gepc.create_detector(backbone, "encoder", encoder=toy_encoder(), size=16).fit(pictures(40, size=16))
    fitted.score_map(pictures(2, size=16))
    assert backbone.forward_count == 0


def test_a_saved_detector_finds_its_encoder_by_the_digest(tmp_path: Path) -> None:
    """The user who saved the detector finds the file again; a folder that names other weights is refused."""
    fitted = detector().fit(pictures(40, size=16))
    fitted.save(tmp_path / "det")
    images = pictures(3, size=16, seed=1)
    again = gepc.load_detector(tmp_path / "det", toy_backbone(image_size=None))
    np.testing.assert_allclose(again.score(images), fitted.score(images), rtol=1e-6)
    text = (tmp_path / "det" / "detector.json").read_text()
    digest = fitted.extractor.options()["encoder"]["sha256"]
    (tmp_path / "det" / "detector.json").write_text(text.replace(digest, "0" * 64))
    with pytest.raises(BackboneError, match="is not opened"):
        gepc.load_detector(tmp_path / "det", toy_backbone(image_size=None)).score(images)


def test_an_encoder_must_be_named() -> None:
    with pytest.raises(OptionError, match="needs a feature network"):
        gepc.create_detector(toy_backbone(), "encoder").fit(pictures(40))


def test_the_memory_is_near_every_vector() -> None:
    """Greedy k-centre: the farthest vector is at most twice as far as with the best choice; here, in clusters."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((5, 3)) * 100.0
    vectors = (centres[:, None] + rng.standard_normal((5, 40, 3))).reshape(-1, 3)
    chosen = vectors[farthest_first(vectors, 5)]
    distance = np.linalg.norm(vectors[:, None] - chosen[None], axis=2).min(axis=1)
    assert distance.max() < 20.0
    assert farthest_first(vectors[:3], 5).tolist() == [0, 1, 2]


def test_the_distance_is_that_to_the_nearest_whitened_vector() -> None:
    columns = np.random.default_rng(0).standard_normal((50, 2, 4)) * (1.0, 5.0, 0.1, 1.0)
    memory = LevelMemory(size=100).fit(columns)
    new = np.random.default_rng(1).standard_normal((7, 2, 4))
    for level in range(2):
        values, axes = np.linalg.eigh(np.cov(columns[:, level], rowvar=False))
        white = axes / np.sqrt(values + 0.05 * values.mean())
        squares = ((((new[:, level, None] - columns[None, :, level]) @ white) ** 2).sum(2)).min(1)
        np.testing.assert_allclose(memory.per_level(new)[:, level], squares, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(memory.per_level(columns), 0.0, atol=1e-3)


def test_a_distance_counts_less_where_the_memory_is_sparse() -> None:
    """The same distance from a cluster of spread 0.1 is more unusual than from one of spread 1."""
    rng = np.random.default_rng(0)
    columns = np.concatenate([rng.normal(-20.0, 0.1, (50, 1, 3)), rng.normal(20.0, 1.0, (50, 1, 3))])
    new = np.array([[[-25.0] * 3], [[25.0] * 3]])
    plain, local = (kind(size=100).fit(columns).per_level(new)[:, 0] for kind in (LevelMemory, LevelLocalMemory))
    assert plain[0] == pytest.approx(plain[1], rel=0.6)
    assert local[0] > 3.0 * local[1]


def test_copies_in_a_memory_have_a_finite_scale() -> None:
    columns = np.repeat(np.random.default_rng(0).standard_normal((9, 1, 3)), 8, axis=0)
    for size in (1, 3, 72):
        memory = LevelLocalMemory(size=size).fit(columns)
        assert np.isfinite(memory.per_level(columns + 1.0)).all()
        restored = LevelLocalMemory(size=size).restore(memory.state())
        np.testing.assert_array_equal(restored.per_level(columns + 1.0), memory.per_level(columns + 1.0))


def test_padding_does_not_raise_the_map_near_the_border() -> None:
    """The zeros around a bright image disturb three cells of 8 pixels; good images have no higher values there."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = torch.nn.Conv2d(1, 6, 8, stride=8)
        net = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Conv2d(6, 6, 7, padding=3), torch.nn.Tanh())
    encoder = gepc.Encoder.load(net, ("2",), mean=(0.0,), std=(0.2,), device="cpu")
    images = np.random.default_rng(0).uniform(-0.1, 0.8, (50, 1, 96, 96)).astype(np.float32)
    backbone = toy_backbone(channels=1, image_size=None)
    fitted = gepc.create_detector(backbone, "encoder", encoder=encoder, resize="native").fit(images[:40])
    maps = fitted.score_map(images[40:])
    near, inside = maps[:, 8:24, 32:64].mean(), maps[:, 32:64, 32:64].mean()
    assert abs(near - inside) < 0.3
