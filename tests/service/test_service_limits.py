"""Limits, key, overload, request ids and what happens when something of ours breaks."""

from __future__ import annotations

import asyncio
import logging
import threading

import httpx
import pytest

from dear_serve.errors import BundleError, GalleryError, OverloadError
from service.errors import error_body, status_of
from service.openapi import describe
from service.settings import Limits
from service.work import Admission, Workers


def chunks(count: int, size: int, sent: list[int]):
    async def produce():
        for _ in range(count):
            sent.append(size)
            yield b"x" * size
            await asyncio.sleep(0)

    return produce()


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=x"])
def test_a_chunked_upload_is_cut_off(make_client, kind):
    sent: list[int] = []
    client = make_client(body_bytes=100_000)
    answer = client.post("/classify", content=chunks(1000, 10_000, sent), headers={"content-type": kind})
    assert answer.status_code in (400, 413)  # junk may be refused as a form before it is too long
    if kind == "application/json":
        assert answer.json()["error"]["code"] == "body_too_large"
    assert sum(sent) <= 200_000


def test_a_long_file_in_a_form_is_cut_off(make_client):
    client = make_client(body_bytes=100_000)
    files = [("images", ("x", b"y" * 200_000))]
    answer = client.post("/classify", files=files)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_an_announced_length_is_refused_unread_and_a_lie_is_not_believed(make_client):
    client = make_client(body_bytes=1000)
    sent: list[int] = []
    headers = {"content-type": "application/json", "content-length": "5000"}
    assert client.post("/classify", content=chunks(5, 1000, sent), headers=headers).status_code == 413
    assert sent == []
    headers["content-length"] = "10"
    assert client.post("/classify", content=chunks(50, 1000, sent), headers=headers).status_code == 413


def test_a_body_that_does_not_arrive(make_client):
    async def never():
        yield b"{"
        await asyncio.sleep(30)

    client = make_client(read_seconds=0.05)
    answer = client.post("/classify", content=never(), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "read_timeout")


def test_bytes_in_flight_are_bounded(make_client):
    client = make_client(buffered_bytes=1000)
    answer = client.post("/classify", content=b"x" * 2000, headers={"content-type": "application/json"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert client.get("/model").status_code == 200


def test_overload_is_503_and_passes(make_client, predictor, picture, monkeypatch):
    client = make_client(workers=1, waiting=2)
    entered, go = threading.Event(), threading.Event()
    real = predictor.embed_images

    def slow(images):
        entered.set()
        assert go.wait(20)
        return real(images)

    monkeypatch.setattr(predictor, "embed_images", slow)

    async def flood():
        transport = httpx.ASGITransport(app=client.app)
        files = [("images", ("x", picture()))]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            running = [asyncio.create_task(http.post("/embed/image", files=files)) for _ in range(6)]
            while sum(task.done() for task in running) < 4 or not entered.is_set():
                await asyncio.sleep(0.01)
            go.set()
            answers = await asyncio.gather(*running)
            return answers, await http.post("/embed/image", files=files)

    answers, after = asyncio.run(flood())
    assert sorted(a.status_code for a in answers) == [200, 200, 503, 503, 503, 503]
    refused = next(a for a in answers if a.status_code == 503)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "overloaded"
    assert after.status_code == 200


def test_a_slow_answer_is_given_up_but_keeps_its_place():
    async def scenario():
        workers = Workers(threads=1, waiting=1, seconds=0.05)
        go = threading.Event()
        with pytest.raises(OverloadError, match="no answer"):
            await workers.run(go.wait, 20)
        assert workers.pending == 1
        go.set()
        while workers.pending:
            await asyncio.sleep(0.01)
        assert await workers.run(lambda: 7) == 7
        workers.close()

    asyncio.run(scenario())


def test_admission_gives_everything_back():
    admission = Admission(Limits(waiting=1, buffered_bytes=10))
    with admission.admit() as ticket:
        ticket.hold(10)
        with pytest.raises(OverloadError):
            ticket.hold(1)
        with pytest.raises(OverloadError), admission.admit():
            pass
    assert (admission.requests, admission.bytes) == (0, 0)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"x-api-key": ""},
        {"x-api-key": "é"},
        {"authorization": "sécret"},
    ],
)
@pytest.mark.parametrize("path", ["/model", "/metrics", "/docs.json", "/gallery/stats"])
def test_without_the_key(make_client, headers, path):
    encoded = {k: v.encode() for k, v in headers.items()}
    answer = make_client(api_key="sécret").get(path, headers=encoded)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_with_the_key(make_client):
    client = make_client(api_key="secret")
    assert client.get("/model", headers={"authorization": "bearer secret"}).status_code == 200
    assert client.get("/model", headers={"x-api-key": "secret"}).status_code == 200
    assert client.get("/").status_code == 200
    assert client.post("/classify", content=b"x" * 10**6).status_code == 401


def test_what_breaks_here_is_a_500_that_tells_nothing(client, predictor, picture, monkeypatch, caplog):
    def broken(images):
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(predictor, "embed_images", broken)
    answer = client.post(
        "/embed/image", files=[("images", ("x", picture()))], headers={"x-request-id": "abc-1"}
    )
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "abc-1"
    record = next(r for r in caplog.records if r.levelno == logging.ERROR)
    assert "abc-1" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize(
    "error", [BundleError("/srv/bundle is broken"), GalleryError("disk"), ValueError("x")]
)
def test_errors_about_our_own_files_are_ours(error):
    assert status_of(error) == 500
    assert str(error) not in str(error_body(error))


@pytest.mark.parametrize("given", ["a b", "x" * 65, "a\tb", ""])
def test_request_ids_that_could_forge_a_log_line_are_replaced(client, given):
    assert client.get("/model", headers={"x-request-id": given}).headers["x-request-id"] != given


def test_page_and_description(client):
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for forbidden in ("http://", "https://", "innerHTML", "eval("):
        assert forbidden not in page.text
    described = client.get("/docs.json").json()
    assert described["openapi"].startswith("3.")
    assert {"/classify", "/search", "/gallery/{id}", "/model", "/readyz"} <= set(described["paths"])
    assert "multipart/form-data" in described["paths"]["/classify"]["post"]["requestBody"]["content"]
    assert_refs_resolve(described, described)


def assert_refs_resolve(node, root):
    if isinstance(node, dict):
        if "$ref" in node:
            assert node["$ref"].rsplit("/", 1)[1] in root["components"]["schemas"]
        for value in node.values():
            assert_refs_resolve(value, root)
    elif isinstance(node, list):
        for value in node:
            assert_refs_resolve(value, root)


def test_describe_needs_no_routes():
    assert describe([])["paths"] == {}


def test_metrics_name_routes_not_paths(search_client, picture):
    files = [("images", ("x", picture()))]
    search_client.post("/gallery/add", files=files, data={"ids": '["secret-name"]'})
    search_client.ask("DELETE", "/gallery/secret-name")
    search_client.post("/search", json={"texts": ["a"]})
    search_client.post("/classify", files=files, data={"labels": '["new label", "other"]'})
    text = search_client.get("/metrics").text
    assert "secret-name" not in text
    for expected in (
        'bentoml_service_request_total{endpoint="/gallery/{id}",http_response_code="200",service_name="dear"} 1.0',
        'dear_stage_seconds_count{stage="preprocess"}',
        'dear_stage_seconds_count{stage="core"}',
        'dear_stage_seconds_count{stage="search"} 1.0',
        'dear_batch_size_count{kind="image"}',
        'dear_class_features_cache_total{result="miss"}',
        'dear_engine_info{engine="fake"',
    ):
        assert expected in text
