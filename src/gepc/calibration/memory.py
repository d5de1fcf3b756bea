"""A memory of vectors that each have a scale of their own."""

from typing import ClassVar

import numpy as np

from gepc.calibration.calibrators import Array, register
from gepc.calibration.joint import LevelMemory


@register("level_local_memory")
class LevelLocalMemory(LevelMemory):
    """`level_memory` with distances that count less where the vectors of the memory are far from each other.

        d^2 = min_i (|z - z_i|^2 / s_i + c s_i),    c = 0.1,
        s_i^2 = the mean of |z_j - z_i|^2 over the five nearest vectors of the memory

    Vectors of edges and of coarse texture differ more from part to part than those of a smooth surface. Without s_i,
    their distances are the largest of good images. A division by s_i^2 would compare ratios alone, as the local outlier
    factor does, and finds fewer small holes: with synthetic defects the mean of both was best. The term c s_i keeps
    logarithms of distances finite. Without it, an image that is a copy of a fitted one has distances of rounding errors
    only, whose logarithms differ as much as those of a defect.

    Options
    -------
    size : the number of vectors in the memory.

    Examples
    --------
    >>> import numpy as np
    >>> from gepc.calibration.memory import LevelLocalMemory
    >>> columns = np.random.default_rng(0).standard_normal((200, 1, 4))
    >>> memory = LevelLocalMemory(size=50).fit(columns)
    >>> bool((memory.per_level(columns + 9.0) > memory.per_level(columns)).all())
    True

    See Also
    --------
    gepc.calibration.joint.LevelMemory : the distance without s_i.
    """

    fitted: ClassVar[tuple[str, ...]] = (*LevelMemory.fitted, "scale")
    NEIGHBOURS = 5
    FLOOR = 0.1  # c
    LEAST = 0.1  # of the mean scale: copies of a vector must not make its surroundings unusual

    def _fit(self, columns: Array) -> None:
        super()._fit(columns)
        self.scale_ = np.ones(self.memory_.shape[:2])
        count = min(self.NEIGHBOURS, self.memory_.shape[1] - 1)
        for level, memory in enumerate(self.memory_ if count else ()):
            # of the nearest ones, the first is the vector itself
            nearest = [np.sort(block, axis=1)[:, 1 : count + 1] for block in self._squares(level, memory)]
            scale = np.sqrt(np.concatenate(nearest).mean(axis=1, dtype=np.float64))
            self.scale_[level] = np.maximum(scale, max(self.LEAST * float(scale.mean()), 1e-12))

    def _nearest(self, level: int, squares: Array) -> Array:
        """min_i (|z - z_i|^2 / s_i + c s_i)."""
        scale = self.scale_[level].astype(np.float32)
        return np.asarray((squares / scale + self.FLOOR * scale).min(axis=1))
