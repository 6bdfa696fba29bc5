"""The training loss of DeAR (method.md §5).

B batch, K attributes, D joint width, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Losses", "cosine_distance", "dear_loss"]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The parts of the loss, scalars; `total` is what is minimised."""

    total: Tensor
    cross_entropy: Tensor
    image_reg: Tensor
    """Mean 1 - cos(f_cls, frozen f_cls), before lambda_reg."""
    text_reg: Tensor
    """Mean over classes 1 - cos(g_c, frozen g_c), before lambda_reg."""
    fusion_reg: Tensor
    """-log alpha_cls, before lambda_fusion."""
    attribute_reg: Tensor
    """Mean 1 - cos(what the attributes add, frozen f_cls), before its weight; 0 where it isn't asked for."""

    def numbers(self) -> dict[str, float]:
        """Each part as a Python number."""
        return {
            "loss": float(self.total.detach()),
            "cross_entropy": float(self.cross_entropy.detach()),
            "image_reg": float(self.image_reg.detach()),
            "text_reg": float(self.text_reg.detach()),
            "fusion_reg": float(self.fusion_reg.detach()),
            "attribute_reg": float(self.attribute_reg.detach()),
        }


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """Mean of 1 - cos over rows of L2-normalised features (B, D) and (B, D): a scalar from 0 to 2."""
    return (1 - (a * b).sum(-1)).mean()


@dataclass(frozen=True, kw_only=True)
class Features:
    """Adapted features of a batch and the frozen ones they are held to, all L2-normalised."""

    cls: Tensor
    """f_cls, (B, D)."""
    frozen_cls: Tensor
    """(B, D)."""
    text: Tensor
    """g, (C, D)."""
    frozen_text: Tensor
    """(C, D)."""
    alpha_cls: Tensor
    """The class feature's fusion weight, a scalar."""
    attributes: Tensor | None = None
    """What the attribute features add to the fused image side, `Fusion.attribute_side`, (B, D); None: not held."""


def dear_loss(
    logits: Tensor,
    labels: Tensor,
    features: Features,
    *,
    reg: float,
    fusion_reg: float,
    attribute_reg: float = 0.0,
) -> Losses:
    """CE(fused logits) + reg * (image + text cosine distance) + fusion_reg * (-log alpha_cls), and ours below.

    Args:
        logits: fused, (B, C), scaled by tau.
        labels: int64 (B,).
        features: adapted and frozen.
        reg: lambda_reg.
        fusion_reg: lambda_fusion.
        attribute_reg: (ours) weight of the cosine distance between what the attributes add together and the frozen
            class feature: single attributes stay free, their sum may not drift.
    """
    cross_entropy = F.cross_entropy(logits, labels)
    image = cosine_distance(features.cls, features.frozen_cls)
    text = cosine_distance(features.text, features.frozen_text)
    fusion = -torch.log(features.alpha_cls)
    total = cross_entropy + reg * (image + text) + fusion_reg * fusion
    attributes = torch.zeros_like(cross_entropy)
    if features.attributes is not None:
        attributes = cosine_distance(features.attributes, features.frozen_cls)
        total = total + attribute_reg * attributes
    return Losses(
        total=total,
        cross_entropy=cross_entropy,
        image_reg=image,
        text_reg=text,
        fusion_reg=fusion,
        attribute_reg=attributes,
    )
