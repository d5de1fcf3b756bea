"""Calibrators against scipy's own densities; far points keep their order; what cannot be calibrated says so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from scipy.special import logsumexp
from scipy.stats import gaussian_kde, multivariate_normal, norm, trim_mean

from gepc.calibration import Aggregation, create_calibrator, per_column
from gepc.calibration.calibrators import AGGREGATIONS, Calibrator, list_calibrators
from gepc.calibration.per_column import KERNELS, log_density, log_tail, silverman
from gepc.core.errors import InputError, OptionError

RNG = np.random.default_rng(0)
ID = np.exp(RNG.standard_normal((60, 3, 2)) * [0.3, 0.8] + RNG.standard_normal((60, 1, 1)))
OTHERS = np.exp(1.5 * RNG.standard_normal((40, 3, 2)))
EVEN = np.full(3, 1 / 3)
PLAIN = Aggregation("sum", "mean")


def test_the_kernel_density_is_scipys() -> None:
    """-log p of every column with the same bandwidth."""
    calibrator = create_calibrator("kde").fit(ID)
    bandwidth = silverman(ID)
    expected = np.zeros(len(OTHERS))
    for level, feature in np.ndindex(3, 2):
        samples = ID[:, level, feature]
        theirs = gaussian_kde(samples, bw_method=bandwidth[level, feature] / samples.std(ddof=1))
        expected -= theirs.logpdf(OTHERS[:, level, feature]) / 3
    np.testing.assert_allclose(calibrator.score(OTHERS, EVEN, PLAIN), expected, rtol=1e-6)


def test_the_bandwidth_is_silvermans_with_the_robust_spread() -> None:
    """h = 0.9 min(std, IQR/1.34) n^(-1/5); the standard deviation alone where the quartiles coincide."""
    normal, heavy = RNG.standard_normal(500), RNG.standard_cauchy(500)
    spiked = np.zeros(500)
    spiked[:40] = RNG.standard_normal(40)
    found = silverman(np.stack([normal, heavy, spiked], axis=1))
    quartiles = np.subtract(*np.quantile(heavy, [0.75, 0.25])) / 1.34
    assert quartiles < heavy.std()
    n_share = 0.9 * 500**-0.2
    spread = min(normal.std(), np.subtract(*np.quantile(normal, [0.75, 0.25])) / 1.34)
    np.testing.assert_allclose(found, n_share * np.array([spread, quartiles, spiked.std()]), rtol=1e-12)


@given(st.floats(10, 1e6), st.floats(1.01, 10))
def test_far_points_do_not_tie(distance: float, factor: float) -> None:
    """A density underflows to 0 beyond 38 bandwidths; its logarithm keeps falling."""
    samples = np.linspace(-1, 1, 50)
    near, far = log_density(np.array([distance, factor * distance]), samples, bandwidth=0.1)
    assert np.isfinite([near, far]).all()
    assert far < near


def test_a_density_integrates_to_one_whatever_the_chunk() -> None:
    grid = np.linspace(-4, 6, 3001)
    samples = RNG.standard_normal(30) + 1
    found = log_density(grid, samples, 0.3)
    assert trapezoid(np.exp(found), grid) == pytest.approx(1, abs=1e-6)
    np.testing.assert_array_equal(log_density(grid, samples, 0.3, kernels=7 * 30), found)


def test_the_z_score_is_the_gaussian_up_to_its_constant() -> None:
    calibrator = create_calibrator("zscore").fit(ID)
    gaussian = norm(ID.mean(0), ID.std(0))
    expected = (gaussian.logpdf(ID.mean(0)) - gaussian.logpdf(OTHERS)).sum(2).mean(1)
    np.testing.assert_allclose(calibrator.score(OTHERS, EVEN, PLAIN), expected, rtol=1e-10)


def test_mvn_is_the_multivariate_gaussian_up_to_its_constant() -> None:
    """Half the squared Mahalanobis distance of the whole vector; weights and aggregation do not enter."""
    calibrator = create_calibrator("mvn").fit(ID)
    vectors, others = ID.reshape(60, -1), OTHERS.reshape(40, -1)
    gaussian = multivariate_normal(vectors.mean(0), np.cov(vectors, rowvar=False, bias=True))
    expected = gaussian.logpdf(vectors.mean(0)) - gaussian.logpdf(others)
    np.testing.assert_allclose(calibrator.score(OTHERS, EVEN, PLAIN), expected, rtol=1e-4)
    skewed = calibrator.score(OTHERS, np.array([1.0, 0, 0]), Aggregation("mean", "max"))
    np.testing.assert_array_equal(skewed, calibrator.score(OTHERS, EVEN, PLAIN))


def test_mvn_adds_a_ridge_to_the_covariance_in_the_units_of_the_columns() -> None:
    flat, others = (values.reshape(len(values), -1) for values in (ID, OTHERS))
    inverse = np.linalg.inv(np.cov(flat, rowvar=False, bias=True) + 0.5 * np.eye(flat.shape[1]))
    gaps = others - flat.mean(0)
    expected = 0.5 * np.einsum("ni,ij,nj->n", gaps, inverse, gaps)
    found = create_calibrator("mvn:ridge=0.5").fit(ID).score(OTHERS, EVEN, PLAIN)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    with pytest.raises(OptionError, match="ridge must not be negative"):
        create_calibrator("mvn:ridge=-1")


def test_mvn_survives_a_column_given_twice_and_columns_of_any_scale() -> None:
    """Collinear columns keep finite scores, and a change of units changes nothing."""
    doubled = ID[:, :, [0, 0]]
    assert np.isfinite(create_calibrator("mvn").fit(doubled).score(doubled, EVEN, PLAIN)).all()
    units = np.array([1e-9, 1e9])
    plain = create_calibrator("mvn").fit(ID).score(OTHERS, EVEN, PLAIN)
    scaled = create_calibrator("mvn").fit(ID * units).score(OTHERS * units, EVEN, PLAIN)
    np.testing.assert_allclose(scaled, plain, rtol=1e-8)


def test_raw_is_the_features_themselves() -> None:
    found = create_calibrator("raw").fit(ID).score(OTHERS, np.array([0.2, 0.3, 0.5]), Aggregation("mean", "wmean"))
    np.testing.assert_allclose(found, OTHERS.mean(2) @ [0.2, 0.3, 0.5])


@pytest.mark.parametrize("name", list_calibrators())
def test_a_calibrator_is_its_state(name: str) -> None:
    """Restored from its state it scores the same, to the bit; scores do not depend on the other rows."""
    fitted = create_calibrator(name).fit(ID)
    restored = create_calibrator(name).restore(fitted.state())
    scores = fitted.score(OTHERS, EVEN, PLAIN)
    np.testing.assert_array_equal(restored.score(OTHERS, EVEN, PLAIN), scores)
    np.testing.assert_allclose(fitted.score(OTHERS[7:9], EVEN, PLAIN), scores[7:9], rtol=1e-12)


@pytest.mark.parametrize("name", list_calibrators())
def test_a_calibrator_leaves_what_it_was_fitted_on_alone(name: str) -> None:
    """Changing the array afterwards changes no score."""
    columns = ID.copy()
    calibrator: Calibrator = create_calibrator(name).fit(columns)
    before = calibrator.score(OTHERS, EVEN, PLAIN)
    columns[:] = 0.0
    np.testing.assert_array_equal(calibrator.score(OTHERS, EVEN, PLAIN), before)


# --- aggregation -----------------------------------------------------------------------------------------------------


def test_every_aggregation_over_levels() -> None:
    values = RNG.standard_normal((20, 8, 1))
    weights = RNG.dirichlet(np.ones(8))
    expected = {
        "wmean": values[:, :, 0] @ weights,
        "mean": values.mean((1, 2)),
        "max": values.max((1, 2)),
        "min": values.min((1, 2)),
        "trimmed": trim_mean(values[:, :, 0], 0.25, axis=1),
    }
    assert set(expected) == set(AGGREGATIONS)
    for name, value in expected.items():
        np.testing.assert_allclose(Aggregation("sum", name)(values, weights), value, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("over_levels", AGGREGATIONS)
def test_levels_that_were_not_looked_at_are_left_out(over_levels: str) -> None:
    """NaN at a level: as if the level and its weight were not there."""
    values, weights = RNG.standard_normal((5, 6, 2)), RNG.dirichlet(np.ones(6))
    hidden = values.copy()
    hidden[:, [1, 4]] = np.nan
    seen = [0, 2, 3, 5]
    expected = Aggregation("sum", over_levels)(values[:, seen], weights[seen] / weights[seen].sum())
    np.testing.assert_allclose(Aggregation("sum", over_levels)(hidden, weights), expected, rtol=1e-12)


@pytest.mark.parametrize("count", range(1, 10))
def test_the_trimmed_mean_leaves_out_the_same_number_below_and_above(count: int) -> None:
    """A quarter of the levels that were looked at, rounded down, on either side; of fewer than four levels none."""
    values = np.full((1, 12, 1), np.nan)
    values[0, :count, 0] = np.random.default_rng(count).permutation(count) ** 2.0
    expected = trim_mean(np.arange(count) ** 2.0, 0.25)
    assert Aggregation("sum", "trimmed")(values, np.ones(12))[0] == pytest.approx(expected)


def test_scores_are_added_over_features_and_levels_weigh_as_selected_unless_told_otherwise() -> None:
    assert Aggregation() == Aggregation("sum", "wmean")


def test_fusion_over_features() -> None:
    values = RNG.standard_normal((5, 3, 4))
    np.testing.assert_allclose(Aggregation("sum", "mean")(values, EVEN), values.sum(2).mean(1))
    np.testing.assert_allclose(Aggregation("mean", "mean")(values, EVEN), values.mean((1, 2)))


# --- what cannot be calibrated ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kde", "zscore", "mvn"])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
def test_a_constant_column_is_an_error(name: str, value: float) -> None:
    """Also where summing a constant leaves a standard deviation of rounding error."""
    columns = ID.copy()
    columns[:, 1, 1] = value
    with pytest.raises(InputError, match="constant over the in-distribution images"):
        create_calibrator(name).fit(columns)


@pytest.mark.parametrize("name", ["kde", "zscore", "mvn"])
def test_a_column_that_is_not_finite_is_an_error(name: str) -> None:
    columns = ID.copy()
    columns[3, 1, 1] = np.inf
    with pytest.raises(InputError, match="not finite"):
        create_calibrator(name).fit(columns)


def test_mvn_needs_more_images_than_columns() -> None:
    with pytest.raises(InputError, match="needs more than 6 ID images, got 6"):
        create_calibrator("mvn").fit(ID[:6])


def test_mvn_needs_every_level() -> None:
    columns = ID.copy()
    columns[0, 1] = np.nan
    with pytest.raises(OptionError, match="needs every level"):
        create_calibrator("mvn").fit(columns)


def test_a_column_that_hardly_varies_can_be_calibrated() -> None:
    """A millionth of its size is far above the rounding error of a constant."""
    columns = ID.copy()
    columns[:, 1, 1] = 1e6 + RNG.standard_normal(60)
    assert np.isfinite(create_calibrator("zscore").fit(columns).score(columns, EVEN, PLAIN)).all()


def test_columns_of_another_number_are_refused() -> None:
    calibrator = create_calibrator("raw").fit(ID)
    with pytest.raises(InputError, match="the images have 1 feature columns, but the calibrator was fitted on 2"):
        calibrator.score(OTHERS[:, :, :1], EVEN, PLAIN)


@pytest.mark.parametrize("name", list_calibrators())
def test_levels_have_scores_of_their_own_or_the_calibrator_says_that_they_have_none(name: str) -> None:
    calibrator = create_calibrator(name).fit(ID)
    if calibrator.by_level:
        assert calibrator.per_level(OTHERS).shape == (40, 3)
    else:
        with pytest.raises(OptionError, match=f"the calibrator '{calibrator.name}' looks at all levels together"):
            calibrator.per_level(OTHERS)
    assert create_calibrator("kde").by_level
    assert not create_calibrator("mvn").by_level


def test_infinite_features_are_replaced_by_the_bounds() -> None:
    """The bounds are the extreme values and ten standard deviations, NaN left out, for each column by itself."""
    columns = ID.copy()
    columns[0, 0] = np.nan
    calibrator = create_calibrator("raw").fit(columns)
    low, high = calibrator.bounds_
    np.testing.assert_allclose(high, np.nanmax(columns, 0) + 10 * np.nanstd(columns, 0))
    np.testing.assert_allclose(low, np.nanmin(columns, 0) - 10 * np.nanstd(columns, 0))
    broken = OTHERS.copy()
    broken[0, 0, 0] = np.inf
    mended = np.where(np.isinf(broken), high, broken)
    with pytest.warns(UserWarning, match="1 features are infinite"):
        found = calibrator.score(broken, EVEN, PLAIN)
    np.testing.assert_array_equal(found, calibrator.score(mended, EVEN, PLAIN))


def test_unknown_names() -> None:
    with pytest.raises(OptionError, match="did you mean 'zscore'"):
        create_calibrator("z-score")
    with pytest.raises(OptionError, match="did you mean 'trimmed'"):
        Aggregation("sum", "trimed")
    with pytest.raises(OptionError, match="unknown fuse 'product'"):
        Aggregation("product", "mean")


def test_defaults_go_with_every_calibrator_and_choices_with_those_that_use_them() -> None:
    for name in list_calibrators():
        calibrator = create_calibrator(name)
        Aggregation().check_used_by(calibrator)
        for choice, used in (
            (Aggregation("mean"), calibrator.uses_fuse),
            (Aggregation("sum", "max"), calibrator.uses_aggregate),
        ):
            if used:
                choice.check_used_by(calibrator)
            else:
                with pytest.raises(OptionError, match="has no effect"):
                    choice.check_used_by(calibrator)


@pytest.mark.parametrize("name", ["kde", "zscore", "raw", "tail"])
def test_calibrators_of_single_columns_take_every_choice(name: str) -> None:
    """They have one score for each level and feature, so that it can be chosen how these are combined."""
    Aggregation("max", "min").check_used_by(create_calibrator(name))


def test_tail_is_the_share_of_larger_features_and_exponential_beyond_them() -> None:
    samples = np.arange(1.0, 100.0)  # the 0.8 quantile is 79.4; those above it exceed it by 10.1 on average
    found = np.exp(log_tail(np.array([0.0, 50.0, 79.5, 79.4 + 10.1 * np.log(2.0)]), samples))
    np.testing.assert_allclose(found, [1.0, 0.51, 0.2, 0.1], rtol=0.05)
    calibrator = create_calibrator("tail").fit(ID)
    each = [-log_tail(OTHERS[:, i, j], np.sort(ID[:, i, j])) for i, j in np.ndindex(3, 2)]
    each = np.stack(each, axis=1).reshape(-1, 3, 2)
    np.testing.assert_allclose(calibrator.score(OTHERS, EVEN, PLAIN), each.sum(2).mean(1))
    np.testing.assert_allclose(calibrator.score(OTHERS, EVEN, Aggregation("max", "mean")), each.max(2).mean(1))
    low = np.full((1, 3, 2), ID.min() - 10.0)
    assert calibrator.score(low, EVEN, PLAIN)[0] == 0.0


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40), st.lists(st.floats(-1e4, 1e4), min_size=8, max_size=30))
def test_tail_falls_with_the_feature_whatever_the_samples(values: list[float], samples: list[float]) -> None:
    assume(np.std(samples) > 1e-3)
    found = log_tail(np.sort(values), np.sort(samples))
    assert (np.diff(found) <= 1e-9).all()
    assert (found <= 0.0).all()


def test_a_kernel_density_of_very_many_samples_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def recorded(values: np.ndarray, axis: int) -> np.ndarray:
        sizes.append(values.size)
        return np.asarray(logsumexp(values, axis=axis))

    monkeypatch.setattr(per_column, "logsumexp", recorded)
    log_density(np.zeros(100), RNG.standard_normal(3 * KERNELS // 10), 0.3)
    assert max(sizes) <= KERNELS
    assert len(sizes) == 34  # of three values each


def test_softplus_leaves_out_levels_that_were_not_evaluated() -> None:
    values = OTHERS.copy()
    values[:, 1] = np.nan
    calibrator = create_calibrator("softplus").fit(ID)
    assert np.isfinite(calibrator.score(values, EVEN, PLAIN)).all()
