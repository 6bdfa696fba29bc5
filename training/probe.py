"""Pictures that roles are computed from, and what every head contributes to them, streamed (method.md §1.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dear_serve.backbone.clip import Clip
from dear_serve.config import PreprocessConfig
from dear_serve.errors import CheckFailedError, DataError, ImageError
from dear_serve.preprocess import preprocess_bytes
from training.mini import pixels_from
from training.textspan import Moments
from training.world import World, sample_scenes

__all__ = ["HeadOutputs", "folder_pictures", "head_outputs", "world_pictures"]

BATCH = 50
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")
_TOLERANCE = 1e-4  # of the image feature's largest value, where that is above 1


@dataclass(frozen=True, kw_only=True)
class HeadOutputs:
    """What the classified heads write, over a probe set: L' blocks, H heads, D joint width."""

    covariance: np.ndarray
    """(L', H, D, D) float64."""
    mean: np.ndarray
    """(L', H, D) float64."""
    pictures: int
    last_block: int
    """L: these are the heads of the last L' blocks."""
    largest_error: float
    """Of the sum of all parts against the image feature, max abs over all pictures."""


def world_pictures(count: int, *, seed: int = 0, n_objects: int | None = None) -> Iterator[Tensor]:
    """Rendered pictures of the attribute world, all combinations, as (B, 3, 64, 64) float32 batches.

    Raises:
        MissingDependencyError: the icon font isn't installed.
    """
    rng = np.random.default_rng(seed)
    scenes = sample_scenes(rng, count, split="any", n_objects=n_objects)
    world = World(n_objects)
    for start in range(0, count, BATCH):
        yield pixels_from(world.render(scenes.select(slice(start, start + BATCH)), rng))


def folder_pictures(
    folder: Path,
    count: int,
    config: PreprocessConfig,
    *,
    seed: int = 0,
    skipped: Callable[[Path, str], None] | None = None,
) -> Iterator[Tensor]:
    """At most `count` pictures from anywhere under `folder`, drawn with `seed`, as (B, 3, S, S) float32 batches.

    Args:
        skipped: told of every file that cannot be read as a picture, and why.

    Raises:
        DataError: no such folder, or no file in it has a picture's suffix.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder of pictures", field="images")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
    if not paths:
        raise DataError(f"{folder} holds no picture ({', '.join(_SUFFIXES)})", field="images")
    order = np.random.default_rng(seed).permutation(len(paths))[:count]
    batch: list[np.ndarray] = []
    for index in sorted(order.tolist()):
        try:
            batch.append(preprocess_bytes(paths[index].read_bytes(), config))
        except (ImageError, OSError) as error:
            if skipped:
                skipped(paths[index], str(error))
        if len(batch) == BATCH:
            yield torch.from_numpy(np.stack(batch))
            batch = []
    if batch:
        yield torch.from_numpy(np.stack(batch))


@torch.no_grad()
def head_outputs(
    clip: Clip,
    batches: Iterable[Tensor],
    *,
    first_block: int,
    progress: Callable[[int], None] | None = None,
) -> HeadOutputs:
    """Covariance of each head's contribution over all pictures; memory doesn't grow with their number.

    Args:
        clip: the base.
        batches: pixels (B, 3, S, S).
        first_block: J; heads of blocks J..L are gathered.
        progress: told the number of pictures seen after each batch.

    Raises:
        CheckFailedError: the parts don't add up to the image feature within 1e-4 (of its largest value, where that
            exceeds 1), or are not finite.
        DataError: fewer than two pictures.
    """
    vision = clip.visual.config
    layers, heads, width = vision.layers - first_block + 1, vision.heads, clip.config.embed_dim
    moments, largest = Moments(layers * heads, width), 0.0
    for pixels in batches:
        parts = clip.visual.contributions(pixels, first_block=first_block)
        feature = clip.visual(pixels)
        error = float((parts.total() - feature).abs().max())
        if not error <= _TOLERANCE * max(1.0, float(feature.abs().max())):
            raise CheckFailedError(
                f"contributions of heads, MLPs, embedding and biases miss the image feature by {error:.2g} "
                f"(allowed {_TOLERANCE:.0e}): these roles could not be trusted"
            )
        largest = max(largest, error)
        moments.add(parts.heads.flatten(1, 2).numpy())
        if progress:
            progress(moments.count)
    if moments.count < 2:
        raise DataError(f"{moments.count} pictures could be read; roles need 2 or more", field="images")
    shape = (layers, heads, width)
    return HeadOutputs(
        covariance=moments.covariance().reshape(*shape, width),
        mean=moments.mean.reshape(shape),
        pictures=moments.count,
        last_block=vision.layers,
        largest_error=largest,
    )
