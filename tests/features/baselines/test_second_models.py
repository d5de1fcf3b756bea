"""Methods that compare several networks (likelihood ratio with a background, WAIC), and IC with two compressors."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import pictures, toy_backbone

import gepc
from gepc.backbones.base import Backbone
from gepc.core.errors import OptionError
from gepc.features.base import Batch, Extractor, find_method
from gepc.features.baselines.second_models import checkpoint
from gepc.features.extraction import ExtractionSpec, FeatureCache
from gepc.images.batches import Chunk
from gepc.images.noise import image_key

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
    detector = gepc.create_detector("waic", backbone, checkpoints=(folders[1],), strata=2, draws=1).fit(images)
    detector.save(tmp_path / "det")
    np.testing.assert_allclose(gepc.load_detector(tmp_path / "det").score(IMAGES), detector.score(IMAGES), rtol=1e-5)


def test_the_cache_tells_second_networks_apart(folders: tuple[str, str], tmp_path: Path) -> None:
    backbone, cache = gepc.load_backbone(folders[0]), FeatureCache(tmp_path)
    chunk = Chunk(list(range(len(IMAGES))), [""] * len(IMAGES), [image_key(image) for image in IMAGES], list(IMAGES))
    for folder in folders:
        spec = ExtractionSpec(find_method("lr")(background=folder), (0,))  # type: ignore[call-arg]
        kept = [cache.extract(backbone, spec, chunk)[0]["bpd"] for _ in range(2)]
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

    from gepc.features.baselines.ic import _SAVE, _picture, packed_bits

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
