"""/search and /gallery: by picture, text and id, with weights, filters and attributes of the caller's own."""

from __future__ import annotations

import base64
import json
import math

import pytest

COLORS = ("red", "green", "blue", "white")


@pytest.fixture
def filled(search_client, picture):
    answer = search_client.post(
        "/gallery/add",
        files=[("images", (c, picture(c))) for c in COLORS],
        data={
            "ids": json.dumps(list(COLORS)),
            "metadata": json.dumps([{"price": i, "name": c} for i, c in enumerate(COLORS)]),
        },
    )
    assert answer.json() == {"results": [{"id": c} for c in COLORS]}
    return search_client


def test_by_picture(filled, picture):
    answer = filled.post("/search", files=[("images", ("x", picture("blue")))], data={"top_k": "2"}).json()
    assert answer["model"] == "tiny"
    first, second = answer["results"]
    assert set(first) == {"id", "score", "scores", "metadata", "thumbnail"}
    assert first["id"] == "blue"
    assert math.isclose(first["score"], 1, abs_tol=1e-5)
    assert first["metadata"] == {"price": 2, "name": "blue"}
    head, data = first["thumbnail"].split(",")
    assert head == "data:image/jpeg;base64"
    assert base64.b64decode(data).startswith(b"\xff\xd8")
    assert second["score"] < first["score"]


def test_score_is_the_weighted_sum(filled):
    weights = {"class": 0.5, "color": 2, "shape": 0.25}
    results = filled.post("/search", json={"texts": ["a red cup"], "attributes": weights}).json()["results"]
    assert len(results) == len(COLORS)
    for hit in results:
        assert set(hit["scores"]) == set(weights)
        assert math.isclose(hit["score"], sum(weights[n] * s for n, s in hit["scores"].items()), abs_tol=1e-5)


def test_by_id_leaves_the_picture_out(filled):
    results = filled.post("/search", json={"ids": ["red"], "attributes": {"shape": 1.0}}).json()["results"]
    assert {h["id"] for h in results} == set(COLORS) - {"red"}


def test_several_searches_in_one_call(filled, picture):
    single = [filled.post("/search", json={"ids": [i]}).json()["results"] for i in ("red", "blue")]
    assert filled.post("/search", json={"ids": ["red", "blue"]}).json()["results"] == [
        {"results": hits} for hits in single
    ]
    files = [("images", ("x", picture("blue"))), ("images", ("y", b"nothing"))]
    good, bad = filled.post("/search", files=files).json()["results"]
    assert good["results"][0]["id"] == "blue"
    assert (bad["error"]["code"], bad["error"]["field"]) == ("not_an_image", "images[1]")


def test_pages_and_diversity(filled):
    whole = filled.post("/search", json={"texts": ["a cup"]}).json()["results"]
    pages = [
        filled.post("/search", json={"texts": ["a cup"], "top_k": 2, "offset": o}).json()["results"]
        for o in (0, 2)
    ]
    assert pages[0] + pages[1] == whole
    diverse = filled.post("/search", json={"texts": ["a cup"], "diversity": 0.5}).json()["results"]
    assert {h["id"] for h in diverse} == {h["id"] for h in whole}
    assert diverse[0] == whole[0]


def test_negative_examples_lower_their_own_score(filled, picture):
    plain = {h["id"]: h["score"] for h in filled.post("/search", json={"texts": ["a cup"]}).json()["results"]}
    image = base64.b64encode(picture("green")).decode()
    for example in ({"ids": ["green"]}, {"images": [image]}):
        asked = {"texts": ["a cup"], "negative": {**example, "weight": 1}}
        found = {h["id"]: h["score"] for h in filled.post("/search", json=asked).json()["results"]}
        assert math.isclose(found["green"], plain["green"] - 1, abs_tol=1e-5)


