"""Reads a request's body within its limits: JSON or multipart/form-data to plain fields and picture bytes."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from dear_serve.errors import DearError, OverloadError

from .errors import ApiError
from .settings import Limits
from .work import Ticket

__all__ = ["Body", "Picture", "decode_picture", "read_body"]

Picture = bytes | DearError
"""A picture's bytes, or why there are none."""

_TEXT_FIELDS = frozenset({"mode", "filter", "model", "label_set"})
"""Fields of a form that are plain text; all others are JSON text."""
_MAX_FIELDS = 32
_FIELD_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Body:
    """A request as it was sent, not yet checked against a schema."""

    fields: dict[str, Any]
    files: list[bytes] = field(default_factory=list)
    """The `images` of a form; those of a JSON body stay in `fields`, as text."""


class _FormParser(MultiPartParser):
    """Starlette's parser, keeping files in memory: the body is bounded, and pictures never touch the disk."""

    spool_max_size = 2**62
    complete = False
    """Whether the closing boundary was seen; a form that was cut has none."""

    def on_end(self) -> None:
        self.complete = True

    def close(self) -> None:
        """Close every file, also of a part without an end, which the form doesn't hold."""
        for file in self._files_to_close_on_error:
            file.close()


async def read_body(request: Request, ticket: Ticket, limits: Limits) -> Body:
    """The body of `request`, counted while it arrives, so that its announced length need not be believed.

    Raises:
        ApiError: body_too_large, read_timeout, bad_json, bad_form, unsupported_media_type, too_many_images,
            unknown_field, bad_field.
        OverloadError: when all requests together hold too many bytes.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/json", "multipart/form-data"):
        raise ApiError(
            f"content type {kind[:100]!r} is not supported; use application/json or multipart/form-data",
            code="unsupported_media_type",
        )
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > limits.body_bytes:
        raise _too_large(limits)
    stream = _counted(request, ticket, limits)
    try:
        reading = _read_json(stream) if kind == "application/json" else _read_form(request, stream, limits)
        return await asyncio.wait_for(reading, limits.read_seconds)
    except asyncio.TimeoutError:
        raise ApiError(
            f"the body did not arrive within {limits.read_seconds:g} s", code="read_timeout"
        ) from None


def decode_picture(text: str) -> Picture:
    """The bytes behind base64 or a base64 data URI; an ApiError (not raised) where there are none."""
    head, comma, _ = text[:200].partition(",")
    if head[:5].lower() == "data:" and comma:
        if not head.lower().endswith(";base64"):
            return ApiError("the data URI is not base64; write data:image/png;base64,...", code="bad_base64")
        text = text[len(head) + 1 :]
    elif "://" in head[:12]:
        return ApiError("pictures are not fetched from addresses; send their bytes", code="url_refused")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return ApiError("the picture is not base64; send base64 of the image file", code="bad_base64")


async def _counted(request: Request, ticket: Ticket, limits: Limits) -> AsyncGenerator[bytes, None]:
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > limits.body_bytes:
            raise _too_large(limits)
        ticket.hold(len(chunk))
        yield chunk


async def _read_json(stream: AsyncGenerator[bytes, None]) -> Body:
    data = b"".join([chunk async for chunk in stream])
    # Large bodies are base64 pictures: parsed in a thread, the others at once.
    value = await asyncio.to_thread(_parse, data, None) if len(data) > 2**18 else _parse(data, None)
    if not isinstance(value, dict):
        raise ApiError('the body is not a JSON object; send one such as {"images": [...]}', code="bad_json")
    return Body(fields=value)


async def _read_form(request: Request, stream: AsyncGenerator[bytes, None], limits: Limits) -> Body:
    parser = _FormParser(
        request.headers, stream, max_files=limits.images, max_fields=_MAX_FIELDS, max_part_size=_FIELD_BYTES
    )
    try:
        form = await parser.parse()
    except (ApiError, OverloadError):
        raise
    except MultiPartException as error:
        raise _form_error(error.message) from None
    except (ValueError, LookupError, AttributeError, TypeError):  # a header that isn't what its name says
        raise ApiError(
            "the form cannot be read; send well-formed multipart/form-data", code="bad_form"
        ) from None
    try:
        if not parser.complete:
            raise ApiError("the form ends before its closing boundary; send all of it", code="bad_form")
        return _sort_form(form.multi_items())
    finally:
        parser.close()


def _sort_form(items: Sequence[tuple[str, str | UploadFile]]) -> Body:
    fields: dict[str, Any] = {}
    files: list[bytes] = []
    for name, value in items:
        if not isinstance(value, str):
            if name != "images":
                raise ApiError(
                    f"file field {name[:100]!r} is not known; send files as images",
                    code="unknown_field",
                    field=name,
                )
            files.append(value.file.read())
        elif name in fields:
            raise ApiError(
                f"{name[:100]!r} is given twice; send a list as one JSON text", code="bad_field", field=name
            )
        elif name == "images":
            raise ApiError(
                "images of a form are files; send them with a file name", code="bad_field", field=name
            )
        else:
            fields[name] = value if name in _TEXT_FIELDS else _parse(value.encode("utf-8", "replace"), name)
    return Body(fields=fields, files=files)


def _form_error(message: str) -> ApiError:
    if message.startswith("Too many files"):
        return ApiError(
            "the form has more files than this server allows; send fewer",
            code="too_many_images",
            field="images",
        )
    if message.startswith(("Too many", "Part exceeded", "Field exceeded")):
        return ApiError("the form has too many or too long fields; send less", code="body_too_large")
    return ApiError("the form cannot be read; send well-formed multipart/form-data", code="bad_form")


def _parse(data: bytes, name: str | None) -> Any:
    """JSON, strictly: no NaN or Infinity, no lone surrogates, no deep nesting."""
    try:
        return from_json(data, allow_inf_nan=False)
    except ValueError as error:
        place = f"{name} is" if name else "the body is"
        raise ApiError(f"{place} not valid JSON: {error}", code="bad_json", field=name) from None


def _too_large(limits: Limits) -> ApiError:
    return ApiError(
        f"the body has more than {limits.body_bytes} bytes; send less at a time", code="body_too_large"
    )
