"""Results of the library as the contract's JSON; no decisions here, only names."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dear_serve.errors import BundleError, DearError
from dear_serve.io_spec import ALL_GRAPHS
from dear_serve.preprocess import decode_image, thumbnail
from dear_serve.runtime.base import Float32
from dear_serve.runtime.predict import PictureResult, Predictor

from .errors import error_body

if TYPE_CHECKING:
    from dear_serve.gallery.store import Hit

__all__ = [
    "Preview",
    "at",
    "cut",
    "data_uri",
    "floats",
    "hit_answer",
    "model_answer",
    "picture_answer",
    "previews",
    "row",
    "settle",
]

T = TypeVar("T")


class Preview(NamedTuple):
    """A picture's bytes and its thumbnail (JPEG)."""

    data: bytes
    thumbnail: bytes


def previews(pictures: Sequence[bytes]) -> list[Preview | DearError]:
    """Each picture with its thumbnail, or why it cannot be used."""

    def preview(data: bytes) -> Preview | DearError:
        try:
            return Preview(data, thumbnail(decode_image(data)))
        except DearError as error:
            return error

    return [preview(data) for data in pictures]


def settle(answers: Sequence[T | DearError]) -> list[T | dict[str, Any]]:
    """Answers with errors in their places; the error of a picture sent alone is raised instead."""
    if len(answers) == 1 and isinstance(answers[0], DearError):
        raise at(answers[0], "images[0]")
    return [
        error_body(a, field=f"images[{i}]") if isinstance(a, DearError) else a for i, a in enumerate(answers)
    ]


def at(error: DearError, field: str) -> DearError:
    """`error`, said to be about `field` unless it names one itself."""
    error.field = error.field or field
    return error


def cut(predictor: Predictor, texts: Sequence[str]) -> list[str]:
    """What was cut off these texts, said in words."""
    return [warning for warnings in predictor.text_warnings(texts) for warning in warnings]


def row(vectors: Mapping[str, Float32], index: int) -> dict[str, Float32]:
    """One row of each array (B, r)."""
    return {name: rows[index] for name, rows in vectors.items()}


def floats(embedding: Mapping[str, Float32]) -> dict[str, list[float]]:
    """Vectors as lists."""
    return {name: vector.tolist() for name, vector in embedding.items()}


def picture_answer(result: PictureResult) -> dict[str, Any]:
    """One entry of /classify's `results`."""
    predictions = [
        {
            "label": p.label,
            "probability": p.probability,
            "logit": p.logit,
            "cosine": p.cosine,
            "contributions": dict(p.contributions),
        }
        for p in result.predictions
    ]
    answer = {
        "predictions": predictions,
        "warnings": result.warnings,
        "none_of_these": result.none_of_these,
    }
    if result.heatmaps:
        answer["heatmaps"] = {name: data_uri(png, "png") for name, png in result.heatmaps.items()}
    return answer


def data_uri(data: bytes, kind: str) -> str:
    """An image's bytes as a data URI."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def hit_answer(hit: Hit) -> dict[str, Any]:
    """One entry of /search's `results`; the thumbnail as a data URI."""
    return {
        "id": hit.id,
        "score": hit.score,
        "scores": hit.scores,
        "metadata": hit.metadata,
        "thumbnail": data_uri(hit.thumbnail, "jpeg") if hit.thumbnail else None,
    }


def model_answer(name: str, predictor: Predictor) -> dict[str, Any]:
    """GET /model: what is served under this name and what runs it."""
    bundle = predictor.bundle
    manifest = bundle.manifest
    try:
        roles: dict[str, Any] | None = bundle.roles().to_dict()
    except BundleError:
        roles = None  # a bundle without attributes needs none
    return {
        "model": name,
        "sha256": bundle.sha256,
        "base": {"name": manifest.base.name, "sha256": manifest.base.sha256},
        "classes": list(manifest.class_names),
        "templates": list(manifest.templates),
        "attributes": list(manifest.dear.attributes),
        "alpha": dict(zip(("class", *manifest.dear.attributes), manifest.alpha, strict=True)),
        "logit_scale": manifest.logit_scale,
        "dear": manifest.dear.to_dict(),
        "readouts": [readout.to_dict() for readout in manifest.readouts],
        "columns": predictor.columns,
        "roles": roles,
        "engine": asdict(predictor.engine.info),
        "graphs": [graph for graph in ALL_GRAPHS if predictor.engine.has(graph)],
        "calibration": None if manifest.calibration is None else manifest.calibration.to_dict(),
        "label_sets": {key: kept.to_dict() for key, kept in manifest.label_sets.items()},
        "metrics": manifest.metrics,
        "files": {name: entry.sha256 for name, entry in manifest.files.items()},
        "format_version": manifest.format_version,
        "library_version": manifest.library_version,
    }
