"""Calibrators of many columns, and of several parts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from sklearn.covariance import ledoit_wolf_shrinkage

from gepc.calibration import Aggregation, Scorer, create_calibrator, joint
from gepc.calibration.evidence import FOLDS, Parts
from gepc.calibration.joint import LevelLOF, LevelPCA, _principal
from gepc.core.errors import InputError, OptionError
from gepc.core.parts import Part

Array = npt.NDArray[np.float64]
PARTS = (Part.of("output", range(3)), Part.of("structure", range(3, 43)))


def columns(count: int, seed: int = 0, levels: int = 2) -> Array:
    """Three columns and forty, the latter of rank five plus noise, of very different scales."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).standard_normal((5, 40))
    narrow = rng.standard_normal((count, levels, 3)) @ np.array([[1.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 1.0]])
    wide = rng.standard_normal((count, levels, 5)) @ mixing + 0.3 * rng.standard_normal((count, levels, 40))
    return np.concatenate([narrow, wide * np.geomspace(0.1, 10.0, 40)], axis=2)


WEIGHTS = np.array([0.25, 0.75])


def score(calibrator: Parts | LevelPCA, values: Array) -> Array:
    return calibrator.score(values, WEIGHTS, Aggregation())


# --- principal components --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20, 300])
def test_principal_axes_are_the_leading_eigenvectors_by_either_route(count: int) -> None:
    z = np.random.default_rng(1).standard_normal((count, 50)) @ np.diag(np.linspace(3.0, 0.1, 50))
    axes, values = _principal(z, 6)
    np.testing.assert_allclose(axes @ axes.T, np.eye(6), atol=1e-10)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(z.T @ z / count)[::-1][:6], rtol=1e-9)
    np.testing.assert_allclose((z @ axes.T).var(axis=0) + (z @ axes.T).mean(axis=0) ** 2, values, rtol=1e-9)


def test_level_pca_is_the_distance_in_its_covariance() -> None:
    """d^2 = z^T S^-1 z with S = V diag(l) V^T + r (I - V V^T), built in full."""
    train, new = columns(200)[:, :1, 3:], columns(7, seed=1)[:, :1, 3:]
    model = LevelPCA(rank=6).fit(train)
    mean, scale = train[:, 0].mean(axis=0), train[:, 0].std(axis=0)
    z = (train[:, 0] - mean) / scale
    shrinkage = ledoit_wolf_shrinkage(z, assume_centered=True)
    values, vectors = np.linalg.eigh(z.T @ z / len(z))
    values = (1 - shrinkage) * values + shrinkage * values.mean()
    leading, rest = vectors[:, -6:], values[:-6].mean()
    covariance = leading @ np.diag(values[-6:] - rest) @ leading.T + rest * np.eye(40)
    z = (new[:, 0] - mean) / scale
    expected = np.einsum("ni,ij,nj->n", z, np.linalg.inv(covariance), z)
    np.testing.assert_allclose(model.score(new, np.ones(1), Aggregation()), expected, rtol=1e-4)


def test_few_images_and_silent_columns_are_no_fault() -> None:
    """Fewer images than columns; a column that is constant over the fitted images counts, but not alone."""
    train, new = columns(12), columns(5, seed=1)
    train[:, :, 10] = new[:, :, 10] = 2.0
    model = LevelPCA().fit(train)
    before = score(model, new)
    assert np.isfinite(before).all()
    new[:, :, 10] += 0.001
    assert (score(model, new) >= before).all()
    with pytest.raises(InputError, match="constant over the in-distribution images"):
        LevelPCA().fit(np.ones((12, 2, 40)))


