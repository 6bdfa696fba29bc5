"""What every engine answers: the interface between a bundle's numbers and whoever asks for them. NumPy only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Engine", "EngineInfo", "Float32", "FusedLogits", "ImageFeatures", "Int64"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What really runs; shown by /model, the log and the metrics."""

    engine: str
    """"onnx", "torch" or "fake"."""
    provider: str
    """For onnx the execution provider the session reports, such as "CPUExecutionProvider"; for torch the device."""
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

    All pixels are float32 (B, 3, S, S), preprocessed by `dear_serve.preprocess`; all tokens are int64 (B, L) made
    by `dear_serve.tokenizer` (0-padded; L may be cut to the longest end-of-text). All features are float32, L2-normalised.
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

    def close(self) -> None:
        """Free what the engine holds; calling it again does nothing."""
