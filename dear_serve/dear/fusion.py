"""Task-adaptive fusion of the class feature and the attribute features (method.md §4)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Fusion"]


class Fusion(nn.Module):
    """K+1 learned scalars w; alpha = softmax(w) weighs the class feature (first) and K attribute features.

    Args:
        attributes: K.
        alpha_cls: initial alpha of the class feature (ours: 0.7); the rest share what is left equally.
        tau: the frozen factor on cosines.
    """

    def __init__(self, attributes: int, *, alpha_cls: float, tau: float) -> None:
        super().__init__()
        rest = [math.log((1 - alpha_cls) / attributes)] * attributes if attributes else []
        self.weights = nn.Parameter(torch.tensor([math.log(alpha_cls), *rest]))
        self.tau = tau

    @property
    def alpha(self) -> Tensor:
        """(K+1,), positive, sums to 1."""
        return self.weights.softmax(0)

    def attribute_side(self, attributes: Tensor) -> Tensor:
        """Direction of what the attributes add to the fused image side, sum over k >= 1 of alpha_k f_k (ours).

        Args:
            attributes: f_1..f_K, (B, K, D).

        Returns:
            (B, D), L2-normalised; zeros without attributes.
        """
        return F.normalize(torch.einsum("k,bkd->bd", self.alpha[1:], attributes), dim=-1)

    def forward(self, cls: Tensor, attributes: Tensor, class_features: Tensor) -> tuple[Tensor, Tensor]:
        """Fused logits and what each feature contributed to them.

        Args:
            cls: f_0, (B, D), L2-normalised like the others.
            attributes: f_1..f_K, (B, K, D).
            class_features: g, (C, D).

        Returns:
            logits (B, C), and contributions tau * alpha_k * f_k.g_c (B, C, K+1) that sum to them over the last axis.
        """
        features = torch.cat([cls.unsqueeze(1), attributes], dim=1)  # (B, K+1, D)
        weighted = features * (self.tau * self.alpha).unsqueeze(-1)
        contributions = (weighted @ class_features.t()).transpose(1, 2)
        return contributions.sum(-1), contributions
