"""The calibrators of the baseline methods against scikit-learn and scipy; options; features that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.stats import gaussian_kde
from sklearn.covariance import LedoitWolf
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import StandardScaler

from gepc.calibration import Aggregation, create_calibrator
from gepc.calibration.calibrators import list_calibrators
from gepc.calibration.joint import GMM, KNN
from gepc.calibration.per_column import KDE
from gepc.core.errors import InputError, OptionError

RNG = np.random.default_rng(0)
MIXING = RNG.standard_normal((6, 6))


def columns(count: int, spread: float = 1.0) -> np.ndarray:
    """Two clusters of correlated columns, (N, 3, 2)."""
    centres = 6.0 * (RNG.random((count, 1)) < 0.4)
    return ((spread * RNG.standard_normal((count, 6)) + centres) @ MIXING).reshape(count, 3, 2) * [1.0, 100.0]


ID, OTHERS = columns(400), columns(40, 3.0)
FLAT, OTHERS_FLAT = ID.reshape(400, 6), OTHERS.reshape(40, 6)
SCALER = StandardScaler().fit(FLAT)
EVEN, PLAIN = np.full(3, 1 / 3), Aggregation("sum", "mean")


def score(name: str, fitted_on: np.ndarray = ID, asked: np.ndarray = OTHERS) -> np.ndarray:
    return create_calibrator(name).fit(fitted_on).score(asked, EVEN, PLAIN)


def test_names() -> None:
    assert set(list_calibrators()) == {
        "raw", "z", "abs_z", "zscore", "kde", "kde1d", "mvn", "mahalanobis", "level_mahalanobis", "level_knn", "knn",
        "gmm", "level_pca", "level_lof", "level_memory", "level_local_memory", "evidence", "parts", "tail", "softplus",
        "soft_minimum",
    }  # fmt: skip
    np.testing.assert_array_equal(score("kde1d"), score("kde"))


def test_z_is_signed_and_abs_z_is_not() -> None:
    z = SCALER.transform(OTHERS_FLAT)
    np.testing.assert_allclose(score("z"), z.sum(1) / 3)
    np.testing.assert_allclose(score("abs_z"), np.abs(z).sum(1) / 3)
    np.testing.assert_allclose(score("zscore"), (z**2 / 2).sum(1) / 3)


def test_the_mixture_is_scikit_learns_with_the_least_bic() -> None:
    z = SCALER.transform(FLAT)
    fitted = {n: GaussianMixture(n, reg_covar=1e-4, max_iter=300, random_state=0).fit(z) for n in (1, 2, 4, 8)}
    best = min(fitted, key=lambda n: fitted[n].bic(z))
    calibrator = create_calibrator("gmm").fit(ID)
    assert isinstance(calibrator, GMM)
    assert len(calibrator.weights_) == best > 1
    expected = -fitted[best].score_samples(SCALER.transform(OTHERS_FLAT))
    np.testing.assert_allclose(calibrator.score(OTHERS, EVEN, PLAIN), expected, rtol=1e-9)


def test_no_more_components_than_the_images_allow() -> None:
    """One for every 50 images: 60 images give one Gaussian, whatever the data."""
    calibrator = create_calibrator("gmm").fit(ID[:60])
    assert isinstance(calibrator, GMM)
    assert len(calibrator.weights_) == 1
    by_folds = create_calibrator("gmm:choose=cv").fit(ID)
    assert isinstance(by_folds, GMM)
    assert len(by_folds.weights_) in (2, 4, 6, 8)


def test_the_mixture_survives_collinear_columns() -> None:
    """Two copies of a column; and rounding as of float32 changes a score by less than a thousandth."""
    doubled = ID[:, :, [0, 0]]
    assert np.isfinite(score("gmm", doubled, OTHERS[:, :, [0, 0]])).all()
    rounded = OTHERS.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(score("gmm", ID, rounded), score("gmm"), rtol=1e-3)


def test_mahalanobis_is_ledoit_wolfs() -> None:
    theirs = LedoitWolf().fit(SCALER.transform(FLAT))
    expected = theirs.mahalanobis(SCALER.transform(OTHERS_FLAT))
    np.testing.assert_allclose(score("mahalanobis"), expected, rtol=1e-3)
    few = score("mahalanobis", ID[:5])
    assert np.isfinite(few).all()


@pytest.mark.parametrize("k", [1, 5, 1000])
def test_the_neighbour_is_the_kth(k: int) -> None:
    gaps = np.sort(cdist(SCALER.transform(OTHERS_FLAT), SCALER.transform(FLAT)), axis=1)
    np.testing.assert_allclose(score(f"knn:k={k}"), gaps[:, min(k, 400) - 1], rtol=1e-9)


def test_a_given_bandwidth() -> None:
    """As scipy has it, in the feature's own units."""
    one = ID[:, :1, :1]
    theirs = gaussian_kde(one[:, 0, 0], bw_method=5.0 / one.std(ddof=1))
    found = create_calibrator("kde:bandwidth=5").fit(one).score(OTHERS[:, :1, :1], np.ones(1), PLAIN)
    np.testing.assert_allclose(found, -theirs.logpdf(OTHERS[:, 0, 0]), rtol=1e-8)


