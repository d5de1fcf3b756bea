"""Calibrators that look at all (level, feature) columns together."""

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy.linalg import eigh, solve_triangular
from scipy.spatial import KDTree
from scipy.spatial.distance import cdist
from scipy.special import logsumexp

from gepc.calibration.calibrators import Aggregation, Array, Calibrator, State, check_varies, register
from gepc.core.errors import InputError, OptionError, check_choice, check_least

RIDGE = 1e-6
PROJECTED = 32  # dimensions in which distances are compared while the vectors of a memory are chosen
AT_ONCE = 1024  # vectors whose distances are computed together, and fewer if they have more than
DISTANCES = 1 << 24  # distances, which bounds the memory


class VectorCalibrator(Calibrator):
    """One model of the whole (level, feature) vector; weights and aggregations do not apply to it."""

    uses_fuse: ClassVar[bool] = False
    uses_aggregate: ClassVar[bool] = False

    @abstractmethod
    def learn(self, vectors: Array) -> None:
        """Fit the model on (N, D)."""

    @abstractmethod
    def distance(self, vectors: Array) -> Array:
        """(N, D) -> (N,), higher = more OOD."""

    def _fit(self, columns: Array) -> None:
        check_varies(columns)
        self.learn(_flatten(columns))

    def _score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        return self.distance(_flatten(columns))


@register("mahalanobis")
class Mahalanobis(VectorCalibrator):
    """Squared Mahalanobis distance with the Ledoit-Wolf covariance of the standardised columns: any number of images.

    Every column's variance is raised by a millionth, so that collinear columns do not break it.
    """

    fitted: ClassVar[tuple[str, ...]] = ("mean", "factor")
    ridge: float = 0.0

    def learn(self, vectors: Array) -> None:
        """Mean, and the Cholesky factor of the covariance."""
        self.mean_, scale = vectors.mean(axis=0), vectors.std(axis=0)
        covariance = self._covariance((vectors - self.mean_) / scale) + np.diag(self.ridge / scale**2)
        self.factor_ = np.linalg.cholesky(covariance + RIDGE * np.eye(len(scale))) * scale[:, None]

    def _covariance(self, z: Array) -> Array:
        from sklearn.covariance import ledoit_wolf

        return np.asarray(ledoit_wolf(z, assume_centered=True)[0])

    def distance(self, vectors: Array) -> Array:
        """d^2 = (f - mean)^T cov^-1 (f - mean)."""
        return _squared_distance(vectors, self.mean_, self.factor_)


@register("mvn")
class MVN(Mahalanobis):
    """One Gaussian over all columns: half the squared Mahalanobis distance, d^2/2, with the sample covariance.

    Options
    -------
    ridge : this times the identity is added to the covariance of the columns in their own units. The paper has none;
        the authors' code adds 1e-4, which dominates where the variance of a column is smaller.
    """

    def __init__(self, ridge: float = 0.0) -> None:
        if ridge < 0.0:
            raise OptionError(f"mvn: ridge must not be negative, got {ridge}")
        self.ridge = ridge

    def _covariance(self, z: Array) -> Array:
        count, width = z.shape
        if count <= width:
            raise InputError(
                f"mvn calibration of {width} columns needs more than {width} ID images, "
                f"got {count}; give more images or use kde"
            )
        return np.atleast_2d(np.cov(z, rowvar=False, bias=True))

    def distance(self, vectors: Array) -> Array:
        """d^2/2."""
        return 0.5 * super().distance(vectors)


class LevelCalibrator(Calibrator):
    """A squared distance for each level that an image was evaluated at; the distances are aggregated over levels."""

    uses_fuse: ClassVar[bool] = False
    is_distance: ClassVar[bool] = True

    @abstractmethod
    def distance_at(self, level: int, vectors: Array) -> Array:
        """d^2 of the features (N, F) of one level."""

    def per_level(self, columns: Array) -> Array:
        found = np.full(columns.shape[:2], np.nan)
        for level in range(columns.shape[1]):
            seen = _looked_at(columns[:, level])
            if seen.any():
                found[seen, level] = self.distance_at(level, columns[seen, level])
        return found

    def _score(self, columns: Array, weights: Array, aggregation: Aggregation) -> Array:
        return aggregation(self.per_level(columns)[:, :, None], weights)


