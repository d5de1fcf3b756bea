"""What the GEPC table holds, what it costs to the pass, and that random subsets estimate the whole without bias."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import LEVELS, as_uint8, pictures, toy_backbone

import gepc
from gepc.backbones.schedule import Levels, cosine_alphas_cumprod
from gepc.core.errors import InputError, OptionError
from gepc.images import noise
from gepc.images.noise import image_key
from gepc.images.preprocessing import Preprocessing
from gepc.images.sources import open_images
from gepc.methods.base import Batch
from gepc.methods.extraction import ExtractionSpec, FeatureCache, extract_all
from gepc.methods.features import find_feature
from gepc.methods.gepc import PAPER_LEVELS, PAPER_LEVELS_CELEBA, GepcExtractor
from gepc.methods.gepc_plus import GepcPlus

WIDTHS = {"s": 7, "cos": 7, "x0": 7, "pair": 21, "walk": 7, "b": None, "d": None, "cycle": None, "var_g": 7}
FEATURES = tuple(WIDTHS)
"""Those of any function; inner layers and a learned variance are tested in test_inner.py."""


def batch_of(images: np.ndarray, seed: int = 0, rows: int = 64) -> Batch:
    return Batch(images, [image_key(image) for image in images], seed, rows)


def method(**options: object) -> GepcExtractor:
    return GepcExtractor(**{"levels": Levels(LEVELS), **options})  # type: ignore[arg-type]


class Recorder:
    """A backbone that keeps every batch it was asked about."""

    def __init__(self) -> None:
        self.calls: list[torch.Tensor] = []
        inner = toy_backbone()

        def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            self.calls.append(x.clone())
            return inner.eps(x, t)

        self.backbone = gepc.Backbone.from_callable(eps, inner.alphas_cumprod, 3, 8)


# --- shape and cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [*((name,) for name in FEATURES), ("pair", "s"), FEATURES])
def test_the_table_holds_what_was_asked_for_and_nothing_else(features: tuple[str, ...]) -> None:
    """Per element, per pair or a single number; float64; the identity's column is 0."""
    extractor = method(features=features)
    backbone = toy_backbone()
    timesteps = extractor.timesteps(backbone)
    table = extractor.extract(backbone, batch_of(pictures(3)), timesteps)
    assert set(table) == set(features)
    for name, values in table.items():
        width = () if WIDTHS[name] is None else (WIDTHS[name],)
        assert values.shape == (3, len(timesteps), *width)
        assert values.dtype == np.float64
        assert np.isfinite(values).all()
        if name in ("s", "cos", "x0"):
            assert (values[:, :, 0] == 0).all()
            assert (values[:, :, 1:] > 0).all()
    assert extractor.columns(table).shape == (3, len(timesteps), len(features))


@pytest.mark.parametrize(
    ("options", "per_level", "levels"),
    [
        ({}, 7, 4),
        ({"features": FEATURES}, 7, 4),
        ({"features": ("b", "d")}, 1, 4),
        ({"mc_samples": 3}, 21, 4),
        ({"group_samples": 2}, 3, 4),
        ({"group_samples": 6}, 7, 4),
        ({"level_samples": 1}, 7, 1),
        ({"level_samples": 9}, 7, 4),
        ({"group": "sign", "mc_samples": 2}, 4, 4),
        ({"group": "d4"}, 8, 4),
        ({"group_samples": 2, "level_samples": 3, "mc_samples": 2}, 6, 3),
    ],
)
def test_the_stated_cost_is_the_counted_one(options: dict[str, object], per_level: int, levels: int) -> None:
    """|G| passes per image, level and draw, not 1 + |G|; fewer where subsets are drawn, one without the group."""
    extractor, backbone = method(**options), toy_backbone()
    extractor.extract(backbone, batch_of(pictures(5)), extractor.timesteps(backbone))
    assert backbone.forward_count == 5 * per_level * levels
    assert extractor.cost(backbone, (8, 8)).forward == per_level * levels
    assert extractor.cost(backbone, (8, 8)).jvp == backbone.jvp_count == 0


def test_the_paper_counts_the_identity_twice() -> None:
    assert method().paper_cost(levels=2).forward == 16
    assert method().cost(toy_backbone(), (8, 8), levels=2).forward == 14


