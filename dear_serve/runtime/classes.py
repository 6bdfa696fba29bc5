"""Text features of classes: of any labels, the last ones kept; and of the trained classes, for some engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import get_args

from dear_serve.bundle import Bundle
from dear_serve.labels import ClassFeatureCache, class_features, fill, validate_labels, validate_templates
from dear_serve.runtime.base import Engine, Float32
from dear_serve.runtime.results import Mode, unknown_mode
from dear_serve.tokenizer import Tokenizer

__all__ = ["LabelFeatures", "TrainedClasses", "shortened"]

_KEPT = 64


class LabelFeatures:
    """Labels and templates of requests to class features; the last 64 sets asked for are kept. Thread-safe.

    Args:
        around: makes the context that one encoding of so many texts runs in, to time it.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        tokenizer: Tokenizer,
        around: Callable[[str, int], AbstractContextManager[None]],
    ) -> None:
        self._manifest = bundle.manifest
        self._engine = engine
        self._tokenizer = tokenizer
        self._around = around
        self._cache = ClassFeatureCache(_KEPT)
        self._checked = lru_cache(maxsize=_KEPT)(validate_labels)
        self.cut = lru_cache(maxsize=_KEPT)(self._find_cut)

    def resolve(
        self, labels: Sequence[str] | None, templates: Sequence[str] | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Labels and templates, checked; the bundle's own where none are given. Raises LabelError."""
        if labels is None:
            names = self._manifest.class_names
        elif isinstance(labels, (list, tuple)) and all(isinstance(label, str) for label in labels):
            names = self._checked(tuple(labels))
        else:
            names = validate_labels(labels)
        return names, self._manifest.templates if templates is None else validate_templates(templates)

    def get(self, names: tuple[str, ...], texts: tuple[str, ...], mode: Mode) -> tuple[Float32, bool]:
        """Class features (C, D), read-only, and whether they were there already. Raises LabelError, InputError."""
        if mode not in get_args(Mode):
            raise unknown_mode(mode)
        encode = self._engine.encode_text if mode == "adapted" else self._engine.encode_text_zero_shot
        computed = False

        def compute() -> Float32:
            nonlocal computed
            computed = True
            with self._around("text", len(names) * len(texts)):
                return class_features(names, texts, encode, self._tokenizer)

        return self._cache.get(mode, names, texts, compute), not computed

    def _find_cut(self, names: tuple[str, ...], templates: tuple[str, ...]) -> tuple[str, ...]:
        """One warning for each label that does not fit the text tower's context."""
        length = self._tokenizer.context_length
        return tuple(
            f"label {shortened(name)} was cut to {length} tokens"
            for name in names
            if any(self._tokenizer.was_truncated(fill(template, name)) for template in templates)
        )


def shortened(text: str) -> str:
    """`text` in quotes, at most 40 characters of it, for a message."""
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


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