@pytest.mark.parametrize("as_list", [False, True])
def test_an_attribute_of_the_callers_own(filled, as_list):
    rust = {"name": "rust", "phrases": ["no rust", "light rust", "heavy rust"], "weight": 1.0}
    asked = {"ids": ["red"], "attributes": [rust, {"name": "color", "weight": 0.5}] if as_list else rust}
    results = filled.post("/search", json=asked).json()["results"]
    assert set(results[0]["scores"]) == ({"rust", "color"} if as_list else {"rust"})


def test_filter(filled):
    asked = {"texts": ["x"], "filter": "price >= 2 AND name <> 'white'"}
    assert [h["id"] for h in filled.post("/search", json=asked).json()["results"]] == ["blue"]


def test_upsert_and_delete(filled, picture):
    data = {"ids": '["red"]', "metadata": '[{"price": 99}]'}
    filled.post("/gallery/add", files=[("images", ("x", picture("black")))], data=data)
    stats = filled.get("/gallery/stats").json()
    assert stats["pictures"] == len(COLORS)
    found = filled.post("/search", files=[("images", ("x", picture("black")))]).json()["results"][0]
    assert (found["id"], found["metadata"]) == ("red", {"price": 99})
    assert filled.ask("DELETE", "/gallery/red").json() == {"deleted": "red"}
    assert filled.ask("DELETE", "/gallery/red").status_code == 404
    assert filled.get("/gallery/stats").json()["pictures"] == len(COLORS) - 1


def test_ids_with_slashes_and_quotes(search_client, picture):
    name = "a/b c/ü'; DROP TABLE x --.png"
    files = [("images", ("x", picture()))]
    search_client.post("/gallery/add", files=files, data={"ids": json.dumps([name])})
    assert search_client.post("/search", json={"ids": [name]}).json()["results"] == []
    assert search_client.ask("DELETE", "/gallery/a%2Fb%20c/%C3%BC'; DROP TABLE x --.png").json() == {
        "deleted": name
    }


def test_a_bad_picture_leaves_the_others_added(search_client, picture):
    files = [("images", ("x", picture())), ("images", ("y", b"nothing"))]
    answer = search_client.post("/gallery/add", files=files, data={"ids": '["good", "bad"]'})
    assert answer.status_code == 200
    good, bad = answer.json()["results"]
    assert (good, bad["error"]["code"]) == ({"id": "good"}, "not_an_image")
    assert search_client.get("/gallery/stats").json()["pictures"] == 1


SEARCH = [
    ({}, "missing_field"),
    ({"texts": []}, "missing_field"),
    ({"texts": ["a"], "ids": ["red"]}, "bad_field"),
    ({"texts": ["a"] * 65}, "bad_field"),
    ({"texts": ["a", ""]}, "empty_text"),
    ({"offset": -1}, "bad_field"),
    ({"diversity": 2}, "bad_field"),
    ({"diversity": 0.5, "offset": 1000}, "bad_offset"),
    ({"negative": {}}, "bad_field"),
    ({"negative": {"ids": ["nobody"]}}, "unknown_id"),
    ({"negative": {"ids": ["red"] * 17}}, "bad_negative"),
    ({"negative": {"texts": ["a"], "weight": 3}}, "bad_field"),
    ({"negative": {"images": ["bm90aGluZw=="]}}, "not_an_image"),
    ({"ids": ["nobody"]}, "unknown_id"),
    ({"ids": ["' OR 1=1 --"]}, "unknown_id"),
    ({"ids": [1]}, "bad_field"),
    ({"texts": [""]}, "empty_text"),
    ({"attributes": {"color": -1}}, "bad_weights"),
    ({"attributes": {"color": 0}}, "bad_weights"),
    ({"attributes": {"color": "1"}}, "bad_weights"),
    ({"attributes": {"color": None}}, "bad_weights"),
    ({"attributes": {"color": True}}, "bad_weights"),
    ({"attributes": {"color": [1]}}, "bad_weights"),
    ({"attributes": {"color": 1e300}}, "bad_weights"),
    ({"attributes": {"color": 10**400}}, "bad_weights"),
    ({"attributes": {"smell": 1}}, "unknown_attribute"),
    ({"attributes": {}}, "bad_weights"),
    ({"attributes": []}, "bad_weights"),
    ({"attributes": "color"}, "bad_field"),
    ({"attributes": [1]}, "bad_field"),
    ({"attributes": [{"weight": 1}]}, "bad_attributes"),
    ({"attributes": {"name": "rust", "phrases": ["one"]}}, "bad_attributes"),
    ({"attributes": {"name": "rust", "phrases": ["a", 3]}}, "bad_attributes"),
    ({"attributes": {"name": "rust", "phrases": "ab"}}, "bad_attributes"),
    ({"attributes": {"name": "color", "phrases": ["a", "b"]}}, "bad_attributes"),
    ({"attributes": {"name": "rust", "phrases": ["a", "b"], "extra": 1}}, "bad_attributes"),
    ({"filter": "price ="}, "bad_filter"),
    ({"filter": "nothing = 1"}, "bad_filter"),
    ({"filter": "1=1; DROP TABLE pictures"}, "bad_filter"),
    ({"filter": "price = 1" + " OR price = 1" * 5000}, "bad_filter"),
    ({"filter": "(" * 5000}, "bad_filter"),
    ({"filter": "price = '\0'"}, "bad_filter"),
    ({"filter": 5}, "bad_field"),
    ({"top_k": 0}, "bad_field"),
    ({"top_k": 10**6}, "bad_field"),
    ({"metadata": []}, "unknown_field"),
]


