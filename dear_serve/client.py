"""Python client of a dear-serve server, `Client` for plain code and `AsyncClient` for asyncio.

    from dear_serve.client import Classify, Client, Search

    with Client("http://127.0.0.1:3000") as client:
        answer = client.classify(["rose.jpg"], Classify(labels=["rose", "tulip"]))
        best = answer.results[0].predictions[0]
        print(best.label, best.probability, best.contributions)
        found = client.search(Search(attributes={"color": 1.0}, top_k=5), images="rose.jpg")
        print([hit.id for hit in found.results[0]])

Both have the same methods. Each may raise, from the project's error tree and with the server's `code` and `field`:
InputError and its kinds for what the caller can mend (one bad picture among several stands in its own place instead),
OverloadError for a server that stayed busy through the retries, DearError with code `unreachable`, `timed_out`,
`bad_answer` or `internal` for the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dear_serve.client_answers import (
    Classified,
    Embedding,
    Found,
    Hit,
    LabelSet,
    ModelInfo,
    PictureAnswer,
    Prediction,
)
from dear_serve.client_calls import Call, Calls, Classify, Picture, Retries, Search, read_answer
from dear_serve.errors import DearError

if TYPE_CHECKING:
    import httpx

__all__ = [
    "AsyncClient", "Classified", "Classify", "Client", "Embedding", "Found", "Hit", "LabelSet", "ModelInfo", "Picture",
    "PictureAnswer", "Prediction", "Retries", "Search",
]  # fmt: skip

T = TypeVar("T")


class _Shared:
    """What both clients are told.

    Args:
        address: such as http://127.0.0.1:3000; a path in front of the server's own is kept.
        api_key: the server's `DEAR_API_KEY`, where it has one.
        timeout: seconds that one try may take in all its parts (connecting, sending, waiting).
        retries: for a busy server.
        transport: httpx's, for tests and proxies of one's own.
    """

    def __init__(
        self,
        address: str = "http://127.0.0.1:3000",
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: Retries | None = None,
        transport: Any = None,
    ) -> None:
        self._retries = retries or Retries()
        self._timeout = timeout
        self._options: dict[str, Any] = {
            "base_url": address.rstrip("/") + "/",
            "headers": {"X-API-Key": api_key} if api_key else {},
            "timeout": timeout,
            "transport": transport,
        }

    def _request(self, call: Call[Any]) -> dict[str, Any]:
        return {
            "json": call.json, "data": call.form, "files": call.files or None, "params": dict(call.query) or None,
        }  # fmt: skip

    def _wait(self, tried: int, response: httpx.Response) -> float | None:
        return self._retries.wait(tried, response.status_code, response.headers.get("retry-after"))

    def _read(self, call: Call[T], response: httpx.Response) -> T:
        return read_answer(
            call, response.status_code, response.text, response.headers.get("x-request-id", "")
        )

    def _failed(self, error: Exception) -> DearError:
        """The error of ours for one of httpx, else `error` itself is raised."""
        import httpx

        address = self._options["base_url"]
        if isinstance(error, httpx.TimeoutException):
            return DearError(f"{address} did not answer within {self._timeout:g} s", code="timed_out")
        if isinstance(error, (httpx.HTTPError, httpx.InvalidURL)):
            return DearError(
                f"{address} cannot be reached ({error}); is the server running there?", code="unreachable"
            )
        raise error


class Client(_Shared):
    """Asks a server and waits for the answer; the arguments are those of `_Shared`. Threads may share one."""

    _http: httpx.Client | None = None

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, call: Call[T]) -> T:
        import httpx  # a tenth of a second, and only callers need it

        if self._http is None:
            self._http = httpx.Client(**self._options)
        tried = 0
        while True:
            try:
                response = self._http.request(call.method, call.path, **self._request(call))
            except Exception as error:
                raise self._failed(error) from error
            wait = self._wait(tried, response)
            if wait is None:
                return self._read(call, response)
            time.sleep(wait)
            tried += 1

    def classify(
        self,
        pictures: Picture | Sequence[Picture],
        asked: Classify | None = None,
    ) -> Classified:
        """Which label is each picture? `asked` has labels, mode and more; without it the trained classes."""
        return self._ask(Calls.classify(pictures, asked or Classify()))

    def embed_images(
        self, pictures: Picture | Sequence[Picture], *, model: str | None = None
    ) -> list[Embedding | DearError]:
        """Normalised features of each picture, (D,) float32 by name."""
        return self._ask(Calls.embed_images(pictures, model))

    def embed_texts(
        self, texts: str | Sequence[str], *, model: str | None = None
    ) -> list[Embedding | DearError]:
        """Normalised features of each text, (D,) float32 by name."""
        return self._ask(Calls.embed_texts(texts, model))

    def search(
        self,
        asked: Search | None = None,
        *,
        images: Picture | Sequence[Picture] | None = None,
        texts: str | Sequence[str] | None = None,
        ids: str | Sequence[str] | None = None,
    ) -> Found:
        """Stored pictures alike to each of `images`, `texts` or `ids` (one of the three); `asked` has the weights."""
        return self._ask(Calls.search({"images": images, "texts": texts, "ids": ids}, asked or Search()))

    def gallery_add(
        self,
        pictures: Picture | Sequence[Picture],
        ids: str | Sequence[str],
        metadata: Sequence[Mapping[str, Any]] | None = None,
        *,
        model: str | None = None,
    ) -> list[str | DearError]:
        """Keep pictures; the ids that are stored durably, an error in the place of one that is not."""
        return self._ask(Calls.gallery_add(pictures, ids, metadata, model))

    def gallery_delete(self, picture: str) -> None:
        """Forget the picture of this id."""
        self._ask(Calls.gallery_delete(picture))

    def gallery_stats(self) -> dict[str, Any]:
        """What the gallery holds."""
        return self._ask(Calls.gallery_stats())

    def label_sets(self) -> list[LabelSet]:
        """The label sets of the bundles and those sent to the server."""
        return self._ask(Calls.label_sets())

    def label_set_add(
        self, name: str, labels: Sequence[str], templates: Sequence[str] | None = None
    ) -> LabelSet:
        """Keep labels under a name until the server stops."""
        return self._ask(Calls.label_set_add(name, labels, templates))

    def label_set_delete(self, name: str) -> None:
        """Forget a label set that was sent."""
        self._ask(Calls.label_set_delete(name))

    def model(self, name: str | None = None) -> ModelInfo:
        """What is served under `name`, or by default."""
        return self._ask(Calls.model(name))

    def reload(self, model: str | None = None) -> dict[str, Any]:
        """Open a bundle's folder anew; needs a server with a key."""
        return self._ask(Calls.reload(model))


