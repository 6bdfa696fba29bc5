"""What the backward pass keeps in memory, estimated before the first step, and gradient checkpointing to keep it small.

N tokens of a sequence, H heads, d tower width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dear_serve.config import TextConfig, VisionConfig

__all__ = ["activation_bytes", "chunk_size", "in_chunks"]

KEEP = 2 * 10**9
"""Bytes of activations a tower may keep before its share of a step is recomputed in parts (ours)."""


def activation_bytes(tower: VisionConfig | TextConfig, *, tokens: int, blocks: int, item: int = 4) -> int:
    """Bytes that autograd keeps of one sequence, through blocks with frozen weights.

    Counted from what it keeps in a block: of every token the inputs of both norms (2 d), queries, keys and values
    (3 d), the input of the activation (the MLP's width); of each head its N x N weights.

    Args:
        tower: its shape.
        tokens: N.
        blocks: how many of its blocks are run with gradients.
        item: bytes of a number.
    """
    per_token = 5 * tower.width + tower.mlp_width + tower.heads * tokens
    return item * blocks * tokens * per_token


def chunk_size(count: int, each: int, *, keep: int = KEEP) -> int:
    """How many of `count` sequences of `each` bytes to run at a time: all of them where they stay within `keep`,
    otherwise as many as a quarter of it holds, at least one."""
    return count if count * each <= keep else max(1, keep // 4 // each)


def in_chunks(
    function: Callable[[Tensor], tuple[Tensor, ...]], items: Tensor, size: int
) -> tuple[Tensor, ...]:
    """`function` of `items`, `size` rows at a time, each part's activations recomputed in the backward pass.

    Equal to `function(items)` up to rounding. With all rows in one part, or without gradients, nothing is recomputed.

    Args:
        function: (n, ...) -> tensors of n rows each.
        items: all rows.
        size: rows of a part, at least 1.
    """
    if size >= len(items):
        return function(items)
    if not torch.is_grad_enabled():
        parts = [function(part) for part in items.split(size)]
    else:
        parts = [
            checkpoint(function, part, use_reentrant=False, preserve_rng_state=False)
            for part in items.split(size)
        ]
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
