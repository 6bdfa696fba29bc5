"""CORS, the log, callers who hang up, and bounds on what waits."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading

import pytest
from starlette.requests import ClientDisconnect

from dear_serve.errors import OverloadError
from dear_serve.runtime.batching import deadline
from service.logs import JsonFormatter, configure
from service.work import Workers

ORIGIN = {"origin": "https://page.example"}


def test_no_other_page_may_call_unless_it_is_told_so(client, make_client):
    assert "access-control-allow-origin" not in client.get("/model", headers=ORIGIN).headers
    allowed = make_client(cors=("https://page.example",))
    answer = allowed.get("/model", headers=ORIGIN)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    asked = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    assert allowed.ask("OPTIONS", "/classify", headers=asked).status_code == 200
    other = allowed.get("/model", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers


def test_refusals_can_be_read_by_an_allowed_page(make_client):
    answer = make_client(cors=("*",), api_key="k").get("/model", headers=ORIGIN)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "*")


def test_a_request_is_one_line_without_what_was_sent(client, picture, caplog):
    caplog.set_level(logging.INFO, logger="service")
    files = [("images", ("secret-name.png", picture()))]
    client.post(
        "/classify", files=files, data={"labels": '["secret label", "b"]'}, headers={"x-request-id": "r1"}
    )
    (record,) = [r for r in caplog.records if r.name == "service"]
    line = json.loads(JsonFormatter().format(record))
    assert (line["method"], line["route"], line["status"], line["id"]) == ("POST", "/classify", 200, "r1")
    assert line["ms"] > 0
    assert "secret" not in json.dumps(line)


def test_a_failure_is_one_json_line_with_its_traceback():
    try:
        raise ValueError("line one\nline two")
    except ValueError:
        record = logging.LogRecord("service", logging.ERROR, "f", 1, "request %s", ("é\n",), sys.exc_info())
    text = JsonFormatter().format(record)
    assert "\n" not in text
    assert "ValueError" in json.loads(text)["traceback"]


@pytest.mark.parametrize("kind", ["text", "json"])
def test_the_log_goes_to_standard_error(kind, capsys):
    loggers = [logging.getLogger(name) for name in ("service", "dear_serve")]
    before = [(log.handlers, log.propagate, log.level) for log in loggers]
    try:
        configure(kind)
        logging.getLogger("service").info("hello")
        written = capsys.readouterr().err
    finally:
        for log, (log.handlers, log.propagate, level) in zip(loggers, before, strict=True):
            log.setLevel(level)
    assert json.loads(written)["message"] == "hello" if kind == "json" else "INFO service: hello" in written


# Work


def test_work_for_a_caller_who_hung_up_is_given_up():
    async def scenario():
        workers = Workers(threads=1, waiting=4, seconds=30)
        entered, go = threading.Event(), threading.Event()
        seen = []

        def busy():
            entered.set()
            assert go.wait(20)
            seen.append(deadline.get().left)

        async def gone():
            while not entered.is_set():
                await asyncio.sleep(0.005)

        with pytest.raises(ClientDisconnect):
            await workers.run(busy, gone=gone)
        with pytest.raises(ClientDisconnect):
            await workers.run(seen.append, "never", gone=gone)  # it waited behind the other and is not begun
        assert workers.pending == 1
        go.set()
        while workers.pending:
            await asyncio.sleep(0.005)
        assert seen == [0.0], "the work under way could see that nobody waits"
        assert await workers.run(lambda: deadline.get().left > 0)
        workers.close()

    asyncio.run(scenario())


def test_an_answer_that_came_before_the_caller_left_is_given():
    async def scenario():
        workers = Workers(threads=1, waiting=1, seconds=30)

        async def never():
            await asyncio.sleep(60)

        assert await workers.run(lambda: 7, gone=never) == 7
        workers.close()

    asyncio.run(scenario())


def test_errors_after_a_timeout_are_nobodys(caplog):
    async def scenario():
        workers = Workers(threads=1, waiting=1, seconds=0.05)
        go = threading.Event()

        def late():
            assert go.wait(20)
            raise ValueError("late")

        with pytest.raises(OverloadError):
            await workers.run(late)
        go.set()
        while workers.pending:
            await asyncio.sleep(0.005)
        workers.close()

    asyncio.run(scenario())
    assert "never retrieved" not in caplog.text


def test_long_labels_are_bounded_together(client, picture):
    labels = json.dumps([f"{i} " + "word " * 1900 for i in range(60)])
    refused = client.post("/classify", files=[("images", ("x", picture()))], data={"labels": labels})
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "text_too_long")
