"""Transformer blocks rewritten for export: the same numbers with fewer and plainer operations.

B batch, N tokens, M queries, H heads, d tower width, e = d / H width of one head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.onnx.ops import attention

from dear_serve.backbone.attention import Attention, Block

__all__ = ["BLOCKED", "LeanAttention", "LeanBlock", "bias_from_mask"]

BLOCKED = -30000.0
"""Added to an attention score whose key the query may not see: finite in fp16 too, and exp of it is exactly 0."""
_ONNX_FLOAT = 1  # TensorProto.FLOAT: the softmax is in fp32 whatever its inputs are


def bias_from_mask(mask: Tensor) -> Tensor:
    """Boolean mask, True where a query sees a key, as float32 of the same shape to add to the scores: 0 or BLOCKED."""
    return torch.zeros(mask.shape).masked_fill(~mask, BLOCKED)


class LeanAttention(nn.Module):
    """`Attention` with one projection each for queries, keys and values, and the scale inside the first.

    Queries may be a part of the tokens: what nobody reads afterwards is not computed.

    Args:
        source: whose weights to take.
        fused: as one ONNX Attention (opset 23 on), which takes the projections as they are, so that no head is moved
            to an axis of its own; otherwise matrix products and a softmax, which every runtime knows.
    """

    def __init__(self, source: Attention, *, fused: bool) -> None:
        super().__init__()
        width = source.in_proj.in_features
        self.heads, self.head_width, self.fused = source.heads, source.head_width, fused
        scale = 1.0 if fused else self.head_width**-0.5
        weights = [w.detach().t().contiguous() for w in source.in_proj.weight.split(width)]
        biases = [b.detach().clone() for b in source.in_proj.bias.split(width)]
        for name, weight, bias, factor in zip("qkv", weights, biases, (scale, 1.0, 1.0), strict=True):
            self.register_buffer(f"{name}_weight", weight * factor)
            self.register_buffer(f"{name}_bias", bias * factor)
        self.register_buffer("out_weight", source.out_proj.weight.detach().t().contiguous())
        self.register_buffer("out_bias", source.out_proj.bias.detach())

    def _project(self, x: Tensor, name: str) -> Tensor:
        """(B, N, d) -> (B, N, d), heads side by side."""
        return x @ self.get_buffer(f"{name}_weight") + self.get_buffer(f"{name}_bias")

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """(B, N, d) -> (B, N, H, e)."""
        return self._project(x, name).unflatten(-1, (self.heads, self.head_width))

    def forward(self, queries: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            queries: normalised tokens that ask, (B, M, d).
            x: normalised tokens that are seen, (B, N, d).
            bias: what is added to the scores, broadcast to (B, H, M, N): 0 or BLOCKED.

        Returns:
            (B, M, d).
        """
        mixed = self._one_operator(queries, x, bias) if self.fused else self._products(queries, x, bias)
        return mixed @ self.get_buffer("out_weight") + self.get_buffer("out_bias")

    def _one_operator(self, queries: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = self._project(queries, "q"), self._project(x, "k"), self._project(x, "v")
        mixed, *_ = attention(
            q,
            k,
            v,
            attn_mask=bias,
            q_num_heads=self.heads,
            kv_num_heads=self.heads,
            softmax_precision=None if q.dtype == torch.float32 else _ONNX_FLOAT,
        )
        return mixed

    def _products(self, queries: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        q, v = self._heads(queries, "q").transpose(1, 2), self._heads(x, "v").transpose(1, 2)
        scores = (q @ self._heads(x, "k").permute(0, 2, 3, 1)).float()
        weights = (scores if bias is None else scores + bias.float()).softmax(-1)
        return (weights.to(v.dtype) @ v).transpose(1, 2).flatten(2)


class LeanBlock(nn.Module):
    """`Block` over `LeanAttention`, with layer scales folded into the weights before them."""

    def __init__(self, source: Block, *, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.activation = source.ln_1, source.ln_2, source.mlp[1]
        self.attention = LeanAttention(source.attention, fused=fused)
        first, last = source.mlp[0], source.mlp[2]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        self.register_buffer("in_weight", first.weight.detach().t().contiguous())
        self.register_buffer("in_bias", first.bias.detach())
        self.register_buffer("out_weight", last.weight.detach().t().contiguous())
        self.register_buffer("out_bias", last.bias.detach())
        self._fold(source)

    def _fold(self, source: Block) -> None:
        for scale, owner in ((source.ls_1, self.attention), (source.ls_2, self)):
            gamma = getattr(scale, "gamma", None)
            if gamma is not None:
                for name in ("out_weight", "out_bias"):
                    owner.register_buffer(name, owner.get_buffer(name) * gamma.detach())

    def forward(self, x: Tensor, bias: Tensor | None = None, *, queries: Tensor | None = None) -> Tensor:
        """(B, N, d) -> (B, N, d).

        Args:
            x: tokens.
            bias: as in `LeanAttention.forward`.
            queries: the tokens of x that are wanted, (B, M, d), when the result of others is not; then (B, M, d).
        """
        normed = self.ln_1(x)
        if queries is None:
            asking, y = normed, x
        else:
            asking, y = self.ln_1(queries), queries
        y = y + self.attention(asking, normed, bias)
        hidden = self.activation(self.ln_2(y) @ self.get_buffer("in_weight") + self.get_buffer("in_bias"))
        return y + (hidden @ self.get_buffer("out_weight") + self.get_buffer("out_bias"))
