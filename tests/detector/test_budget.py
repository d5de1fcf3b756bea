"""Levels and group elements for a number of passes, from ID images alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import as_uint8, pictures, toy_backbone, toy_detector

import gepc
from gepc.core.errors import InputError, OptionError
from gepc.detector.budget import spend, within_budget
from gepc.features.groups import Group

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
    [({}, 1, "least budget is 2"), ({"mc_samples": 3}, 5, "least budget is 6"), ({"features": ("b",)}, 6, "feature s")],
)
def test_a_budget_that_buys_nothing_is_refused(options: dict[str, object], passes: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        within_budget(toy_detector(**options), as_uint8(pictures(40)), passes)


def test_other_methods_and_too_few_images_are_refused() -> None:
    with pytest.raises(OptionError, match="no passes to choose"):
        within_budget(gepc.create_detector("msma", toy_backbone()), as_uint8(pictures(40)), 6)
    with pytest.raises(InputError, match="at least 8"):
        within_budget(toy_detector(), as_uint8(pictures(6)), 6)
