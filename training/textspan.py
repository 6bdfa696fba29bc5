"""TEXTSPAN: which texts span what an attention head writes (Gandelsman, Efros, Steinhardt, ICLR 2024; method.md §1.2).

Everything the algorithm needs from a head is the covariance of its contributions, which `Moments` gathers batch by
batch, so memory does not grow with the number of pictures.

n pictures, M texts, D joint width, r rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dear_serve.errors import ConfigError

__all__ = ["Moments", "span_texts", "textspan", "textspan_of_covariance"]

Array = npt.NDArray[np.float64]
_RELATIVE_ZERO = 1e-10  # of a head's total variance (or of the largest score): less is rounding
_TIE = 1e-9  # scores within this of each other, relatively, are equal and the first text wins


class Moments:
    """Mean and covariance of G groups of D-vectors, merged batch by batch in float64 (Chan et al. 1979).

    Attributes:
        count: pictures seen.
        mean: (G, D).
    """

    def __init__(self, groups: int, width: int) -> None:
        self.count = 0
        self.mean: Array = np.zeros((groups, width))
        self._scatter: Array = np.zeros((groups, width, width))

    def add(self, batch: npt.NDArray[np.float32] | Array) -> None:
        """Take in (B, G, D); an empty batch changes nothing."""
        n = len(batch)
        if n == 0:
            return
        rows = np.asarray(batch, np.float64).transpose(1, 0, 2)  # (G, B, D)
        mean = rows.mean(1)
        centred = rows - mean[:, None]
        shift = mean - self.mean
        total = self.count + n
        self._scatter += centred.transpose(0, 2, 1) @ centred
        self._scatter += (shift[:, :, None] * shift[:, None, :]) * (self.count * n / total)
        self.mean += shift * (n / total)
        self.count = total

    def covariance(self) -> Array:
        """(G, D, D), normalised by the number of pictures.

        Raises:
            ConfigError: fewer than two pictures were seen.
        """
        if self.count < 2:
            raise ConfigError(f"{self.count} pictures have no variance; give 2 or more", field="images")
        return self._scatter / self.count


def textspan(
    contributions: npt.ArrayLike, texts: npt.ArrayLike, *, rank: int, steps: int
) -> list[tuple[int, float]]:
    """Greedy choice of the texts that explain a head's output.

    Args:
        contributions: C (n, D), a head's contributions for n pictures; centred here.
        texts: (M, D) text features.
        rank: r, number of leading right singular vectors of C that texts are projected onto; more than C has are
            cut to what it has.
        steps: N, texts to choose at most; fewer come back when no variance or no new direction is left.

    Returns:
        (text index, variance of C along the text's direction after the earlier ones were removed), in order of
        choice. Empty when C does not vary.

    Raises:
        ConfigError: shapes that do not fit, values that are not finite, fewer than two pictures, rank or steps
            below 1.
    """
    c = np.asarray(contributions, np.float64)
    if c.ndim != 2 or len(c) < 2:
        raise ConfigError(f"contributions have shape {c.shape}; (n, D) with n of 2 or more is expected")
    c = c - c.mean(0)
    return textspan_of_covariance(c.T @ c / len(c), texts, rank=rank, steps=steps)


def textspan_of_covariance(
    covariance: Array, texts: npt.ArrayLike, *, rank: int, steps: int
) -> list[tuple[int, float]]:
    """`textspan` from the covariance (D, D) of the contributions: its leading eigenvectors are C's right singular
    vectors.
    """
    t = np.asarray(texts, np.float64)
    _check(covariance, t, rank, steps)
    lengths = np.linalg.norm(t, axis=1, keepdims=True)
    return span_texts(covariance, t / np.where(lengths > 0, lengths, 1.0), rank=rank, steps=steps)


def span_texts(covariance: Array, texts: Array, *, rank: int, steps: int) -> list[tuple[int, float]]:
    """The greedy choice itself, in any orthonormal coordinates of a space that holds the head's whole output.

    A text's score is the variance of the projections onto its projected feature, not scaled up again, as in the
    source: a text that lies mostly outside the head's span cannot win by the little that is left of it.

    Args:
        covariance: (k, k), of the head's output in these coordinates.
        texts: (M, k) text features of unit length in the joint space, projected into these coordinates.
        rank: r.
        steps: N.

    Raises:
        ConfigError: as `textspan`.
    """
    _check(covariance, texts, rank, steps)
    values, vectors = np.linalg.eigh(covariance)
    total = float(values.clip(0).sum())
    kept = np.argsort(values)[::-1][:rank]
    kept = kept[values[kept] > _RELATIVE_ZERO * total]
    if not len(kept):
        return []
    sigma = np.diag(values[kept])  # C's covariance in its own leading directions, (r, r)
    t = texts @ vectors[:, kept]
    chosen: list[tuple[int, float]] = []
    floor = _RELATIVE_ZERO * float(((t @ sigma) * t).sum(1).max())
    for _ in range(min(steps, len(kept))):
        scores = ((t @ sigma) * t).sum(1)
        best = float(scores.max())
        if best <= floor:
            break
        index = int(np.flatnonzero(scores >= best * (1 - _TIE))[0])
        length = float(np.linalg.norm(t[index]))
        direction = t[index] / length
        chosen.append((index, best / length**2))
        t = t - np.outer(t @ direction, direction)
        t[index] = 0.0
        sigma = _without(sigma, direction)
    return chosen


def _without(sigma: Array, direction: Array) -> Array:
    """P sigma P with P = I - u uT: the covariance after the direction u (unit) was removed."""
    p = np.eye(len(direction)) - np.outer(direction, direction)
    out: Array = p @ sigma @ p
    return out


def _check(covariance: Array, texts: Array, rank: int, steps: int) -> None:
    if rank < 1:
        raise ConfigError(f"rank is {rank}; 1 or more directions are needed", field="rank")
    if steps < 1:
        raise ConfigError(f"steps is {steps}; 1 or more descriptions are needed", field="top_n")
    if texts.ndim != 2 or not len(texts) or texts.shape[1] != covariance.shape[0]:
        raise ConfigError(
            f"text features have shape {texts.shape}; (M, {covariance.shape[0]}) is expected, M of 1 or more"
        )
    if not (np.isfinite(covariance).all() and np.isfinite(texts).all()):
        raise ConfigError("contributions or text features hold NaN or infinity; check the base's weights")
