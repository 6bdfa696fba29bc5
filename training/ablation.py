"""Does a role mean something: replace heads' outputs by their means and see which attribute suffers (ours).

Mean-ablation takes away what a head tells one picture from another and keeps the rest of the computation where it
was trained to be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dear_serve.backbone.attention import Attention, Block
from dear_serve.backbone.clip import Clip
from dear_serve.errors import ConfigError
from training.captions import attribute_prompts
from training.mini import pixels_from
from training.probe import BATCH
from training.sentences import text_features
from training.world import World, sample_scenes
from training.world_vocab import ATTRIBUTES

__all__ = ["LabelledPictures", "ablate_heads", "accuracies", "mean_ablated", "world_task"]

Head = tuple[int, int]  # block from 1, head from 0


@dataclass(frozen=True, kw_only=True)
class LabelledPictures:
    """Pictures with a label per attribute, and the text features that zero-shot classification uses."""

    pixels: Tensor
    """(n, 3, S, S) float32."""
    labels: dict[str, np.ndarray]
    """attribute -> (n,) class index."""
    classes: dict[str, np.ndarray]
    """attribute -> (C, D) text features."""


def world_task(
    clip: Clip, count: int = 500, *, seed: int = 1, n_objects: int | None = None
) -> LabelledPictures:
    """Rendered pictures of held-out combinations, labelled, with zero-shot prompts averaged over wordings."""
    rng = np.random.default_rng(seed)
    scenes = sample_scenes(rng, count, split="heldout", n_objects=n_objects)
    labels = dict(zip(ATTRIBUTES, scenes.attributes().T, strict=True))
    classes = {}
    for name in ATTRIBUTES:
        prompts = attribute_prompts(name, n_objects=n_objects if name == "object" else None)
        flat = text_features(clip, [text for row in prompts for text in row])
        classes[name] = flat.reshape(len(prompts), -1, flat.shape[-1]).mean(1)
        classes[name] /= np.linalg.norm(classes[name], axis=1, keepdims=True)
    return LabelledPictures(
        pixels=pixels_from(World(n_objects).render(scenes, rng)), labels=labels, classes=classes
    )


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
            mixed = inputs[0].unflatten(-1, mean.shape[::2]).clone()  # (B, N, H, e)
            mixed[:, :, rows] = mean[rows].transpose(0, 1)
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
    for part in pixels.split(BATCH):
        x = clip.visual.embed(part)
        for number, block in enumerate(clip.visual.blocks, 1):
            assert isinstance(block, Block)
            if number in layers:
                mixed = block.attention.mix_values(block.ln_1(x)).sum(0)
                sums[number] = sums.get(number, torch.zeros_like(mixed)) + mixed
            x = block(x)
    return {number: total / len(pixels) for number, total in sums.items()}


@torch.no_grad()
def accuracies(clip: Clip, task: LabelledPictures) -> dict[str, float]:
    """Zero-shot accuracy (0 to 1) per attribute."""
    features = torch.cat([clip.encode_image(part) for part in task.pixels.split(BATCH)]).numpy()
    return {
        name: float(((features @ task.classes[name].T).argmax(1) == labels).mean())
        for name, labels in task.labels.items()
    }


def ablate_heads(
    clip: Clip, task: LabelledPictures, groups: Sequence[Sequence[Head]]
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """What mean-ablating each group of heads costs each attribute.

    Args:
        clip: the model.
        task: labelled pictures; means are taken over them.
        groups: each a set of (block from 1, head from 0), such as one head, or all heads of a role.

    Returns:
        Accuracy of the whole model per attribute (0 to 1), and for every group the accuracy lost per attribute.

    Raises:
        ConfigError: a head the model doesn't have.
    """
    vision = clip.visual.config
    for layer, head in (pair for group in groups for pair in group):
        if not (1 <= layer <= vision.layers and 0 <= head < vision.heads):
            raise ConfigError(
                f"no head ({layer}, {head}): blocks run from 1 to {vision.layers}, heads from 0 to {vision.heads - 1}"
            )
    whole = accuracies(clip, task)
    means = value_means(clip, task.pixels, sorted({layer for group in groups for layer, _ in group}))
    losses = []
    for group in groups:
        with mean_ablated(clip, group, means):
            left = accuracies(clip, task)
        losses.append({name: whole[name] - left[name] for name in whole})
    return whole, losses


def _attention(clip: Clip, layer: int) -> Attention:
    block = clip.visual.blocks[layer - 1]
    assert isinstance(block, Block)
    return block.attention
