"""Tests of symmetries keep their level, choose as one expects for oriented data, and are stored with the detector."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from toys import toy_backbone, toy_network

import gepc
from gepc.core.errors import InputError, OptionError
from gepc.core.rates import holm
from gepc.images.batches import MAX_CHUNK_PIXELS, MAX_IMAGE_PIXELS
from gepc.images.noise import image_key
from gepc.lab.analytic import GaussianBackbone
from gepc.methods.base import Batch
from gepc.methods.gepc import GepcExtractor
from gepc.methods.groups import Group, find_action
from gepc.methods.symmetries import LEAST_IMAGES, LEVEL, MOST_BYTES, choose, examine, invariance_p, residuals

Images = npt.NDArray[np.float32]


def batch_of(images: npt.NDArray[np.float64], seed: int = 0) -> Batch:
    pixels = images.astype(np.float32)
    return Batch(pixels, [image_key(image) for image in pixels], seed, 64)


def textures(count: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """White noise: its law is invariant under flips, turns and shifts."""
    return np.random.default_rng(seed).uniform(-1, 1, (count, 1, 8, 8))


def lit_from_above(count: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Bright above and dark below, as photographs are; invariant under the left-right mirror."""
    light = np.linspace(0.6, -0.6, 8)[:, None]
    return (light + 0.3 * np.random.default_rng(seed).standard_normal((count, 1, 8, 8))).clip(-1, 1)


def test_the_test_keeps_its_level() -> None:
    """Under invariance p-values are at most uniform: 60 sets, 12 or more below 0.1 have probability 0.02."""
    p = [invariance_p(batch_of(textures(20, seed), seed), find_action("flip_y")) for seed in range(60)]
    assert sum(value <= 0.1 for value in p) < 12
    assert np.median(p) > 0.2


def test_the_test_finds_what_is_not_a_symmetry() -> None:
    batch = batch_of(lit_from_above(60))
    assert invariance_p(batch, find_action("flip_y")) <= 0.01
    assert invariance_p(batch, find_action("rotate(-180..180)#1")) <= 0.01
    assert invariance_p(batch, find_action("flip_x")) > 0.05


def test_the_test_does_not_depend_on_the_order_of_the_images() -> None:
    images = lit_from_above(40)
    first, second = (invariance_p(batch_of(x), find_action("rot180")) for x in (images, images[::-1]))
    assert first == second


def test_what_is_measured_for_each_action() -> None:
    batch = batch_of(lit_from_above(40))
    method = gepc.GEPC(backbone := toy_backbone(1), levels=(0.99, 0.9)).extractor
    evidence, residuals = examine(method, backbone, batch, Group.of(["flip_x", "scale(1.2)", "gain(2)"]))  # type: ignore[arg-type]
    assert [item.action for item in evidence] == ["flip_x", "scale(1.2)", "gain(2)"]
    assert residuals.shape == (40, 3)
    assert [item.operator_error > 0.01 for item in evidence] == [False, True, True]
    assert json.loads(json.dumps(evidence[0].as_dict()))["residual"] == pytest.approx(residuals[:, 0].mean(), rel=1e-3)


def test_auto_leaves_out_what_turns_oriented_images_upside_down() -> None:
    images = lit_from_above(60)
    backbone = GaussianBackbone.fitted(lit_from_above(400, seed=1))
    group, evidence = choose(gepc.GEPC(backbone).extractor, backbone, batch_of(images))  # type: ignore[arg-type]
    names = {name.rpartition("*")[2] for name in group.names}
    assert not names & {"flip_y", "rot90", "rot180", "rotate(-180..180)#1"}
    assert names & {"flip_x", "shift_x"}
    reasons = {item.action: item.reason for item in evidence}
    assert "not invariant" in reasons["flip_y"]
    assert np.mean([item.weight for item in evidence if item.weight]) == pytest.approx(1.0, abs=0.01)


