"""The frozen blocks' output for every view of a training picture: computed once and kept on disk, or each time.

Blocks 1..J-1 see no learnable token, so their output depends on the base, the picture and the view alone (method.md
§6). One .npy file a picture, (V, (1+N)*d + D) float32, memory-mapped; written whole and renamed, so an interrupted
run leaves nothing half-written, and runs on the same base and augmentation share the files.

B batch, V views, N patch tokens, d tower width, D joint width.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from dear_serve.config import PreprocessConfig
from dear_serve.dear.model import DearModel
from dear_serve.errors import DataError
from dear_serve.preprocess import decode_image, preprocess
from training.config import Augmentation

__all__ = ["CachedTrunks", "PlainTrunks", "view_pixels"]

_FORMAT = 1
_ASPECT = (3 / 4, 4 / 3)  # of a crop, width over height
_CROP_TRIES = 10
_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


def view_pixels(
    data: bytes, view: int, augmentation: Augmentation, config: PreprocessConfig
) -> npt.NDArray[np.float32]:
    """View number `view` of an encoded picture, (3, S, S) float32, normalised.

    View 0 is the picture as at inference; the others are random resized crops (and flips), drawn from the picture's
    content and the view's number alone, so that every run sees the same ones (ours).
    """
    image = decode_image(data)
    if view == 0:
        return preprocess(image, config)
    rng = np.random.default_rng([view, *hashlib.sha256(data).digest()])
    side = (config.size, config.size)
    crop = image.resize(
        side, _RESAMPLING[config.interpolation], box=_crop_box(image.size, augmentation.crop, rng)
    )
    if augmentation.flip and rng.random() < 0.5:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return preprocess(crop, config)


def _crop_box(
    size: tuple[int, int], areas: tuple[float, float], rng: np.random.Generator
) -> tuple[float, float, float, float]:
    """A box of random area and aspect within the picture; the largest centred square if none fits."""
    width, height = size
    for _ in range(_CROP_TRIES):
        area = width * height * rng.uniform(*areas)
        aspect = float(np.exp(rng.uniform(*np.log(_ASPECT))))
        w, h = float(np.sqrt(area * aspect)), float(np.sqrt(area / aspect))
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


class PlainTrunks:
    """Computes what is asked for from the pictures, each time.

    Args:
        model: gives the frozen blocks; on any device.
        paths: of the pictures.
        augmentation: their views.
    """

    def __init__(self, model: DearModel, paths: Sequence[Path], augmentation: Augmentation) -> None:
        self.model = model
        self.paths = list(paths)
        self.augmentation = augmentation

    def batch(self, indices: Sequence[int], views: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Trunk (B, 1+N, d) and frozen image feature (B, D), L2-normalised, of one view of each picture."""
        config = self.model.clip.config.preprocess
        pixels = [
            view_pixels(self.paths[i].read_bytes(), v, self.augmentation, config)
            for i, v in zip(indices, views, strict=True)
        ]
        return self.compute(np.stack(pixels))

    @torch.no_grad()
    def compute(self, pixels: npt.NDArray[np.float32]) -> tuple[Tensor, Tensor]:
        """As `batch`, of pixels (B, 3, S, S)."""
        device = self.model.clip.logit_scale.device
        trunk = self.model.image_trunk(torch.from_numpy(pixels).to(device))
        return trunk, self.model.zero_shot_head(trunk)


class CachedTrunks(PlainTrunks):
    """Reads what is asked for from `folder`, where `fill` put it.

    Args:
        model, paths, augmentation: as for `PlainTrunks`.
        base_sha256: of the base's weights.
        folder: shared by all runs; each base, J and augmentation has its own folder inside.
    """

    def __init__(
        self,
        model: DearModel,
        paths: Sequence[Path],
        augmentation: Augmentation,
        *,
        base_sha256: str,
        folder: Path,
    ) -> None:
        super().__init__(model, paths, augmentation)
        clip = model.clip.config
        self.trunk_shape = (1 + clip.vision.patches, clip.vision.width)
        self.shape = (augmentation.views, int(np.prod(self.trunk_shape)) + clip.embed_dim)
        key = json.dumps([_FORMAT, augmentation.to_dict(), clip.to_dict()], sort_keys=True)
        name = (
            f"{base_sha256[:16]}-J{model.config.first_block}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        )
        self.root = folder
        self.folder = folder / name
        self._files: dict[int, Path] = {}

    @property
    def size(self) -> int:
        """Bytes that all pictures of this run take."""
        return len(self.paths) * 4 * int(np.prod(self.shape))

    def fill(self, *, limit: int, progress: Callable[[Iterable[int]], Iterator[int]] = iter) -> None:
        """Compute what is missing; entries of other runs are deleted, oldest first, to keep within `limit` bytes.

        Raises:
            DataError: the disk is full or the folder cannot be written.
        """
        self._make_room(limit)
        for index in progress(range(len(self.paths))):
            self._row(index)

    def batch(self, indices: Sequence[int], views: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = np.stack([self._row(i)[v] for i, v in zip(indices, views, strict=True)])
        tensor = torch.from_numpy(rows).to(self.model.clip.logit_scale.device)
        width = int(np.prod(self.trunk_shape))
        return tensor[:, :width].unflatten(1, self.trunk_shape), tensor[:, width:]

    def _row(self, index: int) -> npt.NDArray[np.float32]:
        """All views of one picture, memory-mapped, computed if they are not there or not whole."""
        if index not in self._files:
            content = hashlib.sha256(self.paths[index].read_bytes()).hexdigest()
            self._files[index] = self.folder / content[:2] / f"{content}.npy"
        file = self._files[index]
        try:
            rows: npt.NDArray[np.float32] = np.load(file, mmap_mode="r")
            if rows.shape == self.shape and rows.dtype == np.float32:
                return rows
        except (OSError, ValueError, EOFError):
            pass  # not there yet, or cut off: computed again below
        return self._write(file, index)

    def _write(self, file: Path, index: int) -> npt.NDArray[np.float32]:
        """All views of a picture as one batch: the numbers cannot depend on which other pictures were missing."""
        trunk, frozen = self.batch_of_views(index)
        rows = torch.cat([trunk.flatten(1), frozen], dim=1).cpu().numpy()
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as stream:
                np.save(stream, rows)
            partial.replace(file)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise DataError(
                f"the cache {self.root} cannot be written ({error.strerror}); make room, choose another --cache, "
                "or train with --no-cache",
                field="cache",
            ) from error
        return rows

    def batch_of_views(self, index: int) -> tuple[Tensor, Tensor]:
        """Trunk (V, 1+N, d) and frozen feature (V, D) of every view of one picture, computed."""
        views = range(self.augmentation.views)
        return PlainTrunks.batch(self, [index] * len(views), views)

    def _make_room(self, limit: int) -> None:
        """Delete the entries of other runs, those written longest ago first."""
        others = [
            (status.st_mtime, status.st_size, file)
            for file in self.root.rglob("*.npy")
            if self.folder not in file.parents and (status := file.stat())
        ]
        used = sum(size for _, size, _ in others) + self.size
        for _, size, file in sorted(others):
            if used <= limit:
                break
            file.unlink(missing_ok=True)
            used -= size
