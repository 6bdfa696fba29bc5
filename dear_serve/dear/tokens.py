"""Learnable tokens that join the frozen towers and keep their meaning by beta mixing (method.md §2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["LearnableTokens"]


class LearnableTokens(nn.Module):
    """A few learnable tokens r of a tower.

    Args:
        count: K attribute tokens of the image tower, or K_t tokens of the text tower.
        width: d of the tower.
        beta: share of the initial token in each later block's input.
        std: of the normal initial values (ours: 0.02).
    """

    def __init__(self, count: int, width: int, *, beta: float, std: float = 0.02) -> None:
        super().__init__()
        self.beta = beta
        self.tokens = nn.Parameter(std * torch.randn(count, width))

    def first(self, batch: int) -> Tensor:
        """Input of the joining block: (B, count, d)."""
        return self.tokens.expand(batch, -1, -1)

    def mix(self, output: Tensor, start: Tensor | None = None) -> Tensor:
        """Input of a later block: beta * r + (1 - beta) * output of the block before, (B, count, d).

        Args:
            output: of the block before.
            start: input of the joining block in place of r, where it was not r.
        """
        return self.beta * (self.tokens if start is None else start) + (1 - self.beta) * output
