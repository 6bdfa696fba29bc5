"""Traceable modules, one per graph of `io_spec`, with constants folded and nothing computed that nobody reads.

B batch, N patch tokens, K attributes, L text length, d tower width, D joint width, C classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear_serve.backbone.text import TextTower, end_of_text
from dear_serve.backbone.vision import VisionTower
from dear_serve.dear.explain import head_shares
from dear_serve.dear.model import DearModel
from export.lean import LeanBlock, bias_from_mask

__all__ = [
    "ClassHead",
    "Classifier",
    "Explain",
    "Fusion",
    "Image",
    "Joint",
    "Text",
    "ZeroShotImage",
    "ZeroShotText",
    "wrap",
]


def _unit(x: Tensor) -> Tensor:
    """L2-normalised along the last axis; torch's own normalize becomes an Expand with its shape arithmetic."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min(1e-12)


class _ImageTower(nn.Module):
    """What the adapted and the frozen image tower share."""

    def __init__(self, tower: VisionTower, *, fused: bool) -> None:
        super().__init__()
        self.patch_embedding, self.ln_pre, self.ln_post = tower.patch_embedding, tower.ln_pre, tower.ln_post
        position = tower.positional_embedding.detach().clone()
        position[0] += tower.class_embedding.detach()
        self.register_buffer("position", position)
        self.register_buffer("proj", tower.proj.detach())
        self.blocks = nn.ModuleList(LeanBlock(block, fused=fused) for block in tower.blocks)  # type: ignore[arg-type]

    def embed(self, pixels: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, 1+N, d): a row of zeros joins in front, CLS is in the positions."""
        pixels = pixels.to(self.patch_embedding.weight.dtype)
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        return self.ln_pre(F.pad(patches, (0, 0, 1, 0)) + self.get_buffer("position"))

    def feature(self, cls: Tensor) -> Tensor:
        """CLS after the last block, (B, 1, d) -> (B, D), L2-normalised."""
        return _unit((self.ln_post(cls.float()) @ self.get_buffer("proj")).squeeze(1))


class ZeroShotImage(_ImageTower):
    """Graph zero_shot_image: frozen CLIP's image tower."""

    def __init__(self, model: DearModel, *, fused: bool) -> None:
        super().__init__(model.clip.visual, fused=fused)

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, D)."""
        x = self.embed(pixels)
        for block in self.blocks[:-1]:
            x = block(x)
        return self.feature(self.blocks[-1](x, queries=x[:, :1]))


class _AdaptedTower(_ImageTower):
    """The adapted tower with its masks, one constant per block that blocks anything."""

    def __init__(self, model: DearModel, *, fused: bool) -> None:
        super().__init__(model.clip.visual, fused=fused)
        self.first, self.originals = model.config.first_block, model.originals
        tokens = model.attribute_tokens
        self.keep = 1 - tokens.beta
        self.register_buffer("first_tokens", tokens.tokens.detach())
        self.register_buffer("mixed_in", tokens.beta * tokens.tokens.detach())
        self.class_share = tokens.beta if model.config.token_start == "class" else None
        self.register_buffer("attribute_proj", model.attribute_projection.detach())
        last = len(self.blocks)
        for layer in range(self.first, last + 1):
            mask = model.get_buffer(f"mask_{layer}")
            if layer == last:  # only CLS and the attribute tokens ask in the last block
                mask = torch.cat([mask[:, :1], mask[:, self.originals :]], dim=1)
            bias = None if bool(mask.all()) else bias_from_mask(mask)
            self.register_buffer(f"mask_block_{layer}", bias)

    def trunk(self, x: Tensor) -> Tensor:
        """Blocks 1..J-1: (B, 1+N, d) -> (B, 1+N, d)."""
        for block in self.blocks[: self.first - 1]:
            x = block(x)
        return x

    def adapted(self, trunk: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks J..L and what follows: (B, 1+N, d) -> (B, D), (B, K, D)."""
        *_, (_, x) = self.inputs(trunk, len(self.blocks))
        return self.finish(x)

    def finish(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Block L and what follows: (B, 1+N+K, d) -> (B, D), (B, K, D)."""
        tokens = x[:, self.originals :]
        bias = getattr(self, f"mask_block_{len(self.blocks)}")
        y = self.blocks[-1](x, bias, queries=torch.cat([x[:, :1], tokens], dim=1))
        attributes = self.ln_post(y[:, 1:].float()) @ self.get_buffer("attribute_proj")
        return self.feature(y[:, :1]), _unit(attributes)

    def frozen(self, trunk: Tensor) -> Tensor:
        """Blocks J..L without attribute tokens: (B, 1+N, d) -> (B, D)."""
        x = trunk
        for block in self.blocks[self.first - 1 : -1]:
            x = block(x)
        return self.feature(self.blocks[-1](x, queries=x[:, :1]))

    def inputs(self, trunk: Tensor, last: int) -> Iterator[tuple[int, Tensor]]:
        """What enters each of the blocks J..`last`, (B, 1+N+K, d)."""
        x, tokens = trunk, self.get_buffer("first_tokens").expand(trunk.shape[0], -1, -1)
        mixed_in = self.get_buffer("mixed_in")
        if self.class_share is not None:
            tokens, mixed_in = tokens + x[:, :1], mixed_in + self.class_share * x[:, :1]
        for layer in range(self.first, last + 1):
            joined = torch.cat([x, tokens], dim=1)
            yield layer, joined
            if layer < last:
                y = self.blocks[layer - 1](joined, getattr(self, f"mask_block_{layer}"))
                x = y[:, : self.originals]
                tokens = mixed_in + self.keep * y[:, self.originals :]


class Image(_AdaptedTower):
    """Graph image: adapted features."""

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, S, S) -> (B, D), (B, K, D)."""
        return self.adapted(self.trunk(self.embed(pixels)))


class Joint(_AdaptedTower):
    """Graph joint: frozen and adapted features of the same pictures; blocks 1..J-1 run once.

    With the one-way mask nothing reaches CLS from the attribute tokens: its feature is the frozen one, and the joint
    graph is the adapted graph.
    """

    def __init__(self, model: DearModel, *, fused: bool) -> None:
        super().__init__(model, fused=fused)
        self.one_way = model.config.mask == "one-way"

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, 3, S, S) -> zero-shot (B, D), (B, D), (B, K, D)."""
        x = self.trunk(self.embed(pixels))
        cls, attributes = self.adapted(x)
        return (cls.clone() if self.one_way else self.frozen(x)), cls, attributes


class Explain(_AdaptedTower):
    """Graph explain: where each attribute's token looks (`dear.explain`); stops at the last block that counts."""

    def __init__(self, model: DearModel, *, fused: bool) -> None:
        super().__init__(model, fused=fused)
        shares = head_shares(model.roles, model.config.attributes)
        counted = [layer for layer, share in enumerate(shares, self.first) if share.any()]
        self.last = max(counted, default=self.first)
        for layer in range(self.first, self.last + 1):
            share = torch.from_numpy(shares[layer - self.first])  # (H, K)
            self.register_buffer(f"share_{layer}", share.unsqueeze(-1) if layer in counted else None)
            rows = model.get_buffer(f"mask_{layer}")[:, self.originals :]
            self.register_buffer(f"rows_{layer}", None if bool(rows.all()) else bias_from_mask(rows))
        self.width = len(model.config.attributes)

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, K, N)."""
        return self.maps(self.inputs(self.trunk(self.embed(pixels)), self.last))

    def maps(self, inputs: Iterable[tuple[int, Tensor]]) -> Tensor:
        """From what enters each of the blocks from J on, as `inputs` gives it: (B, K, N)."""
        parts: list[Tensor] = []
        tail = self.get_buffer("first_tokens")
        for layer, tail in inputs:
            share = getattr(self, f"share_{layer}", None)
            if share is not None:
                block = self.blocks[layer - 1]
                assert isinstance(block, LeanBlock)
                weights = self._weights(block, block.ln_1(tail), getattr(self, f"rows_{layer}"))
                parts.append((weights * share).sum(1))
        if not parts:  # no head counts for any attribute
            return tail[:, 1 : self.originals, : self.width].transpose(1, 2) * 0.0
        return sum(parts[1:], start=parts[0])

    def _weights(self, block: LeanBlock, normed: Tensor, bias: Tensor | None) -> Tensor:
        """Softmax weights of the attribute tokens over the patches, float32: (B, 1+N+K, d) -> (B, H, K, N)."""
        attention = block.attention
        q, k = (
            (x @ attention.get_buffer(f"{name}_weight") + attention.get_buffer(f"{name}_bias")).unflatten(
                -1, (attention.heads, attention.head_width)
            )
            for name, x in (("q", normed[:, self.originals :]), ("k", normed))
        )
        scale = attention.head_width**-0.5 if attention.fused else 1.0  # otherwise it is in the projection
        scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).float() * scale
        return (scores if bias is None else scores + bias.float()).softmax(-1)[..., 1 : self.originals]


class _TextTower(nn.Module):
    """What the adapted and the frozen text tower share."""

    def __init__(self, tower: TextTower, *, fused: bool, extra: int) -> None:
        super().__init__()
        self.token_embedding, self.ln_final = tower.token_embedding, tower.ln_final
        self.register_buffer("position", tower.positional_embedding.detach())
        self.register_buffer("proj", tower.projection.detach())
        room = tower.config.context_length + extra
        self.register_buffer("causal", bias_from_mask(tower.causal_mask(room)))
        self.blocks = nn.ModuleList(LeanBlock(block, fused=fused) for block in tower.blocks)  # type: ignore[arg-type]

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 (B, L) -> (B, L, d)."""
        return self.token_embedding(tokens) + self.get_buffer("position")[: tokens.shape[1]]

    def causal_bias(self, length: int) -> Tensor:
        """(length, length)."""
        return self.get_buffer("causal")[:length, :length]

    def feature(self, x: Tensor, bias: Tensor, position: Tensor) -> Tensor:
        """Last block and pooling at end-of-text alone: (B, L, d), (L, L), int64 (B,) -> (B, D), L2-normalised."""
        rows = torch.arange(x.shape[0])
        ends = x[rows, position].unsqueeze(1)
        seen = bias[position].unsqueeze(1).unsqueeze(1)  # (B, 1, 1, L)
        y = self.ln_final(self.blocks[-1](x, seen, queries=ends).float()) @ self.get_buffer("proj")
        return _unit(y.squeeze(1))


