"""Exact search over one version of a gallery in memory: a coarse pass in float32, then scores in float64."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dear_serve.errors import QueryError
from dear_serve.gallery.filters import compile_filter
from dear_serve.gallery.query import Query
from dear_serve.gallery.schema import Kind, metadata_kinds, vector_column
from dear_serve.runtime.base import Float32

__all__ = ["Ranking", "Snapshot"]

Float64 = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

_CHUNK = 8192
# Bounds of the coarse pass's error, far above what float32 gives: about 1e-6 for a stored vector; for an
# invented attribute that divided by |Q f|, below 0.01 only for pictures that have nothing of the attribute.
_STORED_MARGIN = 1e-4
_INVENTED_MARGIN = 1e-3


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The best pictures of a search, best first, equal scores in the order of their ids."""

    ids: list[str]
    rows: Rows
    """(k,): row numbers in the snapshot."""
    scores: Float64
    """(k,): sum of weight x cosine."""
    cosines: dict[str, Float64]
    """Per weighted vector or invented attribute, (k,)."""


class Snapshot:
    """One version of a table, never changing. Thread-safe.

    Rows are kept in the order of their ids (by code point), so that a row's number breaks ties. Vectors are
    read when first searched: r x 4 bytes a picture for a vector of r numbers, and 24 bytes a picture for row
    numbers beside the ids themselves.

    Args:
        table: a LanceDB table handle of its own, checked out at the version.
    """

    def __init__(self, table: Any) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._matrices: dict[str, Float32] = {}
        self.version = int(table.version)
        self.kinds: dict[str, Kind] = metadata_kinds(table.schema)
        rows = table.search().select(["id"]).with_row_id(True).to_arrow()
        order = pc.sort_indices(rows["id"])
        self.ids: pa.Array = _one_chunk(rows["id"].take(order))
        self._row_ids = _one_chunk(rows["_rowid"].take(order)).to_numpy()
        self._by_row = np.argsort(self._row_ids).astype(np.int64)
        self._sorted_row_ids = self._row_ids[self._by_row]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def memory(self) -> int:
        """Bytes held in memory."""
        fixed = self.ids.nbytes + self._row_ids.nbytes + self._by_row.nbytes + self._sorted_row_ids.nbytes
        return int(fixed + sum(m.nbytes for m in self._matrices.values()))

    def fetch(self, rows: Rows, columns: list[str]) -> list[dict[str, Any]]:
        """Columns of some rows, "id" among them, in the order of `rows`."""
        if not len(rows):
            return []
        row_ids = self._row_ids[rows].tolist()
        found = self._table.take_row_ids(row_ids).select(columns).to_arrow().to_pylist()
        by_id = {row["id"]: row for row in found}
        return [by_id[i] for i in self.ids.take(pa.array(rows)).to_pylist()]

    def select(self, columns: list[str], where: str | None = None) -> list[dict[str, Any]]:
        """Columns of all rows, or of those a condition of ours (never a user's text) holds for; in any order."""
        query = self._table.search().select(columns)
        found = (query.where(where) if where else query).to_arrow().to_pylist()
        rows: list[dict[str, Any]] = found
        return rows

    def _rows_of(self, row_ids: pa.ChunkedArray) -> Rows:
        """Our row numbers of LanceDB's row ids."""
        found = np.searchsorted(self._sorted_row_ids, _one_chunk(row_ids).to_numpy())
        rows: Rows = self._by_row[found]
        return rows

    def matrix(self, name: str) -> Float32:
        """All rows of one vector, (n, r) float32 of length 1."""
        with self._lock:
            if name not in self._matrices:
                column = vector_column(name)
                found = self._table.search().select([column]).with_row_id(True).to_arrow()
                flat = _one_chunk(found[column])
                values = flat.flatten().to_numpy().reshape(len(flat), flat.type.list_size)
                matrix = np.empty_like(values)
                matrix[self._rows_of(found["_rowid"])] = values
                self._matrices[name] = matrix
            return self._matrices[name]

    def _allowed(self, query: Query) -> npt.NDArray[np.bool_] | None:
        """(n,) which rows the filter and the exclusions leave, None for all."""
        allowed: npt.NDArray[np.bool_] | None = None
        if query.filter is not None:
            sql = compile_filter(query.filter, self.kinds)
            try:
                found = self._table.search().where(sql).select(["id"]).with_row_id(True).to_arrow()
            except (ValueError, RuntimeError) as error:
                raise QueryError(
                    "filter: the gallery cannot run it; write it simpler", code="bad_filter", field="filter"
                ) from error
            allowed = np.zeros(len(self), dtype=np.bool_)
            allowed[self._rows_of(found["_rowid"])] = True
        if query.exclude:
            allowed = np.ones(len(self), dtype=np.bool_) if allowed is None else allowed
            excluded = pc.is_in(self.ids, value_set=pa.array(query.exclude, type=pa.string()))
            allowed &= ~excluded.to_numpy(zero_copy_only=False)
        return allowed

    def rank(self, query: Query) -> Ranking:
        """The query's best pictures; `query.check` has been called. Raises QueryError (bad_filter)."""
        terms = _terms(query)
        allowed = self._allowed(query)
        rows = self._candidates(terms, allowed, query.top_k)
        cosines = {t.name: np.zeros(len(rows)) for t in terms}
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            for term in terms:
                cosines[term.name][part] = term.exact(self.matrix(term.column)[rows[part]])
        scores = sum((t.weight * cosines[t.name] for t in terms), np.zeros(len(rows)))
        best = np.lexsort((rows, -scores))[: query.top_k]
        return Ranking(
            ids=self.ids.take(pa.array(rows[best])).to_pylist(),
            rows=rows[best],
            scores=scores[best],
            cosines={n: c[best] for n, c in cosines.items()},
        )

    def _candidates(self, terms: list[_Term], allowed: npt.NDArray[np.bool_] | None, top_k: int) -> Rows:
        """Row numbers among which the best `top_k` surely are, by scores in float32."""
        kept = np.arange(len(self)) if allowed is None else np.flatnonzero(allowed)
        if len(kept) <= top_k:
            return kept
        coarse = np.zeros(len(self), dtype=np.float32)
        for term in terms:
            coarse += np.float32(term.weight) * term.coarse(self.matrix(term.column))
        coarse = coarse[kept]
        threshold = np.partition(coarse, len(kept) - top_k)[len(kept) - top_k]
        margin = 2 * sum(t.weight * t.margin for t in terms)
        found: Rows = kept[coarse >= threshold - margin]
        return found


