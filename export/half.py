"""Modules in fp16 with what is sensitive in fp32: the graph's types say what runs in which, no runtime decides it.

In fp16: the patch and token embeddings, the blocks' matrix products and activations, the residual stream. In fp32: the
statistics of every LayerNorm (ONNX computes them so, its stash_type), every softmax (`LeanAttention`), the final norms,
the projections into the joint space, the L2 norms, the fusion and its logits; and every input and output.
"""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import nn

__all__ = ["SENSITIVE", "to_half"]

SENSITIVE = frozenset(
    {
        "attribute_proj",
        "attribute_weights",
        "class_weights",
        "cls_weight",
        "ln_final",
        "ln_post",
        "proj",
        "weights",
    }
)
"""Parts of the wrappers, by the name of a module or a constant, that stay in fp32."""


def to_half(module: nn.Module) -> nn.Module:
    """A copy of one of `wrappers.wrap`'s modules whose floating-point constants are fp16, but for `SENSITIVE` ones.

    Constants are rounded to nearest; ones beyond fp16's range (65504) would become infinite, which the check against
    torch reports as such.
    """
    half = copy.deepcopy(module)
    for name, tensor in chain(half.named_parameters(), half.named_buffers()):
        if (
            tensor.is_floating_point()
            and not SENSITIVE.intersection(name.split("."))
            and "share_" not in name
        ):
            tensor.data = tensor.data.to(torch.float16)
    return half
