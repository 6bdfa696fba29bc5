"""What every engine answers: between a bundle's numbers and whoever asks for them. NumPy only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dear_serve.errors import BundleError, ImageError, TextError
from dear_serve.io_spec import GRAPHS

__all__ = [
    "Engine",
    "EngineInfo",
    "Float32",
    "FusedLogits",
    "ImageFeatures",
    "Int64",
    "as_pixels",
    "as_tokens",
    "in_chunks",
]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What really runs; shown by /model, the log and the metrics."""

    engine: str
    """"onnx", "torch" or "fake"."""
    provider: str
    """For onnx the execution provider its session reports ("CPUExecutionProvider"); for torch the device."""
    precision: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class ImageFeatures:
    """Adapted features of B pictures, L2-normalised (method.md §4)."""

    cls: Float32
    """f_0 = f_cls, (B, D)."""
    attributes: Float32
    """f_1..f_K, (B, K, D), in the order of the bundle's attributes."""


@dataclass(frozen=True, kw_only=True)
class FusedLogits:
    """Fused logits and where they come from."""

    logits: Float32
    """(B, C), scaled by tau."""
    contributions: Float32
    """(B, C, K+1): tau * alpha_k * f_k.g_c, class feature first; sums over the last axis to `logits`."""


class Engine(ABC):
    """Runs one bundle. Thread-safe: several threads may call one engine.

    All pixels are float32 (B, 3, S, S), preprocessed by `dear_serve.preprocess`; all tokens are int64 (B,
    L) made by `dear_serve.tokenizer` (0-padded; L may be cut to the longest end-of-text). All features
    are float32, L2-normalised. B may be 0.
    """

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """What really runs."""

    @abstractmethod
    def encode_image(self, pixels: Float32) -> ImageFeatures:
        """Adapted features of each picture."""

    @abstractmethod
    def encode_image_zero_shot(self, pixels: Float32) -> Float32:
        """Frozen CLIP's image features, (B, D)."""

    @abstractmethod
    def encode_text(self, tokens: Int64) -> Float32:
        """Adapted text features g, (B, D)."""

    @abstractmethod
    def encode_text_zero_shot(self, tokens: Int64) -> Float32:
        """Frozen CLIP's text features, (B, D)."""

    @abstractmethod
    def fuse(self, features: ImageFeatures, class_features: Float32) -> FusedLogits:
        """Fused logits of each picture over class features g (C, D)."""

    @abstractmethod
    def classify(self, pixels: Float32) -> Float32:
        """Fused logits (B, C) over the trained classes, in the manifest's order."""

    def has(self, graph: str) -> bool:
        """Whether this engine runs a graph of `io_spec.ALL_GRAPHS`: every one but "joint" and "explain" always."""
        return graph in GRAPHS

    def joint(self, pixels: Float32) -> tuple[Float32, ImageFeatures]:
        """Frozen CLIP's features (B, D) and the adapted ones: one pass with the joint graph, otherwise two."""
        return self.encode_image_zero_shot(pixels), self.encode_image(pixels)

    def explain(self, pixels: Float32) -> Float32:  # noqa: ARG002 (those who have the graph use it)
        """Attention of each attribute's token to the patches (`dear.explain.attention_maps`), (B, K, N).

        Raises BundleError ("no_explain") where the graph is not there; `has` says so beforehand.
        """
        raise BundleError(
            "the bundle has no explain graph, an earlier version exported it; run dear-export on it again",
            code="no_explain",
        )

    def close(self) -> None:  # noqa: B027 (most engines hold nothing)
        """Free what the engine holds; calling it again does nothing."""


def as_pixels(pixels: npt.ArrayLike, size: int) -> Float32:
    """`pixels` as a contiguous float32 (B, 3, S, S) array; ImageError when the shape is another."""
    array = np.ascontiguousarray(pixels, dtype=np.float32)
    if array.ndim != 4 or array.shape[1:] != (3, size, size):
        raise ImageError(f"pixels are {array.shape}; (B, 3, {size}, {size}) is expected", code="bad_shape")
    return array


def as_tokens(tokens: npt.ArrayLike, context_length: int) -> Int64:
    """`tokens` as a contiguous int64 (B, L) array, 1 <= L <= context; TextError when the shape is another."""
    array = np.ascontiguousarray(tokens, dtype=np.int64)
    if array.ndim != 2 or not 1 <= array.shape[1] <= context_length:
        raise TextError(
            f"tokens are {array.shape}; (B, L) with L up to {context_length} is expected", code="bad_shape"
        )
    return array


def in_chunks(
    run: Callable[..., tuple[Float32, ...]], rows: npt.NDArray[Any], *, limit: int, empty: tuple[Float32, ...]
) -> tuple[Float32, ...]:
    """`run` over at most `limit` rows at a time, results joined along the first axis; `empty` for no rows."""
    if len(rows) == 0:
        return empty
    parts = [run(rows[start : start + limit]) for start in range(0, len(rows), limit)]
    return (
        parts[0] if len(parts) == 1 else tuple(np.concatenate(column) for column in zip(*parts, strict=True))
    )
