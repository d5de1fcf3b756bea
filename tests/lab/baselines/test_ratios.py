"""Likelihood ratio, WAIC and input complexity, with one network and with several."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from gaussians import D, distance2, gaussian, method, passes, run, sample
from toys import pictures, toy_backbone

import gepc
from gepc.backbones.base import Backbone
from gepc.backbones.schedule import cosine_alphas_cumprod, rho_of
from gepc.core.errors import OptionError
from gepc.images.batches import Chunk
from gepc.images.noise import image_key
from gepc.lab.baselines.ratios import checkpoint, packed_bits
from gepc.methods.base import Batch, Extractor, find_method
from gepc.methods.extraction import ExtractionSpec, FeatureCache

pytestmark = pytest.mark.usefixtures("trusted")

# --- one network -----------------------------------------------------------------------------------------------------

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


# --- several networks ------------------------------------------------------------------------------------------------

# Methods that compare several networks (likelihood ratio with a background, WAIC), and IC with two compressors.

IMAGES = pictures(2, 16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_net) -> tuple[str, str]:
    """The tiny network, and the same with other weights."""
    from diffusers import DDPMScheduler, UNet2DModel

    with torch.random.fork_rng():
        torch.manual_seed(1)
        other = UNet2DModel.from_config(tiny_net.config)
    found = []
    for name, net in (("one", tiny_net), ("two", other)):
        folder = tmp_path_factory.mktemp("nets") / name
        net.save_pretrained(folder)
        DDPMScheduler(beta_schedule="squaredcos_cap_v2").save_pretrained(folder)
        found.append(str(folder))
    return found[0], found[1]


def table_of(extractor: Extractor, backbone: Backbone) -> dict[str, np.ndarray]:
    batch = Batch(IMAGES, [image_key(image) for image in IMAGES])
    return extractor.extract(backbone, batch, extractor.timesteps(backbone))


def passes_of(extractor: Extractor, backbone: Backbone) -> int:
    before = backbone.forward_count
    table_of(extractor, backbone)
    return (backbone.forward_count - before) // len(IMAGES)


def test_likelihood_ratio_with_a_background(folders: tuple[str, str]) -> None:
    """bpd - bpd of the background, both as nll_vlb gives them; nothing where the two networks are the same."""
    one, two = (gepc.load_backbone(folder) for folder in folders)
    extractor = find_method("lr")(background=folders[1])  # type: ignore[call-arg]
    bounds = [table_of(find_method("nll_vlb")(), net)["bpd"][:, 0] for net in (one, two)]
    np.testing.assert_allclose(extractor.columns(table_of(extractor, one))[:, 0, 0], bounds[0] - bounds[1], rtol=1e-9)
    same = find_method("lr")(background=folders[0])  # type: ignore[call-arg]
    assert (same.columns(table_of(same, one)) == 0.0).all()
    assert passes_of(extractor, one) == extractor.cost(one, (16, 16)).forward == 66
    assert extractor.label == "lr[2 models]"


def test_waic_over_an_ensemble(folders: tuple[str, str]) -> None:
    """Mean and variance over the models, each model's bound averaged over draws."""
    one = gepc.load_backbone(folders[0])
    extractor = find_method("waic")(checkpoints=[folders[1]], strata=3, draws=2)  # type: ignore[call-arg]
    alone = find_method("waic")(strata=3, draws=2)  # type: ignore[call-arg]
    models = [table_of(alone, net)["nll"][:, 0].mean(1) for net in (one, checkpoint(folders[1]))]
    expected = np.mean(models, axis=0) + np.var(models, axis=0, ddof=1)
    np.testing.assert_allclose(extractor.columns(table_of(extractor, one))[:, 0, 0], expected, rtol=1e-9)
    assert passes_of(extractor, one) == extractor.cost(one, (16, 16)).forward == 2 * 2 * 4
    assert extractor.label == "waic[2 models]"


def test_a_detector_with_a_second_network_is_saved_with_it(folders: tuple[str, str], tmp_path: Path) -> None:
    backbone = gepc.load_backbone(folders[0])
    images = pictures(24, 16, seed=1)
    detector = gepc.create_detector(backbone, "waic", checkpoints=(folders[1],), strata=2, draws=1).fit(images)
    detector.save(tmp_path / "det")
    np.testing.assert_allclose(gepc.load_detector(tmp_path / "det").score(IMAGES), detector.score(IMAGES), rtol=1e-5)


def test_the_cache_tells_second_networks_apart(folders: tuple[str, str], tmp_path: Path) -> None:
    backbone, cache = gepc.load_backbone(folders[0]), FeatureCache(tmp_path)
    chunk = Chunk(list(range(len(IMAGES))), [""] * len(IMAGES), [image_key(image) for image in IMAGES], list(IMAGES))
    for folder in folders:
        spec = ExtractionSpec(find_method("lr")(background=folder), (0,))  # type: ignore[call-arg]
        kept = [cache.extract(backbone, spec, spec.batch(chunk))["bpd"] for _ in range(2)]
        np.testing.assert_array_equal(kept[0], kept[1])
    assert (cache.hits, cache.misses) == (2, 2)


def test_a_second_network_must_fit(folders: tuple[str, str]) -> None:
    grey = toy_backbone(channels=1, image_size=16)
    batch = Batch(IMAGES[:, :1], [image_key(image) for image in IMAGES])
    with pytest.raises(OptionError, match="has 3 channels, the backbone 1"):
        find_method("lr")(background=folders[0]).extract(grey, batch, (0,))  # type: ignore[call-arg]


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
