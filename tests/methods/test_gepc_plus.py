"""gepc+: its columns against their formulas, its maps against GEPC's, its calibrator, and what the new terms see."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import LEVELS, pictures, toy_backbone, toy_network

import gepc
from gepc.backbones.schedule import Levels, cosine_alphas_cumprod
from gepc.calibration import Aggregation, create_calibrator
from gepc.core.errors import InputError, OptionError
from gepc.images.noise import image_key
from gepc.lab.analytic import GaussianBackbone
from gepc.lab.metrics import auroc
from gepc.methods.base import Batch
from gepc.methods.features import autocorrelation, channel_correlation
from gepc.methods.gepc import GepcExtractor
from gepc.methods.gepc_plus import CORRELATIONS, GepcPlus
from gepc.methods.groups import Group
from gepc.methods.pooling import position_vectors

LAGS = {"ax": ((0, 1),), "ay": ((1, 0),), "ad": ((1, 1), (1, -1)), "ax2": ((0, 2),), "ay2": ((2, 0),)}

Array = npt.NDArray[np.float64]
IMAGES = pictures(12)


def batch(images: npt.NDArray[np.float32] = IMAGES) -> Batch:
    return Batch(images, [image_key(image) for image in images])


def plus(**options: object) -> GepcPlus:
    return GepcPlus(**{"levels": Levels(LEVELS), **options})  # type: ignore[arg-type]


# --- the columns -----------------------------------------------------------------------------------------------------


def literal_autocorrelation(field: Array, shifts: tuple[tuple[int, int], ...]) -> float:
    """Pixel by pixel."""
    _, height, width = field.shape
    found = []
    for down, right in shifts:
        products = [
            field[c, y, x] * field[c, y + down, x + right]
            for c in range(len(field))
            for y in range(height)
            for x in range(width)
            if 0 <= y + down < height and 0 <= x + right < width
        ]
        found.append(np.mean(products) / np.mean(field**2))
    return float(np.mean(found))


@pytest.mark.parametrize("name", LAGS)
def test_autocorrelation_is_the_literal_one(name: str) -> None:
    field = np.random.default_rng(0).standard_normal((2, 3, 5, 7))
    expected = [literal_autocorrelation(one, LAGS[name]) for one in field]
    np.testing.assert_allclose(autocorrelation(torch.from_numpy(field), LAGS[name]).numpy(), expected, rtol=1e-12)


@given(st.integers(0, 1000), st.floats(0.01, 100.0))
def test_autocorrelation_knows_no_scale_and_follows_the_axes(seed: int, scale: float) -> None:
    """a(c f) = a(f); transposing trades x for y; a mirror image trades the diagonals."""
    field = torch.from_numpy(np.random.default_rng(seed).standard_normal((1, 2, 6, 6)))
    for name, shifts in LAGS.items():
        value = autocorrelation(field, shifts).item()
        assert value == pytest.approx(autocorrelation(scale * field, shifts).item(), abs=1e-12)
        assert value == pytest.approx(autocorrelation(field.flip(-1), shifts).item(), abs=1e-12)
        twin = name.replace("x", "y") if "x" in name else name.replace("y", "x")
        assert value == pytest.approx(autocorrelation(field.transpose(-1, -2), LAGS[twin]).item(), abs=1e-12)


def test_autocorrelation_of_a_constant_a_checkerboard_and_a_pixel() -> None:
    constant = torch.ones(1, 1, 4, 4)
    checkerboard = (-1.0) ** torch.arange(4)[:, None] * (-1.0) ** torch.arange(4)[None, :]
    for name, shifts in LAGS.items():
        assert autocorrelation(constant, shifts).item() == pytest.approx(1.0)
        odd = name in ("ax", "ay")
        assert autocorrelation(checkerboard[None, None], shifts).item() == pytest.approx(-1.0 if odd else 1.0)
        assert autocorrelation(torch.ones(1, 1, 1, 1), shifts).item() == 0.0


def test_channel_correlation_is_the_literal_one_and_knows_no_scale() -> None:
    field = np.random.default_rng(0).standard_normal((2, 3, 5, 7))
    expected = [
        np.mean([(one[c] * one[d]).mean() for c in range(3) for d in range(3) if c != d]) / (one**2).mean()
        for one in field
    ]
    for scale in (1.0, 7.0):
        found = channel_correlation(torch.from_numpy(scale * field)).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    grey = torch.from_numpy(np.repeat(field[:, :1], 3, axis=1))
    np.testing.assert_allclose(channel_correlation(grey).numpy(), 1.0)
    assert channel_correlation(torch.tensor([[[[1.0]], [[-1.0]]]])).item() == pytest.approx(-1.0)


def test_a_network_of_one_channel_has_no_column_between_channels() -> None:
    backbone, images = toy_backbone(channels=1), pictures(40, channels=1)
    options = {"levels": LEVELS[:1], "calibration": "level_knn"}
    detector = gepc.create_detector(backbone, "gepc+", **options).fit(images)
    assert np.isfinite(detector.score(images)).all()
    without = gepc.create_detector(backbone, "gepc+", features=("s", "d", *LAGS), **options).fit(images)
    np.testing.assert_array_equal(detector.score(images), without.score(images))
    with pytest.raises(OptionError, match="there is no feature ac with this backbone"):
        gepc.create_detector(backbone, "gepc+", "fast", features="ac").fit(images)


def test_two_channels_are_enough_for_a_column_between_channels() -> None:
    backbone, images = toy_backbone(channels=2), pictures(4, channels=2)
    method = plus(features=("ac",))
    (t, *_) = method.timesteps(backbone)
    x_t, noise = batch(images).noised(backbone, t)
    expected = channel_correlation((backbone.eps(x_t, t) - noise).double())
    found = method.extract(backbone, batch(images), (t,))["ac"]
    np.testing.assert_allclose(found[:, 0], expected.numpy(), rtol=1e-4, atol=1e-6)


def test_the_columns_are_the_formulas() -> None:
    """Logarithms of GEPC's own table for each element, and the autocorrelations of eps(x_t) - noise."""
    backbone, group = toy_backbone(), Group.of(("rot180", "flip_x"))
    method = plus(group=group, features=("s", "cos", "b", "d", *CORRELATIONS))
    timesteps = method.timesteps(backbone)
    columns = method.columns(method.extract(backbone, batch(), timesteps))
    assert method.column_names == ("s:rot180", "s:flip_x", "cos:rot180", "cos:flip_x", "b", "d", *CORRELATIONS)
    assert columns.shape == (12, 4, len(method.column_names))
    paper = GepcExtractor(levels=Levels(LEVELS), group=group, features=("s", "cos", "b", "d"))
    table = paper.extract(backbone, batch(), timesteps)
    expected = np.concatenate(
        [np.log(table["s"][:, :, 1:]), np.log(table["cos"][:, :, 1:]), np.log(np.stack([table["b"], table["d"]], 2))],
        axis=2,
    )
    np.testing.assert_allclose(columns[:, :, :6], expected, rtol=1e-12)
    x_t, noise = batch().noised(backbone, timesteps[1])
    error = (backbone.eps(x_t, timesteps[1]) - noise).double()
    for place, shifts in enumerate(LAGS.values(), start=6):
        np.testing.assert_allclose(columns[:, 1, place], autocorrelation(error, shifts).numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(columns[:, 1, -1], channel_correlation(error).numpy(), rtol=1e-4, atol=1e-6)


def test_one_column_for_the_mean_over_the_group() -> None:
    backbone = toy_backbone()
    method = plus(group=Group.of("paper"), features=("d", "s"), elements="mean")
    table = method.extract(backbone, batch(), method.timesteps(backbone))
    columns = method.columns(table)
    assert method.column_names == ("s", "d")
    np.testing.assert_allclose(columns[:, :, 0], np.log(table["s"].mean(axis=2)), rtol=1e-12)


@pytest.mark.parametrize(("channels", "size"), [(1, (8, 8)), (3, (8, 12)), (1, (8, 12))])
@pytest.mark.parametrize("features", [("ac", "cos", "s"), ("cos", "d", "s")])
def test_levels_are_chosen_by_s_whatever_columns_drop_out(
    channels: int, size: tuple[int, int], features: tuple[str, ...]
) -> None:
    """By s itself, not its logarithm. A network of one channel has no ac, and images that are not square no rot90."""
    pixels = np.random.default_rng(0).uniform(-1, 1, (12, channels, *size)).astype(np.float32)
    backbone = GaussianBackbone.fitted(pixels)
    method = plus(group=Group.of(("rot90", "flip_x")), features=features)
    looked = Batch(pixels, [bytes([index]) for index in range(12)], seed=0)
    table = method.extract(backbone, looked, method.timesteps(backbone))
    np.testing.assert_allclose(method.stability(table), table["s"].mean(axis=2))


@pytest.mark.parametrize("elements", ["each", "mean"])
def test_gepc_plus_keeps_the_levels_that_gepc_keeps(elements: str) -> None:
    """On the same passes; the coefficients of variation of log s are in another order here."""
    backbone, images, shared = toy_backbone(), pictures(40), {"levels": LEVELS, "group": "flips", "keep": 2}
    paper = gepc.GEPC(backbone, **shared).fit(images)  # type: ignore[arg-type]
    plus = gepc.create_detector(backbone, "gepc+", elements=elements, weights="inv_cv", **shared).fit(images)
    np.testing.assert_allclose(plus.cv_, paper.cv_)
    np.testing.assert_array_equal(plus.kept_, paper.kept_)
    np.testing.assert_allclose(plus.weights_, paper.weights_)


@pytest.mark.parametrize(("preset", "passes"), [("single", 1), ("fast", 2), ("full", 12)])
def test_what_the_presets_cost(preset: str, passes: int) -> None:
    backbone = toy_backbone()
    detector = gepc.create_detector(backbone, "gepc+", preset)
    assert detector.cost().forward == passes
    detector.fit(pictures(30))
    assert len(detector.kept_) == {"single": 1, "fast": 1, "full": 4}[preset]  # no level is selected away
    backbone.reset_counts()
    detector.score(IMAGES)
    assert backbone.forward_count == passes * len(IMAGES)


def test_images_that_are_not_square() -> None:
    """rot90 drops out of `full`; `fast`, which has nothing else, takes rot180 in its place."""
    wide = pictures(30, size=(8, 12))
    full = gepc.create_detector(toy_backbone(image_size=None), "gepc+", "full", levels=LEVELS).fit(wide)
    assert full.cost().forward == 8
    assert np.isfinite(full.score(wide[:3])).all()
    fast, half_turn = (
        gepc.create_detector(toy_backbone(image_size=None), "gepc+", group=group).fit(wide)
        for group in ("rot90", "rot180")
    )
    assert fast.cost().forward == 2
    np.testing.assert_array_equal(fast.score(wide[:3]), half_turn.score(wide[:3]))


def test_an_involution_cannot_tell_an_image_from_its_transform_and_a_quarter_turn_can() -> None:
    """|r_g| at x and at P_g x: equal where g is its own inverse. The noise turns with the image."""
    backbone, t = toy_backbone(), 60
    x = batch().noised(backbone, t)[0]

    def size(name: str, x: torch.Tensor) -> Array:
        action = gepc.methods.groups.find_action(name)
        residual = action.inverse(backbone.eps(action.apply(x).contiguous(), t)) - backbone.eps(x, t)
        return residual.double().flatten(1).norm(dim=1).numpy()

    for name in ("rot180", "flip_x", "flip_y"):
        turned = gepc.methods.groups.find_action(name).apply(x).contiguous()
        np.testing.assert_allclose(size(name, x), size(name, turned), rtol=1e-5)
    turned = gepc.methods.groups.find_action("rot90").apply(x).contiguous()
    assert (np.abs(size("rot90", x) / size("rot90", turned) - 1.0) > 0.01).mean() > 0.5


def test_terms_of_the_error_alone_cost_one_pass() -> None:
    assert plus(levels=Levels((0.99,)), features=("d", *LAGS)).cost(toy_backbone(), (8, 8)).forward == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ("s", "az")}, "feature.*'az'"),
        ({"features": ()}, "at least one feature"),
        ({"elements": "all"}, "elements.*'all'"),
        ({"map_part": "errors"}, "map_part.*'errors'"),
        ({"map_part": "residual", "features": ("d",)}, "needs a feature that compares group elements"),
        ({"group_samples": 1}, "`elements` must be 'mean'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plus(**options)


def test_the_papers_method_does_not_know_the_new_terms() -> None:
    with pytest.raises(OptionError, match="'ax'"):
        GepcExtractor(features=("s", "ax"))


def test_an_exactly_equivariant_network_is_named_as_the_cause() -> None:
    backbone = gepc.Backbone.from_callable(lambda x, t: torch.tanh(x), cosine_alphas_cumprod(1000), 3, 8)
    with pytest.raises(InputError, match="exactly equivariant under this group"):
        gepc.create_detector(backbone, "gepc+", "fast").fit(pictures(30))


# --- maps ------------------------------------------------------------------------------------------------------------


def test_the_parts_of_a_map_add_up_and_mean_what_the_columns_mean() -> None:
    """Residual part: GEPC's own map. With mean pooling the spatial means are s and d/(sigma^2 b)."""
    backbone = toy_backbone()
    method = plus(pool="mean", features=("s", "b", "d"))
    timesteps = method.timesteps(backbone)
    table, parts = method.map_parts(backbone, batch(), timesteps)
    np.testing.assert_allclose(method.raw_map(parts), parts["residual"] + parts["error"], rtol=1e-6)
    own = GepcExtractor(levels=Levels(LEVELS), pool="mean", group=method.group)
    np.testing.assert_allclose(parts["residual"], own.map_parts(backbone, batch(), timesteps)[1]["residual"], rtol=1e-6)
    np.testing.assert_allclose(parts["residual"].mean((2, 3)), table["s"].mean(axis=2), rtol=1e-5)
    variance = 1.0 - backbone.alphas_cumprod[list(timesteps)]
    np.testing.assert_allclose(parts["error"].mean((2, 3)), table["d"] / (variance * table["b"]), rtol=1e-5)


def test_a_detector_shows_the_part_it_is_asked_for(tmp_path: Path) -> None:
    """Also after it was saved; the score does not depend on it."""
    backbone = toy_backbone()
    fitted = {
        part: gepc.create_detector(backbone, "gepc+", levels=LEVELS, map_part=part).fit(pictures(30))
        for part in ("sum", "residual", "error")
    }
    maps = {part: detector.score_map(IMAGES, raw=True) for part, detector in fitted.items()}
    assert maps["sum"].shape == (12, 8, 8)
    np.testing.assert_allclose(maps["sum"], maps["residual"] + maps["error"], rtol=1e-5)
    fitted["error"].save(tmp_path / "det")
    loaded = gepc.load_detector(tmp_path / "det", backbone)
    np.testing.assert_array_equal(loaded.score_map(IMAGES, raw=True), maps["error"])
    np.testing.assert_array_equal(loaded.score_map(IMAGES), fitted["error"].score_map(IMAGES))
    np.testing.assert_array_equal(loaded.score(IMAGES), fitted["sum"].score(IMAGES))


def test_the_vectors_of_positions_take_evenly_spaced_channels_of_all_layers() -> None:
    """Of 500 channels 256, the first and the last among them; of few channels all, in their order."""
    numbers = torch.arange(500.0).reshape(1, 500, 1, 1).expand(2, 500, 4, 4)
    found = position_vectors({"first": numbers[:, :200], "second": numbers[:, 200:]}, (4, 4))
    assert found.shape == (2, 256, 4, 4)
    np.testing.assert_array_equal(found[0, :, 0, 0], np.rint(np.linspace(0, 499, 256)))
    few = position_vectors({"first": numbers[:, :3], "second": numbers[:, 3:5]}, (4, 4))
    np.testing.assert_array_equal(few[1, :, 2, 3], np.arange(5))


@pytest.mark.parametrize(("size", "grid"), [((64, 40), (64, 40)), ((65, 65), (33, 33)), ((20, 200), (5, 50))])
def test_the_grid_of_positions_has_at_most_64_cells_along_a_side(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert position_vectors({"only": torch.ones(1, 2, 8, 8)}, size).shape == (1, 2, *grid)


def test_layers_are_averaged_onto_a_coarser_grid_and_interpolated_onto_a_finer_one() -> None:
    large = torch.arange(64.0).reshape(1, 1, 8, 8)
    small = torch.tensor([[[[0.0, 4.0], [8.0, 12.0]]]])
    found = position_vectors({"large": large, "small": small}, (4, 4))
    np.testing.assert_allclose(found[0, 0], large.reshape(4, 2, 4, 2).mean((1, 3)))
    np.testing.assert_allclose(found[0, 1, 0], [0.0, 1.0, 3.0, 4.0])
    np.testing.assert_allclose(found[0, 1, :, 0], [0.0, 2.0, 6.0, 8.0])


def test_a_raw_map_of_what_has_no_single_field_is_refused_by_name() -> None:
    """Activations are vectors at every position, and a plain function has none."""
    parts = {"error": np.zeros((1, 1, 8, 8)), "activations": np.zeros((1, 1, 3, 4, 4))}
    for part in ("activations", "residual"):
        with pytest.raises(OptionError, match=f"there is no raw map of '{part}' here; choose sum, residual or error"):
            plus(map_part=part).raw_map(parts)
    assert plus(map_part="error").raw_map(parts) is parts["error"]


@pytest.mark.parametrize(
    ("part", "options"), [("activations", {}), ("activations", {"features": ("d",)}), ("inner", {"features": ("d",)})]
)
def test_a_part_of_the_map_that_there_is_not_is_refused_by_fit(part: str, options: dict[str, object]) -> None:
    """A plain function has no activations, whatever the features."""
    detector = gepc.create_detector(toy_backbone(), "gepc+", levels=LEVELS, map_part=part, **options)
    with pytest.raises(OptionError, match=f"no map of '{part}' with this backbone; choose sum, (residual, )?error"):
        detector.fit(pictures(30))


def test_without_a_transform_the_map_is_the_error_alone() -> None:
    detector = gepc.create_detector(toy_backbone(), "gepc+", levels=LEVELS, features=("d",)).fit(pictures(30))
    assert (detector.score_map(IMAGES, raw=True) > 0).all()
    assert detector.fitted.maps is not None
    assert detector.fitted.maps.parts == ("error",)


# --- calibration -----------------------------------------------------------------------------------------------------


def columns(count: int, seed: int = 0) -> Array:
    mix = np.random.default_rng(9).standard_normal((3, 4, 4))
    return np.einsum("nlf,lfk->nlk", np.random.default_rng(seed).standard_normal((count, 3, 4)), mix)


def test_level_mahalanobis_is_the_mean_of_the_levels_distances() -> None:
    inside, new = columns(80), columns(10, seed=1)
    weights = np.array([0.5, 0.3, 0.2])
    together = create_calibrator("level_mahalanobis").fit(inside)
    alone = np.stack(
        [
            create_calibrator("mahalanobis").fit(inside[:, [k]]).score(new[:, [k]], np.ones(1), Aggregation())
            for k in range(3)
        ],
        axis=1,
    )
    np.testing.assert_allclose(together.score(new, weights, Aggregation()), alone @ weights, rtol=1e-10)
    np.testing.assert_allclose(
        together.score(new, weights, Aggregation(over_levels="max")), alone.max(axis=1), rtol=1e-10
    )
    again = create_calibrator("level_mahalanobis").restore(together.state())
    np.testing.assert_array_equal(again.score(new, weights, Aggregation()), together.score(new, weights, Aggregation()))


def test_level_knn_is_the_distance_to_a_neighbour_in_the_metric_of_mahalanobis() -> None:
    """Slowly: d^2 of the Gaussian with an ID image in the place of the mean, for every ID image, sorted."""
    inside, new, weights = columns(30), columns(6, seed=1), np.array([0.5, 0.3, 0.2])
    model = create_calibrator("level_knn:k=3").fit(inside)
    expected = np.zeros((6, 3))
    for level in range(3):
        gaussian = create_calibrator("mahalanobis").fit(inside[:, [level]])
        state = gaussian.state()
        for row, image in enumerate(new[:, level]):
            distances = [
                gaussian.restore({**state, "mean": other}).score(image[None, None], np.ones(1), Aggregation())[0]
                for other in inside[:, level]
            ]
            expected[row, level] = sorted(distances)[2]
    np.testing.assert_allclose(model.score(new, weights, Aggregation()), expected @ weights, rtol=1e-9)
    again = create_calibrator("level_knn:k=3").restore(model.state())
    np.testing.assert_array_equal(again.score(new, weights, Aggregation()), model.score(new, weights, Aggregation()))
    few = create_calibrator("level_knn:k=500").fit(inside)
    assert np.isfinite(few.score(new, weights, Aggregation())).all()
    with pytest.raises(OptionError, match="k must be at least 1"):
        create_calibrator("level_knn:k=0")


def test_between_two_clouds_is_far_from_every_image_though_near_the_mean() -> None:
    clouds = columns(80) + np.where(np.arange(80) % 2, 9.0, -9.0)[:, None, None]
    between, inside = columns(40, seed=1), columns(40, seed=2) + 9.0

    def found(name: str) -> float:
        model = create_calibrator(name).fit(clouds)
        return auroc(*(model.score(part, np.full(3, 1 / 3), Aggregation()) for part in (inside, between)))

    assert found("level_knn") > 0.7 > 0.3 > found("level_mahalanobis")


@pytest.mark.parametrize("name", ["level_mahalanobis", "level_knn"])
def test_levels_that_were_not_looked_at_are_left_out(name: str) -> None:
    inside, new = columns(80), columns(10, seed=1)
    weights = np.array([0.5, 0.3, 0.2])
    model = create_calibrator(name).fit(inside)
    partial = new.copy()
    partial[:, 1] = np.nan
    expected = model.fit(inside[:, [0, 2]]).score(new[:, [0, 2]], weights[[0, 2]], Aggregation())
    found = create_calibrator(name).fit(inside).score(partial, weights, Aggregation())
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("calibration", ["mahalanobis", "gmm", "kde", "knn", "level_mahalanobis", "level_knn"])
def test_other_calibrations_and_random_levels(calibration: str) -> None:
    detector = gepc.create_detector(toy_backbone(), "gepc+", levels=LEVELS, calibration=calibration).fit(pictures(40))
    assert np.isfinite(detector.score(IMAGES)).all()
    if calibration.startswith("level_"):
        options = {"levels": LEVELS, "level_samples": 2, "calibration": calibration}
        some = gepc.create_detector(toy_backbone(), "gepc+", **options).fit(pictures(40))
        assert some.cost().forward == 4
        assert np.isfinite(some.score(IMAGES)).all()


# --- what the whiteness of the error sees ----------------------------------------------------------------------------


def test_the_autocorrelations_see_structure_that_energies_do_not() -> None:
    """Images of the same variance, white where the network expects white, or smooth along x.

    The network is the exact denoiser of white images: linear, so that the energies of its error are those of the
    image and the noise together, whatever the image's structure.
    """
    abar = cosine_alphas_cumprod(1000)

    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        signal = torch.from_numpy(abar).float()[t.long()][:, None, None, None]
        return x * (1 - signal).sqrt() / (signal * 0.2**2 + 1 - signal)

    rng = np.random.default_rng(0)
    white = 0.2 * rng.standard_normal((160, 1, 16, 16)).clip(-3.0, 3.0)
    smooth = (white[:60] + np.roll(white[:60], 1, axis=3)) / np.sqrt(2.0)
    backbone = gepc.Backbone.from_callable(eps, abar, 1, 16)

    def found(features: tuple[str, ...]) -> float:
        options = {"features": features, "levels": (0.97,), "pool": "mean"}
        detector = gepc.create_detector(backbone, "gepc+", **options).fit(white[:100])  # type: ignore[arg-type]
        return auroc(detector.score(white[100:]), detector.score(smooth))

    assert found(("d", "ax")) > 0.99
    assert found(("d",)) < 0.7


def test_one_pair_of_pixels_is_enough_for_an_autocorrelation() -> None:
    """A shift by one less than the side leaves one row or column; a shift by the side leaves nothing: 0."""
    field = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]], dtype=torch.float64)
    assert autocorrelation(field, [(1, 0)]).item() == pytest.approx((1 * 3 + 2 * 4) / 2 / 7.5)
    assert autocorrelation(field, [(0, 1)]).item() == pytest.approx((1 * 2 + 3 * 4) / 2 / 7.5)
    assert autocorrelation(field, [(1, -1)]).item() == pytest.approx(2 * 3 / 7.5)
    assert autocorrelation(field, [(2, 0)]).item() == autocorrelation(field, [(0, 2)]).item() == 0.0


def test_a_preset_without_a_transform_takes_images_that_are_not_square() -> None:
    """The group of `single` is never applied, so a quarter turn in it does not matter."""
    backbone = toy_network(image_size=None)
    detector = gepc.create_detector(backbone, "gepc+", "single", levels=LEVELS[:1], resize="native")
    assert detector.preprocessing().network_size((8, 16)) == (8, 16)
    with pytest.raises(OptionError, match="leave rot90 out"):
        gepc.create_detector(backbone, "gepc+", "fast", levels=LEVELS[:1], resize="native")
