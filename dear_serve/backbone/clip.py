"""The dual encoder: image and text towers and the logit scale."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear_serve.backbone.text import TextTower
from dear_serve.backbone.vision import VisionTower
from dear_serve.config import ClipConfig

__all__ = ["Clip"]


class Clip(nn.Module):
    """A CLIP of two towers built from `config` with random weights; `weights.convert` fills it.

    Attributes:
        visual: the image tower.
        text: the text tower.
        logit_scale: log of tau, a scalar parameter.
    """

    def __init__(self, config: ClipConfig) -> None:
        super().__init__()
        self.config = config
        self.visual = VisionTower(config.vision, embed_dim=config.embed_dim, quick_gelu=config.quick_gelu)
        self.text = TextTower(config.text, embed_dim=config.embed_dim, quick_gelu=config.quick_gelu)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    @property
    def tau(self) -> float:
        """The factor on cosines that gives logits."""
        return float(self.logit_scale.detach().exp())

    def encode_image(self, pixels: Tensor, *, normalize: bool = True) -> Tensor:
        """Preprocessed pixels float (B, 3, S, S) -> image features (B, D), L2-normalised on request."""
        features = self.visual(pixels)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, tokens: Tensor, *, normalize: bool = True) -> Tensor:
        """Token ids int64 (B, L) -> text features (B, D), L2-normalised on request."""
        features = self.text(tokens)
        return F.normalize(features, dim=-1) if normalize else features
