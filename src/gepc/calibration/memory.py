"""A memory of in-distribution vectors: the distance to the nearest of a few that stand for all of them."""

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from gepc.calibration.calibrators import Array, register
from gepc.calibration.joint import LevelCalibrator
from gepc.core.errors import check_least

PROJECTED = 32  # dimensions in which distances are compared while vectors are chosen
AT_ONCE = 1024  # vectors whose distances are computed together, which bounds the memory


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
    >>> from gepc.calibration.memory import LevelMemory
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
        models = [self._learn(columns[:, level]) for level in range(columns.shape[1])]
        self.mean_, self.whitening_, self.memory_ = (np.stack(part) for part in zip(*models, strict=True))

    def _learn(self, vectors: Array) -> tuple[Array, Array, Array]:
        """Mean (D,), whitening matrix (D, D) and memory (size, D) of one level."""
        mean = vectors.mean(axis=0)
        values, axes = np.linalg.eigh(np.atleast_2d(np.cov(vectors, rowvar=False)))
        values = np.maximum(values, 0.0)
        whitening = axes / np.sqrt(values + max(self.RIDGE * float(values.mean()), 1e-12))
        white = (vectors - mean) @ whitening
        return mean, whitening, white[farthest_first(white, self.size)]

    def distance_at(self, level: int, vectors: Array) -> Array:
        """min_i |z - z_i|^2, z whitened."""
        memory = self.memory_[level].astype(np.float32)
        energies = (memory**2).sum(axis=1)
        white = ((vectors - self.mean_[level]) @ self.whitening_[level]).astype(np.float32)
        nearest = []
        for first in range(0, len(white), AT_ONCE):
            some = white[first : first + AT_ONCE]
            squares = (some**2).sum(axis=1, keepdims=True) + energies - 2.0 * some @ memory.T
            nearest.append(np.maximum(squares.min(axis=1), 0.0))
        return np.concatenate(nearest).astype(np.float64)


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
    >>> from gepc.calibration.memory import farthest_first
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
