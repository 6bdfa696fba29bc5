"""Batches across requests: calls that come while an engine is busy are answered together by its next run (ours).

There is no timer and no wished-for batch size: a call that finds the engine idle runs at once and alone, so nothing is
added at rest; while a run is under way the calls that come form the next batch. One thread runs all engines of a
process, so their threads never compete for the same cores.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # the built-in one from Python 3.11 on
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dear_serve.errors import DearError, OverloadError
from dear_serve.runtime.base import Engine, EngineInfo, Float32, FusedLogits, ImageFeatures, Int64

__all__ = ["BatchObserver", "BatchedEngine", "Batcher", "Deadline", "Room", "deadline"]

Rows = npt.NDArray[Any]
Run = Callable[[Any], tuple[Float32, ...]]


class BatchObserver(Protocol):
    """Who wants to know of the runs (a service's metrics)."""

    def stage(self, name: str, seconds: float) -> None:
        """ "queue": a call waited this long; "core": a run took this long."""

    def batch(self, kind: str, size: int) -> None:
        """A run had this many rows of "image" or "text"."""


class Deadline:
    """Until when an answer is of use to whoever asked: for `seconds`, or until `cancel`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._until = monotonic() + seconds
        self._cancelled = False

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._cancelled = True

    @property
    def left(self) -> float:
        """Seconds left; 0 once it is over."""
        return 0.0 if self._cancelled else max(0.0, self._until - monotonic())

    def check(self) -> None:
        """Raise OverloadError once it is over."""
        if self.left <= 0:
            raise OverloadError(f"no answer within {self.seconds:g} s; send less, or try again later")


deadline: ContextVar[Deadline | None] = ContextVar("deadline", default=None)
"""That of the request this thread works for; None: there is no hurry."""


class Room:
    """A bounded number of pictures that are decoded and not yet answered, so that waiting costs no memory.

    Args:
        size: pictures at once; a call with more takes all of it.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size
        self._changed = threading.Condition()

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Room for `count` pictures during the block, waited for until this thread's deadline (OverloadError)."""
        count, until = min(count, self.size), deadline.get()
        with self._changed:
            while self._free < count:
                self._changed.wait(None if until is None else until.left)
                if until is not None:
                    until.check()
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()


@dataclass(frozen=True, eq=False)
class _Job:
    key: Hashable
    kind: str
    rows: Rows
    run: Run
    until: Deadline | None
    asked: float = field(default_factory=perf_counter)
    answer: Future[tuple[Float32, ...]] = field(default_factory=Future)


class Batcher:
    """One thread that runs what it is given, joining calls of equal key into batches, oldest first. Thread-safe.

    Args:
        max_rows: of one batch; a single call with more rows is run as it is.
        max_pictures: decoded and not yet answered, the size of `room`; 256 pictures of 224 x 224 take 150 MB.
        observer: told of waiting times, run times and batch sizes.
    """

    def __init__(
        self, *, max_rows: int = 16, max_pictures: int = 256, observer: BatchObserver | None = None
    ) -> None:
        self.max_rows = max_rows
        self.room = Room(max_pictures)
        self.observer = observer
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="batches", daemon=True)
        self._thread.start()

    def call(self, key: Hashable, kind: str, rows: Rows, run: Run) -> tuple[Float32, ...]:
        """`run(rows)`, possibly joined with the rows of other calls.

        Args:
            key: calls of equal key may be joined: same engine, same function, same shape of a row.
            kind: "image" or "text", for the observer.
            rows: (B, ...).
            run: rows (n, ...) to arrays of n rows each.

        Raises:
            OverloadError: this thread's deadline is over; the rows are not run if they still wait.
            DearError: the batcher is closed. And whatever `run` raises.
        """
        job = _Job(key, kind, rows, run, deadline.get())
        with self._changed:
            if self._closed:
                raise DearError("the server is stopping", code="closed")
            self._jobs.append(job)
            self._changed.notify()
        if job.until is None:
            return job.answer.result()
        try:
            return job.answer.result(job.until.left)
        except FutureTimeout:
            job.until.cancel()
            raise _too_late(job.until) from None

    def close(self) -> None:
        """Run what was accepted, then end the thread; calling it again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        while batch := self._next():
            start = perf_counter()
            try:
                answers = _parted(batch[0].run(_joined(batch)), batch)
                self._observe(batch, start)
            except (
                Exception
            ) as error:  # whoever asked must hear of it, whatever it is, and the thread goes on
                for job in batch:
                    job.answer.set_exception(error)
                continue
            for job, answer in zip(batch, answers, strict=True):
                job.answer.set_result(answer)

    def _next(self) -> list[_Job]:
        """The jobs of the next run, waited for; none when the batcher is closed and everything is answered."""
        with self._changed:
            while True:
                while self._jobs and not _wanted(self._jobs[0]):
                    self._jobs.popleft()
                if self._jobs:
                    return self._take()
                if self._closed:
                    return []
                self._changed.wait()

    def _take(self) -> list[_Job]:
        batch: list[_Job] = []
        others: list[_Job] = []
        room = max(self.max_rows, len(self._jobs[0].rows))
        while self._jobs and room:
            job = self._jobs.popleft()
            if not _wanted(job):
                continue
            if job.key == (batch[0].key if batch else job.key) and len(job.rows) <= room:
                batch.append(job)
                room -= len(job.rows)
            else:
                others.append(job)
        self._jobs.extendleft(reversed(others))
        return batch

    def _observe(self, batch: list[_Job], start: float) -> None:
        if self.observer:
            self.observer.stage("core", perf_counter() - start)
            self.observer.batch(batch[0].kind, sum(len(job.rows) for job in batch))
            for job in batch:
                self.observer.stage("queue", start - job.asked)


def _joined(batch: list[_Job]) -> Rows:
    return batch[0].rows if len(batch) == 1 else np.concatenate([job.rows for job in batch])


def _parted(results: tuple[Float32, ...], batch: list[_Job]) -> list[tuple[Float32, ...]]:
    """Each job's rows of the results."""
    parts, first = [], 0
    for job in batch:
        rows = slice(first, first + len(job.rows))
        parts.append(tuple(array[rows] for array in results))
        first = rows.stop
    return parts


