"""Several bundles in one server, their reload, label sets, and what a calibrated bundle adds to an answer."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import threading

import httpx
import pytest
from PIL import Image

from dear_serve.errors import BundleError
from dear_serve.gallery import Gallery, gallery_spec
from dear_serve.manifest import Calibration, LabelSet
from dear_serve.runtime import open_engine
from dear_serve.runtime.predict import Predictor
from service.models import Models
from service.settings import Settings
from service.start import start


@pytest.fixture
def calibrated(fake_bundle):
    """The same bundle with a temperature, a threshold that nothing passes and a label set."""
    manifest = dataclasses.replace(
        fake_bundle.manifest,
        calibration=Calibration(
            temperature=2.0, threshold=0.9, ece_before=0.2, ece_after=0.1, pictures=9, source="val"
        ),
        label_sets={"pets": LabelSet(labels=("dog", "hamster"), templates=("the {}",))},
    )
    return dataclasses.replace(fake_bundle, manifest=manifest)


def opened(bundle) -> Predictor:
    return Predictor(bundle, open_engine(bundle, "fake"))


@pytest.fixture
def two(make_client, predictor, calibrated):
    other = opened(calibrated)
    yield make_client(models=Models({"tiny": predictor, "warm": other}), label_sets=2)
    other.close()


def form(*pictures, **fields):
    return {
        "files": [("images", ("x", p)) for p in pictures],
        "data": {k: v if isinstance(v, str) else json.dumps(v) for k, v in fields.items()},
    }


def test_the_model_field_chooses_the_bundle(two, picture):
    plain, named = (two.post("/classify", **form(picture(), **m)).json() for m in ({}, {"model": "tiny"}))
    warm = two.post("/classify", **form(picture(), model="warm")).json()
    assert plain == named
    assert (plain["model"], plain["temperature"]) == ("tiny", 1.0)
    assert (warm["model"], warm["temperature"]) == ("warm", 2.0)
    one, other = plain["results"][0], warm["results"][0]
    assert (one["none_of_these"], other["none_of_these"]) == (None, True)
    assert [p["logit"] for p in one["predictions"]] == [p["logit"] for p in other["predictions"]]
    assert other["predictions"][0]["probability"] < one["predictions"][0]["probability"]
    for p in other["predictions"]:
        assert sum(p["contributions"].values()) == pytest.approx(p["logit"], abs=1e-4)
    assert two.post("/embed/image", **form(picture(), model="warm")).json()["model"] == "warm"
    assert two.post("/embed/text", json={"texts": ["a"], "model": "warm"}).json()["model"] == "warm"


def test_model_lists_the_bundles_and_shows_each(two):
    answer = two.get("/model").json()
    assert (answer["model"], answer["models"], answer["gallery_model"]) == ("tiny", ["tiny", "warm"], None)
    assert answer["calibration"] is None
    other = two.get("/model", params={"model": "warm"}).json()
    assert (other["model"], other["calibration"]["temperature"]) == ("warm", 2.0)
    assert other["label_sets"]["pets"]["labels"] == ["dog", "hamster"]
    assert "explain" in other["graphs"]


@pytest.mark.parametrize("name", ["other", "", "x" * 500, "../tiny"])
def test_a_model_that_is_not_served(two, picture, name):
    refused = two.post("/classify", **form(picture(), model=name))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "unknown_model")
    assert two.get("/model", params={"model": name}).status_code == 404


def test_a_threshold_of_the_callers_own(two, picture):
    for threshold, expected in ((-1, False), (1, True), (0.5, True)):
        answer = two.post("/classify", **form(picture(), none_threshold=threshold)).json()
        assert answer["results"][0]["none_of_these"] is expected
    refused = two.post("/classify", **form(picture(), none_threshold=2))
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "none_threshold")


def test_heatmaps_are_pictures(two, picture):
    (result,) = two.post("/classify", **form(picture(), heatmaps=True)).json()["results"]
    assert set(result["heatmaps"]) == {"color", "shape"}
    head, _, data = result["heatmaps"]["color"].partition(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        assert image.size == (32, 32)
    assert "heatmaps" not in two.post("/classify", **form(picture())).json()["results"][0]


def test_heatmaps_without_their_graph_are_refused(client, predictor, picture, monkeypatch):
    def explain(_):
        raise BundleError("/srv/x has no graph", code="no_explain")

    monkeypatch.setattr(predictor.engine, "explain", explain)
    refused = client.post("/classify", **form(picture(), heatmaps=True))
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "no_explain")


# Label sets


def test_label_sets_are_kept_used_listed_and_forgotten(two, picture):
    labels = ["moon", "sun"]
    kept = two.post("/label_sets", json={"name": "sky", "labels": labels, "templates": ["a {}"]}).json()
    assert kept == {"name": "sky", "labels": labels, "templates": ["a {}"], "source": "sent"}
    by_name = two.post("/classify", **form(picture(), label_set="sky")).json()
    assert by_name == two.post("/classify", **form(picture(), labels=labels, templates=["a {}"])).json()
    pets = two.post("/classify", **form(picture(), label_set="pets", model="warm")).json()
    assert {p["label"] for p in pets["results"][0]["predictions"]} == {"dog", "hamster"}
    listed = two.get("/label_sets").json()["label_sets"]
    assert [(s["name"], s["source"]) for s in listed] == [("sky", "sent"), ("pets", "warm")]
    assert two.ask("DELETE", "/label_sets/sky").json() == {"deleted": "sky"}
    for again in (
        two.ask("DELETE", "/label_sets/sky"),
        two.post("/classify", **form(picture(), label_set="sky")),
        two.post("/classify", **form(picture(), label_set="pets")),
    ):
        assert (again.status_code, again.json()["error"]["code"]) == (404, "unknown_label_set")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"name": "a b", "labels": ["x"]}, "bad_field"),
        ({"name": "", "labels": ["x"]}, "bad_field"),
        ({"name": "a", "labels": []}, "no_labels"),
        ({"name": "a", "labels": ["x", "X"]}, "duplicate_label"),
        ({"name": "a", "labels": ["x"], "templates": ["none"]}, "bad_template"),
        ({"name": "a", "labels": ["x" * 10_001]}, "text_too_long"),
        ({"name": "a", "labels": [f"{i} " + "x" * 9000 for i in range(60)]}, "text_too_long"),
        ({"name": "pets", "labels": ["x"]}, "label_set_exists"),
        ({"labels": ["x"]}, "missing_field"),
    ],
)
def test_label_sets_that_cannot_be(two, body, code):
    assert two.post("/label_sets", json=body).json()["error"]["code"] == code


def test_label_sets_are_bounded(two):
    answers = [two.post("/label_sets", json={"name": f"s{i}", "labels": ["x"]}) for i in (1, 2, 1, 3)]
    assert [a.status_code for a in answers] == [200, 200, 200, 422]
    assert answers[3].json()["error"]["code"] == "too_many_label_sets"


def test_labels_and_a_label_set_are_too_much(two, picture):
    refused = two.post("/classify", **form(picture(), label_set="pets", labels=["a"], model="warm"))
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "label_set")


# Reload


def reloading(make_client, bundle, reopen, **options):
    first = opened(bundle)
    models = Models({"tiny": first}, reopen=reopen, gallery=options.pop("gallery", None))
    return make_client(models=models, api_key="k", **options), models, first


KEY = {"x-api-key": "k"}


def test_a_reload_answers_from_the_new_bundle_and_drops_nothing(
    make_client, fake_bundle, calibrated, picture, monkeypatch
):
    client, models, first = reloading(make_client, fake_bundle, lambda _: opened(calibrated))
    entered, go, closed = threading.Event(), threading.Event(), threading.Event()
    real, end = first.embed_images, first.close

    def slow(images):
        entered.set()
        assert go.wait(20)
        return real(images)

    monkeypatch.setattr(first, "embed_images", slow)
    monkeypatch.setattr(first, "close", lambda: (closed.set(), end()))

    async def scenario():
        transport = httpx.ASGITransport(app=client.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=KEY) as http:
            files = [("images", ("x", picture()))]
            under_way = asyncio.create_task(http.post("/embed/image", files=files))
            while not entered.is_set():
                await asyncio.sleep(0.005)
            reloaded = await http.post("/admin/reload", json={"model": "tiny"})
            after = await http.post("/classify", files=files)
            assert not closed.is_set()
            go.set()
            return await under_way, reloaded, after

    under_way, reloaded, after = asyncio.run(scenario())
    assert (under_way.status_code, reloaded.status_code, after.status_code) == (200, 200, 200)
    assert reloaded.json() == {
        "model": "tiny",
        "sha256_before": fake_bundle.sha256,
        "sha256": calibrated.sha256,
    }
    assert after.json()["temperature"] == 2.0
    assert closed.is_set()
    assert client.get("/model", headers=KEY).json()["calibration"]["temperature"] == 2.0
    models.close()


def test_a_reload_that_fails_changes_nothing_and_tells_no_path(make_client, fake_bundle, picture, caplog):
    def broken(_):
        raise BundleError("/srv/secret is broken")

    client, models, _ = reloading(make_client, fake_bundle, broken)
    refused = client.post("/admin/reload", json={}, headers=KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "reload_failed")
    assert "secret" not in refused.text
    assert "/srv/secret is broken" in caplog.text
    assert client.post("/classify", **form(picture()), headers=KEY).status_code == 200
    models.close()


def test_a_reload_that_does_not_fit_the_gallery(make_client, fake_bundle, tmp_path):
    base = dataclasses.replace(fake_bundle.manifest.base, sha256="1" * 64)
    roles = dataclasses.replace(fake_bundle.manifest, base=base)
    with opened(fake_bundle) as first:
        gallery = Gallery.open(tmp_path / "g", create_for=gallery_spec(first))
    other = dataclasses.replace(fake_bundle, manifest=roles)
    client, models, _ = reloading(make_client, fake_bundle, lambda _: opened(other), gallery=gallery)
    assert client.post("/admin/reload", json={}, headers=KEY).json()["error"]["code"] == "reload_failed"
    assert client.get("/model", headers=KEY).json()["gallery_model"] == "tiny"
    models.close()


def test_reload_needs_a_key_and_a_bundle_that_is_served(client, make_client, fake_bundle):
    assert client.post("/admin/reload", json={}).json()["error"]["code"] == "admin_off"
    guarded, models, _ = reloading(make_client, fake_bundle, lambda _: opened(fake_bundle))
    assert guarded.post("/admin/reload", json={}).status_code == 401
    unknown = guarded.post("/admin/reload", json={"model": "x"}, headers=KEY)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_model")
    models.close()


def test_the_gallery_belongs_to_one_bundle(make_client, predictor, calibrated, gallery):
    with opened(calibrated) as other:
        models = Models({"warm": other, "tiny": predictor}, gallery=gallery)
        # Calibration is no part of what vectors depend on, so the first of the two fits.
        client = make_client(models=models)
        assert client.get("/model").json()["gallery_model"] == "warm"
        assert client.post("/search", json={"texts": ["a"]}).json()["model"] == "warm"
        refused = client.post("/search", json={"texts": ["a"], "model": "tiny"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "no_gallery")


# The whole start


def test_start_serves_several_bundles_from_one_batcher(fake_bundle, picture, tmp_path):
    root = fake_bundle.paths.root
    settings = Settings(bundles={"a": root, "b": root}, engine="fake", gallery=tmp_path / "g", api_key="k")
    running = start(settings)

    async def scenario():
        transport = httpx.ASGITransport(app=running.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=KEY) as http:
            files = [("images", ("x", picture()))]
            asked = [http.post("/classify", files=files, data={"model": m}) for m in "ab" * 8]
            answers = await asyncio.gather(*asked)
            reloaded = await http.post("/admin/reload", json={"model": "b"})
            metrics = (await http.get("/metrics")).text
            return answers, reloaded, metrics

    answers, reloaded, metrics = asyncio.run(scenario())
    assert {a.status_code for a in answers} == {200}
    assert [a.json()["results"] for a in answers] == [answers[0].json()["results"]] * 16
    assert reloaded.status_code == 200
    for stage in ("preprocess", "queue", "core", "postprocess"):
        assert f'dear_stage_seconds_count{{stage="{stage}"}}' in metrics
    assert 'model="b"' in metrics
    running.close()