def test_the_identity_is_never_evaluated_again() -> None:
    """Of the 7 inputs per image and level one is x_t itself, and no two are the same."""
    recorder = Recorder()
    extractor = method(levels=Levels(LEVELS[:1]))
    batch = batch_of(pictures(4))
    (t,) = extractor.timesteps(recorder.backbone)
    extractor.extract(recorder.backbone, batch, (t,))
    asked = torch.cat(recorder.calls)
    x_t, _ = batch.noised(recorder.backbone, t)
    assert len(asked) == 28
    for image in x_t:
        assert sum(torch.equal(image, other) for other in asked) == 1
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(asked, 2))


@pytest.mark.parametrize(("count", "rows", "calls"), [(2, 64, 2), (2, 4, 4), (8, 8, 7), (1, 1, 7)])
def test_the_network_is_called_seldom_and_never_with_more_than_rows_images(count: int, rows: int, calls: int) -> None:
    """Small batches are put together: the reference, then as many elements as fit."""
    recorder = Recorder()
    extractor = method(levels=Levels(LEVELS[:1]))
    extractor.extract(recorder.backbone, batch_of(pictures(count), rows=rows), extractor.timesteps(recorder.backbone))
    assert len(recorder.calls) == calls
    assert max(len(call) for call in recorder.calls) <= rows


# --- values ----------------------------------------------------------------------------------------------------------


def test_score_energy_and_denoising_error_of_a_network_that_answers_its_input() -> None:
    """eps(x) = x: b = mean(x_t^2)/(1 - abar), d = mean((x_t - noise)^2)."""
    backbone = gepc.Backbone.from_callable(lambda x, t: x, cosine_alphas_cumprod(1000), 3, 8)
    extractor = method(features=("b", "d"), pool="mean")
    batch = batch_of(pictures(3))
    timesteps = extractor.timesteps(backbone)
    table = extractor.extract(backbone, batch, timesteps)
    for level, t in enumerate(timesteps):
        x_t, field = batch.noised(backbone, t)
        abar = backbone.alphas_cumprod[t]
        np.testing.assert_allclose(table["b"][:, level], x_t.square().mean((1, 2, 3)) / (1 - abar), rtol=1e-5)
        np.testing.assert_allclose(table["d"][:, level], (x_t - field).square().mean((1, 2, 3)), rtol=1e-5)


def test_a_perfect_denoiser_has_no_denoising_error() -> None:
    """A network that knows x_0 recovers the noise."""
    image = torch.from_numpy(pictures(1))
    abar = torch.from_numpy(np.array(cosine_alphas_cumprod(1000)))

    def oracle(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        share = abar[t][:, None, None, None]
        return ((x - share.sqrt() * image) / (1 - share).sqrt()).float()

    backbone = gepc.Backbone.from_callable(oracle, abar.numpy(), 3, 8)
    extractor = method(features=("d",))
    table = extractor.extract(backbone, batch_of(image.numpy()), extractor.timesteps(backbone))
    assert table["d"].max() < 1e-9


@pytest.mark.parametrize("pool", ["mean", "topk"])
def test_features_do_not_depend_on_the_units_of_the_answer(pool: str) -> None:
    """All but b and d are ratios: ten times the prediction changes none of s, cos, pair, walk."""
    plain = toy_backbone()
    loud = gepc.Backbone.from_callable(lambda x, t: 10 * plain.eps(x, t), plain.alphas_cumprod, 3, 8)
    extractor = method(features=("s", "cos", "pair", "walk"), pool=pool)
    timesteps = extractor.timesteps(plain)
    tables = [extractor.extract(backbone, batch_of(pictures(3)), timesteps) for backbone in (plain, loud)]
    for name in tables[0]:
        np.testing.assert_allclose(tables[0][name], tables[1][name], rtol=1e-4, atol=1e-7)


def test_several_draws_are_the_mean_over_single_ones() -> None:
    """mc_samples = 3 equals the average of three tables, each with its own draw given as noise."""
    extractor, backbone = method(features=("s", "pair", "d"), mc_samples=3), toy_backbone()
    timesteps = extractor.timesteps(backbone)
    batch = batch_of(pictures(3), seed=4)
    found = extractor.extract(backbone, batch, timesteps)
    single = method(features=("s", "pair", "d"))
    tables = []
    for draw in range(3):
        fields = {(t, 0): noise.normal(4, batch.keys, (3, 8, 8), t, draw) for t in timesteps}
        tables.append(single.extract(backbone, Batch(batch.images, batch.keys, 4, fixed_noise=fields), timesteps))
    for name, values in found.items():
        np.testing.assert_allclose(values, np.mean([table[name] for table in tables], axis=0), rtol=1e-6)


def test_the_map_of_several_draws_is_the_mean_over_single_ones() -> None:
    extractor, backbone = method(mc_samples=2), toy_backbone()
    timesteps = extractor.timesteps(backbone)
    batch = batch_of(pictures(3), seed=4)
    found = extractor.map_parts(backbone, batch, timesteps)[1]["residual"]
    maps = []
    for draw in range(2):
        fields = {(t, 0): noise.normal(4, batch.keys, (3, 8, 8), t, draw) for t in timesteps}
        single = Batch(batch.images, batch.keys, 4, fixed_noise=fields)
        maps.append(method().map_parts(backbone, single, timesteps)[1]["residual"])
    assert found.shape == (3, len(timesteps), 8, 8)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.mean(maps, axis=0), rtol=1e-5)