@register("level_mahalanobis")
class LevelMahalanobis(LevelCalibrator):
    """`mahalanobis` for each level by itself; the squared distances are aggregated over levels.

    Features of one level are fused with their correlations, levels without theirs: with L levels of F features it
    learns L F^2 numbers instead of (L F)^2.
    """

    fitted: ClassVar[tuple[str, ...]] = ("mean", "factor")

    def _fit(self, columns: Array) -> None:
        check_varies(columns)
        models = [Mahalanobis() for _ in range(columns.shape[1])]
        for model, vectors in zip(models, _by_level(columns), strict=True):
            model.learn(vectors)
        self.mean_ = np.stack([model.mean_ for model in models])
        self.factor_ = np.stack([model.factor_ for model in models])

    def distance_at(self, level: int, vectors: Array) -> Array:
        return _squared_distance(vectors, self.mean_[level], self.factor_[level])


@register("level_knn")
class LevelKNN(LevelMahalanobis):
    """Squared distance to the k-th nearest ID image, for each level by itself, in the metric of `level_mahalanobis`.

    Where the ID images are one cloud both say the same; where they are several (two sensors, day and night), what
    lies between the clouds is near their common mean, but near no image.

    Options
    -------
    k : which neighbour; the farthest there is where there are fewer.
    """

    fitted: ClassVar[tuple[str, ...]] = ("mean", "factor", "samples")

    def __init__(self, k: int = 5) -> None:
        check_least(1, **{"level_knn: k": k})
        self.k = k

    def _fit(self, columns: Array) -> None:
        super()._fit(columns)
        self.samples_ = columns
        self._plant_trees()

    def restore(self, state: State) -> Calibrator:
        super().restore(state)
        self._plant_trees()
        return self

    def _plant_trees(self) -> None:
        levels = enumerate(np.moveaxis(self.samples_, 1, 0))
        self._trees = [_tree(self._white(level, vectors[_looked_at(vectors)])) for level, vectors in levels]

    def _white(self, level: int, vectors: Array) -> Array:
        return _whitened(vectors, self.mean_[level], self.factor_[level])

    def distance_at(self, level: int, vectors: Array) -> Array:
        """The k-th smallest of |z - z_i|^2, z whitened."""
        tree = self._trees[level]
        found, _ = tree.query(self._white(level, vectors), k=[min(self.k, tree.n)])
        return np.asarray(found[:, 0] ** 2)


