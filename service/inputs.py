"""What requests have in common: checked against their schema and the limits, their pictures decoded from text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from dear_serve.errors import DearError

from . import schemas
from .body import Body, Picture, decode_picture
from .errors import ApiError
from .settings import Limits

__all__ = ["Inputs", "each"]

T = TypeVar("T")
R = TypeVar("R", bound=schemas.Request)


class Inputs:
    """Checks requests against the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def request(self, schema: type[R], body: Body) -> R:
        """`body` as a request. Raises ApiError: see `schemas.check`."""
        return schemas.check(schema, body.fields)

    def check_texts(self, name: str, texts: Sequence[str] | None, most: int) -> None:
        """Raise ApiError (too_many_..., text_too_long) for more texts than `most`, or one that is too long."""
        _at_most(name, texts, most)
        for index, text in enumerate(texts or ()):
            if len(text) > self._limits.text_chars:
                raise ApiError(
                    f"the text has {len(text)} characters and {self._limits.text_chars} are allowed",
                    code="text_too_long",
                    field=f"{name}[{index}]",
                )
        total = sum(map(len, texts or ()))
        if total > self._limits.total_text_chars:
            raise ApiError(
                f"{name} have {total} characters and {self._limits.total_text_chars} are allowed; send fewer",
                code="text_too_long",
                field=name,
            )

    def pictures(self, request: schemas.Pictures, body: Body) -> list[Picture]:
        """The pictures of a form or of a JSON body. Raises ApiError: missing_field, too_many_images."""
        if body.files:
            return [*body.files]  # the form's parser has counted them
        _at_most("images", request.images, self._limits.images)
        if not request.images:
            raise ApiError(
                "images is missing; send at least one picture", code="missing_field", field="images"
            )
        return [decode_picture(text) for text in request.images]


def each(pictures: Sequence[Picture], run: Callable[[list[bytes]], Sequence[T]]) -> list[T | DearError]:
    """`run` on the pictures that have bytes; the errors of the others stay in their places."""
    usable = [p for p in pictures if isinstance(p, bytes)]
    results = iter(run(usable) if usable else ())
    return [next(results) if isinstance(p, bytes) else p for p in pictures]


def _at_most(name: str, given: Sequence[Any] | None, most: int) -> None:
    if given and len(given) > most:
        raise ApiError(
            f"{name} has {len(given)} items and {most} are allowed; send fewer",
            code=f"too_many_{name}",
            field=name,
        )
