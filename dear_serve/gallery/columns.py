"""Vectors in memory that grow at their end, so that whoever reads the first n rows is never disturbed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from dear_serve.runtime.base import Float32

__all__ = ["Column", "Values"]

_MANY_CHUNKS = 64
_SPARE = 1.125  # room for rows to come when the buffer is full


class Column:
    """Rows (n, r) float32, read up to any n that was reached; rows are only ever appended. Thread-safe."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._buffer = np.empty((0, width), dtype=np.float32)
        self._filled = 0
        self._lock = threading.Lock()

    @property
    def filled(self) -> int:
        """Rows there are."""
        return self._filled

    @property
    def nbytes(self) -> int:
        return int(self._buffer.nbytes)

    def upto(self, count: int, read: Callable[[int], Float32] | None = None) -> Float32:
        """The first `count` rows, (count, r); `read(start)` gives rows start to count - 1 where they are missing."""
        with self._lock:
            if self._filled < count and read is not None:
                self._append(read(self._filled))
            return self._buffer[:count]

    def append(self, rows: Float32) -> None:
        """Add rows (k, r) at the end."""
        with self._lock:
            self._append(rows)

    def _append(self, rows: Float32) -> None:
        if not self._filled:
            self._buffer = np.ascontiguousarray(rows, dtype=np.float32)
            self._filled = len(rows)
            return
        count = self._filled + len(rows)
        if count > len(self._buffer):
            room = max(count, int(_SPARE * len(self._buffer)))
            buffer = np.empty((room, self.width), dtype=np.float32)
            buffer[: self._filled] = self._buffer[: self._filled]
            self._buffer = buffer
        self._buffer[self._filled : count] = rows
        self._filled = count


class Values:
    """As `Column`, for a metadata key or the ids: an Arrow array that may hold nulls."""

    def __init__(self) -> None:
        self._values: pa.ChunkedArray | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return 0 if self._values is None else int(self._values.nbytes)

    def upto(self, count: int, read: Callable[[int], pa.Array]) -> pa.ChunkedArray:
        """The first `count` values; `read(start)` gives values start to count - 1 where they are missing."""
        with self._lock:
            known = self._values
            start = 0 if known is None else len(known)
            if start < count:
                fresh = read(start)
                known = pa.chunked_array([*(known.chunks if known is not None else ()), fresh], fresh.type)
                if known.num_chunks > _MANY_CHUNKS:
                    known = pa.chunked_array([known.combine_chunks()], fresh.type)
                self._values = known
            return known.slice(0, count) if known is not None else pa.chunked_array([], pa.null())
