"""The role-based attention mask: who sees whom, per head (method.md §3). NumPy only.

Tokens are ordered CLS, N patches ("original"), then K attribute tokens; N' = 1 + N + K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from dear_serve.dear.roles import Roles

__all__ = ["MaskVariant", "block_mask", "head_mask"]

MaskVariant = Literal["paper", "one-way"]


def head_mask(
    role: str, *, core: int | None, originals: int, attributes: int, variant: MaskVariant = "paper"
) -> npt.NDArray[np.bool_]:
    """Mask of one head, True where a query (row) sees a key (column).

    The paper blocks originals from attribute tokens in generalization heads; it does not say whether attribute tokens
    see each other there. They do here (ours): nothing of theirs reaches an original that way.

    Args:
        role: "generalization", "mixed" or "attribute".
        core: index 0..K-1 of the attribute this head is an expert of; None for "other experts".
        originals: 1 + N.
        attributes: K.
        variant: "paper", or "one-way" (ours): originals never see attribute tokens.

    Returns:
        bool (N', N'). Every token sees itself.
    """
    size = originals + attributes
    mask = np.ones((size, size), dtype=np.bool_)
    old, new = slice(0, originals), slice(originals, size)
    if role == "attribute" and core is not None:
        mask[:, new] = mask[new, :] = False
        mask[old, originals + core] = mask[originals + core, old] = True
        np.fill_diagonal(mask, True)
    elif role != "mixed":
        mask[old, new] = mask[new, old] = False
    if variant == "one-way":
        mask[old, new] = False
    return mask


def block_mask(
    roles: Roles, layer: int, *, attributes: Sequence[str], originals: int, variant: MaskVariant = "paper"
) -> npt.NDArray[np.bool_]:
    """Masks of all heads of one block, bool (H, N', N').

    Args:
        roles: of the base.
        layer: the block, counted from 1.
        attributes: names of the K attribute tokens, in order.
        originals: 1 + N.
        variant: see `head_mask`.
    """
    masks = []
    for head in range(roles.heads_per_layer):
        attribute = roles.core_attribute(layer, head)
        masks.append(
            head_mask(
                roles.at(layer, head).role,
                core=attributes.index(attribute) if attribute in attributes else None,
                originals=originals,
                attributes=len(attributes),
                variant=variant,
            )
        )
    return np.stack(masks)
