"""Bounded work: who is let in, how many bytes are held, and the threads that answer off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

from dear_serve.errors import OverloadError
from dear_serve.runtime.batching import Deadline, deadline

from .settings import Limits

__all__ = ["Admission", "Ticket", "Workers"]

T = TypeVar("T")


class Admission:
    """Counts the requests in flight and the bytes they hold; used from the event loop only."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.requests = 0
        self.bytes = 0

    @contextmanager
    def admit(self) -> Iterator[Ticket]:
        """A place among the requests in flight, for the time of the `with` block.

        Raises:
            OverloadError: when `waiting` requests are in flight already.
        """
        if self.requests >= self._limits.waiting:
            raise OverloadError(f"{self.requests} requests are waiting already; try again in a moment")
        self.requests += 1
        ticket = Ticket(self)
        try:
            yield ticket
        finally:
            self.requests -= 1
            self.bytes -= ticket.bytes

    def hold(self, count: int) -> None:
        """Count `count` more bytes, or raise OverloadError when all requests together would hold too many."""
        if self.bytes + count > self._limits.buffered_bytes:
            raise OverloadError("the requests in flight fill the server's memory; try again in a moment")
        self.bytes += count


class Ticket:
    """One admitted request; gives back what it held when its `with` block ends."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.bytes = 0

    def hold(self, count: int) -> None:
        """See `Admission.hold`."""
        self._admission.hold(count)
        self.bytes += count


class Workers:
    """A few threads with a bounded queue in front of them."""

    def __init__(self, *, threads: int, waiting: int, seconds: float) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="answer")
        self._most = threads + waiting
        self._seconds = seconds
        self._lock = threading.Lock()
        self.pending = 0

    async def run(
        self, function: Callable[..., T], *arguments: Any, gone: Callable[[], Awaitable[None]] | None = None
    ) -> T:
        """`function(*arguments)` in a thread, with a deadline that the work in it can see (`batching.deadline`).

        A job that runs keeps its place until it ends, even after its caller was told that it took too long, so
        that slow jobs cannot pile up; one that still waits gives its place back.

        Args:
            gone: returns once the caller has hung up; the work is then given up.

        Raises:
            OverloadError: when the queue is full, or the answer took longer than `seconds`.
            ClientDisconnect: the caller has hung up.
        """
        if self.pending >= self._most:
            raise OverloadError(f"{self.pending} requests are waiting already; try again in a moment")
        until = Deadline(self._seconds)
        future: Future[T] = self._pool.submit(_within, until, function, arguments)
        with self._lock:
            self.pending += 1
        future.add_done_callback(self._done)
        answer = asyncio.wrap_future(future)
        answer.add_done_callback(_heard)
        left = None if gone is None else asyncio.ensure_future(gone())
        try:
            waited: set[asyncio.Future[Any]] = {answer} if left is None else {answer, left}
            await asyncio.wait(
                waited,
                timeout=self._seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            if left is not None:
                left.cancel()
            if not answer.done():
                until.cancel()
                future.cancel()  # at once; the other follows in the loop's next turn
                answer.cancel()
        if answer.cancelled():
            if left is not None and left.done() and not left.cancelled():
                raise ClientDisconnect
            raise OverloadError(f"no answer within {self._seconds:g} s; send less, or try again later")
        return answer.result()

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self.pending -= 1

    def close(self) -> None:
        """Finish what was accepted, then stop the threads."""
        self._pool.shutdown(wait=True)


def _within(until: Deadline, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    token = deadline.set(until)
    try:
        until.check()
        return function(*arguments)
    finally:
        deadline.reset(token)


def _heard(answer: asyncio.Future[Any]) -> None:
    """An error that comes after its caller has gone is nobody's."""
    if not answer.cancelled():
        answer.exception()
