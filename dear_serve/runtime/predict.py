"""From picture bytes and texts to predictions, embeddings and search vectors: what services and tools call.

Three named steps, timed apart: preprocess (CPU, in threads), core (the engine), postprocess (the numbers after it).
A picture that cannot be used gets its own error; the others of its batch are answered.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Protocol, TypeAlias

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, DearError, TextError
from dear_serve.labels import Prediction, predictions, zero_shot_logits
from dear_serve.preprocess import DEFAULT_LIMITS, ImageLimits
from dear_serve.readout import project, span_basis
from dear_serve.runtime import EngineName, open_engine
from dear_serve.runtime.base import Engine, Float32, ImageFeatures, Int64
from dear_serve.runtime.batching import BatchedEngine, Batcher, Room
from dear_serve.runtime.classes import LabelFeatures, shortened
from dear_serve.runtime.decode import Decoder
from dear_serve.runtime.heatmaps import heatmap_png
from dear_serve.runtime.results import Mode, PictureResult, Question
from dear_serve.tokenizer import Tokenizer, token_lengths

__all__ = ["Embedding", "Mode", "Observer", "PictureResult", "Prediction", "Predictor", "Question"]

Embedding: TypeAlias = dict[str, Float32]
"""L2-normalised vectors by name: "class" and the attributes."""

_MAX_DECODERS = 8
_NO_BOUND = 2**31


class Observer(Protocol):
    """Who wants to know what a predictor does (a service's metrics)."""

    def stage(self, name: str, seconds: float) -> None:
        """A step of a call has ended: "preprocess", "core" or "postprocess"."""

    def batch(self, kind: str, size: int) -> None:
        """The engine was given this many of "image" or "text"."""

    def cache(self, *, hit: bool) -> None:
        """Class features were asked for."""


class Predictor:
    """A bundle, the engine that runs it and everything around the engine. Thread-safe.

    Args:
        bundle: an opened bundle. engine: what runs it; closed with the predictor. limits: what a picture
        may cost. decode_threads: pictures decoded at once; default: the CPUs this process may use, at most 8.
        observer: told of timings, batch sizes and cache hits. batcher: joins the engine's work across calls (and
        tells its own observer of it) and bounds the pictures under way; stays open.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        *,
        limits: ImageLimits = DEFAULT_LIMITS,
        decode_threads: int | None = None,
        observer: Observer | None = None,
        batcher: Batcher | None = None,
    ) -> None:
        self.bundle = bundle
        self.engine = engine
        self._batched = batcher is not None
        self._core = engine if batcher is None else BatchedEngine(engine, batcher)
        self._room = Room(_NO_BOUND) if batcher is None else batcher.room
        self.tokenizer = Tokenizer.from_file(bundle.file("tokenizer.json"))
        if self.tokenizer.context_length != bundle.manifest.context_length:
            raise BundleError(
                f"tokenizer.json has a context of {self.tokenizer.context_length} tokens; "
                f"dear.json says {bundle.manifest.context_length}"
            )
        self.observer = observer
        self._attributes = bundle.manifest.dear.attributes
        self._basis = bundle.basis()
        self._labels = LabelFeatures(bundle, self._core, self.tokenizer, self._infer)
        threads = decode_threads or min(_MAX_DECODERS, os.cpu_count() or 1)
        self._decoder = Decoder(bundle.manifest.preprocess, limits=limits, threads=threads)

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
        self._decoder.close()
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
        """`answer` to a question of these options, described in `Question`."""
        return self.answer(images, Question(labels=labels, templates=templates, mode=mode, top_k=top_k))

    def answer(self, images: Sequence[bytes], question: Question) -> list[PictureResult]:
        """The most probable labels of each encoded picture and what each feature contributed to them.

        Returns:
            One result per picture, in order. Probabilities are over the labels asked for, in adapted mode at the
            bundle's temperature; the cosine is that of the class feature and the label; contributions are named
            "class" and by attribute (adapted only) and sum to the logit.

        Raises:
            LabelError: labels or templates cannot be used.
            BundleError: heat maps are asked for and the bundle has no graph for them (code "no_explain").
        """
        names, texts = self._labels.resolve(question.labels, question.templates)
        features = self.class_features(names, texts, question.mode)
        warnings = list(self._labels.cut(names, texts))
        with self._room.take(len(images)):
            pixels, errors = self._decode(images)
            found = iter(self._predict(pixels, features, names, question) if len(pixels) else ())
        return [
            replace(next(found), warnings=list(warnings))
            if error is None
            else PictureResult(predictions=[], warnings=list(warnings), error=error)
            for error in errors
        ]

    def _predict(
        self, pixels: Float32, features: Float32, names: Sequence[str], question: Question
    ) -> list[PictureResult]:
        manifest, maps = self.bundle.manifest, None
        temperature, threshold = 1.0, None
        with self._infer("image", len(pixels)):
            if question.mode == "adapted":
                adapted = self._core.encode_image(pixels)
            else:
                cls = self._core.encode_image_zero_shot(pixels)
            if question.heatmaps:
                maps = self._core.explain(pixels)
        with self._timed("postprocess"):
            if question.mode == "adapted":
                fused = self._core.fuse(adapted, features)
                cls, logits = adapted.cls, fused.logits
                names_of_parts = ("class", *self._attributes)
                parts = {name: fused.contributions[:, :, k] for k, name in enumerate(names_of_parts)}
                temperature, threshold = self.temperature, self._threshold(question)
            else:
                logits = zero_shot_logits(cls, features, manifest.logit_scale)
                parts = {"class": logits}
            found = predictions(
                logits,
                names,
                cosines=cls @ features.T,
                contributions=parts,
                k=question.top_k,
                temperature=temperature,
            )
            return [
                PictureResult(
                    predictions=of_one,
                    warnings=[],
                    none_of_these=None if threshold is None else best < threshold * manifest.logit_scale,
                    heatmaps={} if maps is None else self._heatmaps(maps[row]),
                )
                for row, (of_one, best) in enumerate(zip(found, logits.max(axis=1).tolist(), strict=True))
            ]

    @property
    def temperature(self) -> float:
        """What adapted logits are divided by before they become probabilities; 1 where nothing was fitted."""
        calibration = self.bundle.manifest.calibration
        return 1.0 if calibration is None else calibration.temperature

    def _threshold(self, question: Question) -> float | None:
        calibration = self.bundle.manifest.calibration
        if question.none_threshold is not None or calibration is None:
            return question.none_threshold
        return calibration.threshold

    def _heatmaps(self, attention: Float32) -> dict[str, bytes]:
        size = self.bundle.manifest.preprocess.size
        return {name: heatmap_png(attention[k], size) for k, name in enumerate(self._attributes)}

    def class_features(
        self,
        labels: Sequence[str] | None = None,
        templates: Sequence[str] | None = None,
        mode: Mode = "adapted",
    ) -> Float32:
        """Features of the labels (C, D), read-only; the last label sets asked for are kept.

        Raises LabelError, or InputError for an unknown mode.
        """
        features, hit = self._labels.get(*self._labels.resolve(labels, templates), mode)
        if self.observer:
            self.observer.cache(hit=hit)
        return features

    # --- embeddings -------------------------------------------------------------------------------

    def image_features(self, images: Sequence[bytes]) -> tuple[ImageFeatures, list[DearError | None]]:
        """Adapted features of the pictures that can be used, in order, and per picture its error or None."""
        with self._room.take(len(images)):
            pixels, errors = self._decode(images)
            with self._infer("image", len(pixels)):
                return self._core.encode_image(pixels), errors

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
        encode = self._core.encode_text if mode == "adapted" else self._core.encode_text_zero_shot
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
            [f"text {shortened(t)} was cut to {length} tokens"] if self.tokenizer.was_truncated(t) else []
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
        """See `Decoder`."""
        with self._timed("preprocess"):
            return self._decoder(images)

    @contextmanager
    def _infer(self, kind: str, size: int) -> Iterator[None]:
        if self._batched:  # the batcher knows better how long its runs took and what was in them
            yield
            return
        with self._timed("core"):
            yield
        if self.observer:
            self.observer.batch(kind, size)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = perf_counter()
        yield
        if self.observer:
            self.observer.stage(name, perf_counter() - start)


def _spread(vectors: dict[str, Float32], errors: Sequence[DearError | None]) -> list[Embedding | DearError]:
    """Rows of the pictures that could be used, with the errors of the others between them."""
    rows = iter(range(len(errors)))
    return [_row(vectors, next(rows)) if error is None else error for error in errors]


def _row(vectors: dict[str, Float32], index: int) -> Embedding:
    return {name: rows[index] for name, rows in vectors.items()}
