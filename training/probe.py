"""Pictures that roles are computed from: a folder's, or rendered ones; in a fixed order, from any place in it on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dear_serve.config import PreprocessConfig
from dear_serve.errors import DataError, ImageError
from dear_serve.preprocess import preprocess_bytes
from training.mini import PREPROCESS, pixels_from
from training.world import World, sample_scenes

__all__ = ["SUFFIXES", "Batch", "FolderPictures", "ProbePictures", "WorldPictures", "as_image", "batch_size"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some pictures of a probe set."""

    pixels: Tensor
    """(B, 3, S, S) float32, as the image tower takes them."""
    positions: tuple[int, ...]
    """Place of each in the probe set, from 0; pictures that could not be read are left out."""
    end: int
    """Where the next batch starts."""


class ProbePictures(Protocol):
    """A probe set."""

    what: str
    """For a report: where the pictures come from."""

    def __len__(self) -> int:
        """Pictures at most."""

    @property
    def identity(self) -> str:
        """Changes when the pictures or their order do."""

    def batches(self, start: int, size: int) -> Iterator[Batch]:
        """The pictures from position `start` on (a multiple of `size`)."""

    def pixels(self, position: int) -> Tensor:
        """One picture, (3, S, S) float32."""


def batch_size(patches: int) -> int:
    """Pictures at once, so that activations stay below some hundred MB: N is a picture's number of patches."""
    return 50 if patches <= 100 else 16


class WorldPictures:
    """Rendered pictures of the attribute world, all combinations; equal arguments give equal pictures.

    Args:
        count: pictures.
        seed: of scenes and rendering.
        n_objects: of the world; None for all.

    Raises (when rendering):
        MissingDependencyError: the icon font isn't installed.
    """

    what = "rendered pictures of the attribute world"

    def __init__(self, count: int, *, seed: int = 0, n_objects: int | None = None) -> None:
        self._seed, self._world = seed, World(n_objects)
        self._scenes = sample_scenes(np.random.default_rng(seed), count, split="any", n_objects=n_objects)
        self._count, self._n_objects = count, n_objects

    def __len__(self) -> int:
        return self._count

    @property
    def identity(self) -> str:
        return f"world {self._count} {self._seed} {self._n_objects}"

    def _render(self, start: int, end: int) -> Tensor:
        images = [
            self._world.render(self._scenes.select(slice(i, i + 1)), np.random.default_rng([self._seed, i]))
            for i in range(start, min(end, self._count))
        ]
        return pixels_from(np.concatenate(images))

    def batches(self, start: int, size: int) -> Iterator[Batch]:
        for first in range(start, self._count, size):
            end = min(first + size, self._count)
            yield Batch(pixels=self._render(first, end), positions=tuple(range(first, end)), end=end)

    def pixels(self, position: int) -> Tensor:
        return self._render(position, position + 1)[0]


class FolderPictures:
    """At most `count` pictures from anywhere under `folder`, drawn with `seed`.

    Args:
        folder: with files whose suffix is one of `SUFFIXES`.
        count: pictures at most.
        config: how they become pixels.
        seed: of the choice.
        skipped: told of every file that cannot be read as a picture, and why.

    Raises:
        DataError: no such folder, or no file in it has a picture's suffix.
    """

    def __init__(
        self,
        folder: Path,
        count: int,
        config: PreprocessConfig,
        *,
        seed: int = 0,
        skipped: Callable[[Path, str], None] | None = None,
    ) -> None:
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder of pictures", field="images")
        paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
        if not paths:
            raise DataError(f"{folder} holds no picture ({', '.join(SUFFIXES)})", field="images")
        order = np.random.default_rng(seed).permutation(len(paths))[:count]
        self.what = f"pictures in {folder.name}"
        self._folder, self._paths = folder, [paths[i] for i in sorted(order.tolist())]
        self._config, self._skipped = config, skipped

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def identity(self) -> str:
        digest = hashlib.sha256(repr(self._config).encode())
        for path in self._paths:
            digest.update(f"{path.relative_to(self._folder).as_posix()} {path.stat().st_size}\n".encode())
        return digest.hexdigest()

    def batches(self, start: int, size: int) -> Iterator[Batch]:
        for first in range(start, len(self._paths), size):
            end = min(first + size, len(self._paths))
            rows: list[np.ndarray] = []
            positions = []
            for position in range(first, end):
                try:
                    rows.append(preprocess_bytes(self._paths[position].read_bytes(), self._config))
                except (ImageError, OSError) as error:
                    if self._skipped:
                        self._skipped(self._paths[position], str(error))
                else:
                    positions.append(position)
            if rows:
                yield Batch(pixels=torch.from_numpy(np.stack(rows)), positions=tuple(positions), end=end)

    def pixels(self, position: int) -> Tensor:
        return torch.from_numpy(preprocess_bytes(self._paths[position].read_bytes(), self._config))


def as_image(pixels: Tensor, config: PreprocessConfig = PREPROCESS) -> np.ndarray:
    """Normalised pixels (3, S, S) back as a picture, uint8 (S, S, 3): what the model saw."""
    mean, std = torch.tensor(config.mean), torch.tensor(config.std)
    scaled = (pixels * std[:, None, None] + mean[:, None, None]).clamp(0, 1)
    out: np.ndarray = (scaled * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return out
