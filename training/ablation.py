"""Does a role mean something: replace heads' outputs by their means and see which attribute suffers (ours).

Mean-ablation takes away what a head tells one picture from another and keeps the rest of the computation where it
was trained to be. Accuracy is the measure; where it is saturated (an attribute that many heads know stays at 100 %),
the rise of the cross-entropy of the true value still shows what a head carried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear_serve.backbone.attention import Attention, Block
from dear_serve.backbone.clip import Clip
from dear_serve.errors import ConfigError
from training.labelled import LabelledPictures
from training.probe import batch_size

__all__ = ["Ablation", "Cost", "Head", "ablate_heads", "mean_ablated", "value_means"]

Head = tuple[int, int]  # block from 1, head from 0
Outcome = dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]
"""Attribute -> of the pictures labelled with it: named right (0 or 1), and cross-entropy of the true value (nats)."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What silencing some heads costs each attribute."""

    lost: dict[str, float]
    """Accuracy lost, -1 to 1."""
    error: dict[str, float]
    """Standard error of `lost`, from the same pictures before and after."""
    nats: dict[str, float]
    """Rise of the mean cross-entropy of the true value."""

    def dearest(self) -> str | None:
        """The attribute that loses most accuracy, if that is more than two standard errors; else None."""
        name = max(self.lost, key=lambda a: self.lost[a])
        return name if self.lost[name] > 2 * self.error[name] else None


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """The whole model's accuracy per attribute (0 to 1), and the cost of each group of heads."""

    accuracy: dict[str, float]
    costs: tuple[Cost, ...]


@contextmanager
def mean_ablated(clip: Clip, heads: Iterable[Head], means: dict[int, Tensor]) -> Iterator[None]:
    """Within the context, these heads write their mean over pictures at every token.

    Args:
        clip: the model; as it was afterwards.
        heads: (block from 1, head from 0).
        means: block -> (H, N, e) mean of `Attention.mix_values` over pictures, see `value_means`.
    """
    chosen: dict[int, list[int]] = {}
    for layer, head in heads:
        chosen.setdefault(layer, []).append(head)
    handles = []
    for layer, rows in chosen.items():
        attention = _attention(clip, layer)

        def replace(
            _: nn.Module, inputs: tuple[Tensor], *, rows: list[int] = rows, mean: Tensor = means[layer]
        ) -> tuple[Tensor]:
            mixed = (
                inputs[0].unflatten(-1, mean.shape[::2]).clone()
            )  # (B, M, H, e), M = N or the CLS token alone
            mixed[:, :, rows] = mean[rows, : mixed.shape[1]].transpose(0, 1)
            return (mixed.flatten(-2),)

        handles.append(attention.out_proj.register_forward_pre_hook(replace))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def value_means(clip: Clip, pixels: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """Mean over pictures of each head's attention-weighted values at each token: block -> (H, N, e)."""
    sums: dict[int, Tensor] = {}
    for part in pixels.split(batch_size(clip.visual.config.patches)):
        x = clip.visual.embed(part)
        for number, block in enumerate(clip.visual.blocks, 1):
            assert isinstance(block, Block)
            if number in layers:
                mixed = block.attention.mix_values(block.ln_1(x)).sum(0)
                sums[number] = sums.get(number, torch.zeros_like(mixed)) + mixed
            x = block(x)
    return {number: total / len(pixels) for number, total in sums.items()}


def ablate_heads(
    clip: Clip,
    task: LabelledPictures,
    groups: Sequence[Sequence[Head]],
    *,
    progress: Callable[[], None] | None = None,
) -> Ablation:
    """What mean-ablating each group of heads costs each attribute.

    Blocks before a group's first one are computed once for all groups that start there.

    Args:
        clip: the model.
        task: labelled pictures; means are taken over them.
        groups: each a set of (block from 1, head from 0), such as one head, or all heads of a role.
        progress: told after each group.

    Raises:
        ConfigError: a head the model doesn't have.
    """
    vision = clip.visual.config
    for layer, head in (pair for group in groups for pair in group):
        if not (1 <= layer <= vision.layers and 0 <= head < vision.heads):
            raise ConfigError(
                f"no head ({layer}, {head}): blocks run from 1 to {vision.layers}, heads from 0 to {vision.heads - 1}"
            )
    means = value_means(clip, task.pixels, sorted({layer for group in groups for layer, _ in group}))
    starts = [min((layer for layer, _ in group), default=vision.layers) for group in groups]
    costs: dict[int, Cost] = {}
    reached, trunk = 1, _embed(clip, task.pixels)
    whole = _outcome(clip, task, _features(clip, trunk, 1))
    for index in sorted(range(len(groups)), key=starts.__getitem__):
        if starts[index] > reached:
            trunk = _advance(clip, trunk, reached, starts[index] - 1)
            reached = starts[index]
        with mean_ablated(clip, groups[index], means):
            costs[index] = _cost(whole, _outcome(clip, task, _features(clip, trunk, reached)))
        if progress:
            progress()
    return Ablation(
        accuracy={name: float(right.mean()) for name, (right, _) in whole.items()},
        costs=tuple(costs[i] for i in range(len(groups))),
    )


@torch.no_grad()
def _embed(clip: Clip, pixels: Tensor) -> list[Tensor]:
    return [clip.visual.embed(part) for part in pixels.split(batch_size(clip.visual.config.patches))]


@torch.no_grad()
def _advance(clip: Clip, trunk: list[Tensor], first: int, last: int) -> list[Tensor]:
    """Tokens entering block `first` -> tokens leaving block `last`, in place of the old ones."""
    for i, part in enumerate(trunk):
        trunk[i] = clip.visual.run(part, first, last)
    return trunk


@torch.no_grad()
def _features(clip: Clip, trunk: list[Tensor], first: int) -> Tensor:
    """Image features (n, D), L2-normalised, from the tokens entering block `first`."""
    visual, rows = clip.visual, []
    for part in trunk:
        x = visual.run(part, first, visual.config.layers - 1)
        rows.append(visual.pool(visual.blocks[-1](x, None, x[:, :1])))  # of the last block only CLS is read
    return F.normalize(torch.cat(rows), dim=-1)


def _outcome(clip: Clip, task: LabelledPictures, features: Tensor) -> Outcome:
    outcome: Outcome = {}
    for name, labels in task.labels.items():
        known = labels >= 0
        logits = clip.tau * features[torch.from_numpy(known)] @ torch.from_numpy(task.classes[name]).float().T
        truth = torch.from_numpy(labels[known])
        right = (logits.argmax(1) == truth).double().numpy()
        outcome[name] = right, F.cross_entropy(logits.double(), truth, reduction="none").numpy()
    return outcome


def _cost(whole: Outcome, left: Outcome) -> Cost:
    lost, error, nats = {}, {}, {}
    for name, (right, surprise) in whole.items():
        difference = right - left[name][0]
        lost[name] = float(difference.mean())
        error[name] = float(difference.std() / np.sqrt(len(difference)))
        nats[name] = float((left[name][1] - surprise).mean())
    return Cost(lost=lost, error=error, nats=nats)


def _attention(clip: Clip, layer: int) -> Attention:
    block = clip.visual.blocks[layer - 1]
    assert isinstance(block, Block)
    return block.attention
