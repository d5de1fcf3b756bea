"""Features of inner layers, and those that the authors' code defines."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from toys import LEVELS, pictures, toy_backbone

import gepc
from gepc.backbones.schedule import Levels, cosine_alphas_cumprod, log_variances
from gepc.core.errors import OptionError
from gepc.core.parts import Part
from gepc.images.noise import image_key
from gepc.lab.radar.cfar import RX, OrderStatisticCFAR
from gepc.methods.base import Batch, extract_map_parts, raw_maps
from gepc.methods.features import find_feature, target_map
from gepc.methods.gepc import GepcExtractor
from gepc.methods.gepc_plus import GepcPlus
from gepc.methods.groups import Group, find_action
from gepc.methods.passes import ElementAnswers, LevelAnswers
from gepc.methods.pooling import Pooling, activation_distance, log_contrast, position_distance, position_vectors

IMAGES = pictures(6)
RNG = np.random.default_rng(12)


class Net(nn.Module):
    """Two convolutions, the second at half resolution; with symmetric kernels it is equivariant under the square."""

    def __init__(self, symmetric: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.second = nn.Conv2d(5, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 3, 1)
        if symmetric:
            for layer in (self.first, self.second):
                weight = layer.weight.data
                turned = [weight.rot90(turns, (2, 3)) for turns in range(4)]
                layer.weight.data = sum(turned + [one.flip(-1) for one in turned]) / 8.0

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        half = nn.functional.avg_pool2d(torch.tanh(self.first(x)), 2)
        up = nn.functional.interpolate(torch.tanh(self.second(half)), scale_factor=2.0)
        return x + self.last(up) * (1.0 + t.reshape(-1, 1, 1, 1) / 1000.0)


def network(symmetric: bool = False) -> gepc.Backbone:
    torch.manual_seed(3)
    return gepc.Backbone.from_callable(Net(symmetric), cosine_alphas_cumprod(1000), 3, 8)


def batch(images: np.ndarray = IMAGES) -> Batch:
    return Batch(images, [image_key(image) for image in images])


def extract(method: GepcExtractor, backbone: gepc.Backbone) -> dict[str, np.ndarray]:
    return method.extract(backbone, batch(), method.timesteps(backbone))


LAYERS = ("first", "second")


def test_inner_is_the_literal_residual_of_every_channel() -> None:
    """mean_pixels (A - P_g^-1 A_g)^2 / mean_pixels A^2, by a loop over images, elements and channels."""
    backbone = network()
    method = GepcExtractor(levels=Levels((0.99,)), features=("inner",), group=("rot90", "flip_y"), layers=LAYERS)
    found = extract(method, backbone)["inner"]
    (t,) = method.timesteps(backbone)
    x_t, _ = batch().noised(backbone, t)
    _, base = backbone.eps_and_activations(x_t, t, LAYERS)
    expected = np.zeros((6, 1, 2, 9))
    for place, name in enumerate(("rot90", "flip_y")):
        action = find_action(name)
        _, moved = backbone.eps_and_activations(action.apply(x_t), t, LAYERS)
        column = 0
        for layer in LAYERS:
            for channel in range(base[layer].shape[1]):
                here, there = base[layer][:, channel], action.inverse(moved[layer][:, channel])
                ratio = (here - there).square().mean((1, 2)) / here.square().mean((1, 2))
                expected[:, 0, place, column] = ratio.numpy()
                column += 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    columns = method.columns({"inner": found})
    np.testing.assert_allclose(columns, np.log(expected.mean(axis=2)), rtol=1e-5)
    assert method.parts({"inner": found}) == (Part.of("structure", range(9)),)


def test_the_map_of_inner_layers_is_the_literal_mean_over_the_group_layers_and_channels() -> None:
    """(A - P_g^-1 A_g)^2 / mean_pixels A^2 at the size of the image; the identity counts with 0."""
    backbone = network()
    method = GepcExtractor(levels=Levels((0.99,)), features=("inner",), group=("rot90", "flip_y"), layers=LAYERS)
    (t,) = method.timesteps(backbone)
    found = method.map_parts(backbone, batch(), (t,))[1]["inner"]
    x_t, _ = batch().noised(backbone, t)
    _, base = backbone.eps_and_activations(x_t, t, LAYERS)
    expected = torch.zeros(6, 8, 8)
    for action in (find_action("rot90"), find_action("flip_y")):
        _, moved = backbone.eps_and_activations(action.apply(x_t), t, LAYERS)
        for layer in LAYERS:
            here, there = base[layer], action.inverse(moved[layer])
            ratio = torch.zeros(6, 1, *here.shape[2:])
            for image, channel in np.ndindex(*here.shape[:2]):
                a, b = here[image, channel], there[image, channel]
                ratio[image, 0] += (a - b) ** 2 / (a**2).mean() / here.shape[1]
            expected += nn.functional.interpolate(ratio, (8, 8), mode="bilinear")[:, 0] / len(LAYERS)
    np.testing.assert_allclose(found[:, 0], expected.detach().numpy() / 3, rtol=1e-4)


def test_activation_statistics_are_mean_and_deviation_of_every_channel() -> None:
    backbone = network()
    method = GepcPlus(levels=Levels((0.99,)), features=("h",), layers=LAYERS)
    found = extract(method, backbone)["h"]
    (t,) = method.timesteps(backbone)
    x_t, _ = batch().noised(backbone, t)
    _, maps = backbone.eps_and_activations(x_t, t, LAYERS)
    both = [field.flatten(2).double() for field in maps.values()]
    expected = torch.cat([one.mean(2) for one in both] + [one.std(2, correction=0) for one in both], 1)
    np.testing.assert_allclose(found[:, 0], expected.numpy(), rtol=1e-4, atol=1e-6)
    assert found.dtype == np.float32


def test_the_residual_of_an_equivariant_network_vanishes_in_every_layer() -> None:
    found = {
        symmetric: extract(
            GepcExtractor(levels=Levels(LEVELS), features=("s", "inner"), group="d4", layers=LAYERS), network(symmetric)
        )
        for symmetric in (False, True)
    }
    both = GepcExtractor(features=("s", "inner"), layers=LAYERS)
    assert both.parts(found[True]) == (Part.of("output", [0]), Part.of("structure", range(1, 10)))
    assert found[True]["s"][:, :, 1:].max() < 1e-10 < 1e-3 < found[False]["s"][:, :, 1:].min()
    assert found[True]["inner"].max() < 1e-10 < 1e-3 < found[False]["inner"].min()


class Paired(nn.Module):
    """A kernel and its mirror image, their outputs added: equivariant under flip_x, which swaps the two channels."""

    def __init__(self) -> None:
        super().__init__()
        kernel = torch.randn(1, 3, 3, 3, generator=torch.Generator().manual_seed(0))
        self.pair = nn.Conv2d(3, 2, 3, padding=1, bias=False)
        self.pair.weight.data = torch.cat([kernel, kernel.flip(-1)])

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.pair(x)).sum(1, keepdim=True)


def test_an_equivariant_network_may_have_inner_layers_that_are_not() -> None:
    backbone = gepc.Backbone.from_callable(Paired(), cosine_alphas_cumprod(1000), 3, 8)
    method = GepcExtractor(levels=Levels(LEVELS), features=("s", "inner"), group=("flip_x",), layers=("pair",))
    found = extract(method, backbone)
    assert found["s"].max() < 1e-10
    assert found["inner"].min() > 1e-2


def test_shifts_by_a_pixel_do_not_act_on_layers_of_lower_resolution() -> None:
    backbone = network()
    options = {"levels": Levels((0.99,)), "features": ("inner",), "layers": LAYERS}
    with_shift = GepcExtractor(group=("flip_x", "shift_x"), **options)  # type: ignore[arg-type]
    without = GepcExtractor(group=("flip_x",), **options)  # type: ignore[arg-type]
    np.testing.assert_array_equal(extract(with_shift, backbone)["inner"], extract(without, backbone)["inner"])
    with pytest.raises(OptionError, match="a flip or a rotation"):
        GepcExtractor(group="shifts", features=("inner",))


@pytest.mark.parametrize("name", ["gepc", "gepc+"])
def test_inner_features_cost_no_pass(name: str) -> None:
    backbone = network()
    plain = gepc.create_detector(backbone, name, levels=LEVELS, features=("s",)).extractor
    rich = gepc.create_detector(backbone, name, levels=LEVELS, features=("s", "inner"), layers=LAYERS).extractor
    for method in (plain, rich):
        backbone.reset_counts()
        method.extract(backbone, batch(), method.timesteps(backbone))
        assert backbone.forward_count == len(IMAGES) * plain.cost(backbone, (8, 8)).forward


def test_a_plain_function_has_no_inner_features_and_everything_else_works() -> None:
    backbone, images = toy_backbone(), pictures(40)
    rich = gepc.create_detector(backbone, "gepc+", levels=LEVELS, features=("s", "d", "inner", "h")).fit(images)
    assert set(rich.features(images[:2])) == {"s", "d"}
    assert np.isfinite(rich.score(images)).all()
    with pytest.raises(OptionError, match="no feature inner"):
        gepc.GEPC(backbone, levels=LEVELS, features="inner").fit(images)


def test_random_elements_are_averaged_over_those_evaluated() -> None:
    backbone = network()
    method = GepcExtractor(levels=Levels((0.99,)), features=("inner",), group="d4", group_samples=2, layers=LAYERS)
    found = extract(method, backbone)["inner"]
    assert (np.isfinite(found).all(axis=3).sum(axis=2) == 2).all()
    np.testing.assert_allclose(method.columns({"inner": found}), np.log(np.nanmean(found, axis=2)), rtol=1e-5)


def test_a_detector_with_inner_features_survives_saving(tmp_path: Path) -> None:
    backbone, images = network(), pictures(60)
    detector = gepc.GEPC(backbone, levels=LEVELS, features=("s", "inner"), layers=LAYERS, keep=None).fit(images)
    assert detector.calibration_name == "evidence:narrow=kde"
    detector.save(tmp_path / "detector")
    again = gepc.load_detector(tmp_path / "detector", backbone)
    np.testing.assert_array_equal(again.score(images[:5]), detector.score(images[:5]))


# --- as the authors' code defines them -------------------------------------------------------------------------------


def test_cycle_is_the_change_under_denoising_and_noising_again() -> None:
    """x_t' = sqrt(abar) x0 + sigma n' with fresh noise n', pooled relative to x_t^2; without a group pass."""
    backbone = toy_backbone()
    method = GepcExtractor(levels=Levels((0.97,)), features=("cycle",), pool="mean")
    found = extract(method, backbone)["cycle"]
    (t,) = method.timesteps(backbone)
    x_t, _ = batch().noised(backbone, t)
    abar = float(backbone.alphas_cumprod[t])
    x0 = (x_t - (1 - abar) ** 0.5 * backbone.eps(x_t, t)) / abar**0.5
    again = abar**0.5 * x0 + (1 - abar) ** 0.5 * batch().noise(backbone, t, draw=1 << 16)
    expected = ((again - x_t).square() / (x_t.square() + 1e-8)).mean((1, 2, 3))
    np.testing.assert_allclose(found[:, 0], expected.numpy(), rtol=1e-4)
    assert method.cost(backbone, (8, 8)).forward == 1


