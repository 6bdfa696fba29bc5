"""Bounded work: who is let in, how many bytes are held, and the threads that answer off the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from dear_serve.errors import OverloadError

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

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)` in a thread.

        A job that runs keeps its place until it ends, even after its caller was told that it took too long, so
        that slow jobs cannot pile up.

        Raises:
            OverloadError: when the queue is full, or the answer took longer than `seconds`.
        """
        if self.pending >= self._most:
            raise OverloadError(f"{self.pending} requests are waiting already; try again in a moment")
        future: Future[T] = self._pool.submit(function, *arguments)
        with self._lock:
            self.pending += 1
        future.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._seconds)
        except asyncio.TimeoutError:
            raise OverloadError(
                f"no answer within {self._seconds:g} s; send less, or try again later"
            ) from None

    def _done(self, _: Future[Any]) -> None:
        with self._lock:
            self.pending -= 1

    def close(self) -> None:
        """Finish what was accepted, then stop the threads."""
        self._pool.shutdown(wait=True)
