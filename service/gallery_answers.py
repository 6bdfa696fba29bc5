"""What /search and /gallery answer. Only a server with a gallery imports this, as LanceDB takes a second to import."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from dear_serve.errors import DearError
from dear_serve.gallery.indexer import content_hash
from dear_serve.gallery.query import build_query, parse_attributes
from dear_serve.gallery.store import Gallery
from dear_serve.runtime.predict import Embedding, Predictor

from . import schemas, wire
from .body import Body, decode_picture
from .errors import ApiError
from .inputs import Inputs, each
from .metrics import Metrics
from .models import Models, Served

__all__ = ["GalleryAnswers"]

_MAX_SEARCHES = 64


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
        negatives, weight = self._negatives(predictor, request)
        found = self._looked_for(predictor, request, body)
        queries = [
            replace(
                build_query(
                    parsed, vectors, bases, filter=request.filter, top_k=request.top_k, exclude=exclude
                ),
                offset=request.offset,
                diversity=request.diversity,
                negatives=negatives,
                negative_weight=weight,
            )
            for vectors, exclude in (f for f in found if not isinstance(f, DearError))
        ]
        with self._metrics.timed("search"):
            answers = iter(self._gallery.search_many(queries))
        results = [
            f if isinstance(f, DearError) else {"results": [wire.hit_answer(h) for h in next(answers)]}
            for f in found
        ]
        warnings = wire.cut(predictor, request.texts or ())
        settled: list[Any] = wire.settle(results)
        many = settled if len(settled) > 1 else settled[0]["results"]
        return {"model": served.name, "results": many, "warnings": warnings}

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
    ) -> list[tuple[Embedding, tuple[str, ...]] | DearError]:
        """Per item the vectors searched by and the ids to leave out (the picture itself), or its error."""
        sources = {"images": body.files or request.images, "texts": request.texts, "ids": request.ids}
        given = {name: items for name, items in sources.items() if items is not None and items != []}
        counts = [len(items) for items in given.values()]
        if len(given) != 1 or counts[0] > _MAX_SEARCHES:
            named = ", ".join(f"{len(items)} {name}" for name, items in given.items()) or "nothing"
            raise ApiError(
                f"search by pictures (images), texts or ids, up to {_MAX_SEARCHES} of one kind; {named} given",
                code="bad_field" if given else "missing_field",
                field=[*given, "images"][0],
            )
        if request.ids:
            vectors = self._gallery.vectors(request.ids)
            return [(wire.row(vectors, i), (picture,)) for i, picture in enumerate(request.ids)]
        if request.texts:
            self._inputs.check_texts("texts", request.texts, _MAX_SEARCHES)
            vectors = predictor.readout_text(request.texts)
            return [(wire.row(vectors, i), ()) for i in range(len(request.texts))]
        found = each(self._inputs.pictures(request, body), predictor.readout_images)
        return [f if isinstance(f, DearError) else (f, ()) for f in found]

    def _negatives(
        self, predictor: Predictor, request: schemas.SearchRequest
    ) -> tuple[tuple[Embedding, ...], float]:
        """Vectors of the examples to keep away from, and what they weigh."""
        asked = request.negative
        if asked is None:
            return (), 0.0
        examples: list[Embedding] = []
        if asked.ids:
            vectors = self._gallery.vectors(asked.ids)
            examples += [wire.row(vectors, i) for i in range(len(asked.ids))]
        if asked.texts:
            self._inputs.check_texts("negative.texts", asked.texts, _MAX_SEARCHES)
            vectors = predictor.readout_text(asked.texts)
            examples += [wire.row(vectors, i) for i in range(len(asked.texts))]
        if asked.images:
            pictures = [decode_picture(text) for text in asked.images[:_MAX_SEARCHES]]
            for i, found in enumerate(each(pictures, predictor.readout_images)):
                if isinstance(found, DearError):
                    raise wire.at(found, f"negative.images[{i}]")
                examples.append(found)
        if not examples:
            raise ApiError(
                "negative names no example; give ids, texts or images", code="bad_field", field="negative"
            )
        return tuple(examples), asked.weight
