"""Which pictures a head responds to most, as small JPEGs, for roles.html (ours)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from dear_serve.config import PreprocessConfig
from training.head_values import HeadOutputs
from training.probe import ProbePictures, as_image
from training.role_report import Chosen

__all__ = ["Strongest", "strongest", "thumbnails"]

_PICTURES = 6
_TEXTS = 3
_SIDE, _QUALITY = 64, 80  # of a thumbnail: pixels, JPEG


@dataclass(frozen=True, kw_only=True)
class Strongest:
    """Rows of pictures of one head: positions in the probe set, strongest first."""

    overall: tuple[int, ...]
    """Where its output is farthest from its mean."""
    along: dict[str, tuple[int, ...]]
    """Description -> where the output lies farthest along that text's direction."""


def strongest(
    outputs: HeadOutputs,
    chosen: Sequence[Chosen],
    pool: tuple[Sequence[str], npt.NDArray[np.float32]],
    *,
    count: int = _PICTURES,
    texts: int = _TEXTS,
) -> list[Strongest]:
    """For every head, in the order of `HeadOutputs.heads`.

    Args:
        outputs: of the heads.
        chosen: their descriptions.
        pool: descriptions and their text features (M, D).
        count: pictures a row.
        texts: rows for the first so many descriptions.
    """
    place = {text: i for i, text in enumerate(pool[0])}
    positions = np.array(outputs.positions)
    result = []
    for (i, h), c in zip(outputs.heads, chosen, strict=True):
        directions, r = outputs.directions(i, h)
        rows = np.asarray(outputs.values[:, i, h], np.float64) @ r
        rows -= rows.mean(0)
        scores = {d.text: rows @ (directions @ pool[1][place[d.text]]) for d in c.descriptions[:texts]}
        result.append(
            Strongest(
                overall=_top(positions, (rows**2).sum(1), count),
                along={text: _top(positions, score, count) for text, score in scores.items()},
            )
        )
    return result


def _top(positions: npt.NDArray[np.int_], scores: npt.NDArray[np.float64], count: int) -> tuple[int, ...]:
    return tuple(int(p) for p in positions[np.argsort(-scores, kind="stable")[:count]])


def thumbnails(
    pictures: ProbePictures, found: Sequence[Strongest], config: PreprocessConfig
) -> dict[int, bytes]:
    """JPEG of every picture named in `found`, by position: what the model saw, at most 64 pixels wide."""
    wanted = sorted({p for s in found for row in (s.overall, *s.along.values()) for p in row})
    out = {}
    for position in wanted:
        image = Image.fromarray(as_image(pictures.pixels(position), config))
        image.thumbnail((_SIDE, _SIDE))
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=_QUALITY)
        out[position] = stream.getvalue()
    return out
