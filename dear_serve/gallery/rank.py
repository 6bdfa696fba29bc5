"""The best pictures of a snapshot for a query: a coarse pass in float32, then scores in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dear_serve.gallery.diverse import POOL, diverse_order
from dear_serve.gallery.query import Query
from dear_serve.gallery.snapshot import Mask, Rows, Snapshot
from dear_serve.gallery.terms import Float64, Term, terms_of
from dear_serve.gallery.terms import projected_unit as _projected
from dear_serve.runtime.base import Float32

__all__ = ["Ranking", "rank"]

_CHUNK = 8192
_BLOCK = 16
_FEW = 32  # where fewer than one row in so many is allowed, those alone are looked at


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The pictures of an answer, in its order."""

    rows: Rows
    """(k,): row numbers in the snapshot."""
    scores: Float64
    """(k,): sum of weight x part."""
    parts: dict[str, Float64]
    """Per weighted vector or invented attribute, (k,)."""

    def take(self, order: Rows) -> Ranking:
        """These of the pictures, in this order."""
        parts = {n: p[order] for n, p in self.parts.items()}
        return Ranking(rows=self.rows[order], scores=self.scores[order], parts=parts)


def rank(snapshot: Snapshot, query: Query) -> Ranking:
    """The query's answer: pictures `offset` to `offset + top_k - 1`, best first, equal scores in the order of ids.

    Exact, but for columns with an index (`Snapshot.index`), of which the index's candidates alone are scored.
    `query.check` has been called. Raises QueryError (bad_filter).
    """
    terms = terms_of(query)
    end = query.offset + query.top_k
    wanted = (max(end, POOL) if query.diversity else end) + len(query.exclude)
    rows = _candidates(snapshot, terms, snapshot.allowed(query.filter), wanted)
    found = _in_order(snapshot, _scored(snapshot, terms, rows), wanted)
    if query.exclude:
        excluded = set(query.exclude)
        ids = [row["id"] for row in snapshot.fetch(found.rows, ["id"])]
        found = found.take(np.array([n for n, i in enumerate(ids) if i not in excluded], dtype=np.int64))
    if query.diversity:
        found = _diverse(snapshot, terms, found.take(np.arange(min(len(found.rows), POOL))), query)
    return found.take(np.arange(len(found.rows))[query.offset : end])


def _candidates(snapshot: Snapshot, terms: list[Term], allowed: Mask | None, wanted: int) -> Rows:
    """Row numbers among which the best `wanted` surely are (with an index: probably), in any order."""
    count = snapshot.rows if allowed is None else int(np.count_nonzero(allowed))
    if count <= max(wanted, snapshot.rows // _FEW):
        rows: Rows = np.arange(snapshot.rows) if allowed is None else np.flatnonzero(allowed)
        return rows if count <= wanted else _refined(snapshot, terms, rows, wanted)
    indexes = [snapshot.index(t.column) if t.basis is None else None for t in terms]
    coarse = np.zeros(snapshot.rows, dtype=np.float32)
    for term, index in zip(terms, indexes, strict=True):
        looked_for = term.query.astype(np.float32)
        if index is not None:
            part = index.approximate(snapshot.matrix(term.column), looked_for)
        else:
            part = _matrix(snapshot, term) @ looked_for
        part *= np.float32(term.weight)
        coarse += part
    if allowed is not None:
        np.copyto(coarse, -np.inf, where=~allowed)
    kept = [index.keep for index in indexes if index is not None]
    if kept:
        rows = _at_least(coarse, _bound(coarse, max(wanted, *kept)))
        return _refined(snapshot, terms, rows, wanted)
    return _at_least(coarse, _bound(coarse, wanted) - _margin(terms))


def _refined(snapshot: Snapshot, terms: list[Term], rows: Rows, wanted: int) -> Rows:
    """Those of the rows among which the best `wanted` of them surely are."""
    if len(rows) <= wanted:
        return rows
    scores = np.zeros(len(rows), dtype=np.float32)
    for term in terms:
        vectors = _rows_of(snapshot, term, rows)
        scores += np.float32(term.weight) * (vectors @ term.query.astype(np.float32))
    found: Rows = rows[_at_least(scores, _bound(scores, wanted) - _margin(terms))]
    return found


def _rows_of(snapshot: Snapshot, term: Term, rows: Rows) -> Float32:
    """Unit vectors (k, r) of some rows: an invented attribute's are made of the class vectors when they are few."""
    if term.basis is not None and len(rows) * _FEW < snapshot.rows:
        return _projected(snapshot.matrix("class")[rows], term.basis)
    return _matrix(snapshot, term)[rows]


def _matrix(snapshot: Snapshot, term: Term) -> Float32:
    return snapshot.matrix(term.column) if term.basis is None else snapshot.projected(term.basis)


def _margin(terms: list[Term]) -> float:
    return 2 * sum(t.weight * t.margin for t in terms)


def _bound(scores: Float32, wanted: int) -> float:
    """A number that `wanted` scores or a few more reach. Scores outnumber `wanted`."""
    blocks = len(scores) // _BLOCK
    if blocks >= 2 * wanted:
        scores = scores[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    return float(np.partition(scores, len(scores) - wanted)[len(scores) - wanted])


def _at_least(scores: Float32, bound: float) -> Rows:
    """Numbers of the scores that reach the bound; what is not allowed (-inf) never does."""
    lowest = np.finfo(np.float32).min
    return np.flatnonzero(scores >= np.float32(max(bound, float(lowest))))


def _scored(snapshot: Snapshot, terms: list[Term], rows: Rows) -> Ranking:
    """Exact scores of the rows, in their order."""
    parts = {t.name: np.zeros(len(rows)) for t in terms}
    for start in range(0, len(rows), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        for term in terms:
            parts[term.name][chunk] = term.exact(snapshot.matrix(term.column)[rows[chunk]])
    scores = sum((t.weight * parts[t.name] for t in terms), np.zeros(len(rows)))
    return Ranking(rows=rows, scores=scores, parts=parts)


def _in_order(snapshot: Snapshot, found: Ranking, wanted: int) -> Ranking:
    """The best `wanted`, best first, equal scores in the order of their ids (by code point)."""
    if len(found.rows) > wanted:
        bound = np.partition(found.scores, len(found.rows) - wanted)[len(found.rows) - wanted]
        found = found.take(np.flatnonzero(found.scores >= bound))
    found = found.take(np.argsort(-found.scores, kind="stable"))
    same = found.scores[1:] == found.scores[:-1]
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.insert(same, 0, False))
        ids = [row["id"] for row in snapshot.fetch(found.rows[tied], ["id"])]
        place = np.zeros(len(found.rows), dtype=np.int64)
        place[tied[sorted(range(len(ids)), key=ids.__getitem__)]] = np.arange(len(ids))
        found = found.take(np.lexsort((place, -found.scores)))
    return found.take(np.arange(min(wanted, len(found.rows))))


def _diverse(snapshot: Snapshot, terms: list[Term], found: Ranking, query: Query) -> Ranking:
    """The pictures chosen one after the other, each unlike those before it in what the query asks for."""
    total = sum(t.weight for t in terms)
    vectors = np.concatenate(
        [np.sqrt(t.weight / total) * _rows_of(snapshot, t, found.rows) for t in terms], axis=1
    ).astype(np.float32)
    order = diverse_order(
        found.scores / total,
        vectors,
        diversity=query.diversity,
        count=query.offset + query.top_k,
    )
    return found.take(order)
