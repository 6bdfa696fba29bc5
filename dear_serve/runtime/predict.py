"""From picture bytes and texts to predictions, embeddings and search vectors: what services and tools call.

Three named steps, timed apart: decode (CPU, in threads), infer (the engine), and the numbers after it. A
picture that cannot be used gets its own error; the others of its batch are answered.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from time import perf_counter
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, DearError, ImageError, InputError, LabelError, TextError
from dear_serve.labels import (
    ClassFeatureCache,
    Prediction,
    class_features,
    fill,
    predictions,
    validate_labels,
    validate_templates,
    zero_shot_logits,
)
from dear_serve.preprocess import DEFAULT_LIMITS, ImageLimits, preprocess_bytes
from dear_serve.readout import project, span_basis
from dear_serve.runtime import EngineName, open_engine
from dear_serve.runtime.base import Engine, Float32, ImageFeatures, Int64
from dear_serve.tokenizer import Tokenizer, token_lengths

__all__ = ["Embedding", "Mode", "Observer", "PictureResult", "Prediction", "Predictor"]

Mode = Literal["adapted", "zero_shot"]

Embedding: TypeAlias = dict[str, Float32]
"""L2-normalised vectors by name: "class" and the attributes."""

_MAX_DECODERS = 8
_KEPT_LABEL_SETS = 64


class Observer(Protocol):
    """Who wants to know what a predictor does (a service's metrics)."""

    def stage(self, name: str, seconds: float) -> None:
        """A step of a call has ended: "decode" or "infer"."""

    def batch(self, kind: str, size: int) -> None:
        """The engine was given this many of "image" or "text"."""

    def cache(self, *, hit: bool) -> None:
        """Class features were asked for."""


@dataclass(frozen=True, kw_only=True)
class PictureResult:
    """The answer for one picture: predictions, best first, or the error that stood in their way."""

    predictions: list[Prediction]
    warnings: list[str]
    error: DearError | None = None


class Predictor:
    """A bundle, the engine that runs it and everything around the engine. Thread-safe.

    Args:
        bundle: an opened bundle. engine: what runs it; closed with the predictor. limits: what a picture
        may cost. decode_threads: pictures of one call decoded at once; default: the CPUs this process may
        use, at most 8. observer: told of timings, batch sizes and cache hits.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        *,
        limits: ImageLimits = DEFAULT_LIMITS,
        decode_threads: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.bundle = bundle
        self.engine = engine
        self.tokenizer = Tokenizer.from_file(bundle.file("tokenizer.json"))
        if self.tokenizer.context_length != bundle.manifest.context_length:
            raise BundleError(
                f"tokenizer.json has a context of {self.tokenizer.context_length} tokens; "
                f"dear.json says {bundle.manifest.context_length}"
            )
        self.observer = observer
        self._limits = limits
        self._attributes = bundle.manifest.dear.attributes
        self._basis = bundle.basis()
        self._cache = ClassFeatureCache(_KEPT_LABEL_SETS)
        self._checked_labels = lru_cache(maxsize=_KEPT_LABEL_SETS)(validate_labels)
        self._cut_warnings = lru_cache(maxsize=_KEPT_LABEL_SETS)(self._find_cut)
        workers = decode_threads or min(_MAX_DECODERS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="decode")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        engine: EngineName = "onnx",
        threads: int | None = None,
        providers: Sequence[str] | None = None,
        limits: ImageLimits = DEFAULT_LIMITS,
    ) -> Predictor:
        """Open the bundle in folder `path`; arguments and errors as in `dear_serve.runtime.open_bundle`."""
        bundle = Bundle.open(path)
        return cls(bundle, open_engine(bundle, engine, threads=threads, providers=providers), limits=limits)

    def close(self) -> None:
        """Free the engine and the threads; calling it again does nothing."""
        self._pool.shutdown()
        self.engine.close()

    def __enter__(self) -> Predictor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- classification ---------------------------------------------------------------------------

    def classify(
        self,
        images: Sequence[bytes],
        *,
        labels: Sequence[str] | None = None,
        templates: Sequence[str] | None = None,
        mode: Mode = "adapted",
        top_k: int = 5,
    ) -> list[PictureResult]:
        """The most probable labels of each picture and what each feature contributed to them.

        Args:
            images: encoded pictures.
            labels: any names; default: the trained classes.
            templates: texts with one "{}" for the label; default: the bundle's.
            mode: "adapted" (fused logits, method.md §4) or "zero_shot" (frozen CLIP).
            top_k: predictions a picture; all labels where there are fewer.

        Returns:
            One result per picture, in order. Probabilities are over the given labels; the cosine is that
            of the class feature and the label; contributions are named "class" and by attribute (adapted
            only).

        Raises:
            LabelError: labels, templates or `top_k` cannot be used.
            InputError: unknown mode (code "unknown_mode").
        """
        if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
            raise LabelError(
                f"top_k is {top_k!r}; a whole number of 1 or more", code="bad_top_k", field="top_k"
            )
        names, texts = self._label_set(labels, templates)
        features = self.class_features(names, texts, mode)
        warnings = list(self._cut_warnings(names, texts))
        pixels, errors = self._decode(images)
        found = iter(self._predict(pixels, features, names, mode, top_k) if len(pixels) else ())
        return [
            PictureResult(
                predictions=next(found) if error is None else [], warnings=list(warnings), error=error
            )
            for error in errors
        ]

    def _predict(
        self, pixels: Float32, features: Float32, names: Sequence[str], mode: Mode, top_k: int
    ) -> list[list[Prediction]]:
        with self._infer("image", len(pixels)):
            if mode == "adapted":
                adapted = self.engine.encode_image(pixels)
                fused = self.engine.fuse(adapted, features)
                cls, logits, contributions = adapted.cls, fused.logits, fused.contributions
                parts: tuple[str, ...] = ("class", *self._attributes)
            else:
                cls = self.engine.encode_image_zero_shot(pixels)
                logits = zero_shot_logits(cls, features, self.bundle.manifest.logit_scale)
                contributions, parts = logits[:, :, None], ("class",)
        return predictions(
            logits, names, cosines=cls @ features.T, contributions=contributions, parts=parts, k=top_k
        )

    def class_features(
        self,
        labels: Sequence[str] | None = None,
        templates: Sequence[str] | None = None,
        mode: Mode = "adapted",
    ) -> Float32:
        """Features of the labels (C, D), read-only; the last label sets asked for are kept.

        Raises LabelError, or InputError for an unknown mode.
        """
        if mode not in get_args(Mode):
            raise InputError(
                f"mode is {mode!r:.80}; use one of {', '.join(get_args(Mode))}",
                code="unknown_mode",
                field="mode",
            )
        names, texts = self._label_set(labels, templates)
        encode = self.engine.encode_text if mode == "adapted" else self.engine.encode_text_zero_shot
        computed = False

        def compute() -> Float32:
            nonlocal computed
            computed = True
            with self._infer("text", len(names) * len(texts)):
                return class_features(names, texts, encode, self.tokenizer)

        features = self._cache.get(mode, names, texts, compute)
        if self.observer:
            self.observer.cache(hit=not computed)
        return features

    def _label_set(
        self, labels: Sequence[str] | None, templates: Sequence[str] | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Labels and templates, checked; the bundle's own where none are given."""
        manifest = self.bundle.manifest
        if labels is None:
            names = manifest.class_names
        elif isinstance(labels, (list, tuple)) and all(isinstance(label, str) for label in labels):
            names = self._checked_labels(tuple(labels))
        else:
            names = validate_labels(labels)
        return names, manifest.templates if templates is None else validate_templates(templates)

    def _find_cut(self, names: tuple[str, ...], templates: tuple[str, ...]) -> tuple[str, ...]:
        """One warning for each label that does not fit the text tower's context."""
        length = self.tokenizer.context_length
        return tuple(
            f"label {_short(name)} was cut to {length} tokens"
            for name in names
            if any(self.tokenizer.was_truncated(fill(template, name)) for template in templates)
        )

    # --- embeddings -------------------------------------------------------------------------------

    def image_features(self, images: Sequence[bytes]) -> tuple[ImageFeatures, list[DearError | None]]:
        """Adapted features of the pictures that can be used, in order, and per picture its error or None."""
        pixels, errors = self._decode(images)
        with self._infer("image", len(pixels)):
            return self.engine.encode_image(pixels), errors

    def embed_images(self, images: Sequence[bytes]) -> list[Embedding | DearError]:
        """Per picture the class feature and the K attribute features, (D) each, or its error."""
        features, errors = self.image_features(images)
        vectors = {"class": features.cls}
        vectors |= {name: features.attributes[:, k] for k, name in enumerate(self._attributes)}
        return _spread(vectors, errors)

    def embed_texts(self, texts: Sequence[str]) -> list[Embedding]:
        """Per text the adapted text feature ("class", (D)) and its readout (r) for attributes read by a span.

        Raises TextError if a text is empty or not a text.
        """
        features = self.text_features(texts)
        vectors = {"class": features}
        vectors |= {name: project(features, basis) for name, basis in self._basis.items()}
        return [_row(vectors, i) for i in range(len(texts))]

    def text_features(self, texts: Sequence[str], mode: Mode = "adapted") -> Float32:
        """Text features (B, D). Raises TextError if a text is empty or not a text."""
        encode = self.engine.encode_text if mode == "adapted" else self.engine.encode_text_zero_shot
        tokens: Int64 = self.tokenizer([text if isinstance(text, str) else "" for text in texts])
        lengths = token_lengths(tokens)
        for i, length in enumerate(lengths):
            if length <= 2:  # start and end alone
                raise TextError(
                    f"text {i} is {texts[i]!r:.80}; a text with a word is needed",
                    code="empty_text",
                    field="texts",
                )
        tokens = tokens[:, : lengths.max(initial=1)]
        with self._infer("text", len(tokens)):
            return encode(tokens)

    def text_warnings(self, texts: Sequence[str]) -> list[list[str]]:
        """Per text what was left out of it, for the answer."""
        length = self.tokenizer.context_length
        return [
            [f"text {_short(t)} was cut to {length} tokens"] if self.tokenizer.was_truncated(t) else []
            for t in texts
        ]

    # --- search vectors ---------------------------------------------------------------------------

    @property
    def columns(self) -> dict[str, int]:
        """Width of each search vector: "class" (D), and each attribute (its readout's r, or D)."""
        width = self.bundle.manifest.base.clip.embed_dim
        return {"class": width} | {
            name: len(self._basis[name]) if name in self._basis else width for name in self._attributes
        }

    def readout(self, features: ImageFeatures) -> dict[str, Float32]:
        """What a gallery stores per picture: "class" (B, D) and per attribute its readout (B, r).

        All L2-normalised. The readout is the one recorded in the bundle (method.md §8): the token
        feature, or the class feature projected onto the attribute's span.
        """
        vectors = {"class": features.cls}
        for k, name in enumerate(self._attributes):
            basis = self._basis.get(name)
            vectors[name] = features.attributes[:, k] if basis is None else project(features.cls, basis)
        return vectors

    def readout_images(self, images: Sequence[bytes]) -> list[Embedding | DearError]:
        """Per picture the vectors of `readout`, or its error."""
        features, errors = self.image_features(images)
        return _spread(self.readout(features), errors)

    def readout_text(self, texts: Sequence[str]) -> dict[str, Float32]:
        """What to search with for each text: as `readout`, with the text feature in place of both kinds."""
        features = self.text_features(texts)
        return {"class": features} | {
            name: project(features, self._basis[name]) if name in self._basis else features
            for name in self._attributes
        }

    def readout_phrases(self, phrases: Sequence[str]) -> Float32:
        """Basis Q (r, D) of an attribute made up by whoever asks, for `readout.project` on class vectors.

        Raises TextError for an empty phrase, QueryError ("bad_phrases") for fewer than 2 or all alike.
        """
        return span_basis(self.text_features(phrases, "zero_shot"))

    # --- steps ------------------------------------------------------------------------------------

    def _decode(self, images: Sequence[bytes]) -> tuple[Float32, list[DearError | None]]:
        """Pixels (b, 3, S, S) of the b pictures that can be used, and per picture its error or None."""
        start = perf_counter()
        one = self._decode_one
        decoded = [one(data) for data in images] if len(images) < 2 else list(self._pool.map(one, images))
        size = self.bundle.manifest.preprocess.size
        good = [d for d in decoded if isinstance(d, np.ndarray)]
        pixels = np.stack(good) if good else np.zeros((0, 3, size, size), dtype=np.float32)
        if self.observer:
            self.observer.stage("decode", perf_counter() - start)
        return pixels, [d if isinstance(d, DearError) else None for d in decoded]

    def _decode_one(self, data: bytes) -> Float32 | ImageError:
        try:
            return preprocess_bytes(data, self.bundle.manifest.preprocess, limits=self._limits)
        except ImageError as error:
            return error

    @contextmanager
    def _infer(self, kind: str, size: int) -> Iterator[None]:
        start = perf_counter()
        yield
        if self.observer:
            self.observer.stage("infer", perf_counter() - start)
            self.observer.batch(kind, size)


def _spread(vectors: dict[str, Float32], errors: Sequence[DearError | None]) -> list[Embedding | DearError]:
    """Rows of the pictures that could be used, with the errors of the others between them."""
    rows = iter(range(len(errors)))
    return [_row(vectors, next(rows)) if error is None else error for error in errors]


def _row(vectors: dict[str, Float32], index: int) -> Embedding:
    return {name: rows[index] for name, rows in vectors.items()}


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
