"""Batches across calls: order, joining, deadlines, errors, room; every wait here is for an event, not for a time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from dear_serve.errors import DearError, OverloadError
from dear_serve.runtime.batching import Batcher, Deadline, Room, deadline


class Engine:
    """Doubles its rows; the first run waits until it is told to go on, so that calls gather behind it."""

    def __init__(self) -> None:
        self.runs: list[list[float]] = []
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, rows):
        self.runs.append(rows[:, 0].tolist())
        if len(self.runs) == 1:
            self.entered.set()
            assert self.go.wait(20)
        return (rows * 2,)


def rows(*values):
    return np.array(values, np.float32)[:, None]


class Calls:
    """Calls from threads of their own, in a known order: each has arrived before the next is made."""

    def __init__(self, batcher: Batcher, engine: Engine) -> None:
        self.batcher, self.engine = batcher, engine
        self.pool = ThreadPoolExecutor(16)

    def make(self, *values, key="a", until: Deadline | None = None):
        before, busy = len(self.batcher._jobs), self.engine.entered.is_set() and not self.engine.go.is_set()

        def ask():
            deadline.set(until)
            (result,) = self.batcher.call(key, "image", rows(*values), self.engine)
            return result[:, 0].tolist()

        future = self.pool.submit(ask)
        while busy and not future.done() and len(self.batcher._jobs) == before:
            time.sleep(0.001)
        return future


@pytest.fixture
def calls():
    with closing(Batcher(max_rows=4)) as batcher:
        made = Calls(batcher, Engine())
        yield made
        made.engine.go.set()


def test_what_comes_during_a_run_is_joined_and_nobody_gets_anothers_rows(calls):
    futures = [calls.make(0)]
    assert calls.engine.entered.wait(20)
    futures += [calls.make(1, 2), calls.make(3), calls.make(4, 5), calls.make(6)]
    calls.engine.go.set()
    assert [f.result(20) for f in futures] == [[0], [2, 4], [6], [8, 10], [12]]
    assert calls.engine.runs == [[0], [1, 2, 3, 6], [4, 5]]


def test_other_keys_are_not_joined_and_keep_their_turn(calls):
    futures = [calls.make(0)]
    assert calls.engine.entered.wait(20)
    futures += [calls.make(1), calls.make(2, key="b"), calls.make(3)]
    calls.engine.go.set()
    assert [f.result(20) for f in futures] == [[0], [2], [4], [6]]
    assert calls.engine.runs == [[0], [1, 3], [2]]


def test_a_call_with_more_rows_than_a_batch_is_run_as_it_is(calls):
    calls.engine.go.set()
    assert calls.make(*range(9)).result(20) == [2.0 * i for i in range(9)]
    assert calls.engine.runs == [list(range(9))]


def test_what_nobody_waits_for_is_not_run(calls):
    first = calls.make(0)
    assert calls.engine.entered.wait(20)
    gone = Deadline(60)
    left, kept = calls.make(1, until=gone), calls.make(2, until=Deadline(60))
    gone.cancel()
    calls.engine.go.set()
    with pytest.raises(OverloadError, match="no answer within 60 s"):
        left.result(20)
    assert (first.result(20), kept.result(20)) == ([0], [4])
    assert calls.engine.runs == [[0], [2]]


def test_a_deadline_ends_the_wait_of_whoever_asked(calls):
    first = calls.make(0)
    assert calls.engine.entered.wait(20)
    late = calls.make(1, until=Deadline(0.01))
    with pytest.raises(OverloadError):
        late.result(20)
    calls.engine.go.set()
    assert first.result(20) == [0]


def test_a_failing_run_fails_its_calls_and_no_other():
    def broken(_):
        raise ValueError("no")

    with closing(Batcher()) as batcher:
        with pytest.raises(ValueError, match="no"):
            batcher.call("a", "image", rows(1), broken)
        (result,) = batcher.call("a", "image", rows(1), lambda r: (r,))
    assert result.tolist() == [[1]]
    with pytest.raises(DearError, match="stopping"):
        batcher.call("a", "image", rows(1), broken)


def test_closing_answers_what_was_accepted(calls):
    futures = [calls.make(0)]
    assert calls.engine.entered.wait(20)
    futures += [calls.make(i) for i in range(1, 7)]
    closer = threading.Thread(target=calls.batcher.close)
    closer.start()
    calls.engine.go.set()
    assert [f.result(20) for f in futures] == [[2.0 * i] for i in range(7)]
    closer.join(20)
    assert not closer.is_alive()


def test_the_observer_hears_of_runs_and_waiting(calls):
    heard = []

    class Observer:
        def stage(self, name, seconds):
            heard.append(name)
            assert seconds >= 0

        def batch(self, kind, size):
            heard.append((kind, size))

    calls.batcher.observer = Observer()
    futures = [calls.make(0)]
    assert calls.engine.entered.wait(20)
    futures += [calls.make(1), calls.make(2, 3)]
    calls.engine.go.set()
    assert [f.result(20) for f in futures] == [[0], [2], [4, 6]]
    assert heard == ["core", ("image", 1), "queue", "core", ("image", 3), "queue", "queue"]


def test_room_is_bounded_given_back_and_waited_for_until_the_deadline():
    room = Room(3)
    with room.take(2):
        token = deadline.set(Deadline(0.01))
        with pytest.raises(OverloadError), room.take(2):
            pass
        deadline.reset(token)
        with room.take(1):
            pass
    entered = threading.Event()

    def ask():
        with room.take(100):  # more than there is: all of it
            entered.set()

    with room.take(1):
        thread = threading.Thread(target=ask)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(20)
    thread.join()
