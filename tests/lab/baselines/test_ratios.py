"""Likelihood ratio, WAIC and input complexity."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from gaussians import D, distance2, gaussian, method, passes, run, sample
from toys import pictures, toy_backbone

import gepc
from gepc.backbones.base import Backbone
from gepc.backbones.schedule import cosine_alphas_cumprod, rho_of
from gepc.core.errors import GepcError, OptionError
from gepc.core.files import read_json, write_json
from gepc.images.noise import image_key
from gepc.lab.baselines.ratios import packed_bits
from gepc.methods.base import Batch, Extractor, find_method

pytestmark = pytest.mark.usefixtures("trusted")

# Methods that read a likelihood: input complexity, typicality, density of states, WAIC, likelihood ratio.

RNG = np.random.default_rng(0)


def test_the_compressor_orders_by_complexity() -> None:
    """Constant << blocks < noise; uniform noise takes 8.0 to 8.6 bits a dimension."""
    blocks = np.kron(RNG.integers(0, 256, (3, 8, 8)), np.ones((1, 4, 4))) / 127.5 - 1
    noise = RNG.integers(0, 256, (3, 32, 32)) / 127.5 - 1
    bits = [packed_bits(image.astype(np.float32), "png") for image in (np.zeros((3, 32, 32)), blocks, noise)]
    assert 4 * bits[0] < bits[1] < bits[2]
    assert 8.0 <= bits[2] / 3072 <= 8.6
    assert packed_bits(noise[:1].astype(np.float32), "png") < bits[2] / 2
    assert packed_bits(np.concatenate([noise, noise[:1]]).astype(np.float32), "png") > bits[2]


def test_complexity_is_taken_from_the_bound() -> None:
    """S = bpd - L/D: slope one in the bound, the same bound as the likelihood's."""
    extractor, images = method("ic"), np.clip(sample(4), -1, 1)
    table = run(extractor, images)
    np.testing.assert_array_equal(table["bpd"], run(method("nll_vlb"), images)["bpd"])
    png = np.array([packed_bits(image, "png") for image in images]) / D
    np.testing.assert_allclose(extractor.columns(table)[:, 0, 0], table["bpd"][:, 0] - png)
    assert passes(extractor, gaussian(), 1) == (33, 0)


def test_waic() -> None:
    """mean + variance/D over draws, in nats of the image; per dimension."""
    extractor, images = method("waic", draws=4, strata=8), sample(3)
    table = run(extractor, images)
    nats = table["nll"][:, 0] * D
    np.testing.assert_allclose(extractor.columns(table)[:, 0, 0], (nats.mean(1) + nats.var(1, ddof=1) / D) / D)
    assert passes(extractor, gaussian(), 1) == (36, 0)
    with pytest.raises(OptionError, match="draws must be at least 2, got 1"):
        method("waic", draws=1)


def test_likelihood_ratio() -> None:
    """Losses have their closed expectation; the column is the weighted difference; two-sided."""
    extractor = method("lr", levels="rho:0.1,0.5,1,3")
    images = sample(500, 0.8)
    table = run(extractor, images)
    rho = rho_of(gaussian().alphas_cumprod)[list(extractor._timesteps(gaussian()))]  # type: ignore[attr-defined]
    expected = (rho**2 * distance2(images)[:, None] + 0.5**4 * D) / (0.25 + rho**2) ** 2 / D
    gap = table["loss"][:, 0] - expected
    assert (np.abs(gap.mean(0)) < 4 * gap.std(0) / np.sqrt(500)).all()
    loss = table["loss"][:, 0]
    by_hand = loss[:, :2] @ [1 / 3, 2 / 3] - loss @ [0.1, 0.2, 0.3, 0.4]
    np.testing.assert_allclose(extractor.columns(table)[:, 0, 0], by_hand)
    assert passes(method("lr"), gaussian(), 1) == (16, 0)
    assert passes(method("lr"), gaussian(cosine_alphas_cumprod(100)), 1)[0] <= 16
    with pytest.raises(OptionError, match="fraction"):
        method("lr", fraction=1.0)


IMAGES = pictures(2, 16)


def table_of(extractor: Extractor, backbone: Backbone) -> dict[str, np.ndarray]:
    batch = Batch(IMAGES, [image_key(image) for image in IMAGES])
    return extractor.extract(backbone, batch, extractor.timesteps(backbone))


def test_the_best_of_two_compressors() -> None:
    """WebP is lossless, and L is the smaller of the two for each image."""
    from PIL import Image

    from gepc.lab.baselines.ratios import _SAVE, _picture, packed_bits

    images = np.concatenate([IMAGES, np.zeros((1, 3, 16, 16), dtype=np.float32)])
    for image in images:
        packed = BytesIO()
        _picture(image).save(packed, **_SAVE["webp"])
        assert 8 * packed.getbuffer().nbytes == packed_bits(image, "webp")
        np.testing.assert_array_equal(np.asarray(Image.open(packed).convert("RGB")), np.asarray(_picture(image)))
    both = find_method("ic")(compressors=("png", "webp"), strata=2)  # type: ignore[call-arg]
    table = table_of(both, toy_backbone(image_size=16))
    smaller = np.minimum(table["png"], table["webp"])
    np.testing.assert_allclose(both.columns(table)[:, :, 0], table["bpd"] - smaller)
    assert both.label == "ic[png+webp]"
    with pytest.raises(OptionError, match="did you mean 'webp'"):
        find_method("ic")(compressors="web")  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="at least one compressor"):
        find_method("ic")(compressors=())  # type: ignore[call-arg]


@pytest.mark.parametrize(("name", "retired"), [("lr", {"background": None}), ("waic", {"checkpoints": []})])
def test_detectors_of_earlier_versions_load(name: str, retired: dict[str, object], tmp_path: Path) -> None:
    """They name an option for further networks, which is gone."""
    backbone, images = gaussian(), np.clip(sample(24, 0.5), -1, 1)
    detector = gepc.create_detector(backbone, name).fit(images)
    detector.save(tmp_path / "det")
    description = read_json(tmp_path / "det" / "detector.json")
    write_json(tmp_path / "det" / "detector.json", {**description, "options": {**description["options"], **retired}})
    assert np.array_equal(gepc.load_detector(tmp_path / "det", backbone).score(images), detector.score(images))
    used = dict.fromkeys(retired, "someone/else")
    write_json(tmp_path / "det" / "detector.json", {**description, "options": {**description["options"], **used}})
    with pytest.raises(GepcError, match=f"no option '{next(iter(retired))}'"):
        gepc.load_detector(tmp_path / "det", backbone)
