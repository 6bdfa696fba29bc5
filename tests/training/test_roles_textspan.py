"""TEXTSPAN on planted cases: the planted texts, in order of planted variance, and nothing left along them."""

from __future__ import annotations

import numpy as np
import pytest

from dear_serve.errors import ConfigError
from training.textspan import Moments, textspan, textspan_of_covariance

WIDTH, TEXTS = 32, 200


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def planted(
    rng: np.random.Generator,
    indices: list[int],
    variances: list[float],
    *,
    n: int = 5000,
    orthogonal: bool = True,
) -> tuple[np.ndarray, np.ndarray]:
    """Contributions (n, D) made of the texts at `indices`, and all texts (M, D)."""
    texts = unit(rng.standard_normal((TEXTS, WIDTH)))
    if orthogonal:
        texts[indices] = np.linalg.qr(rng.standard_normal((WIDTH, len(indices))))[0].T
    codes = rng.standard_normal((n, len(indices)))
    if orthogonal:  # exactly the planted variances
        codes -= codes.mean(0)
        codes = np.linalg.qr(codes)[0] * np.sqrt(n)
    offset = rng.standard_normal(WIDTH)
    return codes * np.sqrt(variances) @ texts[indices] + offset, texts


@pytest.mark.parametrize("seed", range(3))
def test_finds_planted_texts_in_order_of_variance(seed: int) -> None:
    indices, variances = [17, 3, 150, 42, 99], [9.0, 5.0, 3.0, 1.5, 0.5]
    contributions, texts = planted(np.random.default_rng(seed), indices, variances)
    found = textspan(contributions, texts, rank=WIDTH, steps=20)
    assert [i for i, _ in found] == indices  # and it stops: nothing is left after five directions
    np.testing.assert_allclose([v for _, v in found], variances, rtol=1e-9)


def test_order_of_planting_does_not_matter() -> None:
    contributions, texts = planted(np.random.default_rng(0), [5, 6, 7], [1.0, 4.0, 2.0])
    assert [i for i, _ in textspan(contributions, texts, rank=WIDTH, steps=3)] == [6, 7, 5]


def test_finds_planted_texts_that_are_not_orthogonal_under_noise() -> None:
    rng = np.random.default_rng(1)
    contributions, texts = planted(rng, [10, 20, 30], [16.0, 8.0, 4.0], orthogonal=False)
    contributions += 0.01 * rng.standard_normal(contributions.shape)
    found = textspan(contributions, texts, rank=3, steps=3)
    assert [i for i, _ in found] == [10, 20, 30]


def test_variances_of_removed_directions_add_up_to_the_whole() -> None:
    """Each variance is what was left along a direction orthogonal to all before it."""
    rng = np.random.default_rng(2)
    contributions = rng.standard_normal((400, 6)) @ rng.standard_normal((6, WIDTH))
    texts = rng.standard_normal((TEXTS, WIDTH))
    found = textspan(contributions, texts, rank=6, steps=20)
    assert len(found) == 6
    assert len({i for i, _ in found}) == 6
    assert sum(v for _, v in found) == pytest.approx(contributions.var(0).sum(), rel=1e-9)


def test_agrees_with_the_algorithm_written_out_on_the_contributions() -> None:
    rng = np.random.default_rng(3)
    contributions = rng.standard_normal((300, 10)) @ rng.standard_normal((10, WIDTH))
    texts = unit(rng.standard_normal((TEXTS, WIDTH)))
    c = contributions - contributions.mean(0)
    v = np.linalg.svd(c, full_matrices=False)[2][:5]
    t, expected = texts @ v.T @ v, []
    for _ in range(5):
        best = int((c @ t.T).var(0).argmax())
        u = t[best] / np.linalg.norm(t[best])
        expected.append((best, (c @ u).var()))
        c, t = c - np.outer(c @ u, u), t - np.outer(t @ u, u)
    found = textspan(contributions, texts, rank=5, steps=5)
    assert [i for i, _ in found] == [i for i, _ in expected]
    np.testing.assert_allclose([v for _, v in found], [v for _, v in expected], rtol=1e-9)