@pytest.mark.parametrize(("fields", "code"), SEARCH, ids=range(len(SEARCH)))
def test_bad_searches(filled, fields, code):
    sources = {"images", "texts", "ids"} & set(fields)
    answer = filled.post("/search", json=fields if sources or not fields else {"texts": ["a"], **fields})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_weights_that_are_no_numbers(filled, text):
    content = f'{{"texts": ["a"], "attributes": {{"color": {text}}}}}'
    answer = filled.post("/search", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("bad_json", "bad_weights")


ADD = [
    ({}, "missing_field"),
    ({"ids": "a"}, "bad_field"),
    ({"ids": []}, "bad_field"),
    ({"ids": ["a", "b"]}, "bad_field"),
    ({"ids": [""]}, "bad_ids"),
    ({"ids": ["a\0"]}, "bad_ids"),
    ({"ids": ["x" * 600]}, "bad_ids"),
    ({"ids": [None]}, "bad_field"),
    ({"ids": ["a"], "metadata": [{}, {}]}, "bad_field"),
    ({"ids": ["a"], "metadata": {}}, "bad_field"),
    ({"ids": ["a"], "metadata": [1]}, "bad_field"),
    ({"ids": ["a"], "metadata": [{"a": {"b": 1}}]}, "bad_metadata"),
    ({"ids": ["a"], "metadata": [{"a": [1]}]}, "bad_metadata"),
    ({"ids": ["a"], "metadata": [{"a": 10**30}]}, "bad_metadata"),
    ({"ids": ["a"], "metadata": [{"a.b": 1}]}, "bad_metadata"),
    ({"ids": ["a"], "metadata": [{"": 1}]}, "bad_metadata"),
    ({"ids": ["a"], "metadata": [{"a": "\0"}]}, "bad_metadata"),
]


@pytest.mark.parametrize(("fields", "code"), ADD, ids=range(len(ADD)))
def test_bad_additions(search_client, picture, fields, code):
    images = [base64.b64encode(picture()).decode()]
    answer = search_client.post("/gallery/add", json={"images": images, **fields})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["code"] == code
    assert search_client.get("/gallery/stats").json()["pictures"] == 0


def test_duplicate_ids(search_client, picture):
    images = [base64.b64encode(picture()).decode()] * 2
    answer = search_client.post("/gallery/add", json={"images": images, "ids": ["a", "a"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_ids")
