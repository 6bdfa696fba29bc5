"""The ASGI application: routes, key, request ids, and an answer in the error contract whatever happens."""

from __future__ import annotations

import hmac
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from . import schemas
from .errors import ApiError, error_body, status_of
from .openapi import Operation, describe
from .settings import Settings

if TYPE_CHECKING:
    from dear_serve.gallery.store import Gallery
    from dear_serve.runtime.predict import Predictor

    from .body import Body

__all__ = ["OPERATIONS", "create_asgi_app"]

Endpoint = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("service")

_PAGE = Path(__file__).parent / "web" / "index.html"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OPEN = frozenset({"page"})
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}

OPERATIONS = (
    Operation(
        method="POST",
        path="/classify",
        name="classify",
        summary="Which of these labels is each picture, and why",
        request=schemas.ClassifyRequest,
        answer=schemas.ClassifyAnswer,
    ),
    Operation(
        method="POST",
        path="/embed/image",
        name="embed_image",
        summary="Features of pictures",
        request=schemas.EmbedImageRequest,
        answer=schemas.EmbedAnswer,
    ),
    Operation(
        method="POST",
        path="/embed/text",
        name="embed_text",
        summary="Features of texts",
        request=schemas.EmbedTextRequest,
        answer=schemas.EmbedAnswer,
    ),
    Operation(
        method="POST",
        path="/search",
        name="search",
        summary="Pictures alike in the attributes you weigh",
        request=schemas.SearchRequest,
        answer=schemas.SearchAnswer,
    ),
    Operation(
        method="POST",
        path="/gallery/add",
        name="gallery_add",
        summary="Keep pictures; durable when answered",
        request=schemas.GalleryAddRequest,
        answer=schemas.GalleryAddAnswer,
    ),
    Operation(
        method="DELETE",
        path="/gallery/{id}",
        name="gallery_delete",
        summary="Forget a picture",
        answer=schemas.DeleteAnswer,
    ),
    Operation(method="GET", path="/gallery/stats", name="gallery_stats", summary="What the gallery holds"),
    Operation(
        method="GET", path="/model", name="model", summary="Classes, attributes, roles, engine, hashes"
    ),
    Operation(method="GET", path="/metrics", name="metrics", summary="Prometheus metrics"),
    Operation(method="GET", path="/docs.json", name="docs", summary="This description"),
    Operation(method="GET", path="/", name="page", summary="The page"),
    Operation(method="GET", path="/livez", name="livez", summary="The process is alive"),
    Operation(method="GET", path="/readyz", name="readyz", summary="The bundle is loaded and warm"),
)
"""Every route, BentoML's probes included."""


def create_asgi_app(predictor: Predictor, gallery: Gallery | None, settings: Settings) -> Starlette:
    """The whole HTTP contract on one predictor and one gallery, without BentoML.

    `app.state.close()` finishes what was accepted and frees the threads; predictor and gallery stay open.
    """
    from .answers import Answers
    from .body import read_body
    from .inputs import Inputs
    from .metrics import Metrics
    from .work import Admission, Workers

    limits = settings.limits
    metrics = Metrics()
    metrics.engine(predictor.engine.info)
    predictor.observer = metrics
    inputs = Inputs(predictor, limits)
    answers = Answers(predictor, inputs, limits)
    admission = Admission(limits)
    workers = Workers(threads=settings.workers, waiting=limits.waiting, seconds=limits.answer_seconds)
    described = describe(OPERATIONS)

    async def with_body(answer: Callable[[Body], dict[str, Any]], request: Request) -> Response:
        with admission.admit() as ticket:
            return _json(await workers.run(answer, await read_body(request, ticket, limits)))

    async def without_body(answer: Callable[[], dict[str, Any]], _: Request) -> Response:
        return _json(await workers.run(answer))

    async def with_id(answer: Callable[[str], dict[str, Any]], request: Request) -> Response:
        return _json(await workers.run(answer, request.path_params["id"]))

    async def docs(_: Request) -> Response:
        return _json(described)

    async def show_metrics(_: Request) -> Response:
        return Response(await workers.run(metrics.text), media_type=metrics.content_type)

    async def page(_: Request) -> Response:
        return FileResponse(_PAGE, headers=_HEADERS, media_type="text/html; charset=utf-8")

    endpoints: dict[str, Endpoint] = {
        "classify": partial(with_body, answers.classify),
        "embed_image": partial(with_body, answers.embed_image),
        "embed_text": partial(with_body, answers.embed_text),
        "model": partial(without_body, answers.model),
        "metrics": show_metrics,
        "docs": docs,
        "page": page,
    }
    if gallery is None:
        endpoints |= dict.fromkeys(("search", "gallery_add", "gallery_delete", "gallery_stats"), _no_gallery)
    else:
        from .gallery_answers import GalleryAnswers

        stored = GalleryAnswers(predictor, inputs, gallery, metrics)
        endpoints |= {
            "search": partial(with_body, stored.search),
            "gallery_add": partial(with_body, stored.add),
            "gallery_delete": partial(with_id, stored.delete),
            "gallery_stats": partial(without_body, stored.stats),
        }
    guard = _Guard(settings.api_key, metrics)
    routes = [
        Route(
            o.path.replace("{id}", "{id:path}"),
            partial(guard.answer, o, endpoints[o.name]),
            methods=[o.method],
        )
        for o in OPERATIONS
        if o.name in endpoints
    ]
    # The fixed path first: {id:path} would take it.
    routes.sort(key=lambda route: "{" in route.path)
    app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
    app.router.redirect_slashes = False
    app.state.close = workers.close
    return app


class _Guard:
    """Around every endpoint: key, request id, metrics, log, and an answer whatever happens.

    Nothing may escape: without an answer BentoML's time-out middleware waits until its time is up.
    """

    def __init__(self, api_key: str | None, metrics: Any) -> None:
        self._key = api_key.encode() if api_key else None
        self._metrics = metrics

    async def answer(self, operation: Operation, endpoint: Endpoint, request: Request) -> Response:
        request_id = _request_id(request)
        with self._metrics.request(operation.path) as status:
            try:
                if operation.name not in _OPEN:
                    self._check_key(request)
                response = await endpoint(request)
            except ClientDisconnect:
                response = _refusal(ApiError("the body broke off", code="bad_body"))
            except Exception as error:
                response = _refusal(error)
                if response.status_code == 500:
                    log.exception("request %s failed", request_id)
            status.append(response.status_code)
        log.info("%s %s %d %s", operation.method, operation.path, response.status_code, request_id)
        response.headers["X-Request-ID"] = request_id
        return response

    def _check_key(self, request: Request) -> None:
        if self._key is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), self._key):
            raise ApiError(
                "a key is needed; send it as Authorization: Bearer KEY or X-API-Key: KEY", code="unauthorized"
            )


async def _no_gallery(_: Request) -> Response:
    raise ApiError("this server has no gallery; start it with one", code="no_gallery")


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = _refusal(
            ApiError(f"{request.method[:20]} is not for this path", code="method_not_allowed")
        )
    else:
        response = _refusal(ApiError("there is no such path; /docs.json lists them", code="not_found"))
    response.headers.update(error.headers or {})
    response.headers["X-Request-ID"] = _request_id(request)
    return response


def _refusal(error: Exception) -> Response:
    response = _json(error_body(error), status_of(error))
    if response.status_code == 503:
        response.headers["Retry-After"] = "1"
    elif response.status_code == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _json(content: Any, status: int = 200) -> Response:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Messages quote what was sent, which may hold lone surrogates.
    return Response(text.encode("utf-8", "replace"), status, _HEADERS, "application/json")
