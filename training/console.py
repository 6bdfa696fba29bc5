"""Where a run tells how far it is, and how it is asked to stop."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

__all__ = ["Console", "Silent", "StopRequest", "Terminal"]

T = TypeVar("T")


class Console(Protocol):
    """Where a run tells how far it is."""

    def say(self, text: str) -> None:
        """A line."""

    def over(self, items: Iterable[T], title: str) -> Iterator[T]:
        """`items`, with progress."""

    def step(self, title: str, done: int, total: int, loss: float) -> None:
        """A training step was done."""


class Silent:
    """Says nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def over(self, items: Iterable[T], title: str) -> Iterator[T]:  # noqa: ARG002 (interface)
        """`items`."""
        yield from items

    def step(self, title: str, done: int, total: int, loss: float) -> None:
        """Nothing."""


class StopRequest:
    """SIGINT and SIGTERM ask the loop to stop after its step; a second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Callable[[], bool]:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._ask)
        return lambda: self.requested

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)

    def _ask(self, number: int, _: object) -> None:
        if self.requested:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.requested = True


class Terminal:
    """Progress bars and lines on stderr."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self._every = 0.2 if sys.stderr.isatty() else 10.0  # seconds between two drawings: a log stays short
        self._bar: tqdm[Any] | None = None

    def _tqdm(
        self,
        title: str,
        *,
        items: Iterable[Any] | None = None,
        total: int | None = None,
        initial: int = 0,
        leave: bool = True,
    ) -> tqdm[Any]:
        return tqdm(
            items,
            desc=title,
            total=total,
            initial=initial,
            leave=leave,
            file=sys.stderr,
            disable=self.quiet,
            mininterval=self._every,
        )

    def say(self, text: str) -> None:
        """A line."""
        if not self.quiet:
            tqdm.write(text, file=sys.stderr)

    def over(self, items: Iterable[T], title: str) -> Iterator[T]:
        """`items` with a bar."""
        yield from self._tqdm(title, items=items, leave=False)

    def step(self, title: str, done: int, total: int, loss: float) -> None:
        """One training step done."""
        if self._bar is None:
            self._bar = self._tqdm(title, total=total, initial=done - 1)
        self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self._bar.update()
        if done == total:
            self.end()

    def end(self) -> None:
        """Close the bar of steps, if there is one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
