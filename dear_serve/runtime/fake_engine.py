"""An engine without weights, for tests of what stands on an engine: right shapes and norms, no meaning.

Features are drawn from the sha256 of each picture's pixels or each text's ids: the same input gives the
same features, alone or in a batch, on every machine. They are independent otherwise, so all cosines are
those of random directions.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from dear_serve.bundle import Bundle
from dear_serve.io_spec import ALL_GRAPHS
from dear_serve.runtime.base import (
    Engine,
    EngineInfo,
    Float32,
    FusedLogits,
    ImageFeatures,
    Int64,
    as_pixels,
    as_tokens,
)
from dear_serve.runtime.classes import TrainedClasses

__all__ = ["FakeEngine"]


class FakeEngine(Engine):
    """Deterministic, weight-free engine with a bundle's sizes, class names, alpha and logit scale."""

    def __init__(self, bundle: Bundle) -> None:
        self._manifest = bundle.manifest
        self._width = bundle.manifest.base.clip.embed_dim
        self._trained = TrainedClasses(bundle)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(engine="fake", provider="none", precision="fp32", threads=1)

    def encode_image(self, pixels: Float32) -> ImageFeatures:
        rows = as_pixels(pixels, self._manifest.preprocess.size)
        count = len(self._manifest.dear.attributes)
        features = self._draw("image", rows, count + 1)
        return ImageFeatures(cls=features[:, 0], attributes=features[:, 1:])

    def encode_image_zero_shot(self, pixels: Float32) -> Float32:
        return self._draw("zero-shot image", as_pixels(pixels, self._manifest.preprocess.size), 1)[:, 0]

    def encode_text(self, tokens: Int64) -> Float32:
        return self._draw("text", self._unpadded(tokens), 1)[:, 0]

    def encode_text_zero_shot(self, tokens: Int64) -> Float32:
        return self._draw("zero-shot text", self._unpadded(tokens), 1)[:, 0]

    def fuse(self, features: ImageFeatures, class_features: Float32) -> FusedLogits:
        stacked = np.concatenate([features.cls[:, None], features.attributes], axis=1)
        weights = np.float32(self._manifest.logit_scale) * np.asarray(self._manifest.alpha, np.float32)
        cosines = np.einsum("bkd,cd->bck", stacked, np.asarray(class_features, np.float32))
        contributions = np.asarray(weights * cosines, np.float32)
        return FusedLogits(logits=contributions.sum(axis=-1), contributions=contributions)

    def classify(self, pixels: Float32) -> Float32:
        return self.fuse(self.encode_image(pixels), self._trained.get(self)).logits

    def has(self, graph: str) -> bool:
        return graph in ALL_GRAPHS

    def explain(self, pixels: Float32) -> Float32:
        """Positive numbers that sum to 1 a row, drawn like the features."""
        rows = as_pixels(pixels, self._manifest.preprocess.size)
        patches, count = self._manifest.base.clip.vision.patches, len(self._manifest.dear.attributes)
        drawn = np.abs(self._draw("attention", rows, count, patches))
        return np.asarray(drawn / drawn.sum(-1, keepdims=True), np.float32)

    def _unpadded(self, tokens: Int64) -> list[Int64]:
        """Each row without its padding, which carries no meaning: a text may come padded to any length."""
        rows = as_tokens(tokens, self._manifest.context_length)
        return [np.trim_zeros(row, "b") for row in rows]

    def _draw(
        self, salt: str, rows: npt.NDArray[np.float32] | list[Int64], count: int, width: int = 0
    ) -> Float32:
        """(B, count, width or D): unit vectors drawn for each row."""
        width = width or self._width
        features = np.empty((len(rows), count, width), dtype=np.float32)
        for index, row in enumerate(rows):
            digest = hashlib.sha256(salt.encode() + row.tobytes()).digest()
            drawn = np.random.default_rng(int.from_bytes(digest[:8], "little")).standard_normal(
                (count, width)
            )
            features[index] = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
        return features
