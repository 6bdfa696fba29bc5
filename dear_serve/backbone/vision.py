"""The image tower: a ViT that runs any range of its blocks and can say what each head contributed.

B batch, N patch tokens, H heads, L blocks, d tower width, D joint width. Blocks are counted from 1, as in method.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dear_serve.backbone.attention import Block, make_blocks
from dear_serve.config import VisionConfig

__all__ = ["Contributions", "VisionTower"]


@dataclass(frozen=True, kw_only=True)
class Contributions:
    """Additive parts of the (not normalised) image feature, each carried into the joint space.

    The final LayerNorm is linear once its statistics are known, so it is applied to every part with the statistics
    of that picture's whole CLS token (Gandelsman et al. 2024; method.md §1.1). All float32.
    """

    heads: Tensor
    """(B, L', H, D): each head of each block asked for; blocks not asked for are summed into `rest`."""
    mlps: Tensor
    """(B, L, D)."""
    embedding: Tensor
    """(B, D): the CLS token as it enters block 1."""
    biases: Tensor
    """(B, D): attention output biases and the final norm's bias."""
    rest: Tensor
    """(B, D): heads of blocks that were not asked for, summed."""

    def total(self) -> Tensor:
        """(B, D): the image feature before L2 normalisation."""
        return self.heads.sum((1, 2)) + self.mlps.sum(1) + self.embedding + self.biases + self.rest


class VisionTower(nn.Module):
    """Pixels to joint space.

    Args:
        config: shape of the tower.
        embed_dim: D.
        quick_gelu: which activation the weights were trained with.
    """

    def __init__(self, config: VisionConfig, *, embed_dim: int, quick_gelu: bool = False) -> None:
        super().__init__()
        self.config = config
        d = config.width
        self.patch_embedding = nn.Conv2d(3, d, config.patch_size, config.patch_size, bias=False)
        self.class_embedding = nn.Parameter(d**-0.5 * torch.randn(d))
        self.positional_embedding = nn.Parameter(d**-0.5 * torch.randn(config.patches + 1, d))
        self.ln_pre = nn.LayerNorm(d) if config.ln_pre else nn.Identity()
        self.blocks = make_blocks(config, quick_gelu=quick_gelu)
        self.ln_post = nn.LayerNorm(d)
        self.proj = nn.Parameter(d**-0.5 * torch.randn(d, embed_dim))

    def embed(self, pixels: Tensor) -> Tensor:
        """Pixels (B, 3, S, S), normalised -> tokens (B, 1+N, d) entering block 1, CLS first."""
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        cls = self.class_embedding.to(patches.dtype).expand(patches.shape[0], 1, -1)
        return self.ln_pre(torch.cat([cls, patches], dim=1) + self.positional_embedding)

    def run(self, x: Tensor, first: int, last: int) -> Tensor:
        """Blocks first..last, both counted from 1 and included; an empty range returns x. (B, N, d) -> (B, N, d)."""
        for block in self.blocks[first - 1 : last]:
            x = block(x)
        return x

    def pool(self, x: Tensor) -> Tensor:
        """Tokens after the last block (B, N, d) -> image feature (B, D), not normalised."""
        return self.ln_post(x[:, 0]) @ self.proj

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, D), not normalised."""
        return self.pool(self.run(self.embed(pixels), 1, self.config.layers))

    def contributions(self, pixels: Tensor, *, first_block: int = 1) -> Contributions:
        """Split the image feature into what each part of the tower added to it (method.md §1.1).

        Args:
            pixels: (B, 3, S, S).
            first_block: heads are kept apart from this block (1-based) on; earlier ones go into `rest`.

        Returns:
            Parts whose `total()` is `forward(pixels)` up to float32 rounding.
        """
        x = self.embed(pixels)
        embedding = x[:, 0]
        rest, bias = torch.zeros_like(embedding), torch.zeros_like(embedding)
        heads, mlps = [], []
        for number, block in enumerate(self.blocks, 1):
            assert isinstance(block, Block)
            normed = block.ln_1(x)
            per_head = block.ls_1(block.attention.head_outputs(normed))  # (B, H, d)
            if number < first_block:
                rest = rest + per_head.sum(1)
            else:
                heads.append(per_head)
            bias = bias + block.ls_1(block.attention.out_proj.bias.expand_as(bias))
            x = x + block.ls_1(block.attention(normed))
            mlp = block.ls_2(block.mlp(block.ln_2(x)))
            mlps.append(mlp[:, 0])
            x = x + mlp
        return self._project_parts(
            x[:, 0], torch.stack(heads, 1), torch.stack(mlps, 1), (embedding, bias, rest)
        )

    def _project_parts(
        self, cls: Tensor, heads: Tensor, mlps: Tensor, others: tuple[Tensor, Tensor, Tensor]
    ) -> Contributions:
        """Carry parts of `cls` (B, d) through the final norm, with the statistics of `cls`, and the projection."""
        scale = torch.rsqrt(cls.var(-1, unbiased=False, keepdim=True) + self.ln_post.eps)  # (B, 1)

        def carry(part: Tensor) -> Tensor:
            factor = scale.reshape(-1, *[1] * (part.dim() - 1))
            centred = part - part.mean(-1, keepdim=True)
            return (centred * factor * self.ln_post.weight) @ self.proj

        embedding, bias, rest = others
        return Contributions(
            heads=carry(heads),
            mlps=carry(mlps),
            embedding=carry(embedding),
            biases=carry(bias) + self.ln_post.bias @ self.proj,
            rest=carry(rest),
        )
