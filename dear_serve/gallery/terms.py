"""The weighted cosines that a search's score is the sum of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dear_serve.gallery.query import Query
from dear_serve.runtime.base import Float32

__all__ = ["Float64", "Term", "projected_unit", "terms_of"]

Float64 = npt.NDArray[np.float64]

# Bounds of the coarse pass's error, far above what float32 gives: about 1e-6 for a stored vector; for an
# invented attribute that divided by |Q f|, below 0.01 only for pictures that have nothing of the attribute.
_STORED_MARGIN = 1e-4
_INVENTED_MARGIN = 1e-3


@dataclass(frozen=True, eq=False)
class Term:
    """One weighted part of the score: of stored vectors, or of them projected by `basis` (r, D).

    `query` is the vector looked for at length 1, less the share of the negative examples (ours): so a
    part is between -1 - s and 1 + s for negatives that weigh s.
    """

    name: str
    column: str
    weight: float
    query: Float64
    basis: Float64 | None

    @property
    def margin(self) -> float:
        """What a float32 product of `query` with a row may be off by, at most."""
        scale = max(1.0, float(np.sqrt((self.query**2).sum())))
        return scale * (_STORED_MARGIN if self.basis is None else _INVENTED_MARGIN)

    def exact(self, rows: Float32) -> Float64:
        """The part of each row, (n,) float64; 0 for a row with nothing along the basis.

        Sums along each row by itself, so equal vectors get equal scores wherever they stand (a matrix product
        doesn't promise that).
        """
        values = rows.astype(np.float64)
        if self.basis is not None:
            values = np.stack([(values * q).sum(axis=1) for q in self.basis], axis=1)
        norms = np.sqrt((values * values).sum(axis=1))
        dots = (values * self.query).sum(axis=1)
        parts: Float64 = np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0)
        return parts


def projected_unit(rows: Float32, basis: Float64) -> Float32:
    """Rows (n, D) on a basis (r, D) at length 1, (n, r) float32; zeros for a row with nothing along it."""
    projected = rows @ basis.T.astype(np.float32)
    norms = np.linalg.norm(projected, axis=1, keepdims=True)
    unit: Float32 = projected / np.maximum(norms, np.finfo(np.float32).tiny)
    return unit


def terms_of(query: Query) -> list[Term]:
    """The weighted parts of the score; weights of 0 are left out."""
    parts: list[tuple[str, str, float, Float64, Float64 | None]] = [
        (n, n, float(w), _looked_for(query, n, query.vectors[n]), None)
        for n, w in query.weights.items()
        if w > 0
    ]
    parts += [
        (
            i.name,
            "class",
            float(i.weight),
            _looked_for(query, "class", i.query, i.basis.astype(np.float64)),
            i.basis.astype(np.float64),
        )
        for i in query.invented
        if i.weight > 0
    ]
    return [Term(*part) for part in parts]


def _looked_for(query: Query, column: str, vector: Float32, basis: Float64 | None = None) -> Float64:
    """The query's vector at length 1, less the mean of the negatives' at length 1 times their weight."""
    looked_for = _unit(vector.astype(np.float64))
    if not query.negatives:
        return looked_for
    away = [n[column].astype(np.float64) for n in query.negatives]
    if basis is not None:
        away = [basis @ a for a in away]
    return looked_for - query.negative_weight * np.mean([_unit(a) for a in away], axis=0)


def _unit(values: Float64) -> Float64:
    """`values` at length 1; zeros stay zeros."""
    norm = np.sqrt((values * values).sum())
    unit: Float64 = values / norm if norm > 0 else values
    return unit
