"""300 mutated requests of benchmarks/fuzz_service.py on the fake engine; all 3,000 are run there."""

from __future__ import annotations

import importlib
from pathlib import Path

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