# --- random subsets --------------------------------------------------------------------------------------------------


def copies(count: int) -> tuple[np.ndarray, list[bytes]]:
    """The same image many times under different keys: each copy gets its own subset."""
    return np.repeat(pictures(1), count, axis=0), [index.to_bytes(2, "big") for index in range(count)]


@pytest.mark.parametrize("group_samples", [2, 4])
def test_a_random_subset_of_the_group_estimates_the_mean_over_it_without_bias(group_samples: int) -> None:
    """Given the noise, the mean over 1500 subsets is the full value within 4.5 standard errors, for every feature."""
    features = ("s", "cos", "x0", "pair")
    backbone, count = toy_backbone(), 1500
    images, keys = copies(count)
    extractor = method(features=features, group_samples=group_samples, levels=Levels(LEVELS[:1]))
    (t,) = extractor.timesteps(backbone)
    field = np.repeat(np.random.default_rng(0).standard_normal((1, 3, 8, 8)), count, axis=0).astype(np.float32)
    sampled = extractor.columns(extractor.extract(backbone, Batch(images, keys, fixed_noise={(t, 0): field}), (t,)))
    whole = method(features=features, levels=Levels(LEVELS[:1]))
    one = Batch(images[:1], keys[:1], fixed_noise={(t, 0): field[:1]})
    exact = whole.columns(whole.extract(backbone, one, (t,)))[0, 0]
    for column, name in enumerate(features):
        values = sampled[:, 0, column]
        assert values.std() > 1e-3 * exact[column], name
        assert abs(values.mean() - exact[column]) < 4.5 * values.std() / math.sqrt(count), name


def test_a_subset_of_the_group_holds_the_same_values_as_the_whole() -> None:
    """NaN where not evaluated, exactly `group_samples` elements besides the identity, the others unchanged."""
    backbone, batch = toy_backbone(), batch_of(pictures(6))
    timesteps = method().timesteps(backbone)
    part = method(group_samples=3).extract(backbone, batch, timesteps)["s"]
    whole = method().extract(backbone, batch, timesteps)["s"]
    seen = ~np.isnan(part)
    assert (seen.sum(2) == 4).all()
    assert len(np.unique(seen.reshape(-1, 7), axis=0)) > 4
    np.testing.assert_allclose(part[seen], whole[seen], rtol=1e-5)


def test_pairs_of_a_subset_are_those_whose_elements_were_both_evaluated() -> None:
    backbone, batch = toy_backbone(), batch_of(pictures(4))
    extractor = method(features=("s", "pair"), group_samples=3)
    table = extractor.extract(backbone, batch, extractor.timesteps(backbone))
    seen = ~np.isnan(table["s"])
    for column, (first, second) in enumerate(itertools.combinations(range(7), 2)):
        np.testing.assert_array_equal(~np.isnan(table["pair"][:, :, column]), seen[:, :, first] & seen[:, :, second])


