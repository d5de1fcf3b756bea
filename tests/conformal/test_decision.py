"""False-discovery control holds for conformal p-values that share a calibration set."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import false_discovery_control

from gepc.conformal.decision import DecisionRule, benjamini_hochberg, storey
from gepc.conformal.p_values import UNGROUPED, CalibrationScores, p_values
from gepc.core.errors import OptionError, TooFewImagesError

rates = st.floats(0.01, 0.5)
lists = st.lists(st.floats(0.0, 1.0), max_size=40)
NINE = CalibrationScores.of(np.arange(9.0), None)


def discoveries(p, fdr, procedure="bh"):
    return DecisionRule(fdr=fdr, procedure=procedure).alarms(p, NINE)


@given(lists, rates)
def test_bh_is_the_adjusted_p_value_below_the_rate(p, fdr):
    flags = benjamini_hochberg(p, fdr)
    adjusted = false_discovery_control(p) if p else np.empty(0)
    undecided = np.isclose(adjusted, fdr, rtol=1e-9)
    assert (flags == (adjusted <= fdr))[~undecided].all()


@given(lists, rates)
def test_flags_are_a_lower_set_of_the_p_values(p, fdr):
    p = np.asarray(p)
    for procedure in ("bh", "storey"):
        flags = discoveries(p, fdr, procedure)
        if flags.any() and not flags.all():
            assert p[flags].max() <= p[~flags].min()


def _simulate(flag, outliers, runs=400, n=200, m=50, fdr=0.2):
    """Mean share of false flags and mean share of outliers found, with a fresh calibration set in each run."""
    rng = np.random.default_rng(7)
    false_share, power = [], []
    for _ in range(runs):
        test = rng.normal(size=m)
        test[:outliers] += 3.0
        flags = flag(p_values(test, rng.normal(size=n)), fdr)
        false_share.append(flags[outliers:].sum() / max(1, flags.sum()))
        power.append(flags[:outliers].mean() if outliers else 0.0)
    return np.mean(false_share), np.mean(power), np.std(false_share) / np.sqrt(runs)


@pytest.mark.parametrize("flag", [benjamini_hochberg, storey])
@pytest.mark.parametrize("outliers", [0, 10, 30])
def test_false_discovery_rate_is_held(flag, outliers):
    rate, power, error = _simulate(flag, outliers)
    assert rate <= 0.2 + 3 * error
    if outliers:
        assert power > 0.5


def test_storey_finds_more_when_many_are_out():
    _, plain, _ = _simulate(benjamini_hochberg, 40, runs=100)
    _, adaptive, _ = _simulate(storey, 40, runs=100)
    assert adaptive > plain


@pytest.mark.parametrize(("p", "fdr"), [([0.1], 0.0), ([0.1], 1.0), ([1.2], 0.1), ([-0.1], 0.1)])
def test_senseless_numbers_are_refused(p, fdr):
    with pytest.raises(OptionError):
        benjamini_hochberg(p, fdr)


def test_an_unknown_procedure_names_the_known_ones():
    with pytest.raises(OptionError, match="storey"):
        discoveries([0.1], 0.1, "story")


def test_no_p_values_no_flags():
    assert discoveries([], 0.1, "bh").shape == discoveries([], 0.1, "storey").shape == (0,)


# --- the rule -------------------------------------------------------------------------------------------------------


def test_a_rate_counts_up_to_rounding_and_a_failed_image_never_alarms():
    p = np.array([0.1, 0.2, np.nan])
    assert DecisionRule(1 - 0.9).alarms(p, NINE).tolist() == [True, False, False]
    assert DecisionRule(fdr=0.5).alarms(p, NINE).tolist() == [True, True, False]


def test_a_rate_that_cannot_be_guaranteed_is_refused_before_any_work():
    with pytest.raises(OptionError, match="at least 19 calibration images, there are 9"):
        DecisionRule(0.05).check(NINE)
    with pytest.raises(OptionError, match="confidence can be used with alpha only"):
        DecisionRule(confidence=0.9, fdr=0.1)
    with pytest.raises(OptionError, match="fdr must be between 0 and 1"):
        DecisionRule(fdr=1.5)
    DecisionRule(fdr=0.1).check(NINE)


def test_every_group_has_its_own_limit():
    groups = CalibrationScores({"few": np.arange(9.0), "many": np.arange(99.0)})
    rule, labels = DecisionRule(0.3, confidence=0.9), np.array(["few", "many", "few"])
    few, many = (float(rule.limits(CalibrationScores({UNGROUPED: scores}))) for scores in groups.by_group.values())
    assert few < many < 0.3
    assert rule.limits(groups, labels).tolist() == [few, many, few]
    with pytest.raises(OptionError, match="fitted with groups"):
        rule.limits(groups)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (DecisionRule(0.1), "at most 0.1 of in-distribution images raise an alarm"),
        (DecisionRule(0.3, confidence=0.5), "with probability 0.5 over calibration sets, at most 0.3"),
        (DecisionRule(fdr=0.2), "at most 0.2 of the flagged images are false alarms"),
    ],
)
def test_the_guarantee_in_words(rule: DecisionRule, words: str):
    assert words in rule.statement(NINE)


@pytest.mark.parametrize("n", [9, 10, 19, 99])
def test_bh_counts_a_p_value_that_meets_its_limit_up_to_rounding(n):
    """p = k/(n + 1) as p-values are computed, against the limit fdr k/m in floating point; never a real difference."""
    for m in range(1, 12):
        for k in range(1, m + 1):
            p = np.r_[np.full(k, k / (n + 1.0)), np.ones(m - k)]
            fdr = m / (n + 1.0)
            if fdr < 1.0:
                assert benjamini_hochberg(p, fdr)[:k].all()
    assert not benjamini_hochberg([0.1 * (1 + 1e-9)], 0.1).any()


def test_bh_by_hand():
    assert benjamini_hochberg([0.01, 0.04, 0.03, 0.9], 0.06).tolist() == [True, True, True, False]
    assert benjamini_hochberg([0.02, 0.9, 0.9, 0.9], 0.06).tolist() == [False] * 4


def test_storey_by_hand():
    """pi_0 = (1 + 2)/(6 x 1/2) = 1 for two large p-values of six; with none it is 1/3, and the limits triple."""
    p = [0.01, 0.02, 0.03, 0.04, 0.9, 0.8]
    assert storey(p, 0.06).tolist() == benjamini_hochberg(p, 0.06).tolist()
    few = [0.01, 0.1, 0.11, 0.12, 0.13, 0.5]
    assert storey(few, 0.06).tolist() == [True, True, True, True, True, False]
    assert benjamini_hochberg(few, 0.06).tolist() == [True] + [False] * 5


def test_the_limit_of_a_rule_with_confidence_counts_as_an_alarm():
    """Nine calibration images, rank 3 of 10: p = 3/10 alarms, p = 4/10 does not."""
    p = NINE.p_values(np.array([6.5, 5.5]))
    assert p.tolist() == [0.3, 0.4]
    assert DecisionRule(0.3, confidence=0.5).alarms(p, NINE).tolist() == [True, False]


def test_storey_flags_up_to_the_cutoff():
    """Where the other limits allow it: pi_0 is 1/5 and 2/5, so that Benjamini-Hochberg runs at 1 and at 0.75."""
    assert storey([0.001] * 9 + [0.5], 0.2).tolist() == [True] * 10
    assert benjamini_hochberg([0.001] * 9 + [0.51], 0.3 / 0.4).all()
    assert storey([0.001] * 9 + [0.51], 0.3).tolist() == [True] * 9 + [False]


def test_rates_are_a_twentieth_and_the_procedure_is_benjamini_hochbergs_unless_others_are_given():
    assert DecisionRule() == DecisionRule(alpha=0.05, confidence=None, fdr=None, procedure="bh", control="tile")
    p = [0.01, 0.1, 0.11, 0.12, 0.13, 0.5]  # storey flags five of them
    assert discoveries(p, 0.06).tolist() == benjamini_hochberg(p, 0.06).tolist() == [True] + [False] * 5
    assert discoveries(p, 0.06, "storey").sum() == 5


@pytest.mark.parametrize(("cutoff", "flagged"), [(0.2, 1), (0.4, 3), (0.8, 0)])
def test_the_cutoff_of_storey_by_hand(cutoff, flagged):
    """pi_0 = (1 + #{p > cutoff})/(5 (1 - cutoff)) is 3/4, 2/3 and 1: the k-th limit is 0.17 k/(5 pi_0)."""
    assert storey([0.04, 0.1, 0.14, 0.3, 0.7], 0.17, cutoff).tolist() == [True] * flagged + [False] * (5 - flagged)


def test_a_cutoff_is_a_number_between_0_and_1():
    with pytest.raises(OptionError, match="cutoff must be between 0 and 1, got 1"):
        storey([0.1], 0.1, cutoff=1.0)


def test_p_values_may_be_0_or_1_and_no_other_number():
    assert benjamini_hochberg([0.0, 1.0], 0.1).tolist() == [True, False]
    for value in (-1e-9, 1.0 + 1e-9, np.nan):
        with pytest.raises(OptionError, match="p-values must be numbers between 0 and 1"):
            benjamini_hochberg([value], 0.1)


def test_storey_warns_where_images_repeat():
    reference = CalibrationScores({UNGROUPED: np.arange(99.0)})
    scores, p = np.array([5.0, 5.0, np.nan, 7.0]), np.array([0.9, 0.9, np.nan, 0.8])
    with pytest.warns(UserWarning, match="1 of 3 images have the same score as another one.*'bh'"):
        DecisionRule(fdr=0.1, procedure="storey").decide(reference, None, p, scores)
    DecisionRule(fdr=0.1).decide(reference, None, p, scores)  # no warning: valid under this dependence
    DecisionRule(fdr=0.1, procedure="storey").decide(reference, None, p, scores + np.arange(4))


def test_a_procedure_without_a_false_discovery_rate_is_refused():
    with pytest.raises(OptionError, match="procedure='storey' has no effect without fdr"):
        DecisionRule(0.1, procedure="storey")
    with pytest.raises(OptionError, match="unknown procedure 'sotrey'"):
        DecisionRule(0.1, procedure="sotrey")


def test_too_few_images_of_a_group_names_the_smallest_one():
    """A rate that the error allows must be possible for every group."""
    reference = CalibrationScores.of(np.arange(20.0), np.repeat(["large", "small"], [12, 8]))
    with pytest.raises(TooFewImagesError, match="there are 8") as error:
        DecisionRule(0.05).check(reference, np.array(["large"]))
    assert len(DecisionRule(error.value.smallest).limits(reference, np.array(["large"]))) == 1
