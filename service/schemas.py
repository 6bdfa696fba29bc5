"""Requests and answers by name: requests are checked against these, and /docs.json is made of them."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import ApiError

__all__ = [
    "ClassifyAnswer",
    "ClassifyRequest",
    "DeleteAnswer",
    "EmbedAnswer",
    "EmbedImageRequest",
    "EmbedTextRequest",
    "ErrorAnswer",
    "GalleryAddAnswer",
    "GalleryAddRequest",
    "LabelSetAnswer",
    "LabelSetRequest",
    "LabelSetsAnswer",
    "Pictures",
    "ReloadAnswer",
    "ReloadRequest",
    "Request",
    "SearchAnswer",
    "SearchRequest",
    "check",
]

_IMAGES = "Base64 or data URIs in JSON; in a form, one file per picture under this name."
_ATTRIBUTES = (
    'Weights such as {"color": 1.0} or {"class": 0.5, "shape": 0.5}; or an attribute of your own, '
    '{"name": "rust", "phrases": ["no rust", "light rust", "heavy rust"], "weight": 1.0}; '
    'or a list of {"name", "weight"} and such objects. Default: the class feature alone.'
)


class Request(BaseModel):
    """Fields common to all requests; unknown ones are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: str | None = Field(
        None, description="The bundle's name, as /model gives it. Default: the one served."
    )


class Pictures(Request):
    """A request that carries pictures."""

    images: list[str] | None = Field(None, description=_IMAGES)


class ClassifyRequest(Pictures):
    """Which of these labels is each picture?"""

    mode: Literal["adapted", "zero_shot"] = "adapted"
    labels: list[str] | None = Field(None, description="Any names. Default: the trained classes.")
    templates: list[str] | None = Field(
        None, description="Sentences with {} for the label. Default: the bundle's."
    )
    label_set: str | None = Field(
        None, description="Labels kept under this name (GET /label_sets), in place of `labels`."
    )
    top_k: int = Field(5, ge=1, le=1000)
    none_threshold: float | None = Field(
        None,
        ge=-1,
        le=1,
        description="Lowest fused cosine (logit / logit_scale) of a label that fits. Default: the bundle's, if any.",
    )
    heatmaps: bool = Field(False, description="Also draw where each attribute looks, as PNG.")


class EmbedImageRequest(Pictures):
    """Features of pictures."""


class EmbedTextRequest(Request):
    """Features of texts."""

    texts: list[str]


class Negative(BaseModel):
    """Examples to keep away from: "like this, not that". Up to 16 together."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    ids: list[str] | None = None
    texts: list[str] | None = None
    images: list[str] | None = Field(None, description="Base64 or data URIs.")
    weight: float = Field(
        0.5, ge=0, le=2, description="Share of the mean cosine with them that is taken off."
    )


class SearchRequest(Pictures):
    """Exactly one of `images`, `texts` and `ids`; each of its items, up to 64, is a search of its own."""

    texts: list[str] | None = None
    ids: list[str] | None = Field(
        None, description="Stored pictures; they are left out of their own results."
    )
    negative: Negative | None = None
    attributes: dict[str, Any] | list[dict[str, Any]] | None = Field(None, description=_ATTRIBUTES)
    filter: str | None = Field(None, description="SQL over metadata, such as price < 10 AND brand = 'x'.")
    top_k: int = Field(10, ge=1, le=1000)
    offset: int = Field(0, ge=0, le=10_000, description="Results to leave out at the front: the next page.")
    diversity: float = Field(
        0.0,
        ge=0,
        le=1,
        description="0: the best; towards 1: unlike one another. With it, offset + top_k is at most 1,000.",
    )


class GalleryAddRequest(Pictures):
    """Pictures to keep; an id that is there already is replaced."""

    ids: list[str]
    metadata: list[dict[str, Any]] | None = Field(None, description="One flat object per picture.")


class LabelSetRequest(Request):
    """Labels to keep under a name; a set of that name that was sent before is replaced."""

    name: str = Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9._-]+$")
    labels: list[str]
    templates: list[str] | None = Field(None, description="Default: the bundle's.")


class ReloadRequest(Request):
    """Which bundle: `model`, or the default."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    code: str
    message: str
    field: str | None