def test_a_subset_of_levels_holds_the_same_values_as_all() -> None:
    """Exactly `level_samples` levels per image, other ones for other images, NaN elsewhere, the values unchanged."""
    backbone, batch = toy_backbone(), batch_of(pictures(12))
    extractor = method(features=("s", "d"), level_samples=2)
    timesteps = extractor.timesteps(backbone)
    part, whole = (
        extractor.extract(backbone, batch, timesteps),
        method(features=("s", "d")).extract(backbone, batch, timesteps),
    )
    seen = ~np.isnan(part["d"])
    assert (seen.sum(1) == 2).all()
    assert len(np.unique(seen, axis=0)) > 3
    for name in ("s", "d"):
        np.testing.assert_allclose(part[name][seen], whole[name][seen], rtol=1e-5)
        assert np.isnan(part[name][~seen]).all()


def test_as_scored_hides_what_scoring_leaves_out() -> None:
    """Fitting sees every level; `as_scored` masks its columns to what `extract` gives at the same levels."""
    backbone, batch = toy_backbone(), batch_of(pictures(8), seed=3)
    extractor = method(level_samples=1)
    kept = extractor.timesteps(backbone)[1:3]
    whole = extractor.for_fitting()
    assert whole.cost(backbone, (8, 8)).forward == 28
    masked = extractor.as_scored(whole.columns(whole.extract(backbone, batch, kept)), batch.keys, seed=3)
    np.testing.assert_allclose(masked, extractor.columns(extractor.extract(backbone, batch, kept)), rtol=1e-5)


def test_random_levels_are_not_extracted_one_by_one() -> None:
    """Which levels an image is scored on depends on how many there are, so a table cannot be put together by level."""
    backbone, batch = toy_backbone(), batch_of(pictures(12))
    whole, part = method(), method(level_samples=1)
    timesteps = part.timesteps(backbone)
    one_by_one = np.concatenate([part.extract(backbone, batch, (t,))["s"] for t in timesteps], axis=1)
    assert not np.isnan(one_by_one).any()
    assert np.isnan(part.extract(backbone, batch, timesteps)["s"]).any()
    assert not part.by_level
    assert whole.by_level


def test_a_cached_table_leaves_out_the_same_random_levels(tmp_path: Path) -> None:
    backbone, images = toy_backbone(), as_uint8(pictures(8))
    backbone.sha256 = "a stand-in for weights"
    spec = ExtractionSpec(method(level_samples=1), method().timesteps(backbone))
    found = [
        extract_all(open_images(images), Preprocessing(size=(8, 8)), backbone, spec, cache=cache).table["s"]
        for cache in (None, FeatureCache(tmp_path), FeatureCache(tmp_path))
    ]
    assert np.isnan(found[0]).any()
    for table in found[1:]:
        np.testing.assert_array_equal(table, found[0])


# --- other images ----------------------------------------------------------------------------------------------------


def test_non_square_images_drop_quarter_turns_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    backbone = toy_backbone(image_size=None)
    extractor = method(features=("s", "pair"))
    with caplog.at_level(logging.INFO, logger="gepc"):
        table = extractor.extract(backbone, batch_of(pictures(2, size=(6, 9))), extractor.timesteps(backbone))
    assert caplog.messages == ["images of 6x9 are not square: rot90 left out"]
    assert table["s"].shape == (2, 4, 6)
    assert table["pair"].shape == (2, 4, 15)
    assert extractor.cost(backbone, (6, 9)).forward == 24
    assert backbone.forward_count == 48


