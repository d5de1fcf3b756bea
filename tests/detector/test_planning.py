"""Choosing transforms and levels without out-of-distribution data: the outliers, the rules, what they may look at."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import as_uint8, pictures, toy_backbone, toy_detector

import gepc
from gepc.backbones.schedule import cosine_alphas_cumprod
from gepc.core.errors import InputError, OptionError
from gepc.detector.planning import by_separation, by_violation, choose, spend, within_budget
from gepc.features.gepc_plus import GepcPlus
from gepc.features.groups import Group

ID = pictures(60)
LEVELS = (0.99, 0.97)
IMAGE = pictures(1, size=16, seed=3)[0]


def detector(**options: object) -> gepc.Detector:
    return gepc.create_detector("gepc+", toy_backbone(), **{"levels": LEVELS, **options})


# --- the rules as arithmetic -----------------------------------------------------------------------------------------


def test_violation_prefers_what_is_broken_much_and_evenly() -> None:
    rng = np.random.default_rng(0)
    mean, cv = np.array([0.0, 0.01, 0.04, 0.04, 0.0]), np.array([0.0, 0.2, 0.2, 0.6, 0.0])
    s = mean * (1.0 + cv * rng.standard_normal((400, 2, 5)))
    group = Group.of(("flip_x", "flip_y", "rot90", "rot180"))
    trials = by_violation(s, group)
    assert [trial.element for trial in trials] == ["flip_y", "rot90", "flip_x", "rot180"]
    assert trials[0].timestep is None
    measured = s[:, :, 2]
    assert trials[0].value == pytest.approx(np.log(measured.mean(0) ** 2 / measured.std(0)).mean())
    assert trials[-1].value == -np.inf


def test_separation_finds_the_level_and_the_element_that_tell_outliers() -> None:
    """Only rot90 at the second level sees them; everything else is the same noise for both."""
    rng = np.random.default_rng(0)
    group = Group.of(("flip_x", "rot90"))
    method = GepcPlus(group=group, features=("s", "d"))
    inside, outside = ({"s": np.exp(rng.standard_normal((64, 2, 3))), "d": np.ones((64, 2))} for _ in range(2))
    for table in (inside, outside):
        table["d"] = np.exp(rng.standard_normal((64, 2)))
    outside["s"][:, 1, 2] *= 1e3
    trials = by_separation(inside, outside, method, "level_mahalanobis", (10, 20))
    assert (trials[0].element, trials[0].timestep) == ("rot90", 20)
    assert trials[0].value > 0.95
    assert len(trials) == 4
    assert all(abs(trial.value - 0.5) < 0.2 for trial in trials[1:])


# --- choosing for a detector -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "passes"), [("violation", 32 * 2 * 4), ("synthetic", 2 * 32 * 2 * 4)])
def test_a_choice_costs_what_it_says_and_does_not_depend_on_order(rule: str, passes: int) -> None:
    elements = ("flip_x", "rot180", "shift_y")
    unfitted = detector()
    choice = choose(unfitted, ID, rule, elements, count=32)
    assert choice.passes == passes == unfitted.backbone.forward_count
    order = np.random.default_rng(1).permutation(len(ID))
    again = choose(unfitted, ID[order], rule, elements, count=32)
    assert [(trial.element, trial.timestep) for trial in again.trials] == [
        (trial.element, trial.timestep) for trial in choice.trials
    ]
    np.testing.assert_allclose([t.value for t in again.trials], [t.value for t in choice.trials], rtol=1e-5)


@pytest.mark.parametrize("rule", ["violation", "synthetic"])
def test_the_chosen_detector_keeps_the_other_options(rule: str) -> None:
    unfitted = detector(map_part="error", seed=3, topk=0.5)
    choice = choose(unfitted, ID, rule, count=32)
    chosen = choice.apply(unfitted)
    assert chosen.extractor.options()["group"].names == ("id", choice.trials[0].element)
    assert chosen.extractor.options()["topk"] == 0.5
    assert chosen.extractor.options()["map_part"] == "error"
    assert chosen.seed == 3
    levels = chosen.extractor.timesteps(chosen.backbone)
    candidates = unfitted.extractor.timesteps(chosen.backbone)
    assert levels == ((choice.trials[0].timestep,) if rule == "synthetic" else candidates)
    assert np.isfinite(chosen.fit(ID).score(ID[:3])).all()


def test_images_held_out_for_p_values_are_never_looked_at() -> None:
    fitted = detector().fit(ID)
    learned = fitted.fitting_images(ID, 1000)
    assert len(learned) == fitted.n_fit_
    scores = fitted.score(np.stack(learned))
    distance = np.abs(scores[:, None] - fitted.calibration_scores_)
    assert distance.min() > 1e-6
    assert len(fitted.fitting_images(ID, 5)) == 5


def test_a_symmetry_that_the_network_keeps_exactly_is_never_chosen() -> None:
    def eps(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * torch.linspace(0.5, 1.5, x.shape[-1]))

    backbone = gepc.Backbone.from_callable(eps, cosine_alphas_cumprod(1000), 3, 8)
    unfitted = gepc.create_detector("gepc+", backbone, levels=LEVELS)
    assert choose(unfitted, ID, elements=("flip_y", "flip_x"), count=16).elements == ("flip_x",)
    with pytest.raises(InputError, match="exactly equivariant under all"):
        choose(unfitted, ID, elements=("flip_y", "shift_y"), count=16)


def test_what_cannot_be_chosen_from() -> None:
    with pytest.raises(OptionError, match=r"rule.*'oracle'"):
        choose(detector(), ID, "oracle")
    with pytest.raises(OptionError, match=r"'gepc\+'"):
        choose(gepc.GEPC(toy_backbone()), ID)
    with pytest.raises(OptionError, match="feature s"):
        choose(detector(features=("d",)), ID)
    with pytest.raises(OptionError, match="count must be at least 16"):
        choose(detector(), ID, count=4)
    with pytest.raises(InputError, match="at least 16 different images"):
        choose(detector(), ID[:9])


# --- a number of passes ----------------------------------------------------------------------------------------------

GROUP = Group.of("paper")


def table(images: int = 40, levels: int = 4, seed: int = 0) -> np.ndarray:
    s = np.random.default_rng(seed).gamma(4.0, size=(images, levels, len(GROUP)))
    s[:, :, 0] = 0.0
    return s


@given(passes=st.integers(2, 40), keep=st.one_of(st.none(), st.integers(1, 4)), seed=st.integers(0, 9))
def test_a_plan_never_costs_more_than_the_budget(passes: int, keep: int | None, seed: int) -> None:
    elements, levels = spend(table(seed=seed), GROUP, passes, keep)
    assert 1 <= len(elements) <= 6
    assert 1 <= len(levels) <= (keep or 4)
    assert len(levels) * (1 + len(elements)) <= passes
    assert list(levels) == sorted(set(levels))


def test_levels_come_first_then_elements() -> None:
    s = table()
    sizes = [tuple(map(len, spend(s, GROUP, passes, 2))) for passes in (2, 3, 4, 6, 14)]
    assert sizes == [(1, 1), (2, 1), (1, 2), (2, 2), (6, 2)]


def test_elements_that_the_network_breaks_much_and_evenly_are_chosen() -> None:
    rng = np.random.default_rng(1)
    s = np.zeros((200, 2, len(GROUP)))
    s[:, :, 1:] = 0.1 * (1 + 0.5 * rng.random((200, 2, 6)))
    s[:, :, GROUP.names.index("rot90")] = 1.0 * (1 + 0.1 * rng.random((200, 2)))
    assert spend(s, GROUP, 4, 2)[0] == ("rot90",)


def test_levels_with_the_lowest_variation_are_chosen() -> None:
    rng = np.random.default_rng(2)
    s = np.zeros((200, 4, len(GROUP)))
    s[:, :, 1:] = 1.0 + np.array([0.9, 0.1, 0.5, 0.2])[None, :, None] * rng.random((200, 1, 6))
    assert spend(s, GROUP, 14, 2)[1] == (1, 3)


@pytest.mark.parametrize("passes", [2, 4, 6, 9])
def test_a_planned_detector_keeps_to_its_passes(passes: int) -> None:
    backbone, images = toy_backbone(), as_uint8(pictures(60))
    detector = toy_detector(backbone)
    before = backbone.forward_count
    plan = within_budget(detector, images, passes)
    assert plan.passes == backbone.forward_count - before == 40 * 4 * 7
    planned = plan.apply(detector).fit(images)
    assert planned.cost().forward <= passes
    before = backbone.forward_count
    planned.score(as_uint8(pictures(5, seed=1)))
    assert backbone.forward_count - before == 5 * planned.cost().forward


def test_images_held_out_for_p_values_play_no_part() -> None:
    images = as_uint8(pictures(60))
    detector = toy_detector()
    seen = {image.tobytes() for image in detector.fitting_images(images, 256)}
    fitted = toy_detector().fit(images)
    assert len(seen) == fitted.n_fit_
    plan = within_budget(detector, images, 6)
    assert plan == within_budget(toy_detector(), images[::-1], 6)


def test_gepc_plus_can_be_planned() -> None:
    detector = gepc.create_detector("gepc+", toy_backbone(), group="paper")
    plan = within_budget(detector, as_uint8(pictures(60)), 6)
    assert plan.apply(detector).cost().forward <= 6


@pytest.mark.parametrize(
    ("options", "passes", "message"),
    [
        ({}, 1, "budget is 2"),
        ({"mc_samples": 3}, 5, "budget is 6"),
        ({"features": ("b",)}, 6, "feature s"),
    ],
)
def test_a_budget_that_buys_nothing_is_refused(options: dict[str, object], passes: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        within_budget(toy_detector(**options), as_uint8(pictures(40)), passes)


def test_other_methods_and_too_few_images_are_refused() -> None:
    with pytest.raises(OptionError, match="cannot be planned"):
        within_budget(gepc.create_detector("msma", toy_backbone()), as_uint8(pictures(40)), 6)
    with pytest.raises(InputError, match="at least 8"):
        within_budget(toy_detector(), as_uint8(pictures(6)), 6)
