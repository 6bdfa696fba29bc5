"""The text tower: a causal transformer that runs any range of its blocks.

B batch, L text length, d tower width, D joint width. Blocks are counted from 1, as in method.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dear_serve.backbone.attention import make_blocks
from dear_serve.config import TextConfig

__all__ = ["MAX_EXTRA_TOKENS", "TextTower", "end_of_text"]

MAX_EXTRA_TOKENS = 64
"""How many learnable tokens the causal mask has room for."""


def end_of_text(tokens: Tensor) -> Tensor:
    """Position of the end-of-text token, the largest id of CLIP's vocabulary: int64 (B, L) -> int64 (B,)."""
    return tokens.argmax(dim=-1)


class TextTower(nn.Module):
    """Token ids to joint space.

    Args:
        config: shape of the tower.
        embed_dim: D.
        quick_gelu: which activation the weights were trained with.
    """

    causal: Tensor

    def __init__(self, config: TextConfig, *, embed_dim: int, quick_gelu: bool = False) -> None:
        super().__init__()
        self.config = config
        d = config.width
        self.token_embedding = nn.Embedding(config.vocab_size, d)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(config.context_length, d))
        self.blocks = make_blocks(config, quick_gelu=quick_gelu)
        self.ln_final = nn.LayerNorm(d)
        self.projection = nn.Parameter(d**-0.5 * torch.randn(d, embed_dim))
        room = config.context_length + MAX_EXTRA_TOKENS
        self.register_buffer("causal", torch.ones(room, room, dtype=torch.bool).tril(), persistent=False)

    def causal_mask(self, length: int) -> Tensor:
        """Boolean (length, length), True on and below the diagonal."""
        return self.causal[:length, :length]

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids int64 (B, L), L up to the context length -> (B, L, d) entering block 1."""
        return self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]

    def run(self, x: Tensor, first: int, last: int) -> Tensor:
        """Blocks first..last, both counted from 1 and included. (B, L, d) -> (B, L, d)."""
        mask = self.causal_mask(x.shape[1])
        for block in self.blocks[first - 1 : last]:
            x = block(x, mask)
        return x

    def pool(self, x: Tensor, position: Tensor) -> Tensor:
        """Tokens after the last block (B, L, d), end-of-text int64 (B,) -> text feature (B, D), not normalised."""
        rows = torch.arange(x.shape[0], device=x.device)
        return self.ln_final(x[rows, position]) @ self.projection

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (B, L) -> (B, D), not normalised. L may be cut to the longest end-of-text: the result is the same."""
        return self.pool(self.run(self.embed(tokens), 1, self.config.layers), end_of_text(tokens))