class ZeroShotText(_TextTower):
    """Graph zero_shot_text: frozen CLIP's text tower."""

    def __init__(self, model: DearModel, *, fused: bool) -> None:
        super().__init__(model.clip.text, fused=fused, extra=0)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (B, L) -> (B, D)."""
        x, bias = self.embed(tokens), self.causal_bias(tokens.shape[1])
        for block in self.blocks[:-1]:
            x = block(x, bias)
        return self.feature(x, bias, end_of_text(tokens))


class Text(_TextTower):
    """Graph text: the adapted tower, with learnable tokens after the start token from block J_t on."""

    def __init__(self, model: DearModel, *, fused: bool) -> None:
        super().__init__(model.clip.text, fused=fused, extra=model.config.text_tokens)
        self.extra = model.config.text_tokens
        self.first = model.config.text_first_block
        self.keep = 1 - model.text_tokens.beta
        self.register_buffer("first_tokens", model.text_tokens.tokens.detach())
        self.register_buffer("mixed_in", model.text_tokens.beta * model.text_tokens.tokens.detach())

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (B, L) -> (B, D)."""
        bias = self.causal_bias(tokens.shape[1])
        trunk, position = self.trunk(self.embed(tokens), bias), end_of_text(tokens)
        return self.adapted(trunk, position) if self.extra else self.frozen(trunk, bias, position)

    def trunk(self, x: Tensor, bias: Tensor) -> Tensor:
        """Blocks 1..J_t-1: (B, L, d) -> (B, L, d)."""
        for block in self.blocks[: self.first - 1]:
            x = block(x, bias)
        return x

    def frozen(self, trunk: Tensor, bias: Tensor, position: Tensor) -> Tensor:
        """Blocks J_t..L_t without learned tokens: (B, L, d), (L, L), int64 (B,) -> (B, D)."""
        x = trunk
        for block in self.blocks[self.first - 1 : -1]:
            x = block(x, bias)
        return self.feature(x, bias, position)

    def adapted(self, trunk: Tensor, position: Tensor) -> Tensor:
        """Blocks J_t..L_t with them: (B, L, d), int64 (B,) -> (B, D)."""
        learned = self.get_buffer("first_tokens").expand(trunk.shape[0], -1, -1)
        x = torch.cat([trunk[:, :1], learned, trunk[:, 1:]], dim=1)
        bias = self.causal_bias(trunk.shape[1] + self.extra)
        for block in self.blocks[self.first - 1 : -1]:
            y = block(x, bias)
            learned = self.get_buffer("mixed_in") + self.keep * y[:, 1 : 1 + self.extra]
            x = torch.cat([y[:, :1], learned, y[:, 1 + self.extra :]], dim=1)
        return self.feature(x, bias, position + self.extra)


