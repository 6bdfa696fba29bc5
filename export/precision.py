"""What each precision of the graphs is held to.

fp32 graphs equal torch. fp16 and int8 ones differ from it; what they may differ by is said here, measured by
`export.parity` and stored in `onnx/export.json`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dear_serve.errors import ConfigError

__all__ = ["PRECISIONS", "Precision", "precision_of"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """One precision of the graphs and its limits."""

    name: str
    opset: int
    """What the graphs are written in unless another is asked for."""
    tolerance: float
    """Largest |difference| of an element of a feature, of a softmax weight; times `logit_factor` of a logit."""
    logit_share: float
    """Logits are tau times a cosine: their tolerance is max(1, tau * logit_share) times `tolerance`."""
    min_cosine: float
    """Smallest cosine of a feature with torch's."""
    min_top1: float
    """Smallest share of pictures whose best class is torch's best class."""
    tie: float | None
    """Classes that torch holds this close together in logits are equally right; None: twice the tolerance.

    0.1 means a probability within a tenth of the best class's.
    """
    hostile: bool
    """Whether `tolerance` and `min_cosine` hold for hostile pictures too; where not, these must be finite."""

    def logit_tolerance(self, tau: float) -> float:
        """Largest |difference| of a logit."""
        return self.tolerance * max(1.0, tau * self.logit_share)


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(
        name="fp32",
        opset=23,
        tolerance=1e-4,
        logit_share=0.1,
        min_cosine=0.9999,
        min_top1=1.0,
        tie=None,
        hostile=True,
    ),
    # Its runtimes are CUDA and TensorRT, whose parser takes Attention from 10.14 on: the decomposed form is for all.
    "fp16": Precision(
        name="fp16",
        opset=20,
        tolerance=0.02,
        logit_share=0.2,
        min_cosine=0.999,
        min_top1=0.99,
        tie=0.02,
        hostile=True,
    ),
    # A cosine of 0.99 is a distance of 0.14. Black frames and noise are not what the ranges were measured on.
    "int8": Precision(
        name="int8",
        opset=23,
        tolerance=0.15,
        logit_share=0.5,
        min_cosine=0.99,
        min_top1=0.99,
        tie=0.1,
        hostile=False,
    ),
}


def precision_of(name: str) -> Precision:
    """The precision called `name`. Raises ConfigError."""
    if name not in PRECISIONS:
        raise ConfigError(f"precision is {name!r}; use one of {', '.join(PRECISIONS)}", field="precision")
    return PRECISIONS[name]