def test_a_standardised_density_has_no_units() -> None:
    """-log density of (f - mean)/std: the units of a column change nothing, so a maximum over columns is fair."""
    most = Aggregation("sum", "max")
    units = np.array([1e-3, 1.0, 1e4]).reshape(3, 1)
    plain = create_calibrator("kde:standardise=true").fit(ID).score(OTHERS, EVEN, most)
    scaled = create_calibrator("kde:standardise=true").fit(ID * units).score(OTHERS * units, EVEN, most)
    np.testing.assert_allclose(scaled, plain, rtol=1e-6)
    difference = score("kde") - score("kde:standardise=true")
    np.testing.assert_allclose(difference, np.log(ID.std(0)).sum() / 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("knn:neighbours=3", "has no option 'neighbours'"),
        ("knn:k=0", "k must be at least 1"),
        ("knn:k=many", "k must be int"),
        ("kde:bandwidth=-1", "bandwidth must be positive"),
        ("soft_minimum:temperature=0", "temperature and references must be positive"),
        ("soft_minimum:references=0", "temperature and references must be positive"),
        ("gmm:choose=aic", "unknown gmm: choose 'aic'"),
        ("raw:k=1", "has no option 'k'"),
        ("mahalonobis", "did you mean 'mahalanobis'"),
    ],
)
def test_bad_options(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        create_calibrator(text)


def test_options_are_stored_untouched() -> None:
    neighbours, density = create_calibrator("knn:k=7"), create_calibrator("kde:bandwidth=0.5,standardise=true")
    assert isinstance(neighbours, KNN)
    assert isinstance(density, KDE)
    assert (neighbours.k, density.bandwidth, density.standardise) == (7, 0.5, True)


@pytest.mark.parametrize("name", list_calibrators())
def test_what_is_not_finite_counts_as_beyond_the_worst(name: str) -> None:
    """Infinity is the largest ID value and ten deviations more, with a warning; never 0, never NaN."""
    calibrator = create_calibrator(name).fit(ID)
    broken, mended = OTHERS.copy(), OTHERS.copy()
    broken[3, 1, 0], broken[5, 0, 1] = np.inf, -np.inf
    mended[3, 1, 0] = ID[:, 1, 0].max() + 10 * ID[:, 1, 0].std()
    mended[5, 0, 1] = ID[:, 0, 1].min() - 10 * ID[:, 0, 1].std()
    with pytest.warns(UserWarning, match="2 features are infinite"):
        found = calibrator.score(broken, EVEN, PLAIN)
    np.testing.assert_allclose(found, calibrator.score(mended, EVEN, PLAIN), rtol=1e-12)
    restored = create_calibrator(name).restore(calibrator.state())
    with pytest.warns(UserWarning, match="2 features are infinite"):
        np.testing.assert_allclose(restored.score(broken, EVEN, PLAIN), found, rtol=1e-12)


def test_what_is_not_finite_among_id_features_is_an_error() -> None:
    broken = ID.copy()
    broken[0, 0, 0] = np.inf
    for name in list_calibrators():
        with pytest.raises(InputError, match="not finite"):
            create_calibrator(name).fit(broken)


@pytest.mark.parametrize("name", ["knn", "level_knn"])
def test_neighbours_of_no_image_are_an_error_and_not_a_crash(name: str) -> None:
    columns = np.random.default_rng(0).normal(size=(20, 2, 3))
    state = create_calibrator(name).fit(columns).state()
    state["samples"] = state["samples"][:0]
    with pytest.raises(InputError, match="no in-distribution image to compare with"):
        create_calibrator(name).restore(state).score(columns, np.ones(2), Aggregation())


@pytest.mark.parametrize("name", ["level_lof", "level_memory:size=20", "level_pca", "level_knn"])
def test_levels_that_no_image_was_evaluated_at_are_left_out(name: str) -> None:
    """Levels are drawn for each image, so that a single image has none at some levels."""
    seen = ID.copy()
    seen[::2, 0], seen[1::2, 2] = np.nan, np.nan
    calibrator = create_calibrator(name).fit(seen)
    asked = OTHERS[:3].copy()
    asked[:, 1] = np.nan
    together = calibrator.score(asked, EVEN, PLAIN)
    assert np.isfinite(together).all()
    for row in range(3):
        np.testing.assert_allclose(calibrator.score(asked[row : row + 1], EVEN, PLAIN), together[row])


def test_the_tail_probability_of_a_level_without_a_value_is_missing() -> None:
    calibrator = create_calibrator("tail").fit(ID)
    asked = OTHERS.copy()
    asked[:, 0] = np.nan
    assert np.isnan(calibrator.surprise(asked)[:, 0]).all()
    np.testing.assert_array_equal(calibrator.surprise(asked)[:, 1:], calibrator.surprise(OTHERS)[:, 1:])


@pytest.mark.parametrize("name", ["level_lof", "level_pca", "level_memory:size=20"])
def test_a_single_column_is_enough(name: str) -> None:
    usual, far = score(name, ID[:, :, :1], ID[:40, :, :1]), score(name, ID[:, :, :1], ID[:40, :, :1] + 500.0)
    assert np.isfinite(usual).all()
    assert far.min() > usual.max()
