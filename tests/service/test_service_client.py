"""The Python client against the real application on the fake engine, synchronous and asynchronous alike."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import textwrap

import httpx
import numpy as np
import pytest

from dear_serve import client as client_module
from dear_serve.client import AsyncClient, Classify, Client, Retries, Search
from dear_serve.errors import (
    DearError,
    ImageError,
    InputError,
    LabelError,
    OverloadError,
    QueryError,
)

KEY = "s3cret"
LABELS = Classify(labels=["rose", "tulip"])


class Bridge(httpx.BaseTransport):
    """An ASGI application for httpx's synchronous client."""

    def __init__(self, app) -> None:
        self.inner = httpx.ASGITransport(app=app)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def ask() -> tuple[httpx.Response, bytes]:
            sent = httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
            response = await self.inner.handle_async_request(sent)
            return response, await response.aread()

        response, content = asyncio.run(ask())
        return httpx.Response(response.status_code, headers=response.headers, content=content)


class Waiting:
    """The methods of AsyncClient, each run to its end."""

    def __init__(self, **options) -> None:
        self.options = options

    def __getattr__(self, name: str):
        def call(*arguments, **named):
            async def ask():
                async with AsyncClient("http://test", **self.options) as client:
                    return await getattr(client, name)(*arguments, **named)

            return asyncio.run(ask())

        return call


@pytest.fixture(params=["sync", "async"])
def connect(request):
    """`connect(app or handler, …)`: a client of either kind."""
    opened = []

    def make(app, **options):
        if request.param == "async":
            transport = app if isinstance(app, httpx.MockTransport) else httpx.ASGITransport(app=app)
            return Waiting(transport=transport, **options)
        transport = app if isinstance(app, httpx.MockTransport) else Bridge(app)
        opened.append(Client("http://test", transport=transport, **options))
        return opened[-1]

    yield make
    for client in opened:
        client.close()


def test_classify(connect, client, picture, tmp_path):
    asked = connect(client.app)
    (tmp_path / "rose.png").write_bytes(picture("red"))
    answer = asked.classify([tmp_path / "rose.png", b"no picture", picture("blue")], LABELS)
    first, bad, _ = answer.results
    assert (answer.model, answer.mode) == ("tiny", "adapted")
    assert {p.label for p in first.predictions} == {"rose", "tulip"}
    for p in first.predictions:
        assert sum(p.contributions.values()) == pytest.approx(p.logit, abs=1e-4)
    assert isinstance(bad, ImageError)
    assert (bad.code, bad.field) == ("not_an_image", "images[1]")
    one = asked.classify(picture("red"), Classify(mode="zero_shot", top_k=1, heatmaps=True, model="tiny"))
    assert len(one.results[0].predictions) == 1
    assert one.results[0].heatmaps.keys() == {"color", "shape"}


def test_embeddings(connect, client, picture):
    asked = connect(client.app)
    (image,) = asked.embed_images(picture("red"))
    one, two = asked.embed_texts(["a rose", "a tulip"])
    assert image.keys() == {"class", "color", "shape"}
    for found in (image, one, two):
        assert found["class"].dtype == np.float32
        assert np.linalg.norm(found["class"]) == pytest.approx(1, abs=1e-5)
    assert len(asked.embed_texts("a rose")) == 1


def test_gallery(connect, search_client, picture):
    asked = connect(search_client.app)
    colors = ["red", "blue", "lime"]
    ids = [f"shelf 1/{color}?.png" for color in colors]
    stored = asked.gallery_add([picture(c) for c in colors], ids, [{"price": i} for i in range(3)])
    assert stored == ids
    assert asked.gallery_stats()["pictures"] == 3
    found = asked.search(Search(attributes={"color": 1.0}, filter="price < 2"), ids=ids[0])
    ((hit,),) = found.results
    assert (hit.id, hit.metadata["price"]) == (ids[1], 1)
    both = asked.search(images=[picture("red"), b"no picture"])
    assert both.results[0][0].id == ids[0]
    assert isinstance(both.results[1], ImageError)
    assert len(asked.search(texts="something red").results[0]) == 3
    asked.gallery_delete(ids[0])
    assert asked.gallery_stats()["pictures"] == 2
    with pytest.raises(QueryError) as refused:
        asked.gallery_delete(ids[0])
    assert refused.value.code == "unknown_id"


def test_label_sets_and_model(connect, client, picture):
    asked = connect(client.app)
    assert asked.label_set_add("garden", ["rose", "tulip"]).source == "sent"
    assert [kept.name for kept in asked.label_sets()] == ["garden"]
    answer = asked.classify(picture(), Classify(label_set="garden"))
    assert {p.label for p in answer.results[0].predictions} == {"rose", "tulip"}
    asked.label_set_delete("garden")
    assert asked.label_sets() == []
    told = asked.model()
    assert (told.models, told.attributes) == (("tiny",), ("color", "shape"))
    assert told.raw["logit_scale"] == 10.0


