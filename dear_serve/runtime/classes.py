"""Text features of a bundle's trained classes, for engines that have no graph with them as constants."""

from __future__ import annotations

import threading

from dear_serve.bundle import Bundle
from dear_serve.labels import class_features
from dear_serve.runtime.base import Engine, Float32
from dear_serve.tokenizer import Tokenizer

__all__ = ["TrainedClasses"]


class TrainedClasses:
    """Adapted features of the trained classes, computed when first asked for and then kept."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._lock = threading.Lock()
        self._features: Float32 | None = None

    def get(self, engine: Engine) -> Float32:
        """(C, D), in the manifest's order."""
        with self._lock:
            if self._features is None:
                manifest = self._bundle.manifest
                tokenizer = Tokenizer.from_file(self._bundle.file("tokenizer.json"))
                self._features = class_features(
                    manifest.class_names, manifest.templates, engine.encode_text, tokenizer
                )
            return self._features
