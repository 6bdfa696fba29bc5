"""The page's files: read once, with their types, and an ETag so that a browser asks whether they changed."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from .errors import ApiError
from .guard import HEADERS

__all__ = ["page_file"]

_FOLDER = Path(__file__).parent / "web"
# Fixed here: mimetypes reads the machine's own tables, and those of Windows call scripts text/plain.
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class _File(NamedTuple):
    data: bytes
    type: str
    etag: str


async def page_file(request: Request) -> Response:
    """The file that the path names, index.html without one; 304 for one that the caller has.

    Raises:
        ApiError: not_found.
    """
    file = _files().get(request.path_params.get("id", "index.html"))
    if file is None:
        raise ApiError("there is no such path; /docs.json lists them", code="not_found")
    headers = {**HEADERS, "ETag": file.etag, "Cache-Control": "no-cache"}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.data, headers=headers, media_type=file.type)


@cache
def _files() -> dict[str, _File]:
    """By name; what isn't in here cannot be asked for, whatever the path says."""
    found = {}
    for path in _FOLDER.iterdir():
        if path.suffix in _TYPES:
            data = path.read_bytes()
            found[path.name] = _File(data, _TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return found
