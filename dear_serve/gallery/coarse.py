"""Which rows of a wide column are worth an exact look: few principal axes, and what a cell's rows have beside them.

A product with all of 1 million x 512 numbers reads 2 GB. Rows are therefore first compared by

    q.x  ~  (P q).(P x) + q.(m - P'P m)

with P (p, D) the first principal axes and m the mean of the rows of x's cell (k-means in the space of some more
axes): p numbers and one cell number a row. The best `keep` rows of that pass are then scored exactly. How many are
kept is measured when the index is built: enough for the ten nearest of a sample of the rows themselves (ours).
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dear_serve.gallery.columns import Column
from dear_serve.runtime.base import Float32

__all__ = ["CoarseIndex", "worth_indexing"]

_AXES = 32  # compared row by row
_CELL_AXES = 64  # that cells are made in
_CELLS = 1024
_SAMPLE = 40_000
_ROUNDS = 8
_CHUNK = 16_384
_QUERIES = 64
_NEAREST = 10
_WANTED = 0.99  # recall that `keep` is chosen for
_MOST = 8  # an index that keeps more than a row in so many is not worth having
_WORTH = 64_000_000  # numbers that a plain product gets through in the time of this index


def worth_indexing(rows: int, width: int) -> bool:
    """Whether a column is long and wide enough for an index: beyond 64 million numbers and 2 x 32 wide."""
    return width >= 2 * _AXES and rows * width > _WORTH


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """What was learned of a column's rows."""

    axes: Float32
    """(64, D) principal axes, strongest first; the first 32 are P."""
    cells: Float32
    """(c, 64): cell centers on the axes."""
    means: Float32
    """(c, D): mean row of each cell."""


class CoarseIndex:
    """An index of one column's rows. Thread-safe; rows are only ever appended.

    Args:
        matrix: (n, D) float32 rows of length 1 it is made for; n of 100 or more.
        live: (n,) which of them count, None for all.
    """

    def __init__(self, matrix: Float32, live: npt.NDArray[np.bool_] | None = None) -> None:
        rng = np.random.default_rng(0)
        rows = np.arange(len(matrix)) if live is None else np.flatnonzero(live)
        sample = matrix[np.sort(rng.choice(rows, min(_SAMPLE, len(rows)), replace=False))]
        self._fit = _fit(sample, rng)
        self.fitted = len(matrix)
        self.keep = 0
        self.recall = 0.0
        self._forget()
        self._choose_keep(matrix, live, rng)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._short = Column(_AXES)
        self._cell = np.empty(0, dtype=np.int32)

    def again(self) -> CoarseIndex:
        """An index with what this one learned and no rows yet, for rows that are read again."""
        other = copy.copy(self)
        other._forget()
        return other

    @property
    def useful(self) -> bool:
        """Whether few enough rows are kept."""
        return self.keep * _MOST <= self.fitted

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        fit = self._fit
        return self._short.nbytes + self._cell.nbytes + fit.axes.nbytes + fit.cells.nbytes + fit.means.nbytes

    def approximate(self, matrix: Float32, query: Float32) -> Float32:
        """q.x of every row of `matrix` (n, D), about: (n,) float32. Rows that are new since the last call join."""
        short, cell = self._rows(matrix)
        projected = self._fit.axes[:_AXES] @ query
        beside = self._fit.means @ query - (self._fit.means @ self._fit.axes[:_AXES].T) @ projected
        values: Float32 = short @ projected
        values += beside.take(cell)
        return values

    def _rows(self, matrix: Float32) -> tuple[Float32, npt.NDArray[np.int32]]:
        with self._lock:
            start, count = len(self._cell), len(matrix)
            if start < count:
                parts = [self._placed(matrix[i : i + _CHUNK]) for i in range(start, count, _CHUNK)]
                self._cell = np.concatenate([self._cell, *(cells for _, cells in parts)])
                self._short.append(np.concatenate([short for short, _ in parts]))
            return self._short.upto(count), self._cell[:count]

    def _placed(self, rows: Float32) -> tuple[Float32, npt.NDArray[np.int32]]:
        """P x of each row, and its cell."""
        projected = rows @ self._fit.axes.T
        return projected[:, :_AXES], _nearest(projected, self._fit.cells)

    def _choose_keep(
        self, matrix: Float32, live: npt.NDArray[np.bool_] | None, rng: np.random.Generator
    ) -> None:
        """`keep`: so many rows that the nearest ten of sampled queries are among them."""
        rows = np.arange(len(matrix)) if live is None else np.flatnonzero(live)
        # A row between two others as well as rows themselves: what is looked for is rarely stored already.
        queries = matrix[rng.choice(rows, _QUERIES)] + 0.5 * matrix[rng.choice(rows, _QUERIES)]
        exact = np.concatenate(
            [matrix[i : i + _CHUNK] @ queries.T for i in range(0, len(matrix), _CHUNK)]
        )  # (n, queries)
        ranks = []
        for number, query in enumerate(queries):
            coarse = self.approximate(matrix, query)
            scores = exact[:, number]
            if live is not None:
                coarse[~live] = scores[~live] = -np.inf
            nearest = np.argpartition(scores, len(scores) - _NEAREST)[-_NEAREST:]
            order = np.sort(coarse)
            ranks += [len(order) - int(np.searchsorted(order, value)) for value in coarse[nearest]]
        self.keep = max(1000, int(1.25 * np.quantile(ranks, _WANTED)))
        self.recall = float(np.mean(np.array(ranks) <= self.keep))


def _fit(sample: Float32, rng: np.random.Generator) -> _Fit:
    centered = sample - sample.mean(axis=0)
    _, vectors = np.linalg.eigh((centered.T @ centered).astype(np.float64))
    axes = np.ascontiguousarray(vectors[:, ::-1][:, :_CELL_AXES].T, dtype=np.float32)
    projected = sample @ axes.T
    cells = projected[rng.choice(len(sample), min(_CELLS, max(1, len(sample) // 32)), replace=False)]
    for _ in range(_ROUNDS):
        cells, _ = _means(projected, _nearest(projected, cells), cells)
    means, counts = _means(
        sample, _nearest(projected, cells), np.zeros((len(cells), sample.shape[1]), np.float32)
    )
    return _Fit(axes=axes, cells=cells[counts > 0], means=means[counts > 0])


def _nearest(rows: Float32, cells: Float32) -> npt.NDArray[np.int32]:
    """Number of the nearest cell of each row, (n,)."""
    half = 0.5 * (cells * cells).sum(axis=1)
    parts = [(rows[i : i + _CHUNK] @ cells.T - half).argmax(axis=1) for i in range(0, len(rows), _CHUNK)]
    return np.concatenate(parts).astype(np.int32)


def _means(
    rows: Float32, cell: npt.NDArray[np.int32], before: Float32
) -> tuple[Float32, npt.NDArray[np.intp]]:
    """Mean of each cell's rows, as before where it has none, and how many it has."""
    counts = np.bincount(cell, minlength=len(before))
    order = np.argsort(cell, kind="stable")
    filled = np.flatnonzero(counts)
    starts = np.searchsorted(cell[order], filled)
    means = before.copy()
    means[filled] = np.add.reduceat(rows[order], starts, axis=0) / counts[filled, None]
    return means, counts
