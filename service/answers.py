"""What each route answers: a request checked, the library called, the result in the contract's names."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from dear_serve.errors import DearError
from dear_serve.gallery.query import build_query, parse_attributes
from dear_serve.gallery.store import Gallery
from dear_serve.runtime.predict import Embedding, PictureResult, Predictor

from . import schemas, wire
from .body import Body, Picture, decode_picture
from .errors import ApiError
from .metrics import Metrics
from .settings import Settings

__all__ = ["Answers"]

T = TypeVar("T")
R = TypeVar("R", bound=schemas.Request)


class Answers:
    """One method per route; called in worker threads, several at a time.

    All raise DearError for what the caller can mend; the error of one picture among several is in the answer.
    """

    def __init__(
        self, predictor: Predictor, gallery: Gallery | None, settings: Settings, metrics: Metrics
    ) -> None:
        self._predictor = predictor
        self._gallery = gallery
        self._limits = settings.limits
        self._metrics = metrics
        self._name = predictor.bundle.name
        self._model = wire.model_answer(predictor)

    def classify(self, body: Body) -> dict[str, Any]:
        """POST /classify."""
        request = self._check(schemas.ClassifyRequest, body)
        labels, templates = request.labels, request.templates
        self._check_texts("labels", labels, self._limits.labels)
        self._check_texts("templates", templates, self._limits.templates)
        own = self._predictor.bundle.manifest
        prompts = len(own.class_names if labels is None else labels)
        prompts *= len(own.templates if templates is None else templates)
        if prompts > self._limits.prompts and (labels is not None or templates is not None):
            raise ApiError(
                f"labels times templates are {prompts} and {self._limits.prompts} are allowed; send fewer",
                code="too_many_prompts",
                field="templates",
            )

        def run(pictures: list[bytes]) -> list[PictureResult]:
            return self._predictor.classify(
                pictures, labels=labels, templates=templates, mode=request.mode, top_k=request.top_k
            )

        results = self._each(self._pictures(request, body), run)
        answers = [r if isinstance(r, DearError) else (r.error or wire.picture_answer(r)) for r in results]
        return {"model": self._name, "mode": request.mode, "results": wire.settle(answers)}

    def embed_image(self, body: Body) -> dict[str, Any]:
        """POST /embed/image."""
        request = self._check(schemas.EmbedImageRequest, body)
        embeddings = self._each(self._pictures(request, body), self._predictor.embed_images)
        answers = [e if isinstance(e, DearError) else wire.floats(e) for e in embeddings]
        return {"model": self._name, "embeddings": wire.settle(answers)}

    def embed_text(self, body: Body) -> dict[str, Any]:
        """POST /embed/text."""
        request = self._check(schemas.EmbedTextRequest, body)
        texts = request.texts
        self._check_texts("texts", texts, self._limits.texts)
        if not texts:
            raise ApiError("texts is empty; send at least one", code="missing_field", field="texts")
        embeddings = [wire.floats(e) for e in self._predictor.embed_texts(texts)]
        return {"model": self._name, "embeddings": embeddings, "warnings": self._cut(texts)}

    def search(self, body: Body) -> dict[str, Any]:
        """POST /search."""
        request = self._check(schemas.SearchRequest, body)
        gallery = self._open_gallery()
        wanted = request.attributes
        if isinstance(wanted, dict) and "phrases" in wanted:
            wanted = [wanted]  # one attribute of the caller's own
        parsed = parse_attributes(wanted, tuple(gallery.spec.columns))
        bases = {own.name: self._predictor.readout_phrases(own.phrases) for own in parsed.invented}
        vectors, exclude = self._looked_for(request, body, gallery)
        query = build_query(
            parsed, vectors, bases, filter=request.filter, top_k=request.top_k, exclude=exclude
        )
        with self._metrics.timed("search"):
            hits = gallery.search(query)
        warnings = self._cut(request.texts or ())
        return {"model": self._name, "results": [wire.hit_answer(h) for h in hits], "warnings": warnings}

    def gallery_add(self, body: Body) -> dict[str, Any]:
        """POST /gallery/add: all usable pictures are stored, together and durably, before this answers."""
        request = self._check(schemas.GalleryAddRequest, body)
        gallery = self._open_gallery()
        pictures = self._pictures(request, body)
        metadata = [{} for _ in pictures] if request.metadata is None else request.metadata
        for name, given in (("ids", request.ids), ("metadata", metadata)):
            if len(given) != len(pictures):
                raise ApiError(
                    f"{len(given)} {name} for {len(pictures)} pictures; send one each",
                    code="bad_field",
                    field=name,
                )
        rows = self._each(pictures, wire.previews)
        kept = [(i, row) for i, row in enumerate(rows) if not isinstance(row, DearError)]
        if kept:
            # A preview means that the picture could be decoded, so none of these fails.
            features, _ = self._predictor.image_features([row.data for _, row in kept])
            gallery.add(
                [request.ids[i] for i, _ in kept],
                self._predictor.readout(features),
                [metadata[i] for i, _ in kept],
                [row.thumbnail for _, row in kept],
                [hashlib.sha256(row.data).hexdigest() for _, row in kept],
            )
        answers = [
            r if isinstance(r, DearError) else {"id": i} for i, r in zip(request.ids, rows, strict=True)
        ]
        return {"results": wire.settle(answers)}

    def gallery_delete(self, picture: str) -> dict[str, Any]:
        """DELETE /gallery/{id}."""
        self._open_gallery().delete(picture)
        return {"deleted": picture}

    def gallery_stats(self) -> dict[str, Any]:
        """GET /gallery/stats."""
        return asdict(self._open_gallery().stats())

    def model(self) -> dict[str, Any]:
        """GET /model."""
        return self._model

    def _check(self, schema: type[R], body: Body) -> R:
        request = schemas.check(schema, body.fields)
        if request.model is not None and request.model != self._name:
            raise ApiError(
                f"model {request.model[:100]!a} is not served here; {self._name!a} is",
                code="unknown_model",
                field="model",
            )
        return request

    def _check_texts(self, name: str, texts: Sequence[str] | None, most: int) -> None:
        _at_most(name, texts, most)
        for index, text in enumerate(texts or ()):
            if len(text) > self._limits.text_chars:
                raise ApiError(
                    f"the text has {len(text)} characters and {self._limits.text_chars} are allowed",
                    code="text_too_long",
                    field=f"{name}[{index}]",
                )

    def _pictures(self, request: schemas.Pictures, body: Body) -> list[Picture]:
        if body.files:
            return [*body.files]  # the form's parser has counted them
        _at_most("images", request.images, self._limits.images)
        if not request.images:
            raise ApiError(
                "images is missing; send at least one picture", code="missing_field", field="images"
            )
        return [decode_picture(text) for text in request.images]

    def _each(
        self, pictures: Sequence[Picture], run: Callable[[list[bytes]], Sequence[T]]
    ) -> list[T | DearError]:
        """`run` on the pictures that have bytes; the errors of the others stay in their places."""
        usable = [p for p in pictures if isinstance(p, bytes)]
        results = iter(run(usable) if usable else ())
        return [next(results) if isinstance(p, bytes) else p for p in pictures]

    def _open_gallery(self) -> Gallery:
        if self._gallery is None:
            raise ApiError("this server has no gallery; start it with one", code="no_gallery")
        return self._gallery

    def _looked_for(
        self, request: schemas.SearchRequest, body: Body, gallery: Gallery
    ) -> tuple[Embedding, tuple[str, ...]]:
        """The vectors searched by, and the ids to leave out: the picture itself."""
        sources = {"images": body.files or request.images, "texts": request.texts, "ids": request.ids}
        given = {name: items for name, items in sources.items() if items is not None and items != []}
        if len(given) != 1 or len(*given.values()) != 1:
            counts = ", ".join(f"{len(items)} {name}" for name, items in given.items()) or "nothing"
            raise ApiError(
                f"search by one picture (images), one text (texts) or one id (ids); {counts} given",
                code="bad_field" if given else "missing_field",
                field=[*given, "images"][0],
            )
        if request.ids:
            return wire.first(gallery.vectors(request.ids)), tuple(request.ids)
        if request.texts:
            self._check_texts("texts", request.texts, 1)
            return wire.first(self._predictor.readout_text(request.texts)), ()
        (found,) = self._each(self._pictures(request, body), self._predictor.readout_images)
        if isinstance(found, DearError):
            raise wire.at(found, "images[0]")
        return found, ()

    def _cut(self, texts: Sequence[str]) -> list[str]:
        return [warning for warnings in self._predictor.text_warnings(texts) for warning in warnings]


def _at_most(name: str, given: Sequence[Any] | None, most: int) -> None:
    if given and len(given) > most:
        raise ApiError(
            f"{name} has {len(given)} items and {most} are allowed; send fewer",
            code=f"too_many_{name}",
            field=name,
        )