def test_var_g_is_the_variance_of_s_over_the_group() -> None:
    backbone = toy_backbone()
    method = GepcExtractor(levels=Levels(LEVELS), features=("s", "var_g"))
    table = extract(method, backbone)
    np.testing.assert_allclose(method.columns(table)[:, :, 1], table["s"].var(axis=2), rtol=1e-12)


class WithVariance(gepc.Backbone):
    """A noise prediction, and a log-variance that depends on where a pixel is."""

    learned_variance = True

    def _predict(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def _predict_with_variance(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tanh(x), x * torch.linspace(0.0, 1.0, x.shape[-1])


def test_var_compares_the_learned_variance_under_the_group() -> None:
    backbone = WithVariance(cosine_alphas_cumprod(1000), 3, 8)
    method = GepcExtractor(levels=Levels((0.97,)), features=("var",), group=("flip_x",), pool="mean")
    found = extract(method, backbone)["var"]
    (t,) = method.timesteps(backbone)
    x_t, _ = batch().noised(backbone, t)
    ramp = torch.linspace(0.0, 1.0, 8)
    expected = ((x_t.flip(-1) * ramp).mean((1, 2, 3)) - (x_t * ramp).mean((1, 2, 3))).abs()
    np.testing.assert_allclose(found[:, 0, 1], expected.numpy(), rtol=1e-4)
    assert (found[:, 0, 0] == 0).all()
    with pytest.raises(OptionError, match="learned variance"):
        extract(method, toy_backbone())
    with pytest.raises(OptionError, match="cannot be combined"):
        GepcExtractor(features=("var", "inner"))


def test_var_raw_compares_the_channels_from_which_the_variance_is_made() -> None:
    class Learned(WithVariance):
        def _predict_with_variance(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            large, small = (self.per_image(table, x, t) for table in log_variances(self.alphas_cumprod))
            share = (torch.tanh(x * torch.linspace(0.0, 1.0, x.shape[-1])) + 1.0) / 2.0
            return torch.tanh(x), share * large + (1.0 - share) * small

    backbone = Learned(cosine_alphas_cumprod(1000), 3, 8)
    method = GepcExtractor(levels=Levels((0.97,)), features=("var_raw",), group=("flip_x",), pool="topk", topk=0.25)
    (t,) = method.timesteps(backbone)
    x_t, _ = batch().noised(backbone, t)
    ramp = torch.linspace(0.0, 1.0, 8)
    channels = [torch.tanh(x * ramp).abs().mean(1).flatten(1) for x in (x_t.flip(-1), x_t)]
    moved, here = (values.sort(1, descending=True).values[:, :16].mean(1) for values in channels)
    found = extract(method, backbone)["var_raw"]
    np.testing.assert_allclose(found[:, 0, 1], (moved - here).abs().numpy(), rtol=2e-2, atol=1e-4)


# --- targets that are small in their image ---------------------------------------------------------------------------


def local(**options: object) -> GepcPlus:
    return GepcPlus(**{**GepcPlus.presets["radar"].method, "window": 3, "topk": 0.05, "layers": LAYERS, **options})


def test_local_features_are_pooled_from_the_literal_maps() -> None:
    backbone, method = network(), local()
    (t,) = method.timesteps(backbone)
    found, (x_t, noise) = extract(method, backbone), batch().noised(backbone, t)
    error = (backbone.eps(x_t, t) - noise).square()
    assert np.allclose(found["d"][:, 0], method.pooling(error).detach().numpy(), rtol=1e-4)
    pooled = {"window": 3, "topk": 0.05}
    for name, test in {"os_cfar": OrderStatisticCFAR(**pooled, scale="log"), "pixel_rx": RX(**pooled)}.items():
        assert np.allclose(found[name], test.extract(backbone, batch(), (t,))[test.name])
    columns = method.columns(found)
    assert method.column_names == ("d", "os_cfar", "pixel_rx")
    assert np.allclose(columns[:, 0, 0], np.log(found["d"][:, 0]))
    assert np.allclose(columns[:, 0, 1], found["os_cfar"][:, 0])


def test_the_map_of_a_target_is_contrast_and_distance() -> None:
    backbone, method = network(), local()
    table, parts = extract_map_parts(method, backbone, batch(), method.timesteps(backbone))
    maps = raw_maps(method, backbone, parts)
    (t,) = method.timesteps(backbone)
    x_t, _ = batch().noised(backbone, t)
    _, here = backbone.eps_and_activations(x_t, t, LAYERS)
    distance = position_distance(here["first"]).detach() / here["first"].shape[1]
    contrast = log_contrast(torch.from_numpy(IMAGES).mean(1), 3)
    assert np.allclose(maps[:, 0], (contrast.square() + distance).numpy(), rtol=1e-3, atol=1e-4)
    assert np.array_equal(table["d"], extract(method, backbone)["d"])


def test_the_gain_of_a_scene_changes_no_pixel_test() -> None:
    """A gain is an offset of log-magnitudes for CFAR, up to the end of the scale, and for RX also a contrast."""
    gained = np.log1p(1.5 * np.expm1((IMAGES + 1.0) / 2.0 * np.log(256.0))) / np.log(256.0) * 2.0 - 1.0
    for name, images in {"os_cfar": gained, "pixel_rx": 0.5 * IMAGES - 0.2}.items():
        found = [local().extract(network(), batch(one.astype(np.float32)), (10,))[name] for one in (IMAGES, images)]
        assert np.allclose(found[0], found[1], rtol=1e-3)


def test_a_plain_function_needs_no_layers_for_targets() -> None:
    plain = extract(local(layers=None), toy_backbone(3, 8))
    assert {"d", "os_cfar", "pixel_rx"} == set(plain)


# --- which layers count, and where ------------------------------------------------------------------------------------


def looking_at(maps: dict[str, torch.Tensor], size: tuple[int, int] = (8, 8)) -> LevelAnswers:
    """Answers with these activations, for two images of zeros."""
    field = torch.zeros(2, 3, *size)
    return LevelAnswers(np.arange(2), 0, 0.9, field, field, field, field, Pooling(window=3), maps)


def test_tokens_that_form_no_grid_are_left_out() -> None:
    """A sequence is recorded as a column; a single position is a grid of one."""
    shapes = {"grid": (4, 4), "line": (1, 6), "tokens": (16, 1), "single": (1, 1), "narrow": (3, 2)}
    found = looking_at({name: torch.ones(2, 5, *shape) for name, shape in shapes.items()})
    assert list(found.grids) == ["grid", "line", "single", "narrow"]


@pytest.mark.parametrize(("size", "kept"), [((16, 4), True), ((13, 4), True), ((8, 4), False), ((4, 16), False)])
def test_a_layer_with_a_single_column_is_a_grid_of_an_image_that_is_as_narrow(
    size: tuple[int, int], kept: bool
) -> None:
    """Four cells in a column: 16x4 pixels that a network shrinks by 4, or tokens of a wider image."""
    assert bool(looking_at({"column": torch.ones(2, 5, 4, 1)}, size).grids) == kept


def test_features_leave_the_activations_as_they_are() -> None:
    """Features share them, and the inverse of a transposition is a view of the same memory."""
    numbers = torch.from_numpy(np.random.default_rng(13).normal(size=(2, 2, 5, 4, 4))).float()
    maps, moved = {"layer": numbers[0]}, {"layer": numbers[1]}
    before = [values["layer"].clone() for values in (maps, moved)]
    level, rows = looking_at(maps), torch.arange(2)
    for action in Group.of(("transpose", "rot90", "flip_x")).moving:
        answers = ElementAnswers(action, rows, level.eps, level.eps[:, 0], moved, None)
        assert find_feature("inner").compute(level, answers) is not None
    assert find_feature("h").compute(level) is not None
    for values, original in zip((maps, moved), before, strict=True):
        assert torch.equal(values["layer"], original)


@pytest.mark.parametrize(("count", "used"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_targets_are_sought_in_the_first_half_of_the_layers(count: int, used: int) -> None:
    maps = {str(place): torch.from_numpy(RNG.normal(size=(2, 3, 4, 4))) for place in range(count)}
    expected = activation_distance(dict(list(maps.items())[:used]), (8, 8))
    assert torch.equal(target_map(looking_at(maps)), expected)  # black images have no contrast


def test_the_distance_of_activations_is_that_of_the_vectors_of_all_layers_on_one_grid() -> None:
    """Layers of 4 x 4 and 8 x 8 on a grid of 8 x 8; divided by the number of channels."""
    small, large = (torch.from_numpy(RNG.normal(size=(2, 2, side, side))).float() for side in (4, 8))
    vectors = torch.cat([small.repeat_interleave(2, 2).repeat_interleave(2, 3), large], 1)
    expected = position_distance(vectors) / 4
    torch.testing.assert_close(activation_distance({"small": small, "large": large}, (8, 8)), expected)
    assert activation_distance({"small": small}, (130, 20)).shape == (2, 130, 20)


def test_a_layer_that_is_larger_along_one_side_only_is_averaged() -> None:
    layer = torch.arange(16.0).reshape(1, 1, 8, 2)
    found = position_vectors({"tall": layer}, (4, 4))[0, 0]
    torch.testing.assert_close(found, layer[0, 0].reshape(4, 2, 2).mean(1).repeat_interleave(2, 1))
    across = position_vectors({"wide": layer.mT}, (4, 4))[0, 0]
    torch.testing.assert_close(across, found.mT)


def test_means_are_columns_as_they_are_and_deviations_in_logarithms() -> None:
    """A channel that is constant over the pixels has a deviation of 0, which counts as 1e-30."""
    values = np.array([[[1.0, -2.0, 0.5, 0.0]]])
    found = GepcPlus(features=("h",)).columns({"h": values})
    np.testing.assert_allclose(found, [[[1.0, -2.0, np.log(0.5), np.log(1e-30)]]])
    inner = GepcExtractor(features=("inner",)).columns({"inner": np.zeros((1, 1, 2, 3))})
    np.testing.assert_allclose(inner, np.full((1, 1, 3), np.log(1e-30)))


def test_levels_are_chosen_by_the_mean_over_the_channels_where_there_is_nothing_else() -> None:
    values = RNG.random((4, 2, 3, 5))
    values[:, :, 1] = np.nan  # an element that was not drawn
    found = GepcExtractor(features=("inner",)).stability({"inner": values})
    np.testing.assert_allclose(found, np.nanmean(values, axis=(2, 3)))


def test_the_mean_of_a_map_of_inner_layers_is_their_mean_residual() -> None:
    """At full resolution, identity counted, also where 2 of 7 elements were drawn for each image."""
    backbone = network()
    method = GepcExtractor(levels=Levels((0.99,)), features=("inner",), group="d4", group_samples=2, layers=("first",))
    table, maps = method.map_parts(backbone, batch(), method.timesteps(backbone))
    expected = np.nanmean(table["inner"], axis=(2, 3)) * 7 / 8
    np.testing.assert_allclose(maps["inner"].mean((2, 3)), expected, rtol=1e-4)


def test_every_draw_of_cycle_has_fresh_noise_of_its_own() -> None:
    """Draw k noises the image with draw k and the estimate with draw 2^16 + k."""
    backbone = toy_backbone()
    method = GepcExtractor(levels=Levels((0.97,)), features=("cycle",), pool="mean", mc_samples=2)
    (t,) = method.timesteps(backbone)
    abar, expected = float(backbone.alphas_cumprod[t]), 0.0
    for draw in range(2):
        x_t, _ = batch().noised(backbone, t, draw)
        change = batch().noise(backbone, t, (1 << 16) + draw) - backbone.eps(x_t, t)
        expected = expected + ((1 - abar) * change.square() / (x_t.square() + 1e-8)).mean((1, 2, 3)) / 2
    np.testing.assert_allclose(extract(method, backbone)["cycle"][:, 0], expected, rtol=1e-4)


def test_the_change_where_x_t_is_zero_is_divided_by_a_hundred_millionth() -> None:
    """A black image without noise; the estimate gets the noise of 1 at every pixel."""
    backbone = gepc.Backbone.from_callable(lambda x, t: torch.zeros_like(x), cosine_alphas_cumprod(1000), 3, 8)
    method = GepcExtractor(levels=Levels((0.97,)), features=("cycle",), pool="mean")
    (t,) = method.timesteps(backbone)
    black = np.zeros((1, 3, 8, 8), dtype=np.float32)
    looked = Batch(black, [b"black"], fixed_noise={(t, 0): black, (t, 1 << 16): black + 1.0})
    found = method.extract(backbone, looked, (t,))["cycle"][0, 0]
    assert found == pytest.approx((1.0 - backbone.alphas_cumprod[t]) / 1e-8, rel=1e-5)