class AsyncClient(_Shared):
    """Asks a server from asyncio, many requests at a time; the arguments are those of `_Shared`."""

    _http: httpx.AsyncClient | None = None

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, call: Call[T]) -> T:
        import httpx

        if self._http is None:
            self._http = httpx.AsyncClient(**self._options)
        tried = 0
        while True:
            try:
                response = await self._http.request(call.method, call.path, **self._request(call))
            except Exception as error:
                raise self._failed(error) from error
            wait = self._wait(tried, response)
            if wait is None:
                return self._read(call, response)
            await asyncio.sleep(wait)
            tried += 1

    async def classify(
        self,
        pictures: Picture | Sequence[Picture],
        asked: Classify | None = None,
    ) -> Classified:
        """Which label is each picture? `asked` has labels, mode and more; without it the trained classes."""
        return await self._ask(Calls.classify(pictures, asked or Classify()))

    async def embed_images(
        self, pictures: Picture | Sequence[Picture], *, model: str | None = None
    ) -> list[Embedding | DearError]:
        """Normalised features of each picture, (D,) float32 by name."""
        return await self._ask(Calls.embed_images(pictures, model))

    async def embed_texts(
        self, texts: str | Sequence[str], *, model: str | None = None
    ) -> list[Embedding | DearError]:
        """Normalised features of each text, (D,) float32 by name."""
        return await self._ask(Calls.embed_texts(texts, model))

    async def search(
        self,
        asked: Search | None = None,
        *,
        images: Picture | Sequence[Picture] | None = None,
        texts: str | Sequence[str] | None = None,
        ids: str | Sequence[str] | None = None,
    ) -> Found:
        """Stored pictures alike to each of `images`, `texts` or `ids` (one of the three); `asked` has the weights."""
        return await self._ask(
            Calls.search({"images": images, "texts": texts, "ids": ids}, asked or Search())
        )

    async def gallery_add(
        self,
        pictures: Picture | Sequence[Picture],
        ids: str | Sequence[str],
        metadata: Sequence[Mapping[str, Any]] | None = None,
        *,
        model: str | None = None,
    ) -> list[str | DearError]:
        """Keep pictures; the ids that are stored durably, an error in the place of one that is not."""
        return await self._ask(Calls.gallery_add(pictures, ids, metadata, model))

    async def gallery_delete(self, picture: str) -> None:
        """Forget the picture of this id."""
        await self._ask(Calls.gallery_delete(picture))

    async def gallery_stats(self) -> dict[str, Any]:
        """What the gallery holds."""
        return await self._ask(Calls.gallery_stats())

    async def label_sets(self) -> list[LabelSet]:
        """The label sets of the bundles and those sent to the server."""
        return await self._ask(Calls.label_sets())

    async def label_set_add(
        self, name: str, labels: Sequence[str], templates: Sequence[str] | None = None
    ) -> LabelSet:
        """Keep labels under a name until the server stops."""
        return await self._ask(Calls.label_set_add(name, labels, templates))

    async def label_set_delete(self, name: str) -> None:
        """Forget a label set that was sent."""
        await self._ask(Calls.label_set_delete(name))

    async def model(self, name: str | None = None) -> ModelInfo:
        """What is served under `name`, or by default."""
        return await self._ask(Calls.model(name))

    async def reload(self, model: str | None = None) -> dict[str, Any]:
        """Open a bundle's folder anew; needs a server with a key."""
        return await self._ask(Calls.reload(model))
