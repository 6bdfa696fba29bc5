"""The ASGI application: each route with what answers it, in threads off the event loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .answers import Answers
from .body import Body, read_body
from .errors import ApiError
from .guard import Endpoint, Guard, json_response, no_route
from .inputs import Inputs
from .metrics import Metrics
from .models import Models
from .openapi import describe
from .operations import OPERATIONS
from .pages import page_file
from .settings import Settings
from .work import Admission, Workers

__all__ = ["OPERATIONS", "create_asgi_app"]


def create_asgi_app(models: Models, settings: Settings, *, metrics: Metrics | None = None) -> Starlette:
    """The whole HTTP contract on opened bundles and a gallery, without BentoML.

    `app.state.close()` finishes what was accepted and frees the threads; bundles and gallery stay open.
    """
    metrics = metrics or Metrics()
    for name, predictor in zip(models.names, models.predictors, strict=True):
        metrics.engine(name, predictor.engine.info)
        predictor.observer = metrics
    limits = settings.limits
    register_url_convertor("id", _AnyText())
    workers = Workers(threads=settings.workers, waiting=limits.waiting, seconds=limits.answer_seconds)
    endpoints = _Endpoints(models, settings, metrics, workers).table()
    guard = Guard(settings.api_key, metrics)
    routes = [
        Route(
            o.path.replace("{id}", "{id:id}"),
            partial(guard.answer, o, endpoints[o.name]),
            methods=[o.method],
        )
        for o in OPERATIONS
        if o.name in endpoints
    ]
    # The fixed path first: {id:id} would take it.
    routes.sort(key=lambda route: "{" in route.path)
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: no_route}, middleware=_middleware(settings.cors)
    )
    app.router.redirect_slashes = False
    app.state.close = workers.close
    return app


class _AnyText(PathConvertor):
    """Starlette's own stops at a line break."""

    regex = r"[\s\S]*"


class _Endpoints:
    """What answers each operation, by name."""

    def __init__(self, models: Models, settings: Settings, metrics: Metrics, workers: Workers) -> None:
        self._models = models
        self._settings = settings
        self._metrics = metrics
        self._workers = workers
        self._admission = Admission(settings.limits)

    def table(self) -> dict[str, Endpoint]:
        """Operation name to endpoint; the probes are BentoML's."""
        inputs = Inputs(self._settings.limits)
        answers = Answers(self._models, inputs, self._settings.limits)
        described = describe(OPERATIONS)

        async def docs(_: Request) -> Response:
            return json_response(described)

        async def metrics(_: Request) -> Response:
            text = await self._workers.run(self._metrics.text)
            return Response(text, media_type=self._metrics.content_type)

        async def model(request: Request) -> Response:
            return await self._workers.run(_answered, answers.model, request.query_params.get("model"))

        return {
            "classify": self._with_body(answers.classify),
            "embed_image": self._with_body(answers.embed_image),
            "embed_text": self._with_body(answers.embed_text),
            "label_sets": self._without_body(answers.label_sets),
            "label_set_add": self._with_body(answers.label_set_add),
            "label_set_delete": self._with_id(answers.label_set_delete),
            "reload": self._with_body(answers.reload) if self._settings.api_key else _admin_off,
            "model": model,
            "metrics": metrics,
            "docs": docs,
            "page": page_file,
            "page_file": page_file,
        } | self._gallery(inputs)

    def _gallery(self, inputs: Inputs) -> dict[str, Endpoint]:
        if self._models.gallery is None:
            return dict.fromkeys(("search", "gallery_add", "gallery_delete", "gallery_stats"), _no_gallery)
        from .gallery_answers import GalleryAnswers  # LanceDB takes a second to import

        stored = GalleryAnswers(self._models, inputs, self._models.gallery, self._metrics)
        return {
            "search": self._with_body(stored.search),
            "gallery_add": self._with_body(stored.add),
            "gallery_delete": self._with_id(stored.delete),
            "gallery_stats": self._without_body(stored.stats),
        }

    def _with_body(self, answer: Callable[[Body], dict[str, Any]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            with self._admission.admit() as ticket:
                body = await read_body(request, ticket, self._settings.limits)
                return await self._workers.run(_answered, answer, body, gone=partial(_gone, request))

        return endpoint

    def _without_body(self, answer: Callable[[], dict[str, Any]]) -> Endpoint:
        async def endpoint(_: Request) -> Response:
            return await self._workers.run(_answered, answer)

        return endpoint

    def _with_id(self, answer: Callable[[str], dict[str, Any]]) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            return await self._workers.run(_answered, answer, request.path_params["id"])

        return endpoint


def _answered(answer: Callable[..., dict[str, Any]], *arguments: Any) -> Response:
    """The answer and its JSON, both in the worker's thread."""
    return json_response(answer(*arguments))


async def _gone(request: Request) -> None:
    """Returns once the caller has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _no_gallery(_: Request) -> Response:
    raise ApiError("this server has no gallery; start it with one", code="no_gallery")


async def _admin_off(_: Request) -> Response:
    raise ApiError("reloading needs a server with a key: start it with DEAR_API_KEY set", code="admin_off")


def _middleware(origins: tuple[str, ...]) -> list[Middleware]:
    if not origins:
        return []
    headers = ["Authorization", "Content-Type", "X-API-Key", "X-Request-ID"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=headers,
            expose_headers=["X-Request-ID", "Retry-After"],
        )
    ]
