"""What a feature is: one function, with what it needs and how its values become columns."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from torch import nn
from toys import LEVELS, pictures, toy_backbone

import gepc
from gepc.backbones.schedule import Levels, cosine_alphas_cumprod
from gepc.core.errors import OptionError
from gepc.core.parts import Part
from gepc.images.noise import image_key
from gepc.methods import features
from gepc.methods import passes as passes_module
from gepc.methods.base import Batch
from gepc.methods.features import Feature, feature, find_feature, logarithm, mean_over_group, unchanged
from gepc.methods.gepc import GepcExtractor
from gepc.methods.gepc_plus import GepcPlus
from gepc.methods.groups import Group
from gepc.methods.passes import ElementAnswers, LevelAnswers, Passes
from gepc.methods.pooling import Pooling

IMAGES = pictures(5)
LAYERS = ("first", "second")


class Net(nn.Module):
    """Two convolutions whose activations are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))[:, :3]


def network() -> gepc.Backbone:
    torch.manual_seed(3)
    return gepc.Backbone.from_callable(Net(), cosine_alphas_cumprod(1000), 3, 8)


def batch(images: np.ndarray = IMAGES) -> Batch:
    return Batch(images, [image_key(image) for image in images])


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that a test adds are gone after it."""
    monkeypatch.setattr(features, "_FEATURES", features.features())


def test_the_residual_of_the_definition_is_not_divided_by_the_score_energy() -> None:
    """mean_g mean |P_g^-1 s(P_g x_t) - s(x_t)|^2 by a loop over the group; and s times b."""
    backbone = toy_backbone()
    method = GepcExtractor(levels=Levels((0.97,)), features=("residual", "s", "b"), pool="mean")
    (t,) = method.timesteps(backbone)
    table = method.extract(backbone, batch(), (t,))
    x_t, _ = batch().noised(backbone, t)
    score = backbone.score(x_t, t)
    gaps = [g.inverse(backbone.score(g.apply(x_t).contiguous(), t)) - score for g in method.group]
    expected = torch.stack([gap.square().mean((1, 2, 3)) for gap in gaps]).mean(0)
    np.testing.assert_allclose(method.columns(table)[:, 0, 0], expected.numpy(), rtol=1e-4)
    np.testing.assert_allclose(table["residual"], table["s"] * table["b"][:, :, None], rtol=1e-5)
    plus = GepcPlus(levels=Levels((0.97,)), features=("residual",), elements="mean", group="paper", pool="mean")
    np.testing.assert_allclose(
        plus.columns(plus.extract(backbone, batch(), (t,)))[:, 0, 0], np.log(expected.numpy()), rtol=1e-4
    )


def test_adding_a_feature_is_one_function() -> None:
    """The largest residual of any pixel: known by name, extracted per element, averaged, in logarithms, fitted."""

    @feature("peak", per="element")
    def peak(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor:
        """max_p mean_c r_g^2 / b."""
        return g.gap.amax((1, 2)) / level.energy[g.rows]

    backbone, images = toy_backbone(), pictures(40)
    detector = gepc.create_detector(backbone, "gepc+", features=("s", "peak"), group="c4", levels=LEVELS).fit(images)
    table = detector.features(images[:3])
    assert table["peak"].shape == (3, len(LEVELS), 4)
    assert (table["peak"][:, :, 1:] > table["s"][:, :, 1:]).all()
    columns = detector.extractor.columns(table)
    np.testing.assert_array_equal(columns[:, :, 3:], np.log(table["peak"][:, :, 1:]))
    assert detector.extractor.column_names[3:] == ("peak:rot90", "peak:rot180", "peak:rot270")
    assert np.isfinite(detector.score(images[:3])).all()


def test_a_name_is_given_once_and_an_unknown_one_is_refused_with_a_suggestion() -> None:
    with pytest.raises(OptionError, match="a feature named 's' exists already"):
        feature("s")(lambda level: level.energy)
    with pytest.raises(OptionError, match="did you mean 'pixel_rx'"):  # registered by the laboratory
        GepcPlus(features=("pixel_r",))


def test_a_feature_of_inner_layers_is_asked_for_flips_and_rotations_only() -> None:
    asked: list[str] = []

    @feature("means", per="element", average=features.mean_over_elements, layers=True)
    def means(level: LevelAnswers, g: ElementAnswers) -> torch.Tensor:
        asked.append(g.action.name)
        return torch.cat([maps.mean((2, 3)).abs() for maps in g.activations.values()], 1)

    method = GepcPlus(features=("means",), group=("shift_x", "flip_x", "rot90"), layers=LAYERS)
    table = method.extract(network(), batch(), method.timesteps(network()))
    assert asked == ["flip_x", "rot90"]
    assert (table["means"].shape, table["means"].dtype) == ((5, 1, 2, 9), np.float32)
    assert method.parts(table) == (Part.of("structure", range(9)),)


def test_a_level_that_no_image_is_scored_at_is_nan_for_every_feature() -> None:
    """One image and one of four levels; the network is not called for the others."""
    backbone = network()
    method = GepcPlus(levels=Levels(LEVELS), level_samples=1, layers=LAYERS)
    table, maps = method.map_parts(backbone, batch(IMAGES[:1]), method.timesteps(backbone))
    for values in (*table.values(), *maps.values()):
        missing = np.isnan(values).reshape(len(LEVELS), -1)
        assert sorted(missing.all(axis=1)) == [False] + [True] * (len(LEVELS) - 1)
        assert not missing[~missing.all(axis=1)].any()
    assert backbone.forward_count == 2


def test_the_answers_are_frozen_and_hold_what_was_asked_for() -> None:
    backbone, group = network(), Group.of("flips")
    passes = Passes(backbone, batch(), group, Pooling(), LAYERS, record=True)
    level = passes.at(10, 0, np.array([True, False, True, True, True]))
    with pytest.raises(FrozenInstanceError):
        level.eps = level.noise  # type: ignore[misc]
    assert level.rows.tolist() == [0, 2, 3, 4]
    assert (level.fresh_noise, level.log_variance, list(level.activations)) == (None, None, list(LAYERS))
    chosen = np.zeros((4, 3), dtype=bool)
    chosen[1, 0] = chosen[:, 2] = True
    answers = list(passes.transported(level, chosen))
    assert [(g.action.name, g.rows.tolist()) for g in answers] == [("flip_x", [1]), ("rot180", [0, 1, 2, 3])]
    assert not answers[0].activations
    torch.testing.assert_close(answers[1].gap, (answers[1].eps - level.eps).square().mean(1))


def test_columns_of_a_feature() -> None:
    values = np.array([[[0.0, 1.0, 4.0]]])
    plain = Feature("plain", "element", torch.square, mean_over_group)
    np.testing.assert_allclose(plain.columns(values, each=False, transformed=False), [[[5.0 / 3.0]]])
    np.testing.assert_allclose(plain.columns(values, each=True, transformed=True), [[[0.0, np.log(4.0)]]])
    per_image = Feature("image", "image", torch.square, unchanged)
    np.testing.assert_allclose(per_image.columns(np.array([[2.0]]), each=True, transformed=True), [[[np.log(2.0)]]])
    assert find_feature("d").transform is logarithm


@pytest.mark.parametrize("count", [1, 3])
def test_a_network_call_has_no_more_pixels_than_its_bound_or_one_element(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Six moved copies of a large image in one call would take six times the memory of the image."""
    monkeypatch.setattr(passes_module, "TOGETHER_PIXELS", 200)  # three copies of 8x8
    backbone, rows = toy_backbone(), []
    eps = backbone.eps
    monkeypatch.setattr(backbone, "eps", lambda x, t: rows.append(len(x)) or eps(x, t))
    method = GepcExtractor(levels=Levels(LEVELS[:1]))
    method.extract(backbone, batch(IMAGES[:count]), method.timesteps(backbone))
    assert rows == ([1, 3, 3] if count == 1 else [3] * 7)
