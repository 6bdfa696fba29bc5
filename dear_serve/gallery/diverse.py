"""Search results that differ from one another: maximal marginal relevance (Carbonell and Goldstein, SIGIR 1998)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dear_serve.runtime.base import Float32

__all__ = ["POOL", "diverse_order"]

POOL = 1000
"""Best pictures that a diverse answer is chosen from."""


def diverse_order(
    relevance: npt.NDArray[np.float64], vectors: Float32, *, diversity: float, count: int
) -> npt.NDArray[np.int64]:
    """Which rows to show, in order: each time the one with the highest (1-d) relevance - d likeness.

    Likeness is the largest cosine with a row that was chosen before.

    Args:
        relevance: (n,) from -1 to 1, best first; equal values are taken in this order.
        vectors: (n, r) of length 1.
        diversity: d, from 0 (relevance alone) to 1.
        count: how many to choose.

    Returns:
        min(count, n) row numbers. The first ones of a longer answer are the same as those of a shorter one.
    """
    chosen: list[int] = []
    likeness = np.zeros(len(relevance))
    left = np.ones(len(relevance), dtype=np.bool_)
    for _ in range(min(count, len(relevance))):
        value = np.where(left, (1 - diversity) * relevance - diversity * likeness, -np.inf)
        best = int(value.argmax())
        chosen.append(best)
        left[best] = False
        alike = (vectors @ vectors[best]).astype(np.float64)
        likeness = alike if len(chosen) == 1 else np.maximum(likeness, alike)
    return np.array(chosen, dtype=np.int64)
