"""Many small requests, few large batches: a bound on what is in service, and one thread that does the work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

Work = TypeVar("Work")
Done = TypeVar("Done")

LONGEST_WAIT = 8  # gaps that the first of a batch waits for others, at most


class FullError(Exception):
    """There is no room for what was asked; ask again later."""


class Capacity:
    """A number of places. `take` is all or nothing and never waits; used from one thread, the event loop's."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.taken = 0

    def enter(self, count: int) -> None:
        """Take places, or raise `FullError` and take none."""
        if self.taken + count > self.places:
            raise FullError
        self.taken += count

    def leave(self, count: int) -> None:
        """Give places back."""
        self.taken -= count

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold places for the time of a `with` block."""
        self.enter(count)
        try:
            yield
        finally:
            self.leave(count)


class MicroBatcher(Generic[Work, Done]):
    """Calls `run` on lists of work in one thread of its own.

    A batch holds at most `max_batch` pieces of work with the same `key`, in the order in which they came. It sets off
    when it is full, or when nothing has come for `gap` seconds. `run` gives one result for each piece; when it fails
    on several, it is called again on each alone, so that one bad piece does not spoil its neighbours.
    """

    def __init__(
        self,
        run: Callable[[list[Work]], Sequence[Done]],
        key: Callable[[Work], Hashable],
        max_batch: int,
        gap: float,
    ) -> None:
        self._run, self._key, self._max_batch, self._gap = run, key, max_batch, gap
        self._queue: deque[tuple[Work, Future[Done]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.seconds_each = 0.0  # moving average of the time one piece takes
        self._thread = threading.Thread(target=self._work, name="gepc-network", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether work is accepted and will be done."""
        return self._thread.is_alive() and not self._closing

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, work: Sequence[Work]) -> list[Future[Done]]:
        """Queue work and return at once; cancel a future to give up what has not begun."""
        futures: list[Future[Done]] = [Future() for _ in work]
        with self._changed:
            if self._closing:
                raise FullError
            self._queue.extend(zip(work, futures, strict=True))
            self._changed.notify()
        return futures

    def close(self) -> None:
        """Accept no more, finish what was accepted, end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            begun = [(work, future) for work, future in batch if future.set_running_or_notify_cancel()]
            if begun:
                start = time.monotonic()
                self._finish(begun)
                each = (time.monotonic() - start) / len(begun)
                self.seconds_each += (0.2 if self.seconds_each else 1.0) * (each - self.seconds_each)

    def _next(self) -> list[tuple[Work, Future[Done]]]:
        """The next batch; empty when there is nothing left and there will be nothing more."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            deadline = time.monotonic() + LONGEST_WAIT * self._gap
            seen = 0
            while seen < len(self._queue) < self._max_batch and not self._closing and time.monotonic() < deadline:
                seen = len(self._queue)
                self._changed.wait_for(lambda: len(self._queue) > seen or self._closing, self._gap)  # noqa: B023
            batch: list[tuple[Work, Future[Done]]] = []
            while self._queue and len(batch) < self._max_batch:
                if batch and self._key(self._queue[0][0]) != self._key(batch[0][0]):
                    break
                batch.append(self._queue.popleft())
            return batch

    def _finish(self, batch: list[tuple[Work, Future[Done]]]) -> None:
        try:
            results = self._run([work for work, _ in batch])
        except Exception as error:  # noqa: BLE001 - the thread must outlive whatever one batch does to it
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for one in batch:
                self._finish([one])
            return
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
