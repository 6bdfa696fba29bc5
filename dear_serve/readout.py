"""Readout 3 of method.md §8: the class feature projected onto the span of an attribute's phrases. NumPy only.

Phrases that differ in one attribute alone ("something red", "something blue", ...) span the directions in
which that attribute shows; what a feature has outside of them is other attributes' business. Needs no
training and a dozen phrases.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dear_serve.errors import QueryError
from dear_serve.labels import l2_normalize

__all__ = ["project", "span_basis"]

# Singular values below this share of the largest are rounding noise of phrases that say the same.
_SMALLEST = 1e-3


def span_basis(
    phrase_features: npt.ArrayLike, *, without: npt.ArrayLike | None = None
) -> npt.NDArray[np.float32]:
    """Orthonormal basis Q (r, D) float32 of the centred phrase features, strongest direction first.

    Args:
        phrase_features: zero-shot text features of the phrases, (n, D), L2-normalised, n of 2 or more.
        without: directions (s, D) of any length and angle, removed from the features first: the spans of
            other attributes, for one whose own span is nearly the whole space (ours).

    Returns:
        The right singular vectors, r <= min(n - 1, D). Their signs are fixed (largest entry positive), so
        that vectors stored earlier still fit a basis computed again.

    Raises:
        QueryError: fewer than 2 phrases, or all of them have the same feature (code "bad_phrases").
    """
    features = np.asarray(phrase_features, dtype=np.float64)
    if features.ndim != 2 or len(features) < 2:
        raise QueryError(
            f"{len(features)} phrases given; 2 or more that differ in the attribute are needed",
            code="bad_phrases",
            field="phrases",
        )
    features = features - features.mean(axis=0)
    if without is not None:
        _, strengths, axes = np.linalg.svd(np.asarray(without, dtype=np.float64), full_matrices=False)
        axes = axes[strengths > _SMALLEST * strengths[0]]
        features = features - features @ axes.T @ axes
    _, values, basis = np.linalg.svd(features, full_matrices=False)
    if values[0] < 1e-6:
        raise QueryError(
            "the phrases mean the same to the model; give phrases that differ in the attribute",
            code="bad_phrases",
            field="phrases",
        )
    basis = basis[: min(len(features) - 1, int(np.sum(values > _SMALLEST * values[0])))]
    largest = np.take_along_axis(basis, np.abs(basis).argmax(axis=1)[:, None], axis=1)
    return np.asarray(basis * np.sign(largest), dtype=np.float32)


def project(features: npt.NDArray[np.float32], basis: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Readout Q f of features (B, D) by a basis (r, D): (B, r) float32, L2-normalised.

    A feature without any part in the span gives zeros, whose cosine with everything is 0.
    """
    return l2_normalize(features @ basis.T)
