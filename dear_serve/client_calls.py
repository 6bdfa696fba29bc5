"""What both Python clients share: how a call is made up, when it is tried again, how its answer is read. No network."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, Union
from urllib.parse import quote

from dear_serve.client_answers import (
    Classified,
    Embedding,
    Found,
    LabelSet,
    ModelInfo,
    error_of,
    read_added,
    read_classified,
    read_embeddings,
    read_found,
    read_label_set,
    read_model,
)
from dear_serve.errors import DearError, InputError

__all__ = ["Call", "Calls", "Classify", "Picture", "Retries", "Search", "read_answer"]

T = TypeVar("T")
Picture = Union[bytes, str, "os.PathLike[str]"]
"""An encoded picture, or the path of its file."""


@dataclass(frozen=True, kw_only=True)
class Classify:
    """What /classify is asked about the pictures; fields as in the HTTP interface, None for the server's default."""

    mode: str | None = None
    labels: Sequence[str] | None = None
    templates: Sequence[str] | None = None
    label_set: str | None = None
    top_k: int | None = None
    none_threshold: float | None = None
    heatmaps: bool | None = None
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class Search:
    """How /search looks for what is alike; fields as in the HTTP interface, None for the server's default."""

    attributes: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    negative: Mapping[str, Any] | None = None
    filter: str | None = None
    top_k: int | None = None
    offset: int | None = None
    diversity: float | None = None
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How often and how long a busy server (429, 503) is asked again.

    Args:
        times: tries after the first; 0 for none.
        longest: seconds that one wait may take; a server that asks for more is not asked again.
    """

    times: int = 3
    longest: float = 10.0

    def __post_init__(self) -> None:
        if self.times < 0 or not self.longest >= 0:
            raise InputError(f"{self} cannot be; times and longest are 0 or more", field="retries")

    def wait(self, tried: int, status: int, retry_after: str | None) -> float | None:
        """Seconds until the next try, or None for no more of them.

        Args:
            tried: retries that were made.
            status: of the last answer.
            retry_after: that answer's header, in seconds; without one 0.5 s, doubled each time.
        """
        if status not in (429, 503) or tried >= self.times:
            return None
        try:
            seconds = float(retry_after or "")
        except ValueError:  # none, or a date
            seconds = 0.5 * 2**tried
        if not 0 <= seconds <= self.longest:
            return None
        # Spread, so that many callers do not come back at once.
        return seconds * random.uniform(1.0, 1.25)


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, and what makes its answer of the JSON."""

    method: str
    path: str
    read: Callable[[Any], T]
    json: Any = None
    form: Mapping[str, str] | None = None
    files: Sequence[tuple[str, tuple[str, bytes]]] = field(default=(), repr=False)
    query: Mapping[str, str] = field(default_factory=dict)


def read_answer(call: Call[T], status: int, text: str, request_id: str = "") -> T:
    """The answer of a call.

    Raises:
        DearError: the server's refusal (see `client_answers.error_of`), or code bad_answer.
    """
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not 200 <= status < 300:
        raise error_of(status, body, default=f"the server answered {status}", request_id=request_id)
    try:
        return call.read(body)
    except (KeyError, TypeError, AttributeError) as error:
        raise DearError(
            f"the answer to {call.method} {call.path} isn't one of dear-serve ({error!r}); is this its address?",
            code="bad_answer",
        ) from None


