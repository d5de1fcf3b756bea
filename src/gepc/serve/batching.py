"""Collects the images of many small requests into batches, and limits how many are accepted."""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Generic, TypeVar

Work = TypeVar("Work")
Done = TypeVar("Done")

MAX_GAPS = 8  # the first of a batch waits for others at most this many gaps


class FullError(Exception):
    """The capacity is used up; try again later."""


@dataclass
class Capacity:
    """A counter with a maximum, for use in one thread."""

    places: int
    taken: int = 0

    @contextlib.contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Hold `count` places during a `with` block, or raise `FullError` and take none."""
        if self.taken + count > self.places:
            raise FullError
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count


class MicroBatcher(Generic[Work, Done]):
    """Calls `run` on batches of consecutive items with the same key, in its own thread.

    If `run` fails on a batch, it is called on each item alone, so that one bad item does not affect the others. An
    incomplete batch starts after `gap` seconds without a new item.
    """

    def __init__(
        self, run: Callable[[list[Work]], Sequence[Done]], key: Callable[[Work], Hashable], max_batch: int, gap: float
    ) -> None:
        self._run, self._key, self._max_batch, self._gap = run, key, max_batch, gap
        self._queue: Queue[tuple[Work, Future[Done]] | None] = Queue()  # None ends the thread
        self._left_over: list[tuple[Work, Future[Done]] | None] = []
        self._lock, self._closing = threading.Lock(), False
        self.seconds_each = 0.0  # moving average of the time per item
        self._thread = threading.Thread(target=self._work, name="gepc-network", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether work is accepted."""
        return self._thread.is_alive() and not self._closing

    def submit(self, work: Sequence[Work]) -> list[Future[Done]]:
        """Queue work and return at once. Cancelling a future drops an item that has not started."""
        futures: list[Future[Done]] = [Future() for _ in work]
        with self._lock:  # nothing may be queued after the end
            if self._closing:
                raise FullError
            for item in zip(work, futures, strict=True):
                self._queue.put(item)
        return futures

    def close(self, timeout: float | None = None) -> None:
        """Accept no more work, finish what was accepted and end the thread; leave it behind after `timeout` seconds."""
        with self._lock:
            self._closing = True
            self._queue.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        while batch := self._next():
            begun = [(work, future) for work, future in batch if future.set_running_or_notify_cancel()]
            if begun:
                start = time.monotonic()
                self._finish(begun)
                each = (time.monotonic() - start) / len(begun)
                self.seconds_each += (0.2 if self.seconds_each else 1.0) * (each - self.seconds_each)

    def _next(self) -> list[tuple[Work, Future[Done]]]:
        """The next batch; empty after `close` when all work is done."""
        item = self._left_over.pop() if self._left_over else self._queue.get()
        batch: list[tuple[Work, Future[Done]]] = []
        deadline = time.monotonic() + MAX_GAPS * self._gap
        while item is not None and (not batch or self._key(item[0]) == self._key(batch[0][0])):
            batch.append(item)
            if len(batch) == self._max_batch:
                return batch
            try:
                item = self._queue.get(timeout=self._gap if time.monotonic() < deadline else 0)
            except Empty:
                return batch
        self._left_over = [item]
        return batch

    def _finish(self, batch: list[tuple[Work, Future[Done]]]) -> None:
        try:
            results = self._run([work for work, _ in batch])
        except Exception as error:  # noqa: BLE001 - the thread must survive any failure of a batch
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for one in batch:
                self._finish([one])
            return
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
