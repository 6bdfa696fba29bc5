"""What is asked of each picture, and what is answered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from dear_serve.errors import DearError, InputError, LabelError
from dear_serve.labels import Prediction

__all__ = ["Mode", "PictureResult", "Question"]

Mode = Literal["adapted", "zero_shot"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Which of these labels is it, and what else to say of it.

    Raises:
        InputError: an unknown mode (code "unknown_mode"), a threshold that is no cosine ("bad_field").
        LabelError: `top_k` cannot be used.
    """

    labels: Sequence[str] | None = None
    """Any names; None: the trained classes."""
    templates: Sequence[str] | None = None
    """Texts with one "{}" for the label; None: the bundle's."""
    mode: Mode = "adapted"
    """"adapted": fused logits (method.md §4); "zero_shot": frozen CLIP."""
    top_k: int = 5
    """Predictions a picture; all labels where there are fewer."""
    none_threshold: float | None = None
    """Lowest fused cosine of a label that fits, -1 to 1; None: the bundle's own, if it has one. Adapted mode only."""
    heatmaps: bool = False
    """Also draw where each attribute looks."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise unknown_mode(self.mode)
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 1:
            raise LabelError(
                f"top_k is {self.top_k!r}; a whole number of 1 or more", code="bad_top_k", field="top_k"
            )
        low = self.none_threshold
        if low is not None and not (math.isfinite(low) and -1 <= low <= 1):
            raise InputError(
                f"none_threshold is {low}; a cosine, -1 to 1", code="bad_field", field="none_threshold"
            )


@dataclass(frozen=True, kw_only=True)
class PictureResult:
    """The answer for one picture: predictions, best first, or the error that stood in their way."""

    predictions: list[Prediction]
    warnings: list[str]
    error: DearError | None = None
    none_of_these: bool | None = None
    """Whether none of the labels fits (`manifest.Calibration`); None: no threshold is known."""
    heatmaps: dict[str, bytes] = field(default_factory=dict)
    """PNG of each attribute's attention, where asked for (`heatmaps.heatmap_png`)."""


def unknown_mode(mode: object) -> InputError:
    """What is raised for a mode that isn't one."""
    return InputError(
        f"mode is {mode!r:.80}; use one of {', '.join(get_args(Mode))}", code="unknown_mode", field="mode"
    )
