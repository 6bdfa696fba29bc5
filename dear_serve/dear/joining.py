"""A block with gradients to the attribute tokens alone, while the original tokens are still constants (ours).

In block J nothing learned has reached CLS and patches yet: their queries, keys, values and the attention among them
need no gradient. What attribute tokens add to that attention is put in afterwards through its normaliser, so the
backward pass never touches an N x N matrix. Where no original may see an attribute token (the one-way mask) they stay
constants.

B batch, N patch tokens, K attributes, H heads, d tower width, e = d / H width of one head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dear_serve.backbone.attention import Block

__all__ = ["joining_block"]


def joining_block(block: nn.Module, originals: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`block` on CLS, patches and attribute tokens; the same numbers as on all of them together, up to rounding.

    Args:
        block: with frozen weights.
        originals: (B, 1+N, d), without gradient.
        tokens: (B, K, d).
        mask: boolean (H, 1+N+K, 1+N+K), True where a query (row) sees a key (column); originals see each other.

    Returns:
        Originals (B, 1+N, d), with a gradient only if a head shows them attribute tokens, and tokens (B, K, d).
    """
    assert isinstance(block, Block)
    attention, count = block.attention, originals.shape[1]
    scale = attention.head_width**-0.5
    with torch.no_grad():
        q, k, v = attention.project(block.ln_1(originals))
        scores = (q * scale) @ k.transpose(-1, -2)
        weights = scores.softmax(-1, dtype=scores.dtype)
        among = weights @ v  # (B, H, 1+N, e)
        total = (
            scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
        )  # log of their normaliser
    token_q, token_k, token_v = attention.project(block.ln_1(tokens))

    keys, values = torch.cat([k, token_k], dim=2), torch.cat([v, token_v], dim=2)
    asked = _masked((token_q * scale) @ keys.transpose(-1, -2), mask[:, count:])
    read = asked.softmax(-1, dtype=asked.dtype) @ values  # (B, H, K, e)
    if not bool(mask[:, :count, count:].any()):
        with torch.no_grad():
            originals = _rest(block, originals, among)
        return originals, _rest(block, tokens, read)

    shown = _masked((q * scale) @ token_k.transpose(-1, -2), mask[:, :count, count:])
    share = torch.cat([total.to(shown.dtype), shown], dim=-1).softmax(
        -1, dtype=shown.dtype
    )  # (B, H, 1+N, 1+K)
    mixed = torch.cat([share[..., :1] * among + share[..., 1:] @ token_v, read], dim=2)
    both = _rest(block, torch.cat([originals, tokens], dim=1), mixed)
    return both[:, :count], both[:, count:]


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)


def _rest(block: Block, x: Tensor, mixed: Tensor) -> Tensor:
    """What follows each head's values (B, H, M, e) in a block: output projection and MLP, each added to (B, M, d)."""
    x = x + block.ls_1(block.attention.out_proj(mixed.transpose(1, 2).flatten(2)))
    out: Tensor = x + block.ls_2(block.mlp(block.ln_2(x)))
    return out
