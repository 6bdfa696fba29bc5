"""A frozen CLIP with DeAR's tokens, masks, projection and fusion (method.md §2 to §4).

B batch, N patch tokens, K attributes, d tower width, D joint width, L text length, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear_serve.backbone.clip import Clip
from dear_serve.backbone.text import MAX_EXTRA_TOKENS, end_of_text
from dear_serve.config import DearConfig, default_first_block
from dear_serve.dear.fusion import Fusion
from dear_serve.dear.joining import joining_block
from dear_serve.dear.mask import block_mask
from dear_serve.dear.roles import Roles
from dear_serve.dear.tokens import LearnableTokens
from dear_serve.errors import BundleError, ConfigError

__all__ = ["DearModel", "HeadStep", "resolve"]


def resolve(config: DearConfig, clip: Clip) -> DearConfig:
    """`config` with J and J_t as numbers (0 means the default rule), checked against the towers.

    Raises:
        ConfigError: a block outside the tower, or too many text tokens.
    """
    blocks: dict[str, int] = {}
    for field, layers in (
        ("first_block", clip.config.vision.layers),
        ("text_first_block", clip.config.text.layers),
    ):
        value = getattr(config, field) or default_first_block(layers)
        if not 1 <= value <= layers:
            raise ConfigError(f"{field} is {value}; the tower has blocks 1 to {layers}", field=field)
        blocks[field] = value
    if config.text_tokens > MAX_EXTRA_TOKENS:
        raise ConfigError(
            f"text_tokens is {config.text_tokens}; at most {MAX_EXTRA_TOKENS}", field="text_tokens"
        )
    return replace(config, first_block=blocks["first_block"], text_first_block=blocks["text_first_block"])


class HeadStep(NamedTuple):
    """One block of J..L: what goes in, (B, 1+N+K, d), and what comes out, the same (or (B, 1+K, d): `head_steps`)."""

    layer: int
    before: Tensor
    after: Tensor


class DearModel(nn.Module):
    """The adapted dual encoder. CLIP's parameters are frozen in place; only `adapter_state` is learned.

    Each tower is split at the block where tokens join: `*_trunk` is blocks 1..J-1, frozen and the same for zero-shot
    and adapted features, so its output can be cached; `*_head` is the rest.

    Args:
        clip: the base.
        roles: of its heads, for blocks J..L.
        config: of the method.

    Raises:
        ConfigError: roles of another J, another tower or another base.
    """

    def __init__(self, clip: Clip, roles: Roles, config: DearConfig) -> None:
        super().__init__()
        self.clip = clip.requires_grad_(False).eval()
        self.config = resolve(config, clip)
        self.roles = roles
        vision, text = clip.config.vision, clip.config.text
        self._check_roles(roles)
        count = len(self.config.attributes)
        self.attribute_tokens = LearnableTokens(count, vision.width, beta=self.config.beta)
        self.text_tokens = LearnableTokens(self.config.text_tokens, text.width, beta=self.config.beta)
        self.attribute_projection = nn.Parameter(clip.visual.proj.detach().clone())
        self.fusion = Fusion(count, alpha_cls=self.config.alpha_cls, tau=clip.tau)
        self.originals = 1 + vision.patches
        for layer in range(self.config.first_block, vision.layers + 1):
            mask = block_mask(
                roles,
                layer,
                attributes=self.config.attributes,
                originals=self.originals,
                variant=self.config.mask,
            )
            self.register_buffer(f"mask_{layer}", torch.from_numpy(mask), persistent=False)

    def _check_roles(self, roles: Roles) -> None:
        vision = self.clip.config.vision
        ours = (vision.layers, vision.heads, self.config.first_block)
        theirs = (roles.layers, roles.heads_per_layer, roles.first_block)
        if ours != theirs:
            raise ConfigError(
                f"roles are for {theirs[0]} blocks of {theirs[1]} heads from block {theirs[2]}, the model has "
                f"{ours[0]} of {ours[1]} from block {ours[2]}: compute roles for it (python -m training.roles)",
                field="roles",
            )

    # Image side -----------------------------------------------------------------------------------------------

    def image_trunk(self, pixels: Tensor) -> Tensor:
        """Frozen blocks 1..J-1: (B, 3, S, S) -> (B, 1+N, d)."""
        visual = self.clip.visual
        return visual.run(visual.embed(pixels), 1, self.config.first_block - 1)

    def image_head(self, trunk: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks J..L with attribute tokens under the role masks.

        Args:
            trunk: (B, 1+N, d) from `image_trunk`.

        Returns:
            f_cls (B, D) and f_1..f_K (B, K, D), L2-normalised.
        """
        visual, y = self.clip.visual, trunk
        for step in self.head_steps(trunk, pooled=True):
            y = step.after
        attributes = visual.ln_post(y[:, 1:]) @ self.attribute_projection
        return F.normalize(visual.pool(y), dim=-1), F.normalize(attributes, dim=-1)

    def head_steps(self, trunk: Tensor, *, pooled: bool = False) -> Iterator[HeadStep]:
        """Blocks J..L one after the other, from `image_trunk`'s output (B, 1+N, d).

        Args:
            trunk: see above.
            pooled: in block L compute only what the features need, CLS and the attribute tokens: (B, 1+K, d).
        """
        x, start = trunk, self.attribute_tokens.first(trunk.shape[0])
        if self.config.token_start == "class":
            start = start + x[:, :1]
        tokens, last = start, self.clip.config.vision.layers
        for layer in range(self.config.first_block, last + 1):
            if layer > self.config.first_block:
                tokens = self.attribute_tokens.mix(tokens, start)
            before, mask, queries = torch.cat([x, tokens], dim=1), self.get_buffer(f"mask_{layer}"), None
            if pooled and layer == last:
                mask = torch.cat([mask[:, :1], mask[:, self.originals :]], dim=1)
                queries = torch.cat([x[:, :1], tokens], dim=1)
            block = self.clip.visual.blocks[layer - 1]
            if queries is None and torch.is_grad_enabled() and not x.requires_grad:
                x, tokens = joining_block(block, x, tokens, mask)
                yield HeadStep(layer, before, torch.cat([x, tokens], dim=1))
                continue
            y = block(before, mask, queries)
            yield HeadStep(layer, before, y)
            x, tokens = y[:, : self.originals], y[:, self.originals :]

    def image_features(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Adapted features of pictures (B, 3, S, S): f_cls (B, D), f_k (B, K, D), L2-normalised."""
        return self.image_head(self.image_trunk(pixels))

    def zero_shot_head(self, trunk: Tensor) -> Tensor:
        """Frozen CLIP's image feature from `image_trunk`'s output: (B, D), L2-normalised."""
        visual = self.clip.visual
        x = visual.run(trunk, self.config.first_block, len(visual.blocks) - 1)
        return F.normalize(visual.pool(visual.blocks[-1](x, None, x[:, :1])), dim=-1)

    def zero_shot_image(self, pixels: Tensor) -> Tensor:
        """Frozen CLIP's image features, (B, D), L2-normalised."""
        return self.clip.encode_image(pixels)

    # Text side ------------------------------------------------------------------------------------------------

    def text_trunk(self, tokens: Tensor) -> Tensor:
        """Frozen blocks 1..J_t-1: int64 (B, L) -> (B, L, d)."""
        text = self.clip.text
        return text.run(text.embed(tokens), 1, self.config.text_first_block - 1)

    def text_head(self, trunk: Tensor, position: Tensor) -> Tensor:
        """Blocks J_t..L_t with K_t tokens after the start token; no role mask.

        Args:
            trunk: (B, L, d) from `text_trunk`.
            position: end-of-text of each text, int64 (B,), before the tokens join.

        Returns:
            g (B, D), L2-normalised.
        """
        text, count = self.clip.text, self.config.text_tokens
        start, rest = trunk[:, :1], trunk[:, 1:]
        tokens = self.text_tokens.first(trunk.shape[0])
        mask = text.causal_mask(trunk.shape[1] + count)
        for layer in range(self.config.text_first_block, self.clip.config.text.layers):
            y = text.blocks[layer - 1](torch.cat([start, tokens, rest], dim=1), mask)
            start, tokens, rest = y[:, :1], self.text_tokens.mix(y[:, 1 : 1 + count]), y[:, 1 + count :]
        x, end = torch.cat([start, tokens, rest], dim=1), position + count
        rows = torch.arange(x.shape[0], device=x.device)
        asking = x[rows, end].unsqueeze(1)  # in the last block only end-of-text
        y = text.blocks[-1](x, mask[end][:, None, None], asking)
        return F.normalize(text.pool(y, torch.zeros_like(end)), dim=-1)

    def text_features(self, tokens: Tensor) -> Tensor:
        """Adapted features of texts int64 (B, L): g (B, D), L2-normalised."""
        return self.text_head(self.text_trunk(tokens), end_of_text(tokens))

    def zero_shot_text(self, tokens: Tensor) -> Tensor:
        """Frozen CLIP's text features, (B, D), L2-normalised."""
        return self.clip.encode_text(tokens)

    # Fusion and state -----------------------------------------------------------------------------------------

    def fuse(self, cls: Tensor, attributes: Tensor, class_features: Tensor) -> tuple[Tensor, Tensor]:
        """Fused logits (B, C) and contributions (B, C, K+1); see `Fusion.forward`."""
        logits, contributions = self.fusion(cls, attributes, class_features)
        return logits, contributions

    def adapter_state(self) -> dict[str, Tensor]:
        """Everything that is learned, by name: what `adapter.safetensors` holds."""
        return {name: p.detach() for name, p in self.named_parameters() if not name.startswith("clip.")}

    def load_adapter_state(self, state: dict[str, Tensor]) -> None:
        """Take what `adapter_state` gave.

        Raises:
            BundleError: a tensor is missing, unknown or has another shape; the message names it.
        """
        ours = {name: p for name, p in self.named_parameters() if not name.startswith("clip.")}
        if set(ours) != set(state):
            raise BundleError(f"adapter tensors differ from the model's: {sorted(set(ours) ^ set(state))}")
        for name, parameter in ours.items():
            if parameter.shape != state[name].shape:
                raise BundleError(
                    f"adapter tensor {name} is {tuple(state[name].shape)}, the model has {tuple(parameter.shape)}"
                )
            with torch.no_grad():
                parameter.copy_(state[name])
