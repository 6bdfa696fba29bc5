"""An attribute as a projection of the class feature."""

from __future__ import annotations

import numpy as np
import pytest

from dear_serve.errors import QueryError
from dear_serve.readout import project, span_basis


def test_basis_is_the_plane_in_which_phrases_differ():
    """Three phrases that differ along two axes, on top of something common that is not theirs."""
    features = np.zeros((3, 6))
    features[:, 5] = 0.8
    features[0, 0], features[1, 0], features[2, 1] = 1.0, -1.0, 0.5
    basis = span_basis(features)
    assert basis.shape == (2, 6)
    assert basis.dtype == np.float32
    assert np.allclose(np.abs(basis[0]), [1, 0, 0, 0, 0, 0], atol=1e-6)
    assert np.allclose(basis @ basis.T, np.eye(2), atol=1e-6)
    vectors = project(np.array([[3, 0, 9, 9, 9, 9], [4, 3, 1, 1, 1, 1]], dtype=np.float32), basis)
    assert np.allclose(np.abs(vectors), [[1, 0], [0.8, 0.6]], atol=1e-6)
    assert not project(np.zeros((1, 6), dtype=np.float32), basis).any()


def test_other_spans_are_removed_first():
    """`without` may be any vectors; nothing of their span is left, and what is left keeps its order."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((20, 8))
    others = np.concatenate([rng.standard_normal((2, 8)), np.ones((1, 8))])
    others = np.concatenate([others, others[:1] * 2])  # dependent ones count once
    basis = span_basis(features, without=others)
    assert basis.shape == (5, 8)
    assert np.abs(basis @ others.T).max() < 1e-5
    assert np.allclose(basis @ basis.T, np.eye(5), atol=1e-5)


def test_signs_are_fixed():
    features = np.random.default_rng(1).standard_normal((5, 8))
    first, second = span_basis(features), span_basis(features[::-1])
    assert np.allclose(first, second, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "without", "message"),
    [
        (np.ones((1, 4)), None, "1 phrases given"),
        (np.ones((3, 4)), None, "mean the same"),
        (np.eye(4)[:2], np.eye(4), "mean the same"),
    ],
)
def test_phrases_that_span_nothing(features, without, message):
    with pytest.raises(QueryError, match=message) as error:
        span_basis(features, without=without)
    assert error.value.code == "bad_phrases"
