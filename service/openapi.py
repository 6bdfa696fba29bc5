"""The OpenAPI description at /docs.json, made of the schemas: BentoML describes only routes of its own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from dear_serve import __version__

from .schemas import ErrorAnswer, Request

__all__ = ["Operation", "describe"]

_REF = "#/components/schemas/{model}"
_OPEN = ("/", "/web/{id}", "/livez", "/readyz")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One route, as it is described."""

    method: str
    path: str
    name: str
    summary: str
    request: type[Request] | None = None
    answer: type[BaseModel] | None = None
    query: tuple[str, ...] = ()
    """Names of query parameters, all texts and optional."""


def describe(operations: Iterable[Operation]) -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    operations = list(operations)
    models = {m for o in operations for m in (o.request, o.answer) if m is not None} | {ErrorAnswer}
    # Requests are checked and answers are sent: both are described as the validator sees them.
    ordered = sorted(models, key=lambda m: m.__name__)
    _, schemas = models_json_schema([(m, "validation") for m in ordered], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dear-serve",
            "version": __version__,
            "description": "Classify, embed and search pictures with an adapted CLIP.",
        },
        "servers": [{"url": "."}],
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _operation(operation: Operation) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": "Success"}
    if operation.answer is not None:
        answer["content"] = {"application/json": {"schema": _ref(operation.answer)}}
    refused = {
        "description": "Refused, with the reason",
        "content": {"application/json": {"schema": _ref(ErrorAnswer)}},
    }
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {"200": answer, "4XX": refused, "503": refused},
    }
    if operation.path not in _OPEN:
        # An empty requirement: the key is needed only where the server has one.
        described["security"] = [{}, {"bearer": []}, {"key": []}]
    if operation.request is not None:
        described["requestBody"] = {"required": True, "content": _contents(operation.request)}
    parameters = [
        {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}
        for name in operation.query
    ]
    if "{id}" in operation.path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        described["parameters"] = parameters
    return described


def _contents(request: type[Request]) -> dict[str, Any]:
    contents: dict[str, Any] = {"application/json": {"schema": _ref(request)}}
    if "images" in request.model_fields:
        properties: dict[str, Any] = {
            name: {"type": "string", "description": "JSON text, except for mode, filter, model and label_set"}
            for name in request.model_fields
        }
        properties["images"] = {"type": "array", "items": {"type": "string", "format": "binary"}}
        form = {"type": "object", "properties": properties, "additionalProperties": False}
        contents["multipart/form-data"] = {"schema": form}
    return contents


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}
