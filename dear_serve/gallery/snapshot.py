"""One version of a gallery in memory: what changed since the version before is read, the rest is shared with it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dear_serve.errors import QueryError
from dear_serve.gallery.coarse import CoarseIndex, worth_indexing
from dear_serve.gallery.columns import Column, Values
from dear_serve.gallery.filters import Columns, compile_filter
from dear_serve.gallery.schema import Kind, metadata_kinds, vector_column
from dear_serve.gallery.terms import Float64, projected_unit
from dear_serve.runtime.base import Float32

__all__ = ["Mask", "Rows", "Snapshot"]

Rows = npt.NDArray[np.int64]
RowIds = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

_KEPT_MASKS = 16
_KEPT_BASES = 8
_CHUNK = 65_536


@dataclass
class _Shared:
    """What versions that grew out of one another have in common: columns that only grow."""

    stored: dict[str, Column] = field(default_factory=dict)
    values: dict[str, Values] = field(default_factory=dict)
    invented: OrderedDict[bytes, Column] = field(default_factory=OrderedDict)
    indexes: dict[str, CoarseIndex] = field(default_factory=dict)
    building: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fresh(self) -> _Shared:
        """For rows that are read again: empty, but what the indexes learned is kept."""
        with self.lock:
            return _Shared(indexes={name: index.again() for name, index in self.indexes.items()})


class Snapshot:
    """One version of a table, never changing. Thread-safe.

    A picture has a row here from when it is added until the table is compacted; a deleted or replaced one leaves
    its row behind, dead. Rows are in the order of LanceDB's row ids. Vectors are read when first searched: r x 4
    bytes a picture for a vector of r numbers, and 8 bytes a picture for row ids.

    Args:
        table: a LanceDB table handle of its own, checked out at the version.
        before: an earlier snapshot of the table; what it holds is not read again.
    """

    def __init__(self, table: Any, before: Snapshot | None = None) -> None:
        self._table = table
        self.version = int(table.version)
        self.kinds: dict[str, Kind] = metadata_kinds(table.schema)
        row_ids = _row_ids(table.search().select(["_rowid"]).to_arrow(), ordered=True)
        self._row_ids: RowIds = row_ids
        self._live: Mask | None = None
        self._shared: _Shared = before._shared if before is not None else _Shared()
        if before is not None:
            grown = _grown(before, row_ids)
            if grown is not None:
                self._row_ids, self._live = grown
            else:
                self._shared = self._shared.fresh()
        self._pictures = len(row_ids)
        self._masks: OrderedDict[str, Mask] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Pictures."""
        return self._pictures

    @property
    def rows(self) -> int:
        """Rows, dead ones included."""
        return len(self._row_ids)

    @property
    def memory(self) -> int:
        """Bytes held in memory."""
        shared = self._shared
        with shared.lock:
            parts: list[Column | Values | CoarseIndex] = [
                *shared.stored.values(),
                *shared.values.values(),
                *shared.invented.values(),
                *shared.indexes.values(),
            ]
        dead = 0 if self._live is None else self._live.nbytes
        return self._row_ids.nbytes + dead + sum(part.nbytes for part in parts)

    # Rows

    def fetch(self, rows: Rows, columns: list[str]) -> list[dict[str, Any]]:
        """Columns of some rows, in the order of `rows`."""
        if not len(rows):
            return []
        row_ids = self._row_ids[rows].tolist()
        found = self._table.take_row_ids(row_ids).select([*columns, "_rowid"]).to_arrow().to_pylist()
        by_id = {row["_rowid"]: row for row in found}
        return [by_id[i] for i in row_ids]

    def select(self, columns: list[str], where: str | None = None) -> list[dict[str, Any]]:
        """Columns of all rows, or of those a condition of ours (never a user's text) holds for; in any order."""
        query = self._table.search().select(columns)
        found = (query.where(where) if where else query).to_arrow().to_pylist()
        rows: list[dict[str, Any]] = found
        return rows

    def batches(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """The table's schema and its rows."""
        return self._table.schema, iter(self._table.search().to_batches())

    def matrix(self, name: str) -> Float32:
        """All rows of one stored vector, (rows, r) float32 of length 1; dead rows hold anything."""
        with self._shared.lock:
            if name not in self._shared.stored:
                width = self._table.schema.field(vector_column(name)).type.list_size
                self._shared.stored[name] = Column(width)
            column = self._shared.stored[name]
        return column.upto(self.rows, lambda start: self._read(name, start, column.width))

    def _read(self, name: str, start: int, width: int) -> Float32:
        query = self._table.search().select([vector_column(name), "_rowid"])
        if start:
            query = query.where(f"_rowid > {self._row_ids[start - 1]}")
        values = np.zeros((self.rows - start, width), dtype=np.float32)
        for batch in query.to_batches():
            vectors = batch.column(vector_column(name)).flatten().to_numpy().reshape(-1, width)
            values[self._rows_of(_row_ids(batch)) - start] = vectors
        return values

    def projected(self, basis: Float64) -> Float32:
        """Class vectors of all rows on a basis (r, D) at length 1, (rows, r) float32; the last few are kept."""
        key, kept = basis.tobytes(), self._shared.invented
        with self._shared.lock:
            column = kept.setdefault(key, Column(len(basis)))
            kept.move_to_end(key)
            while len(kept) > _KEPT_BASES:
                kept.popitem(last=False)
        matrix = self.matrix("class")

        def read(start: int) -> Float32:
            parts = [projected_unit(matrix[i : i + _CHUNK], basis) for i in range(start, self.rows, _CHUNK)]
            return np.concatenate(parts)

        return column.upto(self.rows, read)

    def _rows_of(self, row_ids: RowIds) -> Rows:
        """Our row numbers of LanceDB's row ids."""
        return np.searchsorted(self._row_ids, row_ids)

    # Indexes

    def index(self, name: str) -> CoarseIndex | None:
        """The index of a stored vector where it is worth having one and it is ready; else it is begun.

        It is built in a thread of its own, from the rows of now, and made again when they have doubled.
        """
        matrix = self.matrix(name)
        if not worth_indexing(self._pictures, matrix.shape[1]):
            return None
        with self._shared.lock:
            ready = self._shared.indexes.get(name)
            outgrown = ready is None or self.rows > 2 * ready.fitted
            begin = outgrown and name not in self._shared.building
            if begin:
                self._shared.building.add(name)
        if begin:
            threading.Thread(target=self._build, args=(name,), name=f"index {name}", daemon=True).start()
        return ready if ready is not None and ready.useful else None

    def build_indexes(self) -> None:
        """Read every stored vector, and build the indexes that are missing, before this returns."""
        for field_ in self._table.schema:
            if field_.name.startswith("v_"):
                name = field_.name[2:]
                matrix = self.matrix(name)
                if worth_indexing(self._pictures, matrix.shape[1]) and name not in self._shared.indexes:
                    self._build(name)

    def indexes(self) -> dict[str, CoarseIndex]:
        """The indexes there are, by vector."""
        with self._shared.lock:
            return dict(self._shared.indexes)

    def _build(self, name: str) -> None:
        try:
            index = CoarseIndex(self.matrix(name), self._live)
            with self._shared.lock:
                self._shared.indexes[name] = index
        finally:
            with self._shared.lock:
                self._shared.building.discard(name)

    # Filters

    def allowed(self, text: str | None) -> Mask | None:
        """(rows,) which rows hold a picture the filter is true for; None for all. Raises QueryError (bad_filter)."""
        if text is None:
            return self._live
        with self._lock:
            if text in self._masks:
                self._masks.move_to_end(text)
                return self._masks[text]
        wanted = compile_filter(text, self.kinds)
        mask = self._select(wanted.sql) if wanted.run is None else self._run(wanted.run)
        with self._lock:
            self._masks[text] = mask
            while len(self._masks) > _KEPT_MASKS:
                self._masks.popitem(last=False)
        return mask

    def _run(self, run: Callable[[Columns], pa.ChunkedArray]) -> Mask:
        found = pc.fill_null(run(self.values), False)
        mask: Mask = found.to_numpy() if isinstance(found, pa.ChunkedArray) else np.asarray(found)
        return mask if self._live is None else mask & self._live

    def values(self, column: str) -> pa.ChunkedArray:
        """A column of the table other than vectors, null in dead rows."""
        with self._shared.lock:
            values = self._shared.values.setdefault(column, Values())
        return values.upto(self.rows, lambda start: self._read_values(column, start))

    def _read_values(self, column: str, start: int) -> pa.Array:
        query = self._table.search().select([column, "_rowid"])
        if start:
            query = query.where(f"_rowid > {self._row_ids[start - 1]}")
        found = query.to_arrow()
        place = np.full(self.rows - start, -1, dtype=np.int64)
        place[self._rows_of(_row_ids(found)) - start] = np.arange(len(found))
        return found[column].combine_chunks().take(pa.array(place, mask=place < 0))

    def _select(self, sql: str) -> Mask:
        try:
            found = self._table.search().where(sql).select(["_rowid"]).to_arrow()
        except (ValueError, RuntimeError) as error:
            raise QueryError(
                "filter: the gallery cannot run it; write it simpler", code="bad_filter", field="filter"
            ) from error
        mask = np.zeros(self.rows, dtype=np.bool_)
        mask[self._rows_of(_row_ids(found))] = True
        return mask


def _row_ids(found: pa.Table | pa.RecordBatch, *, ordered: bool = False) -> RowIds:
    """The column of row ids, as it is or ascending."""
    column = found.column("_rowid")
    ids: RowIds = column.to_numpy().astype(np.uint64, copy=False)
    return np.sort(ids) if ordered and np.any(ids[1:] < ids[:-1]) else ids


def _grown(before: Snapshot, row_ids: RowIds) -> tuple[RowIds, Mask | None] | None:
    """Row ids with those of `before` in front, and which rows live (None: all); None to begin anew.

    That is when more than half of the rows would be dead, as after compaction, which moves every row.
    """
    known = before._row_ids
    last = known[-1] if len(known) else 0
    split = int(np.searchsorted(row_ids, last, side="right")) if len(known) else 0
    stayed, fresh = row_ids[:split], row_ids[split:]
    places = np.searchsorted(known, stayed)
    dead = len(known) - len(stayed)
    if (dead > 0 and dead >= len(row_ids)) or not np.array_equal(known[places], stayed):
        return None
    together = np.concatenate([known, fresh])
    if len(stayed) == len(known):
        return together, None
    live = np.zeros(len(together), dtype=np.bool_)
    live[places] = True
    live[len(known) :] = True
    return together, live
