"""Several tests of an image as one: tail probabilities, rules, and the validity of the combination."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import combine_pvalues, genpareto, kstest, norm

from gepc.calibration import Aggregation, Evidence, create_calibrator
from gepc.calibration.evidence import RULES, Tails, combine_parts
from gepc.conformal.p_values import p_values
from gepc.core.errors import OptionError
from gepc.core.parts import Part

Array = npt.NDArray[np.float64]
PARTS = (
    Part.of("output", range(3)),
    Part.of("structure", range(3, 43)),
    Part.of("colour", [0, 2], view=True),
)


def columns(count: int, seed: int = 0, levels: int = 2) -> Array:
    """Three correlated columns and forty of low rank."""
    rng = np.random.default_rng(seed)
    wide = rng.standard_normal((count, levels, 5)) @ np.random.default_rng(9).standard_normal((5, 40))
    narrow = rng.standard_normal((count, levels, 3)) + wide[:, :, :1]
    return np.concatenate([narrow, wide + 0.3 * rng.standard_normal((count, levels, 40))], axis=2)


def score(model: Evidence, values: Array) -> Array:
    return model.score(values, np.full(values.shape[1], 1.0 / values.shape[1]), Aggregation())


# --- rules -----------------------------------------------------------------------------------------------------------


def test_the_rules_are_those_of_the_literature() -> None:
    p = np.random.default_rng(0).uniform(1e-6, 0.4, (20, 3))
    evidence = -np.log(p)
    fisher = [combine_pvalues(row, "fisher").statistic for row in p]
    np.testing.assert_allclose(2.0 * combine_parts(evidence, "fisher"), fisher, rtol=1e-12)
    np.testing.assert_allclose(combine_parts(evidence, "minimum"), -np.log(p.min(axis=1)), rtol=1e-12)
    cauchy = np.tan(np.pi * (0.5 - p)).sum(axis=1)
    np.testing.assert_allclose(np.sinh(combine_parts(evidence, "cauchy")), cauchy, rtol=1e-9)
    np.testing.assert_allclose(combine_parts(evidence, "positive"), (norm.isf(p) ** 2).sum(axis=1), rtol=1e-9)


def test_weights_split_the_rate_between_parts() -> None:
    evidence = -np.log(np.array([[0.01, 0.5], [0.5, 0.01]]))
    for rule in RULES:
        first, second = combine_parts(evidence, rule, np.array([2.0, 1.0]))
        assert first > second, rule


@pytest.mark.parametrize("rule", RULES)
def test_more_evidence_in_any_part_is_never_less_together(rule: str) -> None:
    """Also from the body far into the tail, where probabilities underflow."""
    grid = np.concatenate([np.linspace(1e-3, 5.0, 40), np.geomspace(6.0, 5000.0, 40)])
    other = np.full_like(grid, 0.7)
    together = combine_parts(np.stack([grid, other], axis=-1), rule)
    steps = np.diff(together)
    assert (steps >= 0.0).all()
    assert (steps[40:] > 0.0).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_very_usual_part_cancels_nothing(rule: str) -> None:
    """The sum of standardised scores did: evidence of 4 standard deviations beside -4 was no evidence."""
    unusual = -norm.logsf(4.0)
    beside_usual = combine_parts(np.array([unusual, -norm.logsf(-4.0)]), rule)
    ordinary = combine_parts(-np.log(np.array([0.3, 0.3])), rule)
    assert beside_usual > ordinary


# --- tails -----------------------------------------------------------------------------------------------------------


def test_tails_are_those_of_a_generalised_pareto_distribution() -> None:
    """Heavy, exponential and light tails; k is between 0 and 0.5, so that probabilities never reach 0."""
    rng = np.random.default_rng(1)
    for shape, expected in ((0.3, 0.3), (0.0, 0.0), (-0.5, 0.0)):
        sample = genpareto.rvs(shape, size=20_000, random_state=rng)[:, None, None]
        scale, found = Tails.of(sample).tails[0, :, 0, 0]
        assert found == pytest.approx(expected, abs=0.06)
        assert scale > 0.0
    exponential = Tails.of(rng.exponential(size=(20_000, 1, 1)))
    asked = np.array([0.5, 1.0, 3.0, 6.0])[:, None, None]
    np.testing.assert_allclose(exponential.evidence(asked, np.zeros(1))[:, 0, 0], asked[:, 0, 0], rtol=0.1, atol=0.05)


def test_tail_probabilities_are_continuous_and_strictly_monotone() -> None:
    sample = np.random.default_rng(2).normal(size=(200, 1, 1))
    grid = np.linspace(-5.0, 60.0, 20_001)
    tails = Tails.of(sample)
    right = tails.evidence(grid[:, None, None], np.zeros(1))[:, 0, 0]
    assert np.abs(np.diff(right)).max() < 0.05
    assert (np.diff(right)[grid[1:] > sample.max()] > 0.0).all()
    both = tails.evidence(grid[:, None, None], np.full(1, 0.5))[:, 0, 0]
    middle = both[np.abs(grid) < 0.1]
    assert both[0] > 2.0 > 0.5 > middle.max()
    assert both[-1] == pytest.approx(right[-1] - np.log(2.0))


def test_tail_probabilities_of_new_images_are_nearly_uniform() -> None:
    """Each part by itself. A wide part is less exact, since its final model has seen half as many images again."""
    model = Evidence().fit(columns(2000), PARTS)
    p = np.exp(-model.standing(columns(600, seed=1)))
    assert p.shape == (600, 2, 3)
    for part, largest in ((0, 0.06), (1, 0.12), (2, 0.06)):
        assert kstest(p[:, 0, part], "uniform").statistic < largest


# --- the calibrator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [*RULES, "sum"])
def test_state_and_back_order_of_images_and_far_outliers(rule: str) -> None:
    """Also: an outlier that is farther away scores higher, however far."""
    name = "parts" if rule == "sum" else f"evidence:rule={rule}"
    train, new = columns(90), columns(5, seed=1)
    model = create_calibrator(name).fit(train, PARTS)
    again = create_calibrator(name)
    again.parts = PARTS
    np.testing.assert_array_equal(score(again.restore(model.state()), new), score(model, new))
    shuffled = create_calibrator(name).fit(train[np.random.default_rng(3).permutation(90)], PARTS)
    np.testing.assert_allclose(score(shuffled, new), score(model, new), rtol=1e-9)
    far = new[:1] + np.geomspace(10.0, 1e6, 12)[:, None, None]
    assert (np.diff(score(model, far)) > 0.0).all()


def test_a_part_that_is_too_usual_counts_if_asked() -> None:
    train = columns(300)
    centre = np.repeat(train.mean(axis=0, keepdims=True), 4, axis=0)
    models = (Evidence(left=left, wide="level_pca").fit(train, PARTS) for left in (0.0, 0.3))
    right, both = (model.standing(centre)[0, 0, 1] for model in models)
    assert right < 0.1
    assert both > 2.0


@pytest.mark.parametrize("rule", RULES)
def test_a_single_part_is_scored_whatever_the_weights_of_its_kind(rule: str) -> None:
    """As with the preset `radar` and one of its columns: its parts are views, and a single column has no views."""
    columns = np.random.default_rng(0).standard_normal((90, 1, 1))
    model = Evidence(rule=rule, narrow="z", whole=0.0, view=1.0).fit(columns)
    scores = score(model, np.array([[[0.0]], [[2.0]], [[4.0]]]))
    assert np.isfinite(scores).all()
    assert scores[0] < scores[1] < scores[2]


def test_views_and_wholes_have_weights_of_their_own() -> None:
    train, new = columns(90), columns(6, seed=1)
    names = {options: [part.name for part in create_calibrator(f"evidence:{options}").fit(train, PARTS).used]
             for options in ("view=0", "whole=0", "view=1")}  # fmt: skip
    assert names == {
        "view=0": ["output", "structure"],
        "whole=0": ["colour"],
        "view=1": ["output", "structure", "colour"],
    }
    model = Evidence(view=0.25).fit(train, PARTS)
    weighted = model.standing(new) @ np.array([1.0, 1.0, 0.25])
    np.testing.assert_allclose(score(model, new), weighted.mean(axis=1), rtol=1e-12)
    for bad in ("left=1", "view=-1", "rule=vote", "rule=sum", "narrow=gmm"):
        with pytest.raises(OptionError):
            create_calibrator(f"evidence:{bad}")


@pytest.mark.parametrize("rule", [*RULES, "sum"])
def test_the_conformal_p_value_of_the_combination_is_valid(rule: str) -> None:
    """By simulation: P(p <= alpha) <= alpha up to the error of the simulation, for dependent parts."""
    name = "parts" if rule == "sum" else f"evidence:rule={rule}"
    rejected, repeats, alpha = 0, 60, 0.1
    for seed in range(repeats):
        drawn = columns(30 + 49 + 20, seed=100 + seed, levels=1)
        model = create_calibrator(name).fit(drawn[:30], PARTS)
        scores = score(model, drawn[30:])
        rejected += int((p_values(scores[49:], np.sort(scores[:49])) <= alpha).sum())
    share = rejected / (20 * repeats)
    assert share < alpha + 4.0 * np.sqrt(alpha * (1 - alpha) / (20 * repeats)) + 0.02
    assert share > 0.5 * alpha


def test_scores_of_calibration_and_test_images_are_exchangeable() -> None:
    """The combination is fixed by other images, so the score of an image does not depend on the images beside it."""
    model = Evidence().fit(columns(60), PARTS)
    drawn = columns(40, seed=5)
    order = np.random.default_rng(0).permutation(40)
    np.testing.assert_array_equal(score(model, drawn)[order], score(model, drawn[order]))
    np.testing.assert_allclose(score(model, drawn[:1]), score(model, drawn)[:1], rtol=1e-12)


def test_more_evidence_of_a_part_never_lowers_the_combination() -> None:
    """Also where one part is so small that its probability is handled as a logarithm, and with weights."""
    rng = np.random.default_rng(3)
    grid = np.concatenate([np.linspace(0.0, 45.0, 181), np.linspace(29.9, 30.1, 41)])
    grid.sort()
    for rule in RULES:
        for others in rng.uniform(0.0, 40.0, (20, 2)):
            evidence = np.column_stack([grid, np.broadcast_to(others, (len(grid), 2))])
            found = combine_parts(evidence, rule, np.array([0.2, 0.5, 0.3]))
            assert (np.diff(found) >= -1e-9).all()


def test_the_combination_of_version_0_2_keeps_the_names_of_its_parts() -> None:
    model = create_calibrator("parts")
    assert isinstance(model, Evidence)
    model.fit(columns(90), PARTS[:2])
    assert model.stored_parts == PARTS[:2]


@pytest.mark.parametrize("name", ["evidence", "parts"])
def test_the_order_of_images_does_not_matter_if_the_first_column_is_constant(name: str) -> None:
    """A channel that is silent on all in-distribution images is allowed among many."""
    values = np.random.default_rng(0).standard_normal((60, 1, 40))
    values[:, :, 0] = 0.0
    first, second = (create_calibrator(name).fit(rows) for rows in (values, values[::-1]))
    new = np.random.default_rng(1).standard_normal((9, 1, 40))
    found = [model.score(new, np.ones(1), Aggregation()) for model in (first, second)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
