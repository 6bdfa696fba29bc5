"""What the Python client gives back: the server's answers as typed objects, its refusals as the project's errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dear_serve.errors import DearError, ImageError, InputError, LabelError, OverloadError, QueryError

__all__ = [
    "Classified",
    "Embedding",
    "Found",
    "Hit",
    "LabelSet",
    "ModelInfo",
    "PictureAnswer",
    "Prediction",
    "error_of",
]

T = TypeVar("T")
Embedding = dict[str, npt.NDArray[np.float32]]
"""Normalised features by name, "class" and each attribute: (D,) float32 each."""

_KINDS: dict[str, type[DearError]] = {
    **dict.fromkeys(
        ("bad_base64", "bad_image", "empty_image", "extreme_aspect_ratio", "image_too_large", "not_an_image",
         "too_many_pixels", "truncated_image"), ImageError,
    ),
    **dict.fromkeys(
        ("bad_label", "bad_labels", "bad_template", "duplicate_label", "empty_label", "no_labels", "too_many_labels"),
        LabelError,
    ),
    **dict.fromkeys(
        ("bad_attributes", "bad_filter", "bad_ids", "bad_negative", "bad_offset", "bad_query", "bad_vector",
         "bad_weights", "unknown_attribute", "unknown_id"), QueryError,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One label of one picture; `contributions` sum to `logit` in adapted mode."""

    label: str
    probability: float
    logit: float
    cosine: float
    contributions: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PictureAnswer:
    """One picture: predictions, best first."""

    predictions: tuple[Prediction, ...]
    warnings: tuple[str, ...] = ()
    none_of_these: bool | None = None
    """Whether no label fits; None without a threshold, and in zero-shot mode."""
    heatmaps: Mapping[str, str] = field(default_factory=dict)
    """By attribute a PNG as data URI; only when asked for."""


@dataclass(frozen=True, kw_only=True)
class Classified:
    """Answer of /classify; the error of one picture among several stands in its place."""

    model: str
    mode: str
    temperature: float
    results: tuple[PictureAnswer | DearError, ...]


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One picture found; `score` is the weighted sum of `scores` (cosines)."""

    id: str
    score: float
    scores: Mapping[str, float]
    metadata: Mapping[str, Any]
    thumbnail: str | None
    """A data URI."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Answer of /search: per picture, text or id its hits, best first, or its error."""

    model: str
    results: tuple[tuple[Hit, ...] | DearError, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LabelSet:
    """Labels kept under a name; `source` is "sent", or the name of the bundle that holds them."""

    name: str
    labels: tuple[str, ...]
    templates: tuple[str, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Answer of GET /model: the fields most asked for, and all of it as `raw`."""

    model: str
    models: tuple[str, ...]
    classes: tuple[str, ...]
    attributes: tuple[str, ...]
    engine: Mapping[str, Any]
    sha256: str
    raw: Mapping[str, Any]


def error_of(
    status: int, body: Any, *, default: str = "the server refused without a reason", request_id: str = ""
) -> DearError:
    """The error that `{"error": {"code", "message", "field"}}` tells of.

    Args:
        status: HTTP status of the answer.
        body: the answer's JSON, or anything else if it had none.
        default: the message where the body has none.
        request_id: added to the message of an error that is the server's own.

    Returns:
        OverloadError for 429 and 503; ImageError, LabelError, QueryError or InputError for another 4xx; else DearError.
    """
    told = body.get("error") if isinstance(body, dict) else None
    told = told if isinstance(told, dict) else {}
    code, message, where = told.get("code"), str(told.get("message") or default), told.get("field")
    if status in (429, 503):
        return OverloadError(message, code=code, field=where)
    if 400 <= status < 500:
        kind = _KINDS.get(str(code), InputError)
        return kind(message, code=code or f"http_{status}", field=where)
    if request_id:
        message = f"{message} (request {request_id})"
    return DearError(message, code=code or f"http_{status}", field=where)


def _or_error(item: dict[str, Any], read: Callable[[Any], T]) -> T | DearError:
    """One item of a list, or the error that stands in its place: always something about what was sent."""
    return error_of(422, item) if isinstance(item.get("error"), dict) else read(item)


def _picture(item: dict[str, Any]) -> PictureAnswer:
    return PictureAnswer(
        predictions=tuple(Prediction(**p) for p in item["predictions"]),
        warnings=tuple(item["warnings"]),
        none_of_these=item.get("none_of_these"),
        heatmaps=item.get("heatmaps") or {},
    )


def read_classified(answer: Any) -> Classified:
    """Of POST /classify."""
    return Classified(
        model=answer["model"],
        mode=answer["mode"],
        temperature=answer.get("temperature", 1.0),
        results=tuple(_or_error(item, _picture) for item in answer["results"]),
    )


def read_embeddings(answer: Any) -> list[Embedding | DearError]:
    """Of POST /embed/image and /embed/text."""

    def one(item: dict[str, list[float]]) -> Embedding:
        return {name: np.asarray(vector, np.float32) for name, vector in item.items()}

    return [_or_error(item, one) for item in answer["embeddings"]]


def read_found(answer: Any, *, searches: int) -> Found:
    """Of POST /search, which leaves out the outer list of a single search."""
    results = [{"results": answer["results"]}] if searches == 1 else answer["results"]

    def hits(item: dict[str, Any]) -> tuple[Hit, ...]:
        return tuple(Hit(**hit) for hit in item["results"])

    return Found(
        model=answer["model"],
        results=tuple(_or_error(item, hits) for item in results),
        warnings=tuple(answer["warnings"]),
    )


def read_added(answer: Any) -> list[str | DearError]:
    """Of POST /gallery/add: ids that are stored."""
    return [_or_error(item, lambda stored: str(stored["id"])) for item in answer["results"]]


def read_label_set(answer: Any) -> LabelSet:
    """Of POST /label_sets."""
    return LabelSet(
        name=answer["name"],
        labels=tuple(answer["labels"]),
        templates=tuple(answer["templates"]),
        source=answer["source"],
    )


def read_model(answer: Any) -> ModelInfo:
    """Of GET /model."""
    return ModelInfo(
        model=answer["model"],
        models=tuple(answer["models"]),
        classes=tuple(answer["classes"]),
        attributes=tuple(answer["attributes"]),
        engine=answer["engine"],
        sha256=answer["sha256"],
        raw=answer,
    )