class Calls:
    """Makes up every call of the HTTP interface; sends nothing."""

    @staticmethod
    def classify(pictures: Picture | Sequence[Picture], asked: Classify) -> Call[Classified]:
        """POST /classify."""
        return Call("POST", "classify", read_classified, form=_form(vars(asked)), files=_files(pictures))

    @staticmethod
    def embed_images(
        pictures: Picture | Sequence[Picture], model: str | None
    ) -> Call[list[Embedding | DearError]]:
        """POST /embed/image."""
        return Call(
            "POST", "embed/image", read_embeddings, form=_form({"model": model}), files=_files(pictures)
        )

    @staticmethod
    def embed_texts(texts: str | Sequence[str], model: str | None) -> Call[list[Embedding | DearError]]:
        """POST /embed/text."""
        return Call(
            "POST", "embed/text", read_embeddings, json=_given({"texts": _list(texts), "model": model})
        )

    @staticmethod
    def search(by: Mapping[str, Any], asked: Search) -> Call[Found]:
        """POST /search, by exactly one of images, texts and ids.

        Raises:
            InputError: none or several of them.
        """
        given = _given(by)
        if len(given) != 1:
            raise InputError(
                f"search by one of images, texts and ids; {', '.join(given) or 'nothing'} given",
                code="bad_field" if given else "missing_field",
                field=next(iter(given), "images"),
            )
        ((kind, items),) = given.items()
        items = _list(items)

        def read(answer: Any) -> Found:
            return read_found(answer, searches=len(items))

        if kind == "images":
            return Call("POST", "search", read, form=_form(vars(asked)), files=_files(items))
        return Call("POST", "search", read, json=_given({**vars(asked), kind: items}))

    @staticmethod
    def gallery_add(
        pictures: Picture | Sequence[Picture],
        ids: str | Sequence[str],
        metadata: Sequence[Mapping[str, Any]] | None,
        model: str | None,
    ) -> Call[list[str | DearError]]:
        """POST /gallery/add."""
        fields = {"ids": _list(ids), "metadata": metadata, "model": model}
        return Call("POST", "gallery/add", read_added, form=_form(fields), files=_files(pictures))

    @staticmethod
    def gallery_delete(picture: str) -> Call[None]:
        """DELETE /gallery/{id}."""
        return Call("DELETE", f"gallery/{quote(picture, safe='')}", _nothing)

    @staticmethod
    def gallery_stats() -> Call[dict[str, Any]]:
        """GET /gallery/stats."""
        return Call("GET", "gallery/stats", dict)

    @staticmethod
    def label_sets() -> Call[list[LabelSet]]:
        """GET /label_sets."""
        return Call("GET", "label_sets", lambda answer: [read_label_set(s) for s in answer["label_sets"]])

    @staticmethod
    def label_set_add(name: str, labels: Sequence[str], templates: Sequence[str] | None) -> Call[LabelSet]:
        """POST /label_sets."""
        fields = {"name": name, "labels": list(labels), "templates": templates}
        return Call("POST", "label_sets", read_label_set, json=_given(fields))

    @staticmethod
    def label_set_delete(name: str) -> Call[None]:
        """DELETE /label_sets/{id}."""
        return Call("DELETE", f"label_sets/{quote(name, safe='')}", _nothing)

    @staticmethod
    def model(name: str | None) -> Call[ModelInfo]:
        """GET /model."""
        return Call("GET", "model", read_model, query=_given({"model": name}))

    @staticmethod
    def reload(model: str | None) -> Call[dict[str, Any]]:
        """POST /admin/reload."""
        return Call("POST", "admin/reload", dict, json=_given({"model": model}))


def _nothing(answer: Any) -> None:
    answer["deleted"]  # an answer of another server has none


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _form(fields: Mapping[str, Any]) -> dict[str, str]:
    """Texts as they are, everything else as JSON text."""
    return {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in _given(fields).items()
    }


def _list(items: Any) -> list[Any]:
    """One item or several as a list; a text is one item."""
    return [items] if isinstance(items, (bytes, str, os.PathLike)) else list(items)


def _files(pictures: Picture | Sequence[Picture]) -> list[tuple[str, tuple[str, bytes]]]:
    """The pictures as parts of a form. Raises InputError for a file that cannot be read, and for no picture."""
    files = []
    for picture in _list(pictures):
        if isinstance(picture, bytes):
            files.append(("images", ("picture", picture)))
            continue
        try:
            files.append(("images", ("picture", Path(picture).read_bytes())))
        except OSError as error:
            raise InputError(
                f"picture {picture} cannot be read: {error.strerror}", code="no_file", field="images"
            ) from None
    if not files:
        raise InputError("no picture is given; one at least is needed", code="missing_field", field="images")
    return files
