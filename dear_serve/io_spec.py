"""Name, dtype and axes of every exported graph's inputs and outputs: `export` writes them, `runtime` reads them.

Axis letters: B batch, L text length, D joint width, K attributes, N patches, C classes. A letter in `DYNAMIC` is a
dynamic axis of the graph; the others are fixed by the bundle (`GraphSpec.shape` resolves them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["ALL_GRAPHS", "DYNAMIC", "GRAPHS", "OPTIONAL_GRAPHS", "GraphSpec", "TensorSpec"]

DYNAMIC = frozenset({"B", "L", "C"})


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One graph input or output."""

    name: str
    dtype: str
    axes: tuple[str | int, ...]

    def dynamic_axes(self) -> dict[int, str]:
        """Position -> letter of each dynamic axis."""
        return {i: a for i, a in enumerate(self.axes) if isinstance(a, str) and a in DYNAMIC}

    def shape(self, sizes: Mapping[str, int]) -> tuple[int | str, ...]:
        """Axes with the letters in `sizes` replaced by their size; dynamic letters not in it stay letters."""
        return tuple(sizes.get(a, a) if isinstance(a, str) else a for a in self.axes)


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """One ONNX file of a bundle's `onnx/` folder."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


_PIXELS = TensorSpec(name="pixels", dtype="float32", axes=("B", 3, "S", "S"))
_TOKENS = TensorSpec(name="tokens", dtype="int64", axes=("B", "L"))
_CLS = TensorSpec(name="cls", dtype="float32", axes=("B", "D"))
_ATTRIBUTES = TensorSpec(name="attributes", dtype="float32", axes=("B", "K", "D"))
_CLASSES = TensorSpec(name="class_features", dtype="float32", axes=("C", "D"))

GRAPHS: dict[str, GraphSpec] = {
    # Adapted image tower, role masks inside: S x S pixels -> L2-normalised features.
    "image": GraphSpec(file="image.onnx", inputs=(_PIXELS,), outputs=(_CLS, _ATTRIBUTES)),
    # Adapted text tower: token ids padded with 0, cut to any L that holds every end-of-text.
    "text": GraphSpec(
        file="text.onnx",
        inputs=(_TOKENS,),
        outputs=(TensorSpec(name="features", dtype="float32", axes=("B", "D")),),
    ),
    # Learned fusion (method.md §4): logits (B, C) = contributions (B, C, K+1) summed over the last axis.
    "fusion": GraphSpec(
        file="fusion.onnx",
        inputs=(_CLS, _ATTRIBUTES, _CLASSES),
        outputs=(
            TensorSpec(name="logits", dtype="float32", axes=("B", "C")),
            TensorSpec(name="contributions", dtype="float32", axes=("B", "C", "K+1")),
        ),
    ),
    # Pixels -> fused logits over the trained classes (their text features are constants): C is fixed, "T".
    "classifier": GraphSpec(
        file="classifier.onnx",
        inputs=(_PIXELS,),
        outputs=(TensorSpec(name="logits", dtype="float32", axes=("B", "T")),),
    ),
    # Frozen CLIP, for the zero-shot mode.
    "zero_shot_image": GraphSpec(
        file="zero_shot_image.onnx",
        inputs=(_PIXELS,),
        outputs=(TensorSpec(name="features", dtype="float32", axes=("B", "D")),),
    ),
    "zero_shot_text": GraphSpec(
        file="zero_shot_text.onnx",
        inputs=(_TOKENS,),
        outputs=(TensorSpec(name="features", dtype="float32", axes=("B", "D")),),
    ),
}

OPTIONAL_GRAPHS: dict[str, GraphSpec] = {
    # Frozen and adapted features of the same pictures in one pass: blocks 1..J-1 run once.
    "joint": GraphSpec(
        file="joint.onnx",
        inputs=(_PIXELS,),
        outputs=(TensorSpec(name="zero_shot", dtype="float32", axes=("B", "D")), _CLS, _ATTRIBUTES),
    ),
    # Where each attribute's token looks (`dear.explain`): softmax weights over the N patches, row by row from the top.
    "explain": GraphSpec(
        file="explain.onnx",
        inputs=(_PIXELS,),
        outputs=(TensorSpec(name="attention", dtype="float32", axes=("B", "K", "N")),),
    ),
}
"""Bundles exported by earlier versions lack these: an engine is asked with `Engine.has`."""

ALL_GRAPHS: dict[str, GraphSpec] = {**GRAPHS, **OPTIONAL_GRAPHS}
"""What `dear-export` writes."""