def test_refusals_are_the_errors_of_the_project(connect, client, picture, make_client, tmp_path):
    asked = connect(client.app)
    cases = [
        (ImageError, "not_an_image", "images[0]", lambda: asked.classify(b"no picture")),
        (LabelError, "empty_label", "labels", lambda: asked.classify(picture(), Classify(labels=["a", ""]))),
        (InputError, "unknown_mode", "mode", lambda: asked.classify(picture(), Classify(mode="x"))),
        (InputError, "unknown_model", "model", lambda: asked.model("nothing")),
        (InputError, "no_gallery", None, lambda: asked.gallery_stats()),
        (InputError, "admin_off", None, lambda: asked.reload()),
        (InputError, "missing_field", "images", lambda: asked.search()),
        (InputError, "bad_field", "texts", lambda: asked.search(texts="a", ids="b")),
        (InputError, "missing_field", "images", lambda: asked.classify([])),
        (InputError, "no_file", "images", lambda: asked.classify(tmp_path / "nothing.png")),
    ]
    for kind, code, where, ask in cases:
        with pytest.raises(DearError) as refused:
            ask()
        assert (type(refused.value), refused.value.code) == (kind, code)
        assert where is None or (refused.value.field or "").startswith(where)
    locked = make_client(api_key=KEY).app
    with pytest.raises(InputError, match="key is needed"):
        connect(locked).model()
    assert connect(locked, api_key=KEY).model().model == "tiny"


def answers(*planned: httpx.Response | Exception) -> tuple[httpx.MockTransport, list[httpx.Request]]:
    """A server that gives these answers in turn, and what it was asked."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        given = planned[len(asked) - 1]
        if isinstance(given, Exception):
            raise given
        return given

    return httpx.MockTransport(answer), asked


def busy(status: int = 503, **headers: str) -> httpx.Response:
    error = {"code": "overloaded", "message": "too much is waiting", "field": None}
    return httpx.Response(status, headers=headers, json={"error": error})


DONE = {"label_sets": []}


@pytest.mark.parametrize(
    ("first", "least"),
    [
        ((503, "0.2"), 0.2),
        ((429, "0"), 0.0),
        ((503, None), 0.5),
        ((503, "Wed, 21 Oct 2026 07:28:00 GMT"), 0.5),
    ],
)
def test_a_busy_server_is_asked_again(connect, monkeypatch, first, least):
    slept = []
    status, wait = first

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("dear_serve.client.time.sleep", slept.append)
    monkeypatch.setattr("dear_serve.client.asyncio.sleep", sleep)
    transport, asked = answers(
        busy(status, **({"retry-after": wait} if wait else {})), httpx.Response(200, json=DONE)
    )
    assert connect(transport).label_sets() == []
    assert len(asked) == 2
    assert least <= slept[0] <= 1.3 * least


@pytest.mark.parametrize(
    ("retries", "wait", "tries"), [(Retries(times=2), "0", 3), (Retries(times=0), "0", 1), (None, "3600", 1)]
)
def test_retries_are_bounded(connect, retries, wait, tries):
    transport, asked = answers(*[busy(**{"retry-after": wait})] * 5)
    with pytest.raises(OverloadError, match="too much is waiting"):
        connect(transport, retries=retries).label_sets()
    assert len(asked) == tries


def test_other_failures_are_told_in_words(connect):
    page = httpx.Response(502, text="<html>bad gateway</html>")
    internal = {"error": {"code": "internal", "message": "the server could not answer", "field": None}}
    cases = [
        (httpx.ConnectError("refused"), "unreachable", "is the server running"),
        (httpx.ReadTimeout("late"), "timed_out", "within 5 s"),
        (page, "http_502", "answered 502"),
        (httpx.Response(200, text="<html>hello</html>"), "bad_answer", "is this its address"),
        (httpx.Response(200, json={"other": 1}), "bad_answer", "is this its address"),
        (httpx.Response(500, json=internal, headers={"x-request-id": "abc"}), "internal", r"\(request abc\)"),
    ]
    for given, code, words in cases:
        transport, asked = answers(given)
        with pytest.raises(DearError, match=words) as refused:
            connect(transport, timeout=5).label_sets()
        assert (type(refused.value), refused.value.code, len(asked)) == (DearError, code, 1)


def test_what_is_sent(connect):
    transport, asked = answers(httpx.Response(200, json={"model": "m", "results": [], "warnings": []}))
    search = Search(attributes={"color": 1}, negative={"ids": ["b"]}, diversity=0.2)
    connect(transport, api_key=KEY).search(search, ids="a/b")
    assert asked[0].headers["x-api-key"] == KEY
    assert json.loads(asked[0].content) == {
        "ids": ["a/b"],
        "attributes": {"color": 1},
        "negative": {"ids": ["b"]},
        "diversity": 0.2,
    }


def test_the_sample_of_the_docstring_runs(search_client, listen, picture, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rose.jpg").write_bytes(picture("red", "JPEG"))
    (sample,) = re.findall(r"(?:^ {4}.*\n|^\n)+", client_module.__doc__, flags=re.MULTILINE)
    with listen(search_client.app) as address:
        with Client(address) as client:
            client.gallery_add(picture("blue"), "blue.png")
        exec(textwrap.dedent(sample).replace("http://127.0.0.1:3000", address), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(("rose ", "tulip "))
    assert second == "['blue.png']"


def test_both_clients_have_the_same_methods():
    def public(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert public(Client) == public(AsyncClient)
    with pytest.raises(InputError, match="0 or more"):
        Retries(times=-1)
