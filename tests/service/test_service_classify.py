"""/classify, /embed and /model: the contract's names and numbers, in both ways of sending pictures."""

from __future__ import annotations

import base64
import json
import math

import pytest


def form(*pictures, **fields):
    return {"files": [("images", ("p.png", p, "image/png")) for p in pictures], "data": fields}


def body(*pictures, **fields):
    return {"json": {"images": [base64.b64encode(p).decode() for p in pictures], **fields}}


def alike(one, other):
    """Equal labels in equal order, numbers within 1e-5."""
    for a, b in zip(one["predictions"], other["predictions"], strict=True):
        assert a["label"] == b["label"]
        assert a["contributions"] == pytest.approx(b["contributions"], abs=1e-5)
        assert (a["probability"], a["logit"]) == pytest.approx((b["probability"], b["logit"]), abs=1e-5)


def test_trained_classes_by_default(client, picture):
    answer = client.post("/classify", **form(picture("red"), picture("blue"))).json()
    assert (answer["model"], answer["mode"]) == ("tiny", "adapted")
    assert len(answer["results"]) == 2
    for result in answer["results"]:
        assert set(result) == {"predictions", "warnings", "none_of_these"}
        predictions = result["predictions"]
        assert sorted(p["label"] for p in predictions) == ["cat", "red cup", "tree"]
        assert math.isclose(sum(p["probability"] for p in predictions), 1, abs_tol=1e-5)
        assert [p["logit"] for p in predictions] == sorted((p["logit"] for p in predictions), reverse=True)
        for p in predictions:
            assert set(p) == {"label", "probability", "logit", "cosine", "contributions"}
            assert set(p["contributions"]) == {"class", "color", "shape"}
            assert math.isclose(sum(p["contributions"].values()), p["logit"], abs_tol=1e-4)


def test_form_and_json_answer_alike(client, picture):
    data = picture("green")
    labels = ["été", "a {} %s ${x} <|endoftext|> ../../etc/passwd '; DROP TABLE", "猫"]
    fields = {"labels": labels, "templates": ["a {}"], "top_k": 2, "mode": "zero_shot", "model": "tiny"}
    as_json = client.post("/classify", **body(data, **fields)).json()
    sent = {k: v if isinstance(v, str) else json.dumps(v) for k, v in fields.items()}
    assert client.post("/classify", **form(data, **sent)).json() == as_json
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    assert client.post("/classify", json={"images": [uri], **fields}).json() == as_json
    predictions = as_json["results"][0]["predictions"]
    assert len(predictions) == 2
    assert {p["label"] for p in predictions} <= set(labels)
    assert set(predictions[0]["contributions"]) == {"class"}


def test_batch_equals_single(client, picture):
    pictures = [picture(c) for c in ("red", "green", "blue")]
    together = client.post("/classify", **form(*pictures)).json()["results"]
    for data, result in zip(pictures, together, strict=True):
        alike(client.post("/classify", **form(data)).json()["results"][0], result)


def test_a_cut_label_is_said_to_be_cut(client, picture):
    answer = client.post("/classify", **body(picture(), labels=["word " * 40, "cat"])).json()
    assert any("cut" in w for w in answer["results"][0]["warnings"])


def test_one_bad_picture_among_good_ones(client, picture):
    good = picture("red")
    answer = client.post("/classify", **form(good, b"not a picture", good, picture()[:60]))
    assert answer.status_code == 200
    results = answer.json()["results"]
    assert results[0] == results[2]
    assert [r.get("error", {}).get("code") for r in results] == [
        None,
        "not_an_image",
        None,
        results[3]["error"]["code"],
    ]
    assert results[1]["error"]["field"] == "images[1]"
    mixed = client.post("/classify", json={"images": ["???", base64.b64encode(good).decode()]}).json()[
        "results"
    ]
    assert mixed[0]["error"]["code"] == "bad_base64"
    alike(mixed[1], results[0])


def test_all_pictures_bad_in_a_list(client):
    answer = client.post("/classify", **form(b"x", b"y"))
    assert answer.status_code == 200
    assert [r["error"]["code"] for r in answer.json()["results"]] == ["not_an_image"] * 2
    answer = client.post("/embed/image", **form(b"x", b"y"))
    assert [r["error"]["code"] for r in answer.json()["embeddings"]] == ["not_an_image"] * 2


def test_embeddings_are_normalised(client, picture):
    images = client.post("/embed/image", **form(picture("red"), b"x")).json()["embeddings"]
    texts = client.post("/embed/text", json={"texts": ["a red cup", "b"]}).json()["embeddings"]
    assert set(images[0]) == {"class", "color", "shape"}
    assert "error" in images[1]
    assert len(texts) == 2 and "class" in texts[0]
    for vector in (*images[0].values(), *texts[0].values()):
        assert math.isclose(math.fsum(x * x for x in vector), 1, abs_tol=1e-4)


def test_a_long_text_is_said_to_be_cut(client):
    answer = client.post("/embed/text", json={"texts": ["word " * 40, "cat"]}).json()
    assert len(answer["warnings"]) == 1


def test_model(client):
    answer = client.get("/model").json()
    assert answer["model"] == "tiny"
    assert answer["classes"] == ["cat", "red cup", "tree"]
    assert answer["attributes"] == ["color", "shape"]
    assert answer["alpha"] == {"class": 0.6, "color": 0.3, "shape": 0.1}
    assert answer["engine"]["engine"] == "fake"
    assert answer["base"]["name"] == "tiny"
    assert "roles" in answer
    assert all(len(sha) == 64 for sha in answer["files"].values())


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats(client, picture, kind):
    assert client.post("/classify", **form(picture("red", kind))).status_code == 200
