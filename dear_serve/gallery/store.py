"""The gallery on disk: a LanceDB table of ids, vectors, metadata and thumbnails; every change is durable."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.index import BTree

from dear_serve.errors import GalleryError, InputError, OverloadError, QueryError
from dear_serve.gallery.durable import FolderSync
from dear_serve.gallery.query import Query
from dear_serve.gallery.rank import rank
from dear_serve.gallery.schema import (
    GallerySpec,
    Kind,
    Metadata,
    arrow_schema,
    check_ids,
    check_metadata,
    kind_fields,
    metadata_column,
    metadata_kinds,
    new_kinds,
    spec_of,
    typed_values,
    vector_column,
    vector_columns,
)
from dear_serve.gallery.snapshot import Snapshot
from dear_serve.runtime.base import Float32

__all__ = ["Gallery", "GalleryStats", "Hit", "IndexStats", "Record"]

TABLE = "pictures"
_ATTEMPTS = 30
_INDEX_IDS = 10_000
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One stored picture, without its vectors."""

    id: str
    hash: str
    metadata: Metadata
    thumbnail: bytes


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One answer of a search."""

    id: str
    score: float
    """Sum of weight x cosine."""
    scores: dict[str, float]
    """Cosine per weighted vector or invented attribute, in [-1, 1]."""
    metadata: Metadata
    thumbnail: bytes


@dataclass(frozen=True, kw_only=True)
class IndexStats:
    """How a wide vector of many pictures is searched."""

    pictures: int
    """It was made for."""
    candidates: int
    """Scored exactly for each search."""
    recall: float
    """Share of the ten nearest found, over sampled queries, when it was made."""


@dataclass(frozen=True, kw_only=True)
class GalleryStats:
    """What a gallery holds."""

    pictures: int
    version: int
    columns: dict[str, int]
    metadata: dict[str, Kind]
    bundle_sha256: str
    base_sha256: str
    bytes_in_memory: int
    indexes: dict[str, IndexStats] = field(default_factory=dict)
    """By vector; vectors without an entry are searched exactly."""


class Gallery:
    """Pictures by id, searched by weighted attributes. Thread-safe; several processes may use one gallery.

    An add or delete is on the disk when it returns. Searches see everything that was committed, by any
    process, before they began. The table is the truth; searches run over a copy of the searched vectors in
    memory; what has changed is read when the table has changed. Not to be carried over a fork: open it in the
    process that uses it.
    """

    def __init__(self, connection: Any, table: Any, folder_sync: FolderSync | None) -> None:
        """Use `Gallery.open`."""
        self._connection = connection
        self._table = table
        self._sync = folder_sync
        self._table_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self.spec: GallerySpec = spec_of(table.schema)

    @classmethod
    def open(cls, path: str | PathLike[str], *, create_for: GallerySpec | None = None) -> Gallery:
        """Open the gallery in a folder (or at an object-store URI).

        Args:
            path: the folder.
            create_for: what the vectors are made with: the gallery is created if it is absent, and refused if
                it was made with something else. None opens any existing gallery.

        Raises GalleryError: no_gallery (absent), other_bundle (made with another bundle or base),
        bad_gallery.
        """
        uri = str(path)
        name = Path(uri).name
        local = "://" not in uri
        table_folder = Path(uri).absolute() / f"{TABLE}.lance"
        if local and create_for is None and not table_folder.exists():
            raise GalleryError(
                f"there is no gallery {name!r}; make one with dear-serve index", code="no_gallery"
            )
        try:
            connection = lancedb.connect(uri)
            table, created = _open_table(connection, create_for)
        except (ValueError, RuntimeError, OSError) as error:
            raise GalleryError(
                f"gallery {name!r} cannot be opened; it is broken or not a LanceDB folder"
            ) from error
        gallery = cls(connection, table, FolderSync(table_folder) if local else None)
        if create_for is not None:
            gallery.spec.check_same(create_for)
            if created and gallery._sync:
                gallery._sync.sync_creation()
        return gallery

    # Writing

    def add(
        self,
        ids: Sequence[str],
        vectors: Mapping[str, Float32],
        metadata: Sequence[Mapping[str, Any]],
        thumbnails: Sequence[bytes],
        hashes: Sequence[str],
    ) -> int:
        """Add pictures, or replace the ones with these ids, all of them or none.

        Args:
            ids: n distinct texts of 1 to 512 characters.
            vectors: (n, r) float32 per column of the gallery's specification, of any length but 0; stored at
                length 1.
            metadata: n flat mappings; see `dear_serve.gallery.schema`.
            thumbnails: n encoded pictures.
            hashes: n content hashes, by which the indexer knows what is already there.

        Returns how many there were. Raises InputError (bad_ids, bad_vector, bad_metadata), OverloadError when
        other writers leave no turn, GalleryError when the disk fails.
        """
        check_ids(ids)
        lengths = {len(ids), len(metadata), len(thumbnails), len(hashes)}
        if len(lengths) != 1:
            raise InputError(
                f"ids, metadata, thumbnails and hashes have lengths {sorted(lengths)}", code="bad_ids"
            )
        rows = [check_metadata(row) for row in metadata]
        if not ids:
            return 0
        columns: dict[str, pa.Array] = {
            "id": pa.array(ids, type=pa.string()),
            "hash": pa.array(hashes, type=pa.string()),
            "metadata": pa.array([json.dumps(row, ensure_ascii=False) for row in rows], type=pa.string()),
            "thumbnail": pa.array(thumbnails, type=pa.binary()),
            **vector_columns(self.spec, ids, vectors),
        }

        def upsert(table: Any) -> None:
            if fresh := new_kinds(rows, metadata_kinds(table.schema)):
                table.add_columns(kind_fields(fresh))
            schema = table.schema
            typed = {
                metadata_column(k): typed_values(rows, k, kind) for k, kind in metadata_kinds(schema).items()
            }
            batch = pa.table({**columns, **typed}).select(schema.names).cast(schema)
            table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(batch)

        self._commit(upsert)
        return len(ids)

    def delete(self, id: str) -> None:  # noqa: A002 - the field's name
        """Delete one picture. Raises QueryError (unknown_id) when there is none."""
        condition = f"id = {_literal(id)}"
        if self._commit(lambda table: table.delete(condition)).num_deleted_rows == 0:
            raise _unknown_id(id)

    def compact(self, *, keep: timedelta = timedelta(days=7)) -> None:
        """Merge small files, bring the index of ids up to date, delete versions older than `keep` (readers fail).

        A gallery of 10,000 pictures or more gets an index of ids, which keeps upserts and `get` quick.
        """
        if len(self) >= _INDEX_IDS and not any(i.columns == ["id"] for i in self._table.list_indices()):
            self._commit(lambda table: table.create_index("id", config=BTree()))
        self._commit(lambda table: table.optimize(cleanup_older_than=keep))

    def _commit(self, change: Callable[[Any], T]) -> T:
        """Run a change on the newest version, again when another writer was faster, and sync it."""
        for attempt in range(_ATTEMPTS):
            try:
                with self._table_lock:
                    self._table.checkout_latest()
                    result = change(self._table)
                if self._sync:
                    self._sync.sync()
                return result
            except (ValueError, RuntimeError, OSError) as error:
                if not _is_conflict(error):
                    raise GalleryError("the gallery cannot be written; see the log, and the disk") from error
            time.sleep(random.uniform(0, 0.02 * 2 ** min(attempt, 5)))
        raise OverloadError("other writers left no turn to write the gallery; try again")

    # Reading

    def get(self, ids: Sequence[str]) -> list[Record]:
        """The pictures with these ids, in their order. Raises QueryError (unknown_id)."""
        found = self._rows(ids, ["id", "hash", "metadata", "thumbnail"])
        return [
            Record(id=r["id"], hash=r["hash"], metadata=json.loads(r["metadata"]), thumbnail=r["thumbnail"])
            for r in found
        ]

    def vectors(self, ids: Sequence[str]) -> dict[str, Float32]:
        """The stored vectors of these ids, (n, r) float32 of length 1 each. Raises QueryError
        (unknown_id).
        """
        names = {n: vector_column(n) for n in self.spec.columns}
        found = self._rows(ids, ["id", *names.values()])
        return {
            n: np.array([r[c] for r in found], dtype=np.float32).reshape(len(found), self.spec.columns[n])
            for n, c in names.items()
        }

    def hashes(self) -> dict[str, str]:
        """Content hash of every picture, by id."""
        return {row["id"]: row["hash"] for row in self._latest().select(["id", "hash"])}

    def batches(self) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Every stored column of every picture as it is now, as the table holds it."""
        return self._latest().batches()

    def __len__(self) -> int:
        return len(self._latest())

    def stats(self) -> GalleryStats:
        """What the gallery holds now."""
        snapshot = self._latest()
        return GalleryStats(
            pictures=len(snapshot),
            version=snapshot.version,
            columns=dict(self.spec.columns),
            metadata=dict(snapshot.kinds),
            bundle_sha256=self.spec.bundle_sha256,
            base_sha256=self.spec.base_sha256,
            bytes_in_memory=snapshot.memory,
            indexes={
                name: IndexStats(pictures=i.fitted, candidates=i.keep, recall=i.recall)
                for name, i in snapshot.indexes().items()
                if i.useful
            },
        )

    def search(self, query: Query) -> list[Hit]:
        """The best `top_k` pictures by score = sum of weight x cosine (ours: method.md §8's readouts,
        weighted).

        Best first; equal scores in the order of their ids. Exact: float64 over the stored float32 vectors. Where a
        wide vector of many pictures has an index, its candidates alone are scored, as exactly
        (`dear_serve.gallery.coarse`).
        Raises QueryError (see `Query.check` and `dear_serve.gallery.filters`).
        """
        (hits,) = self.search_many([query])
        return hits

    def search_many(self, queries: Sequence[Query]) -> list[list[Hit]]:
        """As `search` for each of the queries, all of them over one state of the gallery."""
        for query in queries:
            query.check(self.spec.columns)
        snapshot = self._latest()
        rankings = [rank(snapshot, query) for query in queries]
        together = np.concatenate([r.rows for r in rankings]) if rankings else np.empty(0, np.int64)
        rows = iter(snapshot.fetch(together, ["id", "metadata", "thumbnail"]))
        return [
            [
                Hit(
                    id=row["id"],
                    score=float(ranking.scores[i]),
                    scores={n: float(c[i]) for n, c in ranking.parts.items()},
                    metadata=json.loads(row["metadata"]),
                    thumbnail=row["thumbnail"],
                )
                for i, row in enumerate(islice(rows, len(ranking.rows)))
            ]
            for ranking in rankings
        ]

    def prepare(self) -> None:
        """Read every vector into memory and build the indexes that are worth having; searches do so as they need."""
        self._latest().build_indexes()

    def _rows(self, ids: Sequence[str], columns: list[str]) -> list[dict[str, Any]]:
        if not ids:
            return []
        wanted = ", ".join(_literal(i) for i in ids)
        found = self._latest().select(columns, f"id IN ({wanted})")
        by_id = {row["id"]: row for row in found}
        for i in ids:
            if i not in by_id:
                raise _unknown_id(i)
        return [by_id[i] for i in ids]

    def _latest(self) -> Snapshot:
        """A snapshot of the newest version, the same one until the table changes."""
        with self._read_lock:
            with self._table_lock:
                self._table.checkout_latest()
                version = self._table.version
            before = self._snapshot
            if before is not None and before.version == version:
                return before
            table = self._connection.open_table(TABLE)
            table.checkout(version)
            older = before is not None and before.version < version
            self._snapshot = Snapshot(table, before if older else None)
            return self._snapshot


def _open_table(connection: Any, create_for: GallerySpec | None) -> tuple[Any, bool]:
    """The table, and whether it was created now; of several processes that create it at once, one does.

    Creating comes first: a process killed while it created leaves a folder that can only be created again.
    """
    if create_for is not None:
        try:
            return connection.create_table(TABLE, schema=arrow_schema(create_for)), True
        except (ValueError, RuntimeError, OSError) as error:
            if not _is_conflict(error):
                raise
    return connection.open_table(TABLE), False


def _literal(value: str) -> str:
    """`value` as a SQL text literal for LanceDB (a quote is doubled; nothing else is special)."""
    if not isinstance(value, str):
        raise QueryError(f"id is a {type(value).__name__}; text is expected", code="unknown_id", field="id")
    quoted = value.replace("'", "''")
    return f"'{quoted}'"


def _unknown_id(value: str) -> QueryError:
    return QueryError(f"no picture has the id {value[:80]!a}", code="unknown_id", field="id")


def _is_conflict(error: Exception) -> bool:
    """Whether another writer's commit came first; LanceDB has no error class for it."""
    text = str(error).lower()
    return any(word in text for word in ("conflict", "concurrent", "already exists", "duplicate column"))
