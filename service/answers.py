"""Answers of /classify, /embed, /label_sets and /model: requests checked, the library called, the names of the API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dear_serve.errors import DearError
from dear_serve.runtime.predict import PictureResult, Question

from . import schemas, wire
from .body import Body
from .errors import ApiError
from .inputs import Inputs, each
from .label_sets import LabelSets, unknown
from .models import Models, Served
from .settings import Limits

__all__ = ["Answers"]


class Answers:
    """One method per route; called in worker threads, several at a time.

    All raise DearError for what the caller can mend; the error of one picture among several is in the answer.
    """

    def __init__(self, models: Models, inputs: Inputs, limits: Limits) -> None:
        self._models = models
        self._inputs = inputs
        self._limits = limits
        self._sets = LabelSets(limits.label_sets)

    def classify(self, body: Body) -> dict[str, Any]:
        """POST /classify."""
        with self._models.use(body.fields.get("model")) as served:
            request = self._inputs.request(schemas.ClassifyRequest, body)
            question = self._question(served, request)

            def run(pictures: list[bytes]) -> list[PictureResult]:
                return served.predictor.answer(pictures, question)

            results = each(self._inputs.pictures(request, body), run)
            temperature = served.predictor.temperature if request.mode == "adapted" else 1.0
        answers = [r if isinstance(r, DearError) else (r.error or wire.picture_answer(r)) for r in results]
        return {
            "model": served.name,
            "mode": request.mode,
            "temperature": temperature,
            "results": wire.settle(answers),
        }

    def embed_image(self, body: Body) -> dict[str, Any]:
        """POST /embed/image."""
        with self._models.use(body.fields.get("model")) as served:
            request = self._inputs.request(schemas.EmbedImageRequest, body)
            embeddings = each(self._inputs.pictures(request, body), served.predictor.embed_images)
        answers = [e if isinstance(e, DearError) else wire.floats(e) for e in embeddings]
        return {"model": served.name, "embeddings": wire.settle(answers)}

    def embed_text(self, body: Body) -> dict[str, Any]:
        """POST /embed/text."""
        with self._models.use(body.fields.get("model")) as served:
            request = self._inputs.request(schemas.EmbedTextRequest, body)
            texts = request.texts
            self._inputs.check_texts("texts", texts, self._limits.texts)
            if not texts:
                raise ApiError("texts is empty; send at least one", code="missing_field", field="texts")
            embeddings = [wire.floats(e) for e in served.predictor.embed_texts(texts)]
            warnings = wire.cut(served.predictor, texts)
        return {"model": served.name, "embeddings": embeddings, "warnings": warnings}

    def model(self, name: str | None) -> dict[str, Any]:
        """GET /model."""
        with self._models.use(name) as served:
            return {
                **wire.model_answer(served.name, served.predictor),
                "models": self._models.names,
                "gallery_model": self._models.gallery_model,
            }

    def label_sets(self) -> dict[str, Any]:
        """GET /label_sets."""
        found = [("sent", name, kept) for name, kept in self._sets.all().items()]
        for name in self._models.names:
            with self._models.use(name) as served:
                own = served.predictor.bundle.manifest.label_sets
            found += [(name, key, kept) for key, kept in own.items()]
        return {
            "label_sets": [{"name": key, **kept.to_dict(), "source": source} for source, key, kept in found]
        }

    def label_set_add(self, body: Body) -> dict[str, Any]:
        """POST /label_sets."""
        request = self._inputs.request(schemas.LabelSetRequest, body)
        self._check("labels", request.labels, self._limits.labels)
        self._check("templates", request.templates, self._limits.templates)
        for predictor in self._models.predictors:
            if request.name in predictor.bundle.manifest.label_sets:
                raise ApiError(
                    f"a bundle has a label set {request.name!a}; choose another name",
                    code="label_set_exists",
                    field="name",
                )
        self._sets.put(request.name, request.labels, request.templates or [])
        return {
            "name": request.name,
            "labels": request.labels,
            "templates": request.templates or [],
            "source": "sent",
        }

    def label_set_delete(self, name: str) -> dict[str, Any]:
        """DELETE /label_sets/{id}."""
        self._sets.delete(name)
        return {"deleted": name}

    def reload(self, body: Body) -> dict[str, Any]:
        """POST /admin/reload."""
        request = self._inputs.request(schemas.ReloadRequest, body)
        name = request.model or self._models.names[0]
        before, after = self._models.reload(name)
        return {"model": name, "sha256_before": before, "sha256": after}

    def _question(self, served: Served, request: schemas.ClassifyRequest) -> Question:
        labels, templates = self._labels(served, request)
        self._check("labels", labels, self._limits.labels)
        self._check("templates", templates, self._limits.templates)
        own = served.predictor.bundle.manifest
        prompts = len(own.class_names if labels is None else labels)
        prompts *= len(own.templates if templates is None else templates)
        if prompts > self._limits.prompts and (labels is not None or templates is not None):
            raise ApiError(
                f"labels times templates are {prompts} and {self._limits.prompts} are allowed; send fewer",
                code="too_many_prompts",
                field="templates",
            )
        return Question(
            labels=labels,
            templates=templates,
            mode=request.mode,
            top_k=request.top_k,
            none_threshold=request.none_threshold,
            heatmaps=request.heatmaps,
        )

    def _labels(
        self, served: Served, request: schemas.ClassifyRequest
    ) -> tuple[Sequence[str] | None, Sequence[str] | None]:
        """Labels and templates as they were sent, or those of the label set that was named."""
        if request.label_set is None:
            return request.labels, request.templates
        if request.labels is not None:
            raise ApiError("send labels or label_set, not both", code="bad_field", field="label_set")
        own = served.predictor.bundle.manifest.label_sets
        kept = own.get(request.label_set) or self._sets.get(request.label_set)
        if kept is None:
            raise unknown(request.label_set)
        return kept.labels, request.templates or kept.templates or None

    def _check(self, name: str, texts: Sequence[str] | None, most: int) -> None:
        self._inputs.check_texts(name, texts, most)