class ErrorAnswer(BaseModel):
    """Every 4xx and 5xx."""

    error: ErrorDetail


class Prediction(BaseModel):
    """One label; `contributions` (of "class" and each attribute) sum to `logit` in adapted mode."""

    label: str
    probability: float
    logit: float
    cosine: float
    contributions: dict[str, float]


class PictureAnswer(BaseModel):
    """Predictions, best first, or the picture's own error."""

    predictions: list[Prediction]
    warnings: list[str]
    none_of_these: bool | None = Field(
        None, description="Whether no label fits; null without a threshold, and in zero_shot mode."
    )
    heatmaps: dict[str, str] | None = Field(
        None,
        description="By attribute, a PNG (data URI) to lay over the centre crop of the picture; only when asked for.",
    )


class ClassifyAnswer(BaseModel):
    """One result per picture, in order."""

    model: str
    mode: str
    temperature: float = Field(
        description="Probabilities are softmax(logits / temperature); fitted on validation pictures, else 1."
    )
    results: list[PictureAnswer | ErrorAnswer]


class EmbedAnswer(BaseModel):
    """One entry per picture or text, in order: normalised features by name, or its own error."""

    model: str
    embeddings: list[dict[str, list[float]] | ErrorAnswer]
    warnings: list[str] | None = None


class Hit(BaseModel):
    """One picture found; `score` is the weighted sum of `scores` (cosines, less the
    part of negative examples). `thumbnail` is a data URI."""

    id: str
    score: float
    scores: dict[str, float]
    metadata: dict[str, Any]
    thumbnail: str | None


class SearchResult(BaseModel):
    """Of one of several searches, best first."""

    results: list[Hit]


class SearchAnswer(BaseModel):
    """`results`: hits, best first; of several searches in one call one entry each, in order."""

    model: str
    results: list[Hit] | list[SearchResult | ErrorAnswer]
    warnings: list[str]


class Added(BaseModel):
    """A picture that is stored durably."""

    id: str


class GalleryAddAnswer(BaseModel):
    """One result per picture, in order."""

    results: list[Added | ErrorAnswer]


class DeleteAnswer(BaseModel):
    """What was deleted."""

    deleted: str


class LabelSetAnswer(BaseModel):
    """A label set; `source` is "sent", or the name of the bundle that holds it."""

    name: str
    labels: list[str]
    templates: list[str]
    source: str


class LabelSetsAnswer(BaseModel):
    """All of them."""

    label_sets: list[LabelSetAnswer]


class ReloadAnswer(BaseModel):
    """Hashes of what was served and of what is served now."""

    model: str
    sha256_before: str
    sha256: str


R = TypeVar("R", bound=Request)


def check(schema: type[R], fields: dict[str, Any]) -> R:
    """`fields` as a request; or ApiError: missing_field, unknown_field, unknown_mode, bad_field."""
    try:
        return schema.model_validate(fields)
    except ValidationError as errors:
        found = errors.errors(include_url=False, include_context=False, include_input=False)
    first = min(found, key=lambda e: e["type"] != "extra_forbidden")
    field = _path(first["loc"])
    if first["type"] == "extra_forbidden":
        known = ", ".join(schema.model_fields)
        raise ApiError(f"field {field!r} is not known; known are {known}", code="unknown_field", field=field)
    if first["type"] == "missing":
        raise ApiError(f"field {field!r} is missing", code="missing_field", field=field)
    if field == "mode":
        raise ApiError("mode is not known; use adapted or zero_shot", code="unknown_mode", field=field)
    raise ApiError(f"{field}: {first['msg'][:1].lower()}{first['msg'][1:]}", code="bad_field", field=field)


def _path(location: tuple[int | str, ...]) -> str:
    """`("labels", 3)` as `labels[3]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.lstrip(".")[:100]
