"""The frozen blocks' output for every view of a training picture: computed once and kept on disk, or each time.

Blocks 1..J-1 see no learnable token, so their output depends on the base, the picture and the view alone (method.md
§6). One .npy file a picture, (V, (1+N)*d + D + 1) float32; the last number of a row is the CRC-32 of the others, and a
row that does not match it is computed again. Files are written whole and renamed, so an interrupted run leaves none
half-written; runs on the same base and augmentation share them.

B batch, V views, N patch tokens, d tower width, D joint width.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import time
import uuid
import zlib
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
from training.distributed import ALONE, World

__all__ = ["UNWRITABLE", "CachedTrunks", "PlainTrunks", "view_pixels"]

UNWRITABLE = "cache_unwritable"
"""Code of the DataError for a full disk or a folder that cannot be written: a run can do without the cache."""

_FORMAT = 2
_LEFTOVER = 3600.0  # seconds after which a part-written file is nobody's
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
        self.shape = (augmentation.views, int(np.prod(self.trunk_shape)) + clip.embed_dim + 1)
        key = json.dumps([_FORMAT, augmentation.to_dict(), clip.to_dict()], sort_keys=True)
        name = (
            f"{base_sha256[:16]}-J{model.config.first_block}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        )
        self.root = folder
        self.folder = folder / name
        self._header = _npy_header(self.shape)
        self._files: dict[int, Path] = {}

    @property
    def size(self) -> int:
        """Bytes that all pictures of this run take."""
        return len(self.paths) * self._file_size

    @property
    def _file_size(self) -> int:
        return len(self._header) + 4 * int(np.prod(self.shape))

    def fill(
        self,
        *,
        limit: int,
        progress: Callable[[Iterable[int]], Iterator[int]] = iter,
        world: World = ALONE,
    ) -> None:
        """Compute what is missing; entries of other runs are deleted, oldest first, to keep within `limit` bytes.

        Each process of `world` computes a share and waits for the others.

        Raises:
            DataError: code `UNWRITABLE`, the disk is full or the folder cannot be written; raised by every process.
        """
        problem: DataError | None = None
        try:
            if world.first:
                self._make_room(limit)
                self._check_disk()
            world.wait()
            for index in progress(range(world.rank, len(self.paths), world.size)):
                if not self._whole(index):
                    self._store(index, self._compute_rows(index))
        except DataError as error:
            if error.code != UNWRITABLE:
                raise
            problem = error
        if world.any(problem is not None):
            raise problem or DataError(f"the cache {self.root} cannot be written", code=UNWRITABLE)

    def batch(self, indices: Sequence[int], views: Sequence[int]) -> tuple[Tensor, Tensor]:
        rows = np.stack([self._row(i, v) for i, v in zip(indices, views, strict=True)])
        tensor = torch.from_numpy(rows).to(self.model.clip.logit_scale.device)
        width = int(np.prod(self.trunk_shape))
        return tensor[:, :width].unflatten(1, self.trunk_shape), tensor[:, width:]

    # --- entries ----------------------------------------------------------------------------------

    def _file(self, index: int) -> Path:
        if index not in self._files:
            content = hashlib.sha256(self.paths[index].read_bytes()).hexdigest()
            self._files[index] = self.folder / content[:2] / f"{content}.npy"
        return self._files[index]

    def _row(self, index: int, view: int) -> npt.NDArray[np.float32]:
        """One view of a picture without its checksum; computed, and stored if that can be, where the entry is bad."""
        found = self._read(index, view)
        if found is not None:
            return found
        rows = self._compute_rows(index)
        with suppress(DataError):  # the disk is full by now: the numbers are right all the same
            self._store(index, rows)
        return rows[view]

    def _read(self, index: int, view: int) -> npt.NDArray[np.float32] | None:
        """None where the entry is absent, cut off, unreadable, or not what was written."""
        columns = self.shape[1]
        try:
            row: npt.NDArray[np.float32] = np.fromfile(
                self._file(index), np.float32, columns, offset=len(self._header) + 4 * view * columns
            )
        except OSError:
            return None
        whole = len(row) == columns and row[-1:].view(np.uint32)[0] == zlib.crc32(row[:-1].data)
        return row[:-1] if whole else None

    def _whole(self, index: int) -> bool:
        """Whether the entry has its length and, in each view, its checksum; then it counts as used now."""
        file = self._file(index)
        try:
            if file.stat().st_size != self._file_size:
                return False
            os.utime(file)
        except OSError:
            return False
        return all(self._read(index, view) is not None for view in range(self.augmentation.views))

    def _compute_rows(self, index: int) -> npt.NDArray[np.float32]:
        """All views of a picture as one batch: the numbers cannot depend on which other pictures were missing."""
        views = range(self.augmentation.views)
        trunk, frozen = PlainTrunks.batch(self, [index] * len(views), views)
        rows: npt.NDArray[np.float32] = torch.cat([trunk.flatten(1), frozen], dim=1).cpu().numpy()
        return rows

    def _store(self, index: int, rows: npt.NDArray[np.float32]) -> None:
        file = self._file(index)
        sums = np.array([zlib.crc32(row.data) for row in rows], np.uint32).view(np.float32)
        partial = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as stream:
                stream.write(self._header)
                stream.write(np.concatenate([rows, sums[:, None]], axis=1).data)
            partial.replace(file)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise self._unwritable(error.strerror or str(error)) from error

    # --- room -------------------------------------------------------------------------------------

    def _unwritable(self, why: str) -> DataError:
        return DataError(
            f"the cache {self.root} cannot be written ({why}); make room, choose another --cache, "
            "or train with --no-cache",
            code=UNWRITABLE,
            field="cache",
        )

    def _check_disk(self) -> None:
        """Before an hour of computing: is there room for what is missing?"""
        missing = sum(self._file_size for i in range(len(self.paths)) if not self._file(i).exists())
        place = self.folder
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if missing > free:
            raise self._unwritable(
                f"{missing / 1e6:.0f} MB are to be written and the disk has {free / 1e6:.0f} MB"
            )

    def _make_room(self, limit: int) -> None:
        """Delete what interrupted runs left, then entries of other runs, those used longest ago first."""
        others = []
        for file in self.root.rglob("*.npy*"):
            with suppress(FileNotFoundError):  # another run may make room too
                status = file.stat()
                if file.name.startswith("."):
                    if time.time() - status.st_mtime > _LEFTOVER:
                        file.unlink()
                elif self.folder not in file.parents:
                    others.append((status.st_mtime, status.st_size, file))
        used = sum(size for _, size, _ in others) + self.size
        for _, size, file in sorted(others):
            if used <= limit:
                break
            file.unlink(missing_ok=True)
            used -= size


def _npy_header(shape: tuple[int, int]) -> bytes:
    """What numpy writes in front of a float32 array of this shape."""
    stream = io.BytesIO()
    table = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(np.float32)),
        "fortran_order": False,
        "shape": shape,
    }
    np.lib.format.write_array_header_1_0(stream, table)
    return stream.getvalue()
