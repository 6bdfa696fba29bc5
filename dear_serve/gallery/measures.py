"""How good a ranking of labelled pictures is: precision at k, mean average precision, recall. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dear_serve.runtime.base import Float32

__all__ = ["Labels", "Quality", "chance", "highest_precision", "measure", "precision_at"]

Labels = npt.NDArray[np.str_]
_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Means over the queries that have a label and at least one other picture with the same; from 0 to 1."""

    precision: float
    """Share of the first k with the query's label."""
    mean_ap: float
    """Mean of the precision at each picture with the query's label (average precision)."""
    recall: float
    """Share of the pictures with the query's label that are among the first `recall_at`."""


def precision_at(vectors: Float32, labels: npt.NDArray[Any], *, k: int = 10) -> float:
    """Mean share of the k nearest other pictures with the same label.

    Args:
        vectors: (n, r), L2-normalised; searched by cosine.
        labels: (n,) of anything comparable.
        k: from 1 to n - 1.
    """
    scores = vectors @ vectors.T
    np.fill_diagonal(scores, -np.inf)
    nearest = np.argpartition(-scores, k - 1, axis=1)[:, :k]
    return float((labels[nearest] == labels[:, None]).mean())


def chance(labels: npt.NDArray[Any]) -> float:
    """Precision of a random order: the share of pairs of different pictures that agree; "" agrees with nothing."""
    values, counts = np.unique(labels, return_counts=True)
    known = counts[values != ""] if values.dtype.kind == "U" else counts
    return float((known * (known - 1)).sum() / max(1, known.sum() * (len(labels) - 1)))


def highest_precision(labels: npt.NDArray[Any], *, k: int = 10) -> float:
    """Precision at k of a perfect order: values of fewer than k + 1 pictures keep it below 1.

    As `measure`, over the pictures with at least one other of the same value.
    """
    values, counts = np.unique(labels, return_counts=True)
    others = np.array([c - 1 for v, c in zip(values, counts, strict=True) if c > 1 and v != ""])
    return float((np.minimum(others, k) * (others + 1)).sum() / max(1, k * (others + 1).sum()))


def measure(
    vectors: Float32,
    labels: Mapping[str, Labels],
    *,
    k: int = 10,
    recall_at: int = 100,
    queries: tuple[Float32, Mapping[str, Labels]] | None = None,
) -> dict[str, Quality]:
    """Quality of the ranking by cosine, for each meaning of "the same".

    Args:
        vectors: (n, r) of the pictures, L2-normalised.
        labels: by attribute the value of each picture, (n,); "" is no value.
        k, recall_at: from 1 to n - 1.
        queries: vectors (q, r) and their labels by attribute; default: every picture, which is then left out itself.

    Returns:
        By attribute of the queries; attributes without a usable query are left out.
    """
    asked, wanted = (vectors, labels) if queries is None else queries
    sums = {name: np.zeros(4) for name in wanted}
    for start in range(0, len(asked), _CHUNK):
        part = np.arange(start, min(start + _CHUNK, len(asked)))
        scores = asked[part] @ vectors.T
        if queries is None:
            scores[np.arange(len(part)), part] = -np.inf
        order = np.argsort(-scores, axis=1, kind="stable")
        if queries is None:
            order = order[:, :-1]
        for name, values in wanted.items():
            same = labels[name][order] == values[part][:, None]
            sums[name] += _sums(same[values[part] != ""], k, recall_at)
    return {
        name: Quality(precision=float(s[0] / s[3]), mean_ap=float(s[1] / s[3]), recall=float(s[2] / s[3]))
        for name, s in sums.items()
        if s[3]
    }


def _sums(same: npt.NDArray[np.bool_], k: int, recall_at: int) -> npt.NDArray[np.float64]:
    """Precision, average precision, recall and number, summed over the queries (q, n) that have something to find."""
    same = same[same.any(axis=1)]
    total = same.sum(axis=1)
    precisions = np.cumsum(same, axis=1) / np.arange(1, same.shape[1] + 1)
    average = (precisions * same).sum(axis=1) / total
    recall = same[:, :recall_at].sum(axis=1) / total
    return np.array([same[:, :k].mean(axis=1).sum(), average.sum(), recall.sum(), len(same)])
