"""What /search and /gallery answer. Only a server with a gallery imports this, as LanceDB takes a second to import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from dear_serve.errors import DearError
from dear_serve.gallery.indexer import content_hash
from dear_serve.gallery.query import build_query, parse_attributes
from dear_serve.gallery.store import Gallery
from dear_serve.runtime.predict import Embedding, Predictor

from . import schemas, wire
from .body import Body
from .errors import ApiError
from .inputs import Inputs, each
from .metrics import Metrics
from .models import Models, Served

__all__ = ["GalleryAnswers"]


class GalleryAnswers:
    """One method per route, as in `answers.Answers`."""

    def __init__(self, models: Models, inputs: Inputs, gallery: Gallery, metrics: Metrics) -> None:
        self._models = models
        self._inputs = inputs
        self._gallery = gallery
        self._metrics = metrics

    def search(self, body: Body) -> dict[str, Any]:
        """POST /search."""
        with self._use(body) as served:
            return self._search(served, body)

    def _search(self, served: Served, body: Body) -> dict[str, Any]:
        predictor = served.predictor
        request = self._inputs.request(schemas.SearchRequest, body)
        wanted = request.attributes
        if isinstance(wanted, dict) and "phrases" in wanted:
            wanted = [wanted]  # one attribute of the caller's own
        parsed = parse_attributes(wanted, tuple(self._gallery.spec.columns))
        bases = {own.name: predictor.readout_phrases(own.phrases) for own in parsed.invented}
        vectors, exclude = self._looked_for(predictor, request, body)
        query = build_query(
            parsed, vectors, bases, filter=request.filter, top_k=request.top_k, exclude=exclude
        )
        with self._metrics.timed("search"):
            hits = self._gallery.search(query)
        warnings = wire.cut(predictor, request.texts or ())
        return {"model": served.name, "results": [wire.hit_answer(h) for h in hits], "warnings": warnings}

    def add(self, body: Body) -> dict[str, Any]:
        """POST /gallery/add: all usable pictures are stored, together and durably, before this answers."""
        with self._use(body) as served:
            return self._add(served.predictor, body)

    def _add(self, predictor: Predictor, body: Body) -> dict[str, Any]:
        request = self._inputs.request(schemas.GalleryAddRequest, body)
        pictures = self._inputs.pictures(request, body)
        metadata = [{} for _ in pictures] if request.metadata is None else request.metadata
        for name, given in (("ids", request.ids), ("metadata", metadata)):
            if len(given) != len(pictures):
                raise ApiError(
                    f"{len(given)} {name} for {len(pictures)} pictures; send one each",
                    code="bad_field",
                    field=name,
                )
        rows = each(pictures, wire.previews)
        kept = [(i, row) for i, row in enumerate(rows) if not isinstance(row, DearError)]
        if kept:
            # A preview means that the picture could be decoded, so none of these fails.
            features, _ = predictor.image_features([row.data for _, row in kept])
            self._gallery.add(
                [request.ids[i] for i, _ in kept],
                predictor.readout(features),
                [metadata[i] for i, _ in kept],
                [row.thumbnail for _, row in kept],
                [content_hash(row.data, metadata[i]) for i, row in kept],
            )
        answers = [
            r if isinstance(r, DearError) else {"id": i} for i, r in zip(request.ids, rows, strict=True)
        ]
        return {"results": wire.settle(answers)}

    def delete(self, picture: str) -> dict[str, Any]:
        """DELETE /gallery/{id}."""
        self._gallery.delete(picture)
        return {"deleted": picture}

    def stats(self) -> dict[str, Any]:
        """GET /gallery/stats."""
        return asdict(self._gallery.stats())

    @contextmanager
    def _use(self, body: Body) -> Iterator[Served]:
        """The bundle that the gallery belongs to. Raises ApiError: unknown_model, no_gallery."""
        wanted, own = body.fields.get("model"), self._models.gallery_model
        with self._models.use(own if wanted is None else wanted) as served:
            if served.name != own:
                raise ApiError(
                    f"the gallery of this server belongs to model {own!a}", code="no_gallery", field="model"
                )
            yield served

    def _looked_for(
        self, predictor: Predictor, request: schemas.SearchRequest, body: Body
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
            return wire.first(self._gallery.vectors(request.ids)), tuple(request.ids)
        if request.texts:
            self._inputs.check_texts("texts", request.texts, 1)
            return wire.first(predictor.readout_text(request.texts)), ()
        (found,) = each(self._inputs.pictures(request, body), predictor.readout_images)
        if isinstance(found, DearError):
            raise wire.at(found, "images[0]")
        return found, ()
