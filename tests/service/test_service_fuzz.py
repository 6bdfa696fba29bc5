"""300 mutated requests of benchmarks/fuzz_service.py on the fake engine; all 3,000 are run there."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def fuzz(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("fuzz_service")


@pytest.mark.parametrize("seed", [1, 2])
def test_mutated_requests(fuzz, search_client, listen, seed):
    with listen(search_client.app) as address, httpx.Client(base_url=address, timeout=30) as client:
        description = client.get("docs.json").json()
        sent = list(fuzz.attempts(150, seed, description))
        result = fuzz.run(sent, lambda attempt: fuzz._ask(client, attempt), threads=4)
    assert result["wrong"] == []
    assert result["requests"] == 150
    assert {"200", "400", "422"} <= result["statuses"].keys()
    assert len(result["kinds"]) == 5


@pytest.mark.parametrize(
    ("status", "text", "seconds", "wrong"),
    [
        (500, "{}", 0.1, "status 500"),
        (503, '{"error": {"code": "other"}}', 0.1, "status 503"),
        (200, "{}", 11.0, "11.0 s"),
        (200, "Traceback (most recent call last)", 0.1, "says 'Traceback'"),
        (422, '{"detail": 1}', 0.1, "is outside the error contract"),
        (422, '{"error": {"code": "a", "message": "b", "field": null}}', 0.1, None),
        (503, '{"error": {"code": "overloaded", "message": "b", "field": null}}', 0.1, None),
    ],
)
def test_what_counts_as_wrong(fuzz, status, text, seconds, wrong):
    assert fuzz.complaint(fuzz.Attempt("JSON", "POST", "classify"), status, text, seconds) == wrong


def test_ids_with_line_breaks_can_be_deleted(search_client, picture):
    """Found by the 3,000: no route took such a path."""
    ids = ["shelf\n1", "\nshelf\r\n2\n"]
    files = [("images", (name, picture(), "image/png")) for name in "ab"]
    stored = search_client.post("/gallery/add", files=files, data={"ids": json.dumps(ids)})
    assert stored.json() == {"results": [{"id": i} for i in ids]}
    for name in ids:
        answer = search_client.ask("DELETE", "/gallery/" + quote(name, safe=""))
        assert answer.json() == {"deleted": name}
    refused = search_client.ask("DELETE", "/label_sets/" + quote("a\nb", safe=""))
    assert refused.json()["error"]["code"] == "unknown_label_set"


def test_a_form_that_was_cut_is_refused(client, picture):
    """Found by the 3,000: the last picture was left out in silence, and its file left open."""
    part = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n' + picture() + b"\r\n"
    for content, status in ((2 * part + b"--x--\r\n", 200), (2 * part, 400), (part + part[:-40], 400)):
        answer = client.post(
            "/classify", content=content, headers={"content-type": "multipart/form-data; boundary=x"}
        )
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "bad_form"