def _wanted(job: _Job) -> bool:
    """Whether somebody still waits for this job; if not, it is answered with the error."""
    if job.until is None or job.until.left > 0:
        return True
    job.answer.set_exception(_too_late(job.until))
    return False


def _too_late(until: Deadline) -> OverloadError:
    return OverloadError(f"no answer within {until.seconds:g} s; send less, or try again later")


class BatchedEngine(Engine):
    """An engine whose towers run through a batcher; the small work after them runs where it is asked for.

    Closing it leaves the engine and the batcher open: both may be shared.
    """

    def __init__(self, engine: Engine, batcher: Batcher) -> None:
        self._engine = engine
        self._batcher = batcher

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def encode_image(self, pixels: Float32) -> ImageFeatures:
        def run(rows: Float32) -> tuple[Float32, ...]:
            features = self._engine.encode_image(rows)
            return features.cls, features.attributes

        cls, attributes = self._call("image", "image", pixels, run)
        return ImageFeatures(cls=cls, attributes=attributes)

    def encode_image_zero_shot(self, pixels: Float32) -> Float32:
        (features,) = self._call(
            "zero_shot_image", "image", pixels, lambda rows: (self._engine.encode_image_zero_shot(rows),)
        )
        return features

    def encode_text(self, tokens: Int64) -> Float32:
        (features,) = self._call("text", "text", tokens, lambda rows: (self._engine.encode_text(rows),))
        return features

    def encode_text_zero_shot(self, tokens: Int64) -> Float32:
        (features,) = self._call(
            "zero_shot_text", "text", tokens, lambda rows: (self._engine.encode_text_zero_shot(rows),)
        )
        return features

    def fuse(self, features: ImageFeatures, class_features: Float32) -> FusedLogits:
        return self._engine.fuse(features, class_features)

    def classify(self, pixels: Float32) -> Float32:
        (logits,) = self._call("classifier", "image", pixels, lambda rows: (self._engine.classify(rows),))
        return logits

    def has(self, graph: str) -> bool:
        return self._engine.has(graph)

    def joint(self, pixels: Float32) -> tuple[Float32, ImageFeatures]:
        def run(rows: Float32) -> tuple[Float32, ...]:
            zero_shot, features = self._engine.joint(rows)
            return zero_shot, features.cls, features.attributes

        zero_shot, cls, attributes = self._call("joint", "image", pixels, run)
        return zero_shot, ImageFeatures(cls=cls, attributes=attributes)

    def explain(self, pixels: Float32) -> Float32:
        (maps,) = self._call("explain", "image", pixels, lambda rows: (self._engine.explain(rows),))
        return maps

    def _call(self, name: str, kind: str, rows: Rows, run: Run) -> tuple[Float32, ...]:
        if len(rows) == 0:
            return run(rows)
        return self._batcher.call((id(self._engine), name, rows.shape[1:]), kind, rows, run)