class Fusion(nn.Module):
    """Graph fusion: features to fused logits, tau and alpha folded into one constant (K+1, 1)."""

    def __init__(self, model: DearModel) -> None:
        super().__init__()
        self.register_buffer("weights", (model.fusion.tau * model.fusion.alpha.detach()).unsqueeze(-1))

    def forward(self, cls: Tensor, attributes: Tensor, class_features: Tensor) -> tuple[Tensor, Tensor]:
        """(B, D), (B, K, D), (C, D) -> logits (B, C), contributions (B, C, K+1)."""
        weighted = torch.cat([cls.unsqueeze(1), attributes], dim=1) * self.get_buffer("weights")
        contributions = class_features @ weighted.transpose(1, 2)
        return contributions.sum(-1), contributions


class ClassHead(nn.Module):
    """Features to fused logits over fixed classes, whose features are folded into one constant.

    The fused feature tau * sum_k alpha_k f_k is formed first, so its product with the classes is one matrix product.
    """

    def __init__(self, model: DearModel, class_features: Tensor) -> None:
        super().__init__()
        weights = model.fusion.tau * model.fusion.alpha.detach()
        self.register_buffer("cls_weight", weights[0] * torch.ones(1))
        self.register_buffer("attribute_weights", weights[1:].unsqueeze(-1).clone())
        self.register_buffer("class_weights", class_features.detach().t().contiguous())

    def forward(self, cls: Tensor, attributes: Tensor) -> Tensor:
        """(B, D), (B, K, D) -> (B, C)."""
        weighted = (attributes * self.get_buffer("attribute_weights")).sum(1)
        return (cls * self.get_buffer("cls_weight") + weighted) @ self.get_buffer("class_weights")


class Classifier(nn.Module):
    """Graph classifier: pixels to fused logits over fixed classes."""

    def __init__(self, model: DearModel, class_features: Tensor, *, fused: bool) -> None:
        super().__init__()
        self.image, self.head = Image(model, fused=fused), ClassHead(model, class_features)

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, 3, S, S) -> (B, C)."""
        logits: Tensor = self.head(*self.image(pixels))
        return logits


def wrap(model: DearModel, class_features: Tensor, *, fused: bool) -> dict[str, nn.Module]:
    """One module per graph of `io_spec.ALL_GRAPHS`, in evaluation mode.

    Args:
        model: the adapted model.
        class_features: adapted text features of the trained classes, (C, D), L2-normalised.
        fused: see `LeanAttention`.
    """
    modules: dict[str, nn.Module] = {
        "image": Image(model, fused=fused),
        "text": Text(model, fused=fused),
        "fusion": Fusion(model),
        "classifier": Classifier(model, class_features, fused=fused),
        "zero_shot_image": ZeroShotImage(model, fused=fused),
        "zero_shot_text": ZeroShotText(model, fused=fused),
        "joint": Joint(model, fused=fused),
        "explain": Explain(model, fused=fused),
    }
    return {name: module.eval() for name, module in modules.items()}
