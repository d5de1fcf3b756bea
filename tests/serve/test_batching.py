"""The micro-batcher and its capacity, without a network."""

import threading
from concurrent.futures import CancelledError, wait

import pytest

from gepc.serve.batching import Capacity, FullError, MicroBatcher

pytestmark = pytest.mark.usefixtures("trusted")


class Recorder:
    """Doubles numbers; remembers the batches; waits at the gate before each."""

    def __init__(self, open_gate=True):
        self.batches = []
        self.entered, self.gate = threading.Semaphore(0), threading.Event()
        if open_gate:
            self.gate.set()

    def __call__(self, numbers):
        self.entered.release()
        assert self.gate.wait(120)
        self.batches.append(numbers)
        if -1 in numbers:
            raise ValueError("no")
        return [2 * number for number in numbers]


def batcher(run, key=lambda number: 0, max_batch=4, gap=0.001):
    return MicroBatcher(run, key, max_batch, gap)


def test_what_comes_while_the_network_is_busy_goes_together_in_order():
    run = Recorder(open_gate=False)
    made = batcher(run)
    first = made.submit([1])
    assert run.entered.acquire(timeout=120)
    later = [future for number in range(2, 8) for future in made.submit([number])]
    run.gate.set()
    assert [future.result(120) for future in first + later] == [2, 4, 6, 8, 10, 12, 14]
    assert run.batches == [[1], [2, 3, 4, 5], [6, 7]]
    made.close()


def test_different_keys_are_never_in_one_batch():
    run = Recorder(open_gate=False)
    made = batcher(run, key=lambda number: number // 10)
    futures = made.submit([1])
    assert run.entered.acquire(timeout=120)
    futures += made.submit([2, 3, 11, 12, 4])
    run.gate.set()
    assert [future.result(120) for future in futures] == [2, 4, 6, 22, 24, 8]
    assert run.batches == [[1], [2, 3], [11, 12], [4]]
    made.close()


def test_a_bad_piece_fails_alone():
    run = Recorder()
    made = batcher(run)
    futures = made.submit([1, -1, 3])
    wait(futures, 120)
    assert (futures[0].result(), futures[2].result()) == (2, 6)
    with pytest.raises(ValueError, match="no"):
        futures[1].result()
    assert made.submit([5])[0].result(120) == 10
    made.close()


def test_what_was_given_up_before_it_began_is_not_done():
    run = Recorder(open_gate=False)
    made = batcher(run)
    made.submit([1])
    assert run.entered.acquire(timeout=120)
    given_up, wanted = made.submit([2, 3])
    assert given_up.cancel()
    run.gate.set()
    assert wanted.result(120) == 6
    assert run.batches == [[1], [3]]
    with pytest.raises(CancelledError):
        given_up.result()
    made.close()


def test_closing_finishes_what_was_accepted_and_refuses_more():
    run = Recorder(open_gate=False)
    made = batcher(run)
    futures = [future for number in range(10) for future in made.submit([number])]
    assert run.entered.acquire(timeout=120)
    closing = threading.Thread(target=made.close)
    closing.start()
    run.gate.set()
    closing.join(120)
    assert [future.result(0) for future in futures] == [2 * number for number in range(10)]
    assert not made.alive
    with pytest.raises(FullError):
        made.submit([1])


def test_capacity_is_taken_whole_or_not_at_all():
    capacity = Capacity(3)
    with capacity.take(2):
        with pytest.raises(FullError), capacity.take(2):
            pass
        assert capacity.taken == 2
        with capacity.take(1):
            assert capacity.taken == 3
    assert capacity.taken == 0