def test_level_lof_is_the_ratio_to_the_radii_of_the_neighbours() -> None:
    """By hand: with all components, d is the Euclidean distance of standardised columns."""
    train, new = (np.random.default_rng(seed).standard_normal((count, 1, 3)) for seed, count in ((0, 90), (1, 7)))
    found = LevelLOF(rank=2).fit(train).per_level(new)[:, 0]
    z, asked = ((values[:, 0] - train[:, 0].mean(axis=0)) / train[:, 0].std(axis=0) for values in (train, new))
    _, _, axes = np.linalg.svd(z, full_matrices=False)

    def squares(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The third direction of two images is orthogonal."""
        lengths = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)
        return lengths - 2.0 * (first @ axes[:2].T) @ (second @ axes[:2].T).T

    own, others = squares(z, z), squares(asked, z)
    np.fill_diagonal(own, np.inf)
    radii, near = np.sort(own, axis=1)[:, 4], np.argsort(others, axis=1)[:, :5]
    expected = np.sort(others, axis=1)[:, 4] / np.exp(np.log(radii[near]).mean(axis=1))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_level_lof_finds_what_lies_between_two_clouds() -> None:
    """The common mean is the most usual point of one Gaussian, and far from every image."""
    rng = np.random.default_rng(0)
    train = rng.standard_normal((200, 1, 40))
    train[:100] += 3.0
    train[100:] -= 3.0
    between = train.mean(axis=0, keepdims=True)
    local, gaussian = LevelLOF().fit(train), LevelPCA().fit(train)
    assert local.per_level(between) > local.per_level(train).max()
    assert gaussian.per_level(between) < gaussian.per_level(train).min()


def test_level_lof_leaves_out_levels_that_were_not_evaluated_and_bears_copies() -> None:
    """Images without a level are no neighbours at it, and a cluster of equal images does not make others unusual."""
    train, new = columns(60)[:, :, 3:], columns(20, seed=1)[:, :, 3:]
    some = train.copy()
    some[::2, 1] = np.nan
    model = LevelLOF().fit(some)
    np.testing.assert_allclose(model.per_level(new)[:, 1:], LevelLOF().fit(train[1::2, 1:]).per_level(new[:, 1:]))
    assert np.isnan(model.radii_[1, ::2]).all()
    train[:7] = train[0]
    copied = LevelLOF().fit(train)
    assert (copied.radii_[:, :7] > 0.0).all()
    assert np.isfinite(copied.per_level(train[:1] + 1e-3)).all()
    assert np.isfinite(LevelLOF().fit(train[7:10]).per_level(new)).all()  # two neighbours are all there are


# --- parts -----------------------------------------------------------------------------------------------------------


def test_the_score_is_the_sum_of_standardised_logarithms() -> None:
    """By hand: each part's distance, its logarithm standardised on held-out folds, added, averaged over levels."""
    train, new = columns(90), columns(8, seed=1)
    fold = np.empty(90, dtype=int)
    fold[np.argsort(train[:, 0, 0])] = np.arange(90) % FOLDS
    expected = np.zeros((8, 2))
    for name, part in (("level_knn", slice(0, 3)), ("level_pca", slice(3, 43))):
        held_out = np.empty((90, 2))
        for number in range(FOLDS):
            model = create_calibrator(name).fit(train[fold != number][:, :, part])
            held_out[fold == number] = model.per_level(train[fold == number][:, :, part])
        usual = np.log(held_out)
        found = np.log(create_calibrator(name).fit(train[:, :, part]).per_level(new[:, :, part]))
        expected += (found - usual.mean(axis=0)) / usual.std(axis=0)
    np.testing.assert_allclose(score(Parts().fit(train, PARTS), new), expected @ WEIGHTS, rtol=1e-9)


def test_a_part_sees_what_the_other_does_not() -> None:
    train, new = columns(200), columns(50, seed=1)
    changed = new.copy()
    changed[:, :, 3:] += 3.0 * train[:, :, 3:].std(axis=0) * np.random.default_rng(2).standard_normal(40)
    model = Parts().fit(train, PARTS)
    by_part = model.standing(changed).mean(axis=(0, 1))
    assert by_part[1] > 5.0 > 1.0 > by_part[0]
    assert score(model, changed).min() > score(model, new).mean()


def test_the_order_of_the_images_does_not_matter() -> None:
    train, new = columns(60), columns(5, seed=1)
    order = np.random.default_rng(3).permutation(60)
    np.testing.assert_allclose(
        score(Parts().fit(train[order], PARTS), new), score(Parts().fit(train, PARTS), new), rtol=1e-9
    )


def test_copies_of_an_image_do_not_decide_the_scale() -> None:
    """Six copies have a neighbour at distance 0, whose logarithm would be minus infinity."""
    train, new = columns(60), columns(20, seed=1)
    plain = Parts().fit(train, PARTS)
    train[:6] = train[0]
    copied = Parts().fit(train, PARTS)
    assert np.isfinite(score(copied, train)).all()
    assert (copied.std_ < 3.0 * plain.std_).all()
    assert np.corrcoef(score(copied, new), score(plain, new))[0, 1] > 0.9


def test_state_and_back() -> None:
    train, new = columns(60), columns(5, seed=1)
    model = Parts(narrow="kde").fit(train, PARTS)
    again = Parts(narrow="kde").restore(model.state())
    np.testing.assert_array_equal(score(again, new), score(model, new))
    assert sum(array.nbytes for array in model.state().values()) < 200_000


def test_levels_that_were_not_evaluated_are_left_out() -> None:
    train, new = columns(60), columns(5, seed=1)
    new[:, 0] = np.nan
    found = score(Parts().fit(train, PARTS), new)
    assert np.isfinite(found).all()
    alone = Parts().fit(train[:, 1:], PARTS).standing(new[:, 1:]).sum(axis=2)[:, 0]
    assert np.corrcoef(found, alone)[0, 1] > 0.99


def test_without_parts_there_is_one() -> None:
    """The sum over one part is increasing in its score."""
    train, new = columns(60)[:, :1, :3], columns(9, seed=1)[:, :1, :3]
    one = np.ones(1)
    found = Parts().fit(train).score(new, one, Aggregation())
    plain = create_calibrator("level_knn").fit(train).score(new, one, Aggregation())
    np.testing.assert_array_equal(np.argsort(found), np.argsort(plain))


def test_calibrators_of_all_levels_are_refused() -> None:
    with pytest.raises(OptionError, match="'gmm' looks at all levels together"):
        Parts(narrow="gmm")
    with pytest.raises(OptionError, match="looks at all levels together"):
        create_calibrator("gmm").fit(columns(60)[:, :, :3]).per_level(columns(5)[:, :, :3])


def test_images_with_other_columns_are_refused() -> None:
    scorer = Scorer("parts").fit(columns(60), parts=PARTS)
    with pytest.raises(InputError, match="42 feature columns, but the calibrator was fitted on 43"):
        scorer.score(columns(5)[:, :, 1:])
    with pytest.raises(InputError, match="more columns than the 43 of the features"):
        Scorer("parts").fit(columns(60), parts=[Part.of("output", range(44))])


def test_neighbours_among_very_many_images_are_found_in_fewer_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is that of a number of distances, whatever the number of images."""
    values = np.random.default_rng(0).standard_normal((60, 1, 12))
    model = create_calibrator("level_lof").fit(values)
    expected, projected, rows = model.per_level(values), LevelLOF.projected, []

    def counted(self: LevelLOF, level: int, vectors: Array) -> tuple[Array, Array]:
        rows.append(len(vectors))
        return projected(self, level, vectors)

    monkeypatch.setattr(LevelLOF, "projected", counted)
    monkeypatch.setattr(joint, "DISTANCES", 7 * 60 + 5)
    np.testing.assert_allclose(model.per_level(values), expected)
    assert rows == [7] * 8 + [4]
