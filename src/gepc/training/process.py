"""What any long-running process needs: a clock that goes on, signals, and a folder to itself."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Wall and CPU time of a whole run, this process going on from where the run stood."""

    def __init__(self, seconds: float, cpu_seconds: float) -> None:
        self._start = time.monotonic() - seconds
        self._cpu_start = time.process_time() - cpu_seconds

    @property
    def seconds(self) -> float:
        """Wall time."""
        return time.monotonic() - self._start

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all threads."""
        return time.process_time() - self._cpu_start


class Speed:
    """Steps per second over the last hundred steps; the first step, which may compile, does not count."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._ends: deque[float] = deque(maxlen=101)

    def after_step(self) -> float:
        """Note that a step ended; the speed so far."""
        self._ends.append(time.monotonic())
        if len(self._ends) == 1:
            return 1.0 / max(1e-9, self._ends[0] - self._begun)
        return (len(self._ends) - 1) / max(1e-9, self._ends[-1] - self._ends[0])


@contextmanager
def stop_on_signals() -> Iterator[list[bool]]:
    """Ctrl-C and SIGTERM set the flag that is yielded; a second Ctrl-C interrupts at once."""
    stopping = [False]

    def stop(number: int, _frame: object) -> None:
        if stopping[0] and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopping[0] = True

    try:
        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the caller keeps its own handlers
        yield stopping
        return
    try:
        yield stopping
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
