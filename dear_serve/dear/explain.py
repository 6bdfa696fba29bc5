"""Where each attribute's token looks: the attention of its expert heads, as the reference for the explain graph (ours).

B batch, N patch tokens, H heads, K attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dear_serve.dear.roles import Roles

if TYPE_CHECKING:
    from torch import Tensor

    from dear_serve.dear.model import DearModel

__all__ = ["attention_maps", "head_shares"]


def head_shares(roles: Roles, attributes: Sequence[str]) -> npt.NDArray[np.float32]:
    """How much each head counts in an attribute's map: (L - J + 1, H, K) float32.

    The attribute's core heads share 1 evenly; where it has none, the mixed heads do; where there are none either, all
    are 0. NumPy only.
    """
    shares = np.zeros(
        (roles.layers - roles.first_block + 1, roles.heads_per_layer, len(attributes)), np.float32
    )
    mixed = [(head.layer, head.head) for head in roles.heads if head.role == "mixed"]
    for k, attribute in enumerate(attributes):
        counted = roles.experts(attribute) or mixed
        for layer, head in counted:
            shares[layer - roles.first_block, head, k] = 1 / len(counted)
    return shares


def attention_maps(model: DearModel, pixels: Tensor) -> Tensor:
    """Softmax weights from each attribute's token to the patches, averaged over the heads of `head_shares`.

    Args:
        model: the adapted model.
        pixels: (B, 3, S, S), normalised.

    Returns:
        (B, K, N), N in rows from the top left. A row sums to at most 1: what the token gives to CLS and to attribute
        tokens is left out.
    """
    import torch

    from dear_serve.backbone.attention import Block

    first = model.originals
    shares = torch.from_numpy(head_shares(model.roles, model.config.attributes)).to(pixels)
    total = pixels.new_zeros(len(pixels), len(model.config.attributes), first - 1)
    for step in model.head_steps(model.image_trunk(pixels)):
        block = model.clip.visual.blocks[step.layer - 1]
        assert isinstance(block, Block)
        mask = model.get_buffer(f"mask_{step.layer}")
        weights = block.attention.weights(block.ln_1(step.before), mask, first=first)  # (B, H, K, N')
        share = shares[step.layer - model.config.first_block]
        total = total + torch.einsum("bhkn,hk->bkn", weights[..., 1:first], share)
    return total
