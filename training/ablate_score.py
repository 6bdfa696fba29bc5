"""Accuracies of one model under every way of scoring, from one pass over the pictures.

B pictures, C classes, K attributes, D joint width. Every feature is L2-normalised unless said otherwise; `v` is the
fused image side, sum_k alpha_k f_k (method.md §4), g the adapted text feature, f' and g' the frozen ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear_serve.dear.model import DearModel
from training.loop import TextSide

__all__ = ["FACTORS", "Question", "Sides", "image_sides", "score"]

FACTORS = tuple(round(0.1 * i, 1) for i in range(11))
"""Interpolation factors tried: 0 is frozen CLIP, 1 the adapted model."""

_BATCH = 128


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of some pictures: which of these names?"""

    text: TextSide
    """Of the C names."""
    trained: Tensor
    """Which names the adapter was trained on, bool (C,)."""
    labels: Tensor
    """int64 (B,)."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The image sides of B pictures, (B, D) each."""

    frozen: Tensor
    """f', frozen CLIP's."""
    cls: Tensor
    """f_0."""
    attributes: Tensor
    """sum over k >= 1 of alpha_k f_k; its length is what the attributes weigh."""
    fused: Tensor
    """v = alpha_0 f_0 + attributes."""

    def rows(self, rows: Sequence[int]) -> Sides:
        """Those of some pictures."""
        index = torch.tensor(rows)
        return Sides(
            frozen=self.frozen[index],
            cls=self.cls[index],
            attributes=self.attributes[index],
            fused=self.fused[index],
        )

    def constant(self) -> float:
        """Share (0 to 1) of the attribute side that is the same for every picture: |mean| / mean of |.|."""
        length = float(self.attributes.norm(dim=-1).mean())
        return float(self.attributes.mean(0).norm()) / length if length else 0.0


@torch.no_grad()
def image_sides(model: DearModel, batches: Iterable[tuple[Tensor, Tensor]]) -> Sides:
    """Image sides of pictures given as batches of trunk (B, 1+N, d) and frozen feature (B, D)."""
    frozen, classes, attributes = [], [], []
    alpha = model.fusion.alpha
    for trunk, feature in batches:
        for start in range(0, len(trunk), _BATCH):
            cls, others = model.image_head(trunk[start : start + _BATCH])
            classes.append(cls)
            attributes.append(torch.einsum("k,bkd->bd", alpha[1:], others))
        frozen.append(feature)
    cls, side = torch.cat(classes), torch.cat(attributes)
    return Sides(frozen=torch.cat(frozen), cls=cls, attributes=side, fused=alpha[0] * cls + side)


@torch.no_grad()
def score(model: DearModel, sides: Sides, question: Question) -> dict[str, float]:
    """Accuracy (0 to 1) by way of scoring, of one question.

    Keys: "zero_shot"; "fused" (every name by v·g); "class" (names outside the trained ones by f_0·g, as MMRL does);
    "mix F" (those by ((1-F) f' + F v)·((1-F) g' + F g), normalised text) and "whole F" (all names so) for each factor
    F; and "IMAGE x TEXT" for each image side (frozen, class, attributes, fused) and text (frozen, adapted): where
    something is lost. And "constant", see `Sides.constant`.
    """
    g, frozen = question.text.features(model), question.text.frozen
    images = {
        "frozen": sides.frozen,
        "class": sides.cls,
        "attributes": sides.attributes,
        "fused": sides.fused,
    }
    split = {
        f"{name} x {kind}": image @ text.t()
        for name, image in images.items()
        for kind, text in (("frozen", frozen), ("adapted", g))
    }
    logits = dict(split)
    logits["zero_shot"], logits["fused"] = split["frozen x frozen"], split["fused x adapted"]
    logits["class"] = torch.where(question.trained, logits["fused"], split["class x adapted"])
    for factor in FACTORS:
        image = torch.lerp(sides.frozen, sides.fused, factor)
        whole = image @ F.normalize(torch.lerp(frozen, g, factor), dim=-1).t()
        logits[f"whole {factor}"] = whole
        logits[f"mix {factor}"] = torch.where(question.trained, logits["fused"], whole)
    right = {key: (value.argmax(1) == question.labels).float().mean() for key, value in logits.items()}
    return {key: float(np.float64(value)) for key, value in right.items()} | {"constant": sides.constant()}
