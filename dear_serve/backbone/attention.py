"""Multi-head attention with an optional mask per head, and the transformer block around it.

B batch, N tokens, H heads, d tower width, e = d / H width of one head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear_serve.config import TextConfig, VisionConfig

__all__ = ["Attention", "Block", "LayerScale", "QuickGELU", "make_blocks"]


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), the activation of OpenAI's CLIP weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, elementwise."""
        return x * torch.sigmoid(1.702 * x)


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return x * self.gamma


class Attention(nn.Module):
    """Self-attention whose heads may each see different tokens.

    Args:
        width: d.
        heads: H; divides d.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None, queries: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: (B, N, d).
            mask: boolean, True where a query (row) sees a key (column): (M, N) for all heads, (H, M, N), or
                (B, 1 or H, M, N). No row may be all False.
            queries: the tokens that ask, (B, M, d); all of `x` (M = N) by default.

        Returns:
            (B, M, d).
        """
        mixed = self.mix_values(x, mask, queries)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def mix_values(self, x: Tensor, mask: Tensor | None = None, queries: Tensor | None = None) -> Tensor:
        """Each head's attention-weighted values before the output projection, (B, H, M, e); see `forward`."""
        if queries is not None and self.heads * queries.shape[1] < x.shape[-1]:
            return self._mix_for_few(x, mask, queries)
        q, k, v = self.project(x, queries)
        if x.device.type == "cpu" and torch.is_grad_enabled() and q.requires_grad:
            # torch's fused CPU attention has a slow backward (2.3 times the step of a 6-block tower, torch 2.14).
            scores = (q * self.head_width**-0.5) @ k.transpose(-1, -2)
            if mask is not None:
                scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
            return scores.softmax(-1, dtype=scores.dtype) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def _mix_for_few(self, x: Tensor, mask: Tensor | None, queries: Tensor) -> Tensor:
        """`mix_values` for queries so few that no key or value is computed.

        q.(W x + b) is (W^T q).x and the same number for every key, which a softmax does not see; the weights sum to 1,
        so the mixed values are W times the mixed tokens, plus b. That is H M products with a token instead of 2 d.
        """
        batch, count, d = queries.shape
        heads = (self.heads, self.head_width)
        weight_q, weight_k, weight_v = self.in_proj.weight.split(d)
        bias_q, _, bias_v = self.in_proj.bias.split(d)
        q = F.linear(queries, weight_q, bias_q).unflatten(-1, heads) * self.head_width**-0.5  # (B, M, H, e)
        asked = q.permute(2, 0, 1, 3).flatten(1, 2) @ weight_k.unflatten(0, heads)  # (H, B M, d)
        asked = asked.unflatten(1, (batch, count)).transpose(0, 1).flatten(1, 2)  # (B, H M, d)
        scores = (asked @ x.transpose(1, 2)).unflatten(1, (self.heads, count))  # (B, H, M, N)
        if mask is not None:
            scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
        read = scores.softmax(-1, dtype=scores.dtype).flatten(1, 2) @ x  # (B, H M, d)
        read = read.unflatten(1, (self.heads, count)).transpose(0, 1).flatten(1, 2)  # (H, B M, d)
        mixed = read @ weight_v.unflatten(0, heads).transpose(1, 2) + bias_v.unflatten(0, heads).unsqueeze(1)
        return mixed.unflatten(1, (batch, count)).transpose(0, 1)

    def project(self, x: Tensor, queries: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, M, e), keys and values (B, H, N, e); see `forward`."""
        shape = (self.heads, self.head_width)
        if queries is None:
            q, k, v = self.in_proj(x).unflatten(-1, (3, *shape)).permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        d = self.heads * self.head_width
        weight, bias = self.in_proj.weight, self.in_proj.bias
        q = F.linear(queries, weight[:d], bias[:d]).unflatten(-1, shape).transpose(1, 2)
        k, v = F.linear(x, weight[d:], bias[d:]).unflatten(-1, (2, *shape)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def weights(self, x: Tensor, mask: Tensor | None = None, *, first: int = 0) -> Tensor:
        """Softmax weights of the queries from token `first` on: (B, N, d) -> (B, H, N - first, N).

        Args:
            x: (B, N, d), already normalised.
            mask: as in `forward`.
            first: index of the first token that asks.
        """
        q, k, _ = self.in_proj(x).unflatten(-1, (3, self.heads, self.head_width)).unbind(2)
        scores = (q[:, first:].transpose(1, 2) * self.head_width**-0.5) @ k.permute(0, 2, 3, 1)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., first:, :], torch.finfo(scores.dtype).min)
        return scores.softmax(-1)

    def head_outputs(self, x: Tensor, token: int = 0) -> Tensor:
        """What each head alone adds at one token, without the output bias (which belongs to no head).

        Args:
            x: (B, N, d), already normalised.
            token: index of the token (0 is CLS).

        Returns:
            (B, H, d); the sum over H plus the output bias is `forward(x)[:, token]`.
        """
        mixed = self.mix_values(x)[:, :, token]  # (B, H, e)
        weight = self.out_proj.weight.unflatten(1, (self.heads, self.head_width))  # (d, H, e)
        return torch.einsum("bhe,dhe->bhd", mixed, weight)


class Block(nn.Module):
    """One pre-norm transformer block: x + ls_1(attention(ln_1 x)), then x + ls_2(mlp(ln_2 x))."""

    def __init__(
        self, *, width: int, heads: int, mlp_width: int, quick_gelu: bool = False, layer_scale: bool = False
    ) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.ls_1 = LayerScale(width) if layer_scale else nn.Identity()
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width),
            QuickGELU() if quick_gelu else nn.GELU(),
            nn.Linear(mlp_width, width),
        )
        self.ls_2 = LayerScale(width) if layer_scale else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None, queries: Tensor | None = None) -> Tensor:
        """(B, N, d) -> (B, M, d); `mask` as in `Attention.forward`.

        `queries` (B, M, d) are the tokens of `x` whose output is wanted (default: all, M = N): in a last block the
        others need no query, no projection and no MLP, which are five sixths of its work.
        """
        if queries is None:
            x = x + self.ls_1(self.attention(self.ln_1(x), mask))
        else:
            x = queries + self.ls_1(self.attention(self.ln_1(x), mask, self.ln_1(queries)))
        out: Tensor = x + self.ls_2(self.mlp(self.ln_2(x)))
        return out


def make_blocks(config: VisionConfig | TextConfig, *, quick_gelu: bool) -> nn.ModuleList:
    """The blocks of a tower."""
    return nn.ModuleList(
        Block(
            width=config.width,
            heads=config.heads,
            mlp_width=config.mlp_width,
            quick_gelu=quick_gelu,
            layer_scale=config.layer_scale,
        )
        for _ in range(config.layers)
    )