@dataclass(frozen=True)
class _Term:
    """One weighted cosine of the score: of stored vectors, or of them projected by `basis` (r, D)."""

    name: str
    column: str
    weight: float
    query: Float64
    basis: Float64 | None

    @property
    def margin(self) -> float:
        return _STORED_MARGIN if self.basis is None else _INVENTED_MARGIN

    def coarse(self, matrix: Float32) -> Float32:
        """cos with every row, (n,) float32, off by less than `margin`."""
        if self.basis is None:
            return matrix @ self.query.astype(np.float32)
        projected = matrix @ self.basis.T.astype(np.float32)
        norms = np.maximum(np.linalg.norm(projected, axis=1), np.finfo(np.float32).tiny)
        cosines: Float32 = projected @ self.query.astype(np.float32) / norms
        return cosines

    def exact(self, rows: Float32) -> Float64:
        """cos with each row, (n,) float64; 0 for a row with nothing along the basis.

        Sums along each row by itself, so equal vectors get equal scores wherever they stand (a matrix product
        doesn't promise that).
        """
        values = rows.astype(np.float64)
        if self.basis is not None:
            values = np.stack([(values * q).sum(axis=1) for q in self.basis], axis=1)
        norms = np.sqrt((values * values).sum(axis=1))
        dots = (values * self.query).sum(axis=1)
        cosines: Float64 = np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0)
        return cosines


def _terms(query: Query) -> list[_Term]:
    """The weighted parts of the score, query vectors at length 1, weights of 0 left out."""
    parts: list[tuple[str, str, float, Float32, Float32 | None]] = [
        (n, n, float(w), query.vectors[n], None) for n, w in query.weights.items() if w > 0
    ]
    parts += [(i.name, "class", float(i.weight), i.query, i.basis) for i in query.invented if i.weight > 0]
    return [
        _Term(name, column, weight, _unit(vector), None if basis is None else basis.astype(np.float64))
        for name, column, weight, vector, basis in parts
    ]


def _unit(vector: Float32) -> Float64:
    values = vector.astype(np.float64)
    unit: Float64 = values / np.sqrt((values * values).sum())
    return unit


def _one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
