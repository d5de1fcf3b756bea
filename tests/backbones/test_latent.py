"""Latent backbones: an orthogonal encoder around a pixel network changes nothing that it should not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from toys import LEVELS, pictures, toy_backbone

import gepc
from gepc.core.errors import BackboneError, OptionError
from gepc.images import noise
from gepc.images.noise import image_key
from gepc.methods.base import Cost
from gepc.methods.groups import IDENTITY, Action, Group

HADAMARD = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2.0
IMAGES = pictures(12, seed=3)
OPTIONS: dict[str, Any] = {"levels": LEVELS[:2], "keep": None, "pool": "mean", "features": ("s", "b", "d")}


def encode(x: torch.Tensor) -> torch.Tensor:
    """The Hadamard transform of every 2x2 block: C -> 4C, orthogonal."""
    blocks = torch.nn.functional.pixel_unshuffle(x, 2).unflatten(1, (-1, 4))
    return torch.einsum("ij,ncjhw->ncihw", HADAMARD.to(x), blocks).flatten(1, 2)


def decode(z: torch.Tensor) -> torch.Tensor:
    """The inverse, which is the transpose."""
    blocks = torch.einsum("ji,ncjhw->ncihw", HADAMARD.to(z), z.unflatten(1, (-1, 4)))
    return torch.nn.functional.pixel_shuffle(blocks.flatten(1, 2), 2)


def in_latents(pixel: gepc.Backbone, act_on: str = "latents", image_size: int | None = 4) -> gepc.Backbone:
    """eps_z(z, t) = E eps(D z, t), behind the encoder E."""
    inner = gepc.Backbone.from_callable(
        lambda z, t: encode(pixel.eps(decode(z), t)), pixel.alphas_cumprod, channels=12, image_size=image_size
    )
    return inner.with_encoder(encode, factor=2, channels=3, act_on=act_on)


def carried(action: Action) -> Action:
    """E P_g D: the action on pixels as an action on latents."""
    return Action(
        f"carried {action.name}", lambda z: encode(action.apply(decode(z))), lambda z: encode(action.inverse(decode(z)))
    )


def mean_pool(x: torch.Tensor) -> torch.Tensor:
    """An encoder that commutes with flips, turns and shifts by whole cells."""
    return torch.nn.functional.avg_pool2d(x, 2)


def test_an_orthogonal_encoder_keeps_every_energy() -> None:
    """d and b as they are, and s with the group carried through the encoder, are those of the pixel network."""
    group = Group.of("paper")
    pixel = gepc.GEPC(toy_backbone(), group=group, **OPTIONS)
    latent = gepc.GEPC(in_latents(toy_backbone()), group=Group((IDENTITY, *map(carried, group.moving))), **OPTIONS)
    fields = np.random.default_rng(0).standard_normal((2, 12, 3, 8, 8)).astype(np.float32)
    moved = np.stack([encode(torch.from_numpy(field)).numpy() for field in fields])
    expected, found = pixel.features(IMAGES, fields), latent.features(IMAGES, moved)
    for name in ("s", "b", "d"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-4)
    assert expected["s"][:, :, 1:].min() > 1e-3


def test_the_noise_of_latents_is_keyed_by_the_pixels() -> None:
    backbone = in_latents(toy_backbone())
    detector = gepc.GEPC(backbone, **OPTIONS)
    keys = [image_key(image) for image in IMAGES]
    steps = detector.extractor.timesteps(backbone)
    drawn = np.stack([noise.normal(detector.seed, keys, (12, 4, 4), t) for t in steps])
    for name, values in detector.features(IMAGES, drawn).items():
        np.testing.assert_array_equal(values, detector.features(IMAGES)[name])


@pytest.mark.parametrize("act_on", ["latents", "pixels"])
def test_costs_are_counted(act_on: str) -> None:
    backbone = in_latents(toy_backbone(), act_on)
    detector = gepc.create_detector(backbone, "gepc+", "full", levels=LEVELS, keep=2)
    encoder = 1 if act_on == "latents" else 3
    assert detector.fit_cost() == Cost(12, 0, encoder)
    assert str(detector.fit_cost()) == f"12F+0J+{encoder}E"
    images = pictures(24)
    detector.fit(images)
    again = detector.map_images(16, 8)  # what is usual in maps is learnt in a second look
    assert backbone.counts == (24 * 12 + again * 6, 0, (24 + again) * encoder)
    backbone.reset_counts()
    detector.score(IMAGES)
    assert backbone.counts == (12 * 6, 0, 12 * encoder)
    assert detector.cost() == Cost(6, 0, encoder)


def test_the_group_on_pixels_is_the_group_on_latents_if_the_encoder_commutes_with_it() -> None:
    """And differs from it where the encoder does not."""

    def table(encoder: Any, act_on: str) -> Any:
        backbone = toy_backbone(3, 4).with_encoder(encoder, 2, 3, act_on)
        return gepc.GEPC(backbone, group="paper", **OPTIONS).features(IMAGES)["s"]

    np.testing.assert_allclose(table(mean_pool, "pixels"), table(mean_pool, "latents"), rtol=1e-4)

    def corner(x: torch.Tensor) -> torch.Tensor:
        return x[..., ::2, ::2]

    on_pixels, on_latents = table(corner, "pixels"), table(corner, "latents")
    turned = [1, 2, 3, 4]  # flips and turns move the corner; shifts by whole cells do not
    assert (np.abs(on_pixels - on_latents)[:, :, turned] > 1e-3).all()
    np.testing.assert_allclose(on_pixels[:, :, 5:], on_latents[:, :, 5:], rtol=1e-4)


def test_maps_come_back_at_the_resolution_of_the_images() -> None:
    """One value for each cell of 2x2 pixels."""
    detector = gepc.GEPC(in_latents(toy_backbone()), levels=LEVELS).fit(pictures(24))
    maps = detector.score_map(IMAGES, raw=True)
    assert maps.shape == (12, 8, 8)
    for row, column in ((1, 0), (0, 1), (1, 1)):
        np.testing.assert_array_equal(maps[:, row::2, column::2], maps[:, ::2, ::2])
    assert len(np.unique(maps[0])) == 16


@pytest.mark.parametrize("method", ["nll_vlb", "ic", "typicality", "lr", "waic", "lmd", "ddpm_ood"])
def test_methods_that_need_pixels_say_why(method: str) -> None:
    with pytest.raises(OptionError, match=f"'{method}' does not run on a latent backbone: it .*"):
        gepc.create_detector(in_latents(toy_backbone()), method)


def test_what_a_latent_backbone_says_of_itself() -> None:
    backbone = in_latents(toy_backbone(), "pixels")
    assert (backbone.channels, backbone.image_size, backbone.size_multiple) == (3, (8, 8), 2)
    assert backbone.network_shape((8, 8)) == (12, 4, 4)
    about = backbone.describe()
    assert about["encoder"] == {"factor": 2, "channels": 12}
    assert about["act_on"] == "pixels"


def test_encoders_that_do_not_fit() -> None:
    backbone = toy_backbone(3, 4)
    with pytest.raises(OptionError, match="has an encoder already"):
        in_latents(toy_backbone()).with_encoder(encode, 2)
    with pytest.raises(OptionError, match="act_on"):
        backbone.with_encoder(encode, 2, 3, "images")
    with pytest.raises(OptionError, match="factor must be at least 1, got 0"):
        backbone.with_encoder(encode, 0)
    wrong = backbone.with_encoder(encode, 2, 3)
    with pytest.raises(BackboneError, match=r"latents of shape \(5, 12, 4, 4\), expected \(5, 3, 4, 4\)"):
        wrong.encode(torch.zeros(5, 3, 8, 8))


def test_large_images_are_encoded_a_few_at_a_time() -> None:
    seen: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return mean_pool(x)

    backbone = toy_backbone(3, None).with_encoder(counted, 2, 3)
    backbone.encode(torch.zeros(5, 3, 512, 256))
    assert seen == [2, 2, 1]


def test_a_batch_that_does_not_fit_is_halved() -> None:
    """Until the device holds it; the answers do not change, and one image that does not fit is an error."""
    whole = toy_backbone()

    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if len(x) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole.eps(x, t)

    backbone = gepc.Backbone.from_callable(eps, whole.alphas_cumprod, 3, 8)
    x, limit = torch.from_numpy(IMAGES), 4
    torch.testing.assert_close(backbone.eps(x, 3), whole.eps(x, 3))
    assert (backbone.rows, backbone.forward_count) == (3, 12)
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        backbone.eps(x, 3)


def test_elements_on_pixels_are_counted_on_images_that_are_not_square() -> None:
    """The quarter turns of the default do not act there; rot180 stands in for them."""
    backbone = in_latents(toy_backbone(3, None), "pixels", image_size=None)
    detector = gepc.create_detector(backbone, "gepc+", levels=LEVELS[:1], size=(8, 12)).fit(pictures(24, (8, 12)))
    backbone.reset_counts()
    detector.score(pictures(4, (8, 12), seed=1))
    cost = detector.cost()
    assert backbone.counts == (4 * cost.forward, 0, 4 * cost.encoder)


def test_gain_on_pixels_acts_before_the_encoder() -> None:
    images, cost = pictures(24), {}
    for act_on in ("latents", "pixels"):
        backbone = in_latents(toy_backbone(), act_on)
        options = {"group": ("flip_x", "gain(0.5)"), "features": ("s", "d"), "levels": LEVELS[:1]}
        detector = gepc.create_detector(backbone, "gepc+", **options).fit(images)
        backbone.reset_counts()
        detector.score(IMAGES)
        cost[act_on] = backbone.counts[2] / len(IMAGES)
        assert cost[act_on] == detector.cost().encoder
    assert cost == {"latents": 1, "pixels": 3}