@register("level_pca")
class LevelPCA(LevelCalibrator):
    """`level_mahalanobis` for many columns: principal components, and one variance for all other directions.

    Of the standardised columns z, with the eigenvalues l_i of their covariance shrunk as by Ledoit and Wolf,

        d^2 = sum_{i <= k} (v_i.z)^2 / l_i + (|z|^2 - sum_{i <= k} (v_i.z)^2) / r,

    where r is the mean of the other eigenvalues. It learns k F numbers per level instead of F^2.

    Options
    -------
    rank : k, the number of components; at most one for every two ID images.
    """

    LEAST_SPREAD = 0.01  # of the median over columns: a channel that is silent on ID images must not dominate

    fitted: ClassVar[tuple[str, ...]] = ("mean", "scale", "axes", "variances")

    def __init__(self, rank: int = 96) -> None:
        check_least(1, **{"level_pca: rank": rank})
        self.rank = rank

    def _fit(self, columns: Array) -> None:
        levels = _by_level(columns)
        rank = min(self.rank, min(map(len, levels)) // 2, columns.shape[2] - 1)
        models = [self._learn(values, rank) for values in levels]
        self.mean_, self.scale_, self.axes_, self.variances_ = (np.stack(part) for part in zip(*models, strict=True))

    def _learn(self, vectors: Array, rank: int) -> tuple[Array, Array, npt.NDArray[np.float32], Array]:
        """Mean, scale, v (k, F), and the variances l_1 ... l_k, r of one level."""
        from sklearn.covariance import ledoit_wolf_shrinkage

        mean, spread = vectors.mean(axis=0), vectors.std(axis=0)
        scale = np.maximum(spread, self.LEAST_SPREAD * np.median(spread))
        check_varies(scale[None] * np.array([[-1.0], [1.0]]))
        z = (vectors - mean) / scale
        count, width = z.shape
        axes, values = _principal(z, rank)
        shrinkage = float(ledoit_wolf_shrinkage(z, assume_centered=True))
        total = float((z**2).sum()) / count
        rest = max(total - values.sum(), 0.0) / (width - rank)
        variances = (1.0 - shrinkage) * np.append(values, rest) + shrinkage * total / width
        return mean, scale, axes.astype(np.float32), variances

    def projected(self, level: int, vectors: Array) -> tuple[Array, Array]:
        """The components v_i.z (N, k) and the energies |z|^2 (N,) of features (N, F)."""
        z = (vectors - self.mean_[level]) / self.scale_[level]
        return z @ self.axes_[level].T.astype(np.float64), (z**2).sum(axis=1)

    def distance_at(self, level: int, vectors: Array) -> Array:
        components, energies = self.projected(level, vectors)
        along = components**2
        rest = np.maximum(energies - along.sum(axis=1), 0.0)
        return np.asarray(along @ (1.0 / self.variances_[level, :-1]) + rest / self.variances_[level, -1])


@register("level_lof")
class LevelLOF(LevelPCA):
    """How much farther an image is from its neighbours than they are from theirs, for each level by itself.

    With the components v_i.z of `level_pca`, and two images taken as orthogonal in all other directions,

        d^2(x, y) = |z_x|^2 + |z_y|^2 - 2 sum_{i <= k} (v_i.z_x)(v_i.z_y)
        score     = r^2(x) / geometric mean of r^2 over the 5 nearest ID images of x

    where r is the distance to the fifth nearest ID image, which counts as at least a tenth of its median over the ID
    images. An image between several clouds, near their common mean but unlike every image, has a high score. This is
    the local outlier factor (Breunig et al., SIGMOD 2000) with squared distances, and with another lower limit.

    Options
    -------
    rank : k, the number of components; at most one for every two ID images.
    """

    NEIGHBOURS = 5
    LEAST_RADIUS = 0.01  # r^2 of a fitted image, in units of the median: copies of an image must not dominate

    fitted: ClassVar[tuple[str, ...]] = ("mean", "scale", "axes", "samples", "energies", "radii")

    def _fit(self, columns: Array) -> None:
        super()._fit(columns)
        levels = range(columns.shape[1])
        components, energies = zip(*(self.projected(level, columns[:, level]) for level in levels), strict=True)
        self.samples_, self.energies_ = np.stack(components).astype(np.float32), np.stack(energies)
        radii = np.full(self.energies_.shape, np.nan)
        for level in levels:
            seen = np.flatnonzero(_looked_at(columns[:, level]))
            radii[level, seen], _ = self._nearest(level, columns[seen, level], seen)
        self.radii_ = np.maximum(radii, self.LEAST_RADIUS * np.nanmedian(radii, axis=1, keepdims=True))

    def _nearest(
        self, level: int, vectors: Array, own: npt.NDArray[np.int64] | None = None
    ) -> tuple[Array, npt.NDArray[np.int64]]:
        """r^2 of features (N, F), and which ID images are their neighbours; `own` are the numbers of ID images."""
        samples, energies = self.samples_[level].astype(np.float64), self.energies_[level]
        # an image is not its own neighbour
        count = min(self.NEIGHBOURS, int(np.isfinite(energies).sum()) - (own is not None))
        radii, neighbours = [], []
        rows = min(AT_ONCE, max(1, DISTANCES // len(samples)))
        for first in range(0, len(vectors), rows):
            components, own_energies = self.projected(level, vectors[first : first + rows])
            squares = np.maximum(own_energies[:, None] + energies - 2.0 * components @ samples.T, 0.0)
            squares[:, np.isnan(energies)] = np.inf
            if own is not None:
                squares[np.arange(len(squares)), own[first : first + rows]] = np.inf
            nearest = np.argsort(squares, axis=1)[:, :count]
            radii.append(np.take_along_axis(squares, nearest[:, -1:], axis=1)[:, 0])
            neighbours.append(nearest)
        return np.concatenate(radii), np.concatenate(neighbours)

    def distance_at(self, level: int, vectors: Array) -> Array:
        """r^2(x) in units of its geometric mean over the neighbours."""
        radii, neighbours = self._nearest(level, vectors)
        return np.asarray(radii / np.exp(np.log(self.radii_[level][neighbours]).mean(axis=1)))


def _principal(z: Array, rank: int) -> tuple[Array, Array]:
    """The first `rank` principal axes (rank, F) of centred rows, and their variances, largest first."""
    count, width = z.shape
    if rank == 0:
        return np.empty((0, width)), np.empty(0)
    if count < width:  # the Gram matrix is the smaller one; v = z^T u / |z^T u|
        values, vectors = eigh(z @ z.T / count, subset_by_index=[count - rank, count - 1])
        vectors = z.T @ vectors
        vectors /= np.maximum(np.linalg.norm(vectors, axis=0), 1e-300)
    else:
        values, vectors = eigh(z.T @ z / count, subset_by_index=[width - rank, width - 1])
    return vectors.T[::-1], np.maximum(values[::-1], 0.0)


@register("level_memory")
class LevelMemory(LevelCalibrator):
    """Squared distance to the nearest vector of a memory, for each level by itself, in a whitened space.

    The memory is a coreset: starting from one vector, the one that is farthest from all chosen ones is added until
    there are `size` (greedy k-centre, as in PatchCore, Roth et al., CVPR 2022). Unlike PatchCore, vectors are whitened
    by the covariance of the ID vectors with a ridge, C + 0.05 tr(C)/D I, so that strong channels do not hide others.

    Options
    -------
    size : the number of vectors in the memory.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.calibration.joint import LevelMemory
    >>> columns = np.random.default_rng(0).standard_normal((200, 1, 4))
    >>> memory = LevelMemory(size=50).fit(columns)
    >>> bool((memory.per_level(columns + 9.0) > memory.per_level(columns)).all())
    True

    See Also
    --------
    gepc.calibration.joint.LevelKNN : keeps all vectors, which suits a few per image.
    """

    fitted: ClassVar[tuple[str, ...]] = ("mean", "whitening", "memory")
    RIDGE = 0.05

    def __init__(self, size: int = 4000) -> None:
        check_least(1, **{"level_memory: size": size})
        self.size = size

    def _fit(self, columns: Array) -> None:
        levels = _by_level(columns)
        size = min(self.size, *map(len, levels))
        models = [self._learn(values, size) for values in levels]
        self.mean_, self.whitening_, self.memory_ = (np.stack(part) for part in zip(*models, strict=True))

    def _learn(self, vectors: Array, size: int) -> tuple[Array, Array, Array]:
        """Mean (D,), whitening matrix (D, D) and memory (size, D) of one level."""
        mean = vectors.mean(axis=0)
        values, axes = np.linalg.eigh(np.atleast_2d(np.cov(vectors, rowvar=False)))
        values = np.maximum(values, 0.0)
        whitening = axes / np.sqrt(values + max(self.RIDGE * float(values.mean()), 1e-12))
        white = (vectors - mean) @ whitening
        return mean, whitening, white[farthest_first(white, size)]

    def distance_at(self, level: int, vectors: Array) -> Array:
        """min_i |z - z_i|^2, z whitened."""
        white = (vectors - self.mean_[level]) @ self.whitening_[level]
        nearest = [self._nearest(level, squares) for squares in self._squares(level, white)]
        return np.concatenate(nearest).astype(np.float64)

    def _nearest(self, level: int, squares: Array) -> Array:
        """The distance (N,) to the nearest vector of the memory from the |z - z_i|^2 (N, size)."""
        return np.asarray(squares.min(axis=1))

    def _squares(self, level: int, white: Array) -> Iterator[Array]:
        """|z - z_i|^2 of some whitened vectors after others, each with all vectors of the memory."""
        memory, white = self.memory_[level].astype(np.float32), white.astype(np.float32)
        energies = (memory**2).sum(axis=1)
        for first in range(0, len(white), AT_ONCE):
            some = white[first : first + AT_ONCE]
            yield np.maximum((some**2).sum(axis=1, keepdims=True) + energies - 2.0 * some @ memory.T, 0.0)


def farthest_first(vectors: Array, count: int) -> npt.NDArray[np.int64]:
    """Rows of a coreset: each is the farthest from those before it, in a random projection to few dimensions.

    Parameters
    ----------
    vectors : (N, D).
    count : how many rows; all of them if there are no more.

    Returns
    -------
    Indices (min(count, N),) in the order in which they were chosen.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.calibration.joint import farthest_first
    >>> farthest_first(np.array([[0.0], [0.1], [5.0], [9.0]]), 2).tolist()
    [0, 3]
    """
    if len(vectors) <= count:
        return np.arange(len(vectors))
    small = vectors.astype(np.float32)
    if vectors.shape[1] > PROJECTED:
        directions = np.random.default_rng(0).standard_normal((vectors.shape[1], PROJECTED))
        small = small @ directions.astype(np.float32)
    chosen = [0]
    distance = ((small - small[0]) ** 2).sum(axis=1)
    while len(chosen) < count:
        chosen.append(int(distance.argmax()))
        np.minimum(distance, ((small - small[chosen[-1]]) ** 2).sum(axis=1), out=distance)
    return np.array(chosen)


@register("knn")
class KNN(VectorCalibrator):
    """Distance to the k-th nearest ID vector, columns standardised first.

    Options
    -------
    k : which neighbour; the farthest there is where there are fewer.
    """

    fitted: ClassVar[tuple[str, ...]] = ("mean", "scale", "samples")

    def __init__(self, k: int = 5) -> None:
        check_least(1, **{"knn: k": k})
        self.k = k

    def learn(self, vectors: Array) -> None:
        self.mean_, self.scale_ = vectors.mean(axis=0), vectors.std(axis=0)
        self.samples_ = (vectors - self.mean_) / self.scale_

    def distance(self, vectors: Array) -> Array:
        """The k-th smallest of |z - z_i|."""
        k = min(self.k, len(self.samples_))
        found, _ = _tree(self.samples_).query((vectors - self.mean_) / self.scale_, k=[k])
        return np.asarray(found[:, 0])


@register("soft_minimum")
class SoftMinimum(KNN):
    """-T log mean_i exp(-|z - z_i|/T) over some ID vectors: between the nearest neighbour and the mean distance.

    Options
    -------
    temperature : T, in standard deviations of a column.
    references : the largest number of ID vectors that are kept, spread evenly over them.
    """

    def __init__(self, temperature: float = 1.0, references: int = 100) -> None:
        if not temperature > 0.0 or references < 1:
            raise OptionError(f"soft_minimum: temperature and references must be positive: {temperature}, {references}")
        self.temperature, self.references = temperature, references

    def learn(self, vectors: Array) -> None:
        super().learn(vectors)
        count = min(self.references, len(vectors))
        order = np.lexsort(self.samples_.T)  # whatever the order of the images
        self.samples_ = self.samples_[order[np.linspace(0, len(vectors) - 1, count).round().astype(np.int64)]]

    def distance(self, vectors: Array) -> Array:
        found = cdist((vectors - self.mean_) / self.scale_, self.samples_) / self.temperature
        return np.asarray(-self.temperature * (logsumexp(-found, axis=1) - np.log(found.shape[1])))


@register("gmm")
class GMM(VectorCalibrator):
    """-log p of a mixture of full-covariance Gaussians on the standardised columns.

    Options
    -------
    choose : how many components: `bic` over 1, 2, 4, 8, 16, or `cv`, 10-fold held-out log-likelihood over
        2, 4, ..., 20. At most one component for every 50 ID images.

    Variances are raised by 1e-4 of a column's, or nearly collinear columns would amplify the rounding of float32.
    """

    GRIDS: ClassVar[dict[str, tuple[int, ...]]] = {"bic": (1, 2, 4, 8, 16), "cv": tuple(range(2, 21, 2))}
    IMAGES_PER_COMPONENT = 50
    RIDGE = 1e-4

    fitted: ClassVar[tuple[str, ...]] = ("mean", "scale", "weights", "means", "whitening")

    def __init__(self, choose: str = "bic") -> None:
        check_choice("gmm: choose", choose, self.GRIDS)
        self.choose = choose

    def learn(self, vectors: Array) -> None:
        self.mean_, self.scale_ = vectors.mean(axis=0), vectors.std(axis=0)
        z = (vectors - self.mean_) / self.scale_
        most = max(1, len(z) // self.IMAGES_PER_COMPONENT)
        candidates = [count for count in self.GRIDS[self.choose] if count <= most] or [1]
        with warnings.catch_warnings():
            # a mixture that has not settled after 300 rounds is a worse candidate, not a fault
            warnings.filterwarnings("ignore", message=".*did not converge")
            best = candidates[0]
            if len(candidates) > 1:
                best = min(candidates, key=lambda count: self._badness(count, z))
            mixture = _mixture(best).fit(z)
        self.weights_, self.means_, self.whitening_ = mixture.weights_, mixture.means_, mixture.precisions_cholesky_

    def _badness(self, count: int, z: Array) -> float:
        if self.choose == "bic":
            return float(_mixture(count).fit(z).bic(z))
        from sklearn.model_selection import KFold, cross_val_score

        return -float(cross_val_score(_mixture(count), z, cv=KFold(10, shuffle=True, random_state=0)).mean())

    def distance(self, vectors: Array) -> Array:
        """-log sum_k w_k N(z; mean_k, cov_k), up to the constant of standardising."""
        mixture = _mixture(len(self.weights_))
        mixture.weights_, mixture.means_, mixture.precisions_cholesky_ = self.weights_, self.means_, self.whitening_
        return np.asarray(-mixture.score_samples((vectors - self.mean_) / self.scale_))


def _mixture(count: int) -> Any:
    from sklearn.mixture import GaussianMixture

    return GaussianMixture(count, reg_covar=GMM.RIDGE, max_iter=300, random_state=0)


def _tree(samples: Array) -> KDTree:
    if not samples.size:
        raise InputError("there is no in-distribution image to compare with")  # a search in an empty tree crashes
    return KDTree(samples)


def _looked_at(vectors: Array) -> npt.NDArray[np.bool_]:
    """Which rows have all of their features: the others are of images that were not evaluated at this level."""
    return np.asarray(~np.isnan(vectors).any(axis=1))


def _by_level(columns: Array) -> list[Array]:
    """For each level, the features (n, F) of the images that were evaluated at it."""
    return [vectors[_looked_at(vectors)] for vectors in np.moveaxis(columns, 1, 0)]


def _squared_distance(vectors: Array, mean: Array, factor: Array) -> Array:
    return np.asarray((_whitened(vectors, mean, factor) ** 2).sum(axis=1))


def _whitened(vectors: Array, mean: Array, factor: Array) -> Array:
    """factor^-1 (f - mean) for every row: the covariance becomes the identity."""
    return np.asarray(solve_triangular(factor, (vectors - mean).T, lower=True).T)


def _flatten(columns: Array) -> Array:
    vectors = columns.reshape(len(columns), -1)
    if np.isnan(vectors).any():
        raise OptionError("vector calibration needs every level for every image; use kde or zscore with level_samples")
    return vectors