def test_auto_is_chosen_while_fitting_and_stored_with_its_reasons(tmp_path: Path) -> None:
    images = lit_from_above(90)
    backbone = toy_backbone(1)
    detector = gepc.GEPC(backbone, levels=(0.9,), keep=1, group="auto", maps="raw").fit(images)
    assert detector.extractor.options()["group"].auto
    with pytest.raises(OptionError, match="chosen by fit"):
        detector.features(images[:2])
    chosen = detector.fitted.options["group"]
    assert "auto" not in chosen
    assert not {"flip_y", "rot180"} & {name.rpartition("*")[2] for name in chosen}
    detector.save(tmp_path / "det")
    stored = json.loads((tmp_path / "det" / "detector.json").read_text())
    assert stored["options"]["group"] == chosen
    assert {item["action"] for item in stored["fitted"]["group_choice"]} >= {"flip_x", "rot90"}
    loaded = gepc.load_detector(tmp_path / "det", backbone)
    assert loaded.fitted.group_choice == detector.fitted.group_choice
    np.testing.assert_array_equal(loaded.score(images[:3]), detector.score(images[:3]))


def test_auto_does_not_look_at_calibration_images() -> None:
    """Other calibration images, same choice: p-values stay exchangeable."""
    images, others = textures(40), [lit_from_above(12, seed) for seed in (5, 6)]
    detectors = [
        gepc.GEPC(toy_backbone(1), levels=(0.9,), keep=1, group="auto", maps="raw").fit(images, calibration_images=x)
        for x in others
    ]
    assert detectors[0].fitted.group_choice == detectors[1].fitted.group_choice


def test_auto_keeps_an_action_for_inner_layers() -> None:
    images = np.repeat(lit_from_above(90), 3, axis=1)
    detector = gepc.create_detector(toy_network(), "gepc+", group="auto", features=("s", "inner"), maps="raw")
    names = detector.fit(images).fitted.options["group"]
    assert any(action.on_layers for action in Group.of(names))


def test_auto_on_a_network_that_is_equivariant_under_some_actions() -> None:
    """Their residual is exactly zero, so it separates nothing."""
    backbone = gepc.Backbone.from_callable(lambda x, t: x * x.flip(-1), toy_backbone().alphas_cumprod, 1, 8)
    _, evidence = choose(gepc.GEPC(backbone).extractor, backbone, batch_of(textures(30)))  # type: ignore[arg-type]
    reasons = {item.action: item.reason for item in evidence}
    assert reasons["flip_y"] == "its residual does not separate synthetic outliers"
    assert "hue(120)" not in reasons


def test_auto_needs_images_to_read_twice_and_enough_of_them() -> None:
    detector = gepc.GEPC(toy_backbone(1), levels=(0.9,), keep=1, group="auto")
    with pytest.raises(InputError, match="reads the images twice"):
        detector.fit(iter(textures(40)))
    with pytest.raises(InputError, match="at least 16 images"):
        detector.fit(textures(20))


@pytest.mark.skipif("GEPC_DATA" not in os.environ, reason="GEPC_DATA names no folder with data sets")
def test_faces_and_digits_are_upright() -> None:
    """Real data: faces keep the mirror and lose what turns them over; digits lose the mirror, too."""
    from sklearn.datasets import load_digits

    faces = np.load(Path(os.environ["GEPC_DATA"]) / "celeba32.npz")["test_x"][:160].transpose(0, 3, 1, 2) / 127.5 - 1
    digits = load_digits().images[:160, None] / 8.0 - 1
    for images, upright in ((faces, ["flip_x"]), (digits, [])):
        p = [invariance_p(batch_of(images), find_action(name)) for name in ("flip_x", "flip_y", "rot90", "rot180")]
        rejected = holm(p, LEVEL)
        held = [name for name, no in zip(("flip_x", "flip_y", "rot90", "rot180"), rejected, strict=True) if not no]
        assert held == upright


def test_enough_of_the_largest_images_are_kept() -> None:
    largest = 3 * 4 * MAX_IMAGE_PIXELS  # bytes
    assert LEAST_IMAGES * largest <= MOST_BYTES * 2 / 3  # a third may be held out


def test_no_network_call_has_more_images_or_pixels_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    network = toy_backbone(1)

    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return network.eps(x, t)

    backbone = gepc.Backbone.from_callable(eps, network.alphas_cumprod, 1, 8)
    batch, method, group = batch_of(textures(20)), GepcExtractor(), Group.of("flips")
    found = residuals(method, backbone, batch, group)
    assert max(calls) > 6
    for rows, most_pixels in ((6, MAX_CHUNK_PIXELS), (64, 6 * 64)):
        calls.clear()
        monkeypatch.setattr("gepc.images.batches.MAX_CHUNK_PIXELS", most_pixels)
        np.testing.assert_allclose(residuals(method, backbone, replace(batch, rows=rows), group), found, rtol=1e-5)
        assert max(calls) == 6