def test_one_channel() -> None:
    backbone = toy_backbone(channels=1)
    extractor = method(features=FEATURES)
    table = extractor.extract(backbone, batch_of(pictures(2, channels=1)), extractor.timesteps(backbone))
    assert all(np.isfinite(values).all() for values in table.values())


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ("s", "coss")}, "did you mean 'cos'"),
        ({"features": ()}, "at least one feature"),
        ({"features": ("s", "s")}, "named twice"),
        ({"mc_samples": 0}, "mc_samples must be at least 1"),
        ({"group_samples": 0}, "group_samples must be between 1 and 6"),
        ({"group_samples": 7}, "group_samples must be between 1 and 6"),
        ({"group_samples": 2, "features": ("walk",)}, "'walk' needs the whole group"),
        ({"group_samples": 1, "features": ("pair",)}, "'pair' needs group_samples of at least 2"),
        ({"level_samples": 0}, "level_samples must be at least 1"),
        ({"pool": "median"}, "unknown pool"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        method(**options)


@pytest.mark.parametrize(("features", "base"), [(("cos", "s"), 1), (("cos", "pair"), 0), ("s", 0)])
def test_levels_are_chosen_by_s_where_it_is_there(features: tuple[str, ...], base: int) -> None:
    backbone, extractor = toy_backbone(), method(features=features)
    table = extractor.extract(backbone, batch_of(pictures(3)), extractor.timesteps(backbone))
    np.testing.assert_array_equal(extractor.stability(table), extractor.columns(table)[:, :, base])


def test_given_noise_must_fit() -> None:
    backbone, extractor = toy_backbone(), method(levels=Levels(LEVELS[:1]))
    (t,) = extractor.timesteps(backbone)
    batch = batch_of(pictures(2))
    batch.fixed_noise = {(t, 0): np.zeros((2, 1, 8, 8), dtype=np.float32)}
    with pytest.raises(InputError, match=r"noise of shape \(2, 1, 8, 8\) does not fit"):
        extractor.extract(backbone, batch, (t,))
    batch.fixed_noise = {(t, 0): np.zeros((2, 3, 8, 8), dtype=np.float32)}
    with pytest.raises(InputError, match="draw 1"):
        method(levels=Levels(LEVELS[:1]), mc_samples=2).extract(backbone, batch, (t,))


def test_the_defaults_are_the_papers() -> None:
    assert PAPER_LEVELS == (0.99997, 0.9999, 0.9979, 0.9969)
    assert PAPER_LEVELS_CELEBA == (0.99997, 0.99, 0.999, 0.9969)
    method = GepcExtractor()
    assert (method.features, method.pool, method.topk, method.window) == (("s",), "topk", 0.3, 9)
    assert (method.mc_samples, method.group_samples, method.level_samples) == (1, None, None)
    assert (GepcExtractor.keep, GepcExtractor.calibration) == (2, "kde")


@pytest.mark.parametrize("feature", ["s", "cos", "x0"])
def test_an_average_over_the_group_counts_the_identity(feature: str) -> None:
    """Its residual is zero and is not evaluated: the mean over G is (|G| - 1)/|G| times the mean over the others."""
    values = np.concatenate([np.zeros((2, 3, 1)), np.random.default_rng(0).random((2, 3, 6))], axis=2)
    np.testing.assert_allclose(find_feature(feature).average(values), values.mean(axis=2), rtol=1e-12)
    sampled = values.copy()
    sampled[:, :, [2, 5]] = np.nan  # elements that were not drawn
    others = np.nanmean(sampled[:, :, 1:], axis=2)
    np.testing.assert_allclose(find_feature(feature).average(sampled), others * 6 / 7, rtol=1e-12)


def test_the_dispersion_is_the_mean_over_all_pairs() -> None:
    """7 elements have 21 pairs; two have one, which is with the identity."""
    for count in (21, 1):
        values = np.random.default_rng(0).random((2, 3, count))
        np.testing.assert_allclose(find_feature("pair").average(values), values.mean(axis=2), rtol=1e-12)


def test_a_single_evaluated_element_is_its_own_mean_and_none_is_nan() -> None:
    values = np.full((1, 2, 7), np.nan)
    values[:, :, 0] = 0.0
    values[0, 0, 3] = 5.0
    found = find_feature("s").average(values)
    assert found[0, 0] == pytest.approx(5.0 * 6 / 7)
    assert np.isnan(found[0, 1])


def test_the_walk_is_averaged_over_its_steps() -> None:
    values = np.random.default_rng(0).random((2, 3, 7))
    np.testing.assert_allclose(find_feature("walk").average(values), values.mean(axis=2), rtol=1e-12)


def test_pairs_of_a_subset_are_averaged_apart_from_those_with_the_identity() -> None:
    """Of 4 elements 3 pairs are with the identity and 3 are not: (2 mean(with) + 2 mean(others))/4."""
    values = np.array([[[1.0, np.nan, 3.0, np.nan, 7.0, np.nan]]])
    assert find_feature("pair").average(values).tolist() == [[(2 * 2.0 + 2 * 7.0) / 4]]


@pytest.mark.parametrize(
    ("act_on", "features", "size", "passes"),
    [
        ("latents", ("s",), (8, 8), 1),
        ("pixels", ("s",), (8, 8), 7),
        ("pixels", ("s",), (8, 12), 6),
        ("pixels", ("b", "d"), (8, 8), 1),
    ],
)
def test_encoder_passes(act_on: str, features: tuple[str, ...], size: tuple[int, int], passes: int) -> None:
    """One; where the group acts on pixels, one for each of its elements that act on images of this size."""
    backbone = toy_backbone(image_size=None).with_encoder(
        lambda x: torch.nn.functional.avg_pool2d(x, 2), factor=2, channels=3, act_on=act_on
    )
    assert method(features=features).encoder_passes(backbone, size) == passes
    assert method(features=features).encoder_passes(toy_backbone(), size) == 0


def test_square_images_leave_nothing_out(caplog: pytest.LogCaptureFixture) -> None:
    backbone, extractor = toy_backbone(), method()
    with caplog.at_level(logging.INFO, logger="gepc"):
        extractor.extract(backbone, batch_of(pictures(1)), extractor.timesteps(backbone)[:1])
    assert caplog.messages == []


def test_only_features_that_compare_elements_have_a_map() -> None:
    assert method(features=("b", "s")).has_maps
    assert not method(features=("b", "d", "cycle")).has_maps
    assert set(method(features=("s",)).map_parts(toy_backbone(), batch_of(pictures(1)), (10,))[1]) == {"residual"}


def test_the_levels_cover_little_to_moderate_noise_unless_others_are_given() -> None:
    assert GepcExtractor().levels == Levels((0.9999, 0.998, 0.99, 0.97, 0.9))
    assert GepcExtractor(features=("inner",), layers="mid").layers == ("mid",)


def test_layers_that_no_feature_and_no_map_reads_are_refused() -> None:
    with pytest.raises(OptionError, match="`layers` needs a feature of inner layers, such as inner"):
        GepcExtractor(layers="mid")
    assert GepcPlus(features=("d",), map_part="target", layers="mid").layers == ("mid",)


@pytest.mark.parametrize("options", [{"group_samples": 2}, {"group_samples": 1}, {"group": "flip_x"}, {}], ids=str)
def test_the_mean_of_a_residual_map_is_s(options: dict[str, object]) -> None:
    """With mean pooling, also where some elements were drawn or there is but one."""
    backbone, extractor = toy_backbone(), method(pool="mean", **options)
    timesteps = extractor.timesteps(backbone)[:2]
    table, maps = extractor.map_parts(backbone, batch_of(pictures(5)), timesteps)
    np.testing.assert_allclose(maps["residual"].mean((2, 3)), extractor.columns(table)[:, :, 0], rtol=1e-5)


def test_levels_that_an_image_is_not_scored_at_have_a_map_of_nan() -> None:
    backbone, extractor = toy_backbone(), method(level_samples=1)
    timesteps = extractor.timesteps(backbone)
    table, maps = extractor.map_parts(backbone, batch_of(pictures(1)), timesteps)
    seen = ~np.isnan(table["s"][0, :, 0])
    assert seen.sum() == 1
    assert np.isnan(maps["residual"][0, ~seen]).all()
    assert (maps["residual"][0, seen] > 0).all()


def test_inner_layers_need_a_draw_that_has_a_flip_or_a_turn() -> None:
    """The paper's group has shifts, which inner layers are not compared under."""
    shifts = sum(not action.on_layers for action in GepcExtractor(group="paper").group.moving)
    with pytest.raises(OptionError, match=f"'inner' needs group_samples of at least {shifts + 1}"):
        GepcExtractor(group="paper", features=("s", "inner"), group_samples=shifts)
    assert GepcExtractor(group="paper", features=("s", "inner"), group_samples=shifts + 1).group_samples == shifts + 1
