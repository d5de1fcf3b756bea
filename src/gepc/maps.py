"""Heat maps on one common scale: m(h, w) = sum_t w_t mean_g mean_c r_g^2 / b_t."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

Map = npt.NDArray[np.float32]
POOL_SIZE = 64
QUANTILE = 0.99


class MapPool:
    """A bounded sample of in-distribution maps, chosen by the images' keys so that their order does not matter."""

    def __init__(self, capacity: int = POOL_SIZE) -> None:
        self._capacity = capacity
        self._heap: list[tuple[int, Map]] = []

    def add(self, key: bytes, levels: Map) -> None:
        """Offer one image's maps per level (levels, H, W); the smallest keys stay."""
        rank = -int.from_bytes(key, "big")
        if any(rank == known for known, _ in self._heap):
            return
        if len(self._heap) < self._capacity:
            heapq.heappush(self._heap, (rank, levels))
        elif rank > self._heap[0][0]:
            heapq.heapreplace(self._heap, (rank, levels))

    def v_global(self, kept: tuple[int, ...], weights: npt.NDArray[np.float64]) -> float:
        """median over ID maps of the 0.99 quantile: the common scale for pictures."""
        maps = [combine(levels[None, list(kept)], weights)[0] for _, levels in self._heap]
        return float(np.median([np.quantile(field, QUANTILE) for field in maps]))


def combine(levels: Map, weights: npt.NDArray[np.float64]) -> Map:
    """sum_t w_t m_t for (N, levels, H, W)."""
    return np.asarray(np.einsum("nlhw,l->nhw", levels, weights), dtype=np.float32)
