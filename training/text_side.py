"""The trained classes' prompts in the loop: cut to the longest end-of-text, frozen blocks once.

C classes, M templates, L text length, d tower width, D joint width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear_serve.backbone.text import end_of_text
from dear_serve.dear.model import DearModel
from dear_serve.labels import fill
from dear_serve.tokenizer import Tokenizer, token_lengths
from training.execution import Execution
from training.memory import activation_bytes, chunk_size, in_chunks

__all__ = ["TextSide"]

_AT_ONCE = 256  # prompts through the frozen blocks


class TextSide:
    """The trained classes' prompts, cut to the longest end-of-text, through the frozen text blocks once.

    Args:
        model: gives the frozen blocks.
        tokenizer: of the base.
        names: C class names.
        templates: M texts with one {}; a class feature is the normalised mean over them (as in `labels`).
        execution: with several processes each holds its share of the classes.
    """

    def __init__(
        self,
        model: DearModel,
        tokenizer: Tokenizer,
        names: Sequence[str],
        templates: Sequence[str],
        *,
        execution: Execution | None = None,
    ) -> None:
        self.execution = execution or Execution()
        self.classes, self.templates = len(names), len(templates)
        world = self.execution.world
        tokens = tokenizer([fill(template, name) for name in names for template in templates])
        cut = torch.from_numpy(np.ascontiguousarray(tokens[:, : int(token_lengths(tokens).max())]))
        share = torch.tensor(world.share(self.classes))
        cut = cut.unflatten(0, (self.classes, self.templates))[share].flatten(0, 1)
        cut = cut.to(model.clip.logit_scale.device)
        self.position = end_of_text(cut)
        trunks, frozen = [], []
        with torch.no_grad():
            for part in cut.split(_AT_ONCE):
                trunks.append(model.text_trunk(part))
                frozen.append(_rest(model, trunks[-1], end_of_text(part)))
            self.trunk = torch.cat(trunks)  # (C*M, L, d) of the share
            self.frozen = self._classes(torch.cat(frozen))  # (C, D)
        text, config = model.clip.config.text, model.config
        self.activation_bytes = activation_bytes(
            text,
            tokens=cut.shape[1] + config.text_tokens,
            blocks=text.layers - config.text_first_block + 1,
            item=2 if self.execution.precision == "bf16" else 4,
        )
        """Estimated, that autograd keeps of one prompt."""

    @property
    def chunk(self) -> int:
        """Prompts that are run at a time; fewer than there are: gradient checkpointing."""
        return chunk_size(len(self.trunk), self.activation_bytes, keep=self.execution.keep)

    def features(self, model: DearModel) -> Tensor:
        """g, (C, D), L2-normalised, float32, with gradients to the text tokens."""

        def run(rows: Tensor) -> tuple[Tensor]:
            with self.execution.autocast(rows.device):
                return (model.text_head(self.trunk[rows], self.position[rows]),)

        rows = torch.arange(len(self.trunk), device=self.trunk.device)
        return self._classes(in_chunks(run, rows, self.chunk)[0].float())

    def _classes(self, features: Tensor) -> Tensor:
        """All processes' class features from this one's prompts', (C*M, D) -> (C, D)."""
        own = F.normalize(features.unflatten(0, (-1, self.templates)).mean(1), dim=-1)
        return self.execution.world.gather(own, self.classes)


def _rest(model: DearModel, trunk: Tensor, position: Tensor) -> Tensor:
    """Frozen CLIP's text features (B, D), L2-normalised, from `DearModel.text_trunk`'s output (B, L, d)."""
    text = model.clip.text
    x = text.run(trunk, model.config.text_first_block, text.config.layers)
    return F.normalize(text.pool(x, position), dim=-1)
