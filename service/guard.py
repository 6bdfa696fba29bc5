"""Around every endpoint: key, request id, metrics, log, and an answer in the error contract whatever happens."""

from __future__ import annotations

import hmac
import json
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from .errors import ApiError, error_body, status_of
from .metrics import Metrics
from .openapi import Operation

__all__ = ["HEADERS", "Endpoint", "Guard", "json_response", "no_route"]

Endpoint = Callable[[Request], Awaitable[Response]]

log = logging.getLogger("service")

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; "
        "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OPEN = frozenset({"page", "page_file"})


class Guard:
    """Nothing may escape an endpoint: without an answer BentoML's time-out middleware waits until its time is up."""

    def __init__(self, api_key: str | None, metrics: Metrics) -> None:
        self._key = api_key.encode() if api_key else None
        self._metrics = metrics

    async def answer(self, operation: Operation, endpoint: Endpoint, request: Request) -> Response:
        """The endpoint's response, or a refusal; with the request's id, counted and logged."""
        request_id, start = _request_id(request), perf_counter()
        with self._metrics.request(operation.path) as status:
            try:
                if operation.name not in _OPEN:
                    self._check_key(request)
                response = await endpoint(request)
            except ClientDisconnect:
                response = _refusal(ApiError("the caller has gone", code="client_gone"))
            except Exception as error:
                response = _refusal(error)
                if response.status_code == 500:
                    log.exception("request %s failed", request_id, extra={"fields": {"id": request_id}})
            status.append(response.status_code)
        fields = {
            "method": operation.method,
            "route": operation.path,
            "status": response.status_code,
            "id": request_id,
            "ms": round(1000 * (perf_counter() - start), 1),
        }
        log.info("%(method)s %(route)s %(status)d %(id)s %(ms).1f ms", fields, extra={"fields": fields})
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


def json_response(content: Any, status: int = 200) -> Response:
    """`content` as JSON."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Messages quote what was sent, which may hold lone surrogates.
    return Response(text.encode("utf-8", "replace"), status, HEADERS, "application/json")


async def no_route(request: Request, error: Exception) -> Response:
    """The answer to a path or a method that is not there."""
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


def _request_id(request: Request) -> str:
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _refusal(error: Exception) -> Response:
    response = json_response(error_body(error), status_of(error))
    if response.status_code in (429, 503):
        response.headers["Retry-After"] = "1"
    elif response.status_code == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
