"""What /classify, /embed and /model answer: a request checked, the library called, the contract's names."""

from __future__ import annotations

from typing import Any

from dear_serve.errors import DearError
from dear_serve.runtime.predict import PictureResult, Predictor

from . import schemas, wire
from .body import Body
from .errors import ApiError
from .inputs import Inputs, each
from .settings import Limits

__all__ = ["Answers"]


class Answers:
    """One method per route; called in worker threads, several at a time.

    All raise DearError for what the caller can mend; the error of one picture among several is in the answer.
    """

    def __init__(self, predictor: Predictor, inputs: Inputs, limits: Limits) -> None:
        self._predictor = predictor
        self._inputs = inputs
        self._limits = limits
        self._name = predictor.bundle.name
        self._model = wire.model_answer(predictor)

    def classify(self, body: Body) -> dict[str, Any]:
        """POST /classify."""
        request = self._inputs.request(schemas.ClassifyRequest, body)
        labels, templates = request.labels, request.templates
        self._inputs.check_texts("labels", labels, self._limits.labels)
        self._inputs.check_texts("templates", templates, self._limits.templates)
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

        results = each(self._inputs.pictures(request, body), run)
        answers = [r if isinstance(r, DearError) else (r.error or wire.picture_answer(r)) for r in results]
        return {"model": self._name, "mode": request.mode, "results": wire.settle(answers)}

    def embed_image(self, body: Body) -> dict[str, Any]:
        """POST /embed/image."""
        request = self._inputs.request(schemas.EmbedImageRequest, body)
        embeddings = each(self._inputs.pictures(request, body), self._predictor.embed_images)
        answers = [e if isinstance(e, DearError) else wire.floats(e) for e in embeddings]
        return {"model": self._name, "embeddings": wire.settle(answers)}

    def embed_text(self, body: Body) -> dict[str, Any]:
        """POST /embed/text."""
        request = self._inputs.request(schemas.EmbedTextRequest, body)
        texts = request.texts
        self._inputs.check_texts("texts", texts, self._limits.texts)
        if not texts:
            raise ApiError("texts is empty; send at least one", code="missing_field", field="texts")
        embeddings = [wire.floats(e) for e in self._predictor.embed_texts(texts)]
        return {"model": self._name, "embeddings": embeddings, "warnings": wire.cut(self._predictor, texts)}

    def model(self) -> dict[str, Any]:
        """GET /model."""
        return self._model
