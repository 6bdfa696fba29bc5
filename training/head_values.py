"""What every head writes to the image feature, for each picture of a probe set, streamed, resumable (method.md §1.1).

A head's contribution C (n, D) is its e attention-weighted values, times the final norm's factor of that picture, times
a fixed matrix A (e, D) that is its slice of the output projection, the final norm and the visual projection. So e
numbers a picture and head are all there is to keep: 10,000 pictures and all 384 heads of ViT-L/14 take 1 GB on disk,
memory-mapped, and covariances are e x e (ours; exact).

n pictures, L' blocks looked at, H heads, e width of one head, D joint width, k <= e directions of a head's output.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dear_serve.backbone.attention import Block, LayerScale
from dear_serve.backbone.clip import Clip
from dear_serve.errors import CheckFailedError, DataError
from training.probe import Batch, ProbePictures, batch_size
from training.textspan import Moments

__all__ = ["HeadOutputs", "ProbeState", "gather", "head_basis", "head_values"]

Array = npt.NDArray[np.float64]
TOLERANCE = 1e-4  # of the image feature's largest value, where that is above 1
_CHECKED_EVERY = 10  # batches: the first and every tenth are checked, at about the cost of one more pass each
_CHUNK = 1000  # pictures at once in float64


@dataclass(frozen=True, kw_only=True)
class HeadOutputs:
    """What the heads of the last L' blocks write, over a probe set."""

    values: npt.NDArray[np.float32]
    """(n, L', H, e), may be memory-mapped: attention-weighted values at the CLS token times the final norm's factor."""
    basis: Array
    """(L', H, e, D): A; `values[:, i, h] @ basis[i, h]` is the head's contribution C."""
    positions: tuple[int, ...]
    """Place of each of the n pictures in the probe set."""
    last_block: int
    """L: these are the heads of the last L' blocks."""
    largest_error: float
    """Of the sum of all parts against the image feature, max abs over the checked pictures."""
    checked: int
    """Pictures for which that sum was taken."""

    @property
    def pictures(self) -> int:
        """n."""
        return len(self.positions)

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Indices (block from 0 within the L', head) of all heads, in the order of `Roles.heads`."""
        layers, heads = self.basis.shape[:2]
        return [(i, h) for i in range(layers) for h in range(heads)]

    def directions(self, i: int, h: int) -> tuple[Array, Array]:
        """Orthonormal directions Q (k, D) of a head's output, and R (e, k) with A = R Q."""
        q, r = np.linalg.qr(self.basis[i, h].T)
        return q.T, r.T

    def contributions(self, i: int, h: int, rows: slice = slice(None)) -> Array:
        """C (n, D) of one head, not centred."""
        out: Array = np.asarray(self.values[rows, i, h], np.float64) @ self.basis[i, h]
        return out

    def value_covariances(self) -> Array:
        """Covariances of the values, (L', H, e, e), streamed over the pictures.

        Raises:
            ConfigError: fewer than two pictures.
        """
        layers, heads, width = self.values.shape[1:]
        moments = Moments(layers * heads, width)
        for start in range(0, self.pictures, _CHUNK):
            moments.add(self.values[start : start + _CHUNK].reshape(-1, layers * heads, width))
        return moments.covariance().reshape(layers, heads, width, width)

    def resampled_covariances(self, counts: npt.NDArray[np.int64]) -> Array:
        """`value_covariances` of a sample that holds picture i `counts[i]` times."""
        layers, heads, width = self.values.shape[1:]
        out = np.empty((layers, heads, width, width))
        total = counts.sum()
        for i, h in self.heads:
            rows = np.asarray(self.values[:, i, h], np.float64)
            rows = rows - (counts @ rows) / total
            out[i, h] = (rows * counts[:, None]).T @ rows / total
        return out


@torch.no_grad()
def head_basis(clip: Clip, first_block: int) -> Array:
    """A of every head of blocks `first_block`..L, (L', H, e, D) float64."""
    visual, rows = clip.visual, []
    for block in visual.blocks[first_block - 1 :]:
        assert isinstance(block, Block)
        weight = block.attention.out_proj.weight.double()  # (d, H e)
        if isinstance(block.ls_1, LayerScale):
            weight = weight * block.ls_1.gamma.double()[:, None]
        weight = (weight - weight.mean(0)) * visual.ln_post.weight.double()[:, None]
        rows.append(weight.T.unflatten(0, (block.attention.heads, -1)) @ visual.proj.double())
    out: Array = torch.stack(rows).numpy()
    return out


@torch.no_grad()
def head_values(clip: Clip, pixels: Tensor, first_block: int) -> tuple[Tensor, Tensor]:
    """Values (B, L', H, e) of the heads of blocks `first_block`..L, and the image feature (B, D), in one pass."""
    visual, values = clip.visual, []
    x = visual.run(visual.embed(pixels), 1, first_block - 1)
    for block in visual.blocks[first_block - 1 :]:
        assert isinstance(block, Block)
        mixed = block.attention.mix_values(block.ln_1(x))  # (B, H, N, e)
        values.append(mixed[:, :, 0])
        x = x + block.ls_1(block.attention.out_proj(mixed.transpose(1, 2).flatten(2)))
        x = x + block.ls_2(block.mlp(block.ln_2(x)))
    factor = torch.rsqrt(x[:, 0].var(-1, unbiased=False) + visual.ln_post.eps)
    return torch.stack(values, 1) * factor[:, None, None, None], visual.pool(x)


class ProbeState:
    """The values gathered so far, in a folder, so that a stopped run goes on where it was.

    Args:
        folder: made if absent; None keeps everything in memory.
        key: what must be equal for the folder's content to be used; otherwise it starts again.
        shape: (pictures at most, L', H, e).
    """

    def __init__(self, folder: Path | None, key: str, shape: tuple[int, int, int, int]) -> None:
        self._folder, self._key = folder, key
        self.positions: list[int] = []
        self.next = 0
        """Position of the first picture not yet seen."""
        self.largest_error, self.checked = 0.0, 0
        self.values: npt.NDArray[np.float32]
        if folder is None:
            self.values = np.empty(shape, np.float32)
            return
        folder.mkdir(parents=True, exist_ok=True)
        if not self._read(shape):
            self.values = np.lib.format.open_memmap(
                folder / "values.npy", mode="w+", dtype=np.float32, shape=shape
            )
            self._note()

    def _read(self, shape: tuple[int, int, int, int]) -> bool:
        assert self._folder
        try:
            data: Any = json.loads((self._folder / "state.json").read_text(encoding="utf-8"))
            values = np.lib.format.open_memmap(self._folder / "values.npy", mode="r+")
        except (OSError, ValueError):
            return False
        if data.get("key") != self._key or values.shape != shape:
            return False
        self.values, self.positions, self.next = values, data["positions"], data["next"]
        self.largest_error, self.checked = data["largest_error"], data["checked"]
        return True

    def add(self, batch: Batch, values: Tensor, error: float | None) -> None:
        """Take in a batch's values (B, L', H, e), and the error of their sum where it was checked."""
        start = len(self.positions)
        self.values[start : start + len(values)] = values.numpy()
        self.positions += batch.positions
        self.next = batch.end
        if error is not None:
            self.largest_error, self.checked = max(self.largest_error, error), self.checked + len(values)
        if self._folder is not None:
            assert isinstance(self.values, np.memmap)
            self.values.flush()
            self._note()

    def _note(self) -> None:
        assert self._folder
        partial = self._folder / ".state.json.partial"
        data = {
            "key": self._key,
            "next": self.next,
            "positions": self.positions,
            "largest_error": self.largest_error,
            "checked": self.checked,
        }
        partial.write_text(json.dumps(data), encoding="utf-8")
        partial.replace(self._folder / "state.json")


@torch.no_grad()
def gather(
    clip: Clip,
    pictures: ProbePictures,
    *,
    first_block: int,
    state: Path | None = None,
    key: str = "",
    progress: Callable[[int], None] | None = None,
) -> HeadOutputs:
    """What each head writes, over all pictures; memory does not grow with their number when `state` is given.

    Args:
        clip: the base.
        pictures: the probe set.
        first_block: J; heads of blocks J..L are gathered.
        state: folder to keep the values in, and to go on from.
        key: identity of the base, for `state`.
        progress: told the position reached after each batch, and at the start.

    Raises:
        CheckFailedError: the parts don't add up to the image feature within 1e-4 (of its largest value, where that
            exceeds 1), or are not finite.
        DataError: fewer than two pictures.
    """
    vision, basis = clip.visual.config, head_basis(clip, first_block)
    size = batch_size(vision.patches)
    identity = f"{key} {pictures.identity} {first_block} {size}"
    kept = ProbeState(state, identity, (len(pictures), *basis.shape[:3]))
    if progress:
        progress(kept.next)
    for batch in pictures.batches(kept.next, size):
        values, feature = head_values(clip, batch.pixels, first_block)
        check = (batch.end - 1) // size % _CHECKED_EVERY == 0
        error = _error_of_sum(clip, batch.pixels, (values, feature), basis) if check else None
        kept.add(batch, values, error)
        if progress:
            progress(kept.next)
    count = len(kept.positions)
    if count < 2:
        raise DataError(f"{count} pictures could be read; roles need 2 or more", field="images")
    return HeadOutputs(
        values=kept.values[:count],
        basis=basis,
        positions=tuple(kept.positions),
        last_block=vision.layers,
        largest_error=kept.largest_error,
        checked=kept.checked,
    )


def _error_of_sum(clip: Clip, pixels: Tensor, found: tuple[Tensor, Tensor], basis: Array) -> float:
    """Largest error of the parts' sum against the feature, and of the heads' parts against their values times A."""
    values, feature = found
    first = clip.visual.config.layers - len(basis) + 1
    parts = clip.visual.contributions(pixels, first_block=first)
    heads = torch.einsum("blhe,lhed->blhd", values.double(), torch.from_numpy(basis))
    error = max(float((parts.total() - feature).abs().max()), float((heads - parts.heads).abs().max()))
    if not error <= TOLERANCE * max(1.0, float(feature.abs().max())):
        raise CheckFailedError(
            f"contributions of heads, MLPs, embedding and biases miss the image feature by {error:.2g} "
            f"(allowed {TOLERANCE:.0e}): these roles could not be trusted"
        )
    return error
