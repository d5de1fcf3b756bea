"""Maps as numbers: one field per level becomes one field per image, and a common scale for pictures."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

Map = npt.NDArray[np.float32]
QUANTILE = 0.99
SAMPLE_SIZE = 64


class MapSample:
    """A bounded sample of in-distribution maps, chosen by the images' keys so that their order does not matter.

    Parameters
    ----------
    capacity : the largest number of maps to keep.
    """

    def __init__(self, capacity: int = SAMPLE_SIZE) -> None:
        self._capacity = capacity
        self._heap: list[tuple[int, Map]] = []

    def add(self, key: bytes, levels: Map) -> None:
        """Offer one image's maps per level (levels, H, W); those with the smallest keys are kept, as copies."""
        rank = -int.from_bytes(key, "big")
        if any(rank == known for known, _ in self._heap):
            return
        if len(self._heap) < self._capacity:
            heapq.heappush(self._heap, (rank, levels.copy()))
        elif rank > self._heap[0][0]:
            heapq.heapreplace(self._heap, (rank, levels.copy()))

    def v_global(self, kept: tuple[int, ...], weights: npt.NDArray[np.float64]) -> float:
        """Median over in-distribution maps of the 0.99 quantile: the common scale of pictures."""
        maps = [combine(levels[None, list(kept)], weights)[0] for _, levels in self._heap]
        return float(np.median([np.quantile(field, QUANTILE) for field in maps]))


def combine(levels: Map, weights: npt.NDArray[np.float64]) -> Map:
    """sum_t w_t m_t for (N, levels, H, W), over the levels at which an image was evaluated; the others are NaN."""
    seen = ~np.isnan(levels[:, :, 0, 0])
    share = seen * weights
    share /= share.sum(axis=1, keepdims=True)
    fields = np.where(seen[:, :, None, None], levels, 0.0)
    return np.asarray(np.einsum("nlhw,nl->nhw", fields, share), dtype=np.float32)
