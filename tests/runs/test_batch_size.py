"""`--batch-size auto`: the fastest that fits. Nothing is timed here: the times are given."""

from __future__ import annotations

import pytest

import gepc
from gepc.runs.batch_size import SIZES, fastest, fastest_for


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({8: 4.0, 16: 3.0, 32: 2.0, 64: 2.5}, 32),
        ({8: 1.0, 16: 1.0, 32: 0.1}, 8),  # larger and no faster: memory for nothing
        ({8: 4.0, 16: 3.0, 32: 2.0}, 32),
    ],
)
def test_the_fastest(seconds: dict[int, float], expected: int) -> None:
    assert fastest(seconds.__getitem__, sorted(seconds)) == expected


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate"), RuntimeError("can't allocate memory")],
)
def test_what_does_not_fit_is_not_taken(error: Exception) -> None:
    def seconds(size: int) -> float:
        if size > 32:
            raise error
        return 1.0 / size

    assert fastest(seconds) == 32
    with pytest.raises(type(error)):
        fastest(seconds, (64, 128))


def test_other_errors_are_not_hidden() -> None:
    def seconds(size: int) -> float:
        if size > 8:
            raise RuntimeError("shape mismatch")
        return 1.0

    with pytest.raises(RuntimeError, match="shape"):
        fastest(seconds)


def test_measuring_leaves_the_detector_as_it_was(detector: gepc.GEPC) -> None:
    before = (detector.batch_size, detector.backbone.forward_count)
    assert fastest_for(detector, 20) in SIZES[:2]
    assert fastest_for(detector, 3) == SIZES[0]
    assert (detector.batch_size, detector.backbone.forward_count) == before