def test_scale_of_texts_does_not_matter() -> None:
    rng = np.random.default_rng(4)
    contributions, texts = planted(rng, [1, 2], [2.0, 1.0])
    scaled = texts * rng.uniform(0.1, 50, (TEXTS, 1))
    assert [i for i, _ in textspan(contributions, scaled, rank=8, steps=2)] == [1, 2]


def test_the_first_of_equal_texts_wins_and_equal_ones_are_not_repeated() -> None:
    contributions, texts = planted(np.random.default_rng(5), [50, 60], [2.0, 1.0])
    texts[[7, 120]] = texts[50]
    assert [i for i, _ in textspan(contributions, texts, rank=8, steps=9)] == [7, 60]


def test_rank_bounds_what_is_found() -> None:
    contributions, texts = planted(np.random.default_rng(6), [1, 2, 3], [3.0, 2.0, 1.0])
    assert [i for i, _ in textspan(contributions, texts, rank=2, steps=9)] == [1, 2]


def test_constant_contributions_give_nothing() -> None:
    texts = np.eye(4)
    assert textspan(np.ones((10, 4)), texts, rank=2, steps=3) == []
    assert textspan_of_covariance(np.zeros((4, 4)), texts, rank=2, steps=3) == []


def test_texts_outside_the_span_give_nothing() -> None:
    contributions = np.zeros((10, 4))
    contributions[:, 0] = np.arange(10)
    assert textspan(contributions, np.eye(4)[1:], rank=4, steps=3) == []
    assert textspan(contributions, np.zeros((3, 4)), rank=4, steps=3) == []


@pytest.mark.parametrize(
    ("contributions", "texts", "options", "message"),
    [
        (np.eye(4), np.eye(4), {"rank": 0, "steps": 1}, "rank is 0"),
        (np.eye(4), np.eye(4), {"rank": 1, "steps": 0}, "steps is 0"),
        (np.eye(4), np.eye(3), {"rank": 1, "steps": 1}, r"\(3, 3\)"),
        (np.eye(4), np.zeros((0, 4)), {"rank": 1, "steps": 1}, r"\(0, 4\)"),
        (np.ones((1, 4)), np.eye(4), {"rank": 1, "steps": 1}, r"\(1, 4\)"),
        (np.ones(4), np.eye(4), {"rank": 1, "steps": 1}, r"\(4,\)"),
        (np.full((4, 4), np.nan), np.eye(4), {"rank": 1, "steps": 1}, "NaN"),
        (np.eye(4), np.full((2, 4), np.inf), {"rank": 1, "steps": 1}, "NaN or infinity"),
    ],
)
def test_refusals(
    contributions: np.ndarray, texts: np.ndarray, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        textspan(contributions, texts, **options)


@pytest.mark.parametrize("sizes", [(100,), (1, 99), (33, 0, 33, 34)])
def test_moments_are_those_of_all_batches_together(sizes: tuple[int, ...]) -> None:
    data = np.random.default_rng(7).standard_normal((100, 3, 5)) + 1000.0
    moments, start = Moments(3, 5), 0
    for size in sizes:
        moments.add(data[start : start + size])
        start += size
    assert moments.count == 100
    np.testing.assert_allclose(moments.mean, data.mean(0), rtol=1e-12)
    expected = [np.cov(data[:, g].T, bias=True) for g in range(3)]
    np.testing.assert_allclose(moments.covariance(), expected, rtol=1e-8, atol=1e-10)


def test_moments_of_one_picture_have_no_variance() -> None:
    moments = Moments(1, 2)
    moments.add(np.ones((1, 1, 2)))
    with pytest.raises(ConfigError, match="1 pictures"):
        moments.covariance()
