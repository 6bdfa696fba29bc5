"""The predictor: per-picture errors, label sets, numbers, search vectors; on the fake engine."""

from __future__ import annotations

import dataclasses
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from PIL import Image

from dear_serve.errors import ImageError, InputError, LabelError
from dear_serve.labels import softmax
from dear_serve.manifest import Calibration
from dear_serve.preprocess import ImageLimits, preprocess_bytes
from dear_serve.runtime import open_engine
from dear_serve.runtime.batching import Batcher
from dear_serve.runtime.heatmaps import heatmap_png
from dear_serve.runtime.predict import Predictor, Question


def picture(color, size=(40, 30), kind="PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def predictor(fake_bundle):
    with Predictor.open(fake_bundle.paths.root, engine="fake") as predictor:
        yield predictor


PICTURES = [picture("red"), picture("green"), picture("blue", (64, 64), "JPEG")]


# Classification


def test_numbers_of_an_adapted_answer(predictor):
    """Checked against the engine and the equations of method.md §4, not against the code under test."""
    results = predictor.classify(PICTURES, top_k=3)
    manifest = predictor.bundle.manifest
    pixels = np.stack([preprocess_bytes(p, manifest.preprocess) for p in PICTURES])
    features = predictor.engine.encode_image(pixels)
    logits = predictor.engine.classify(pixels)
    classes = predictor.class_features()
    for row, result in enumerate(results):
        assert result.error is None
        assert result.warnings == []
        assert sorted(p.label for p in result.predictions) == sorted(manifest.class_names)
        probabilities = [p.probability for p in result.predictions]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) == pytest.approx(1.0, abs=1e-6)
        for p in result.predictions:
            column = manifest.class_names.index(p.label)
            assert p.logit == pytest.approx(logits[row, column], abs=1e-5)
            assert p.cosine == pytest.approx(float(features.cls[row] @ classes[column]), abs=1e-6)
            assert p.probability == pytest.approx(float(softmax(logits)[row, column]), abs=1e-6)
            assert list(p.contributions) == ["class", "color", "shape"]
            assert sum(p.contributions.values()) == pytest.approx(p.logit, abs=1e-5)
            assert p.contributions["class"] == pytest.approx(10.0 * 0.6 * p.cosine, abs=1e-5)


def test_numbers_of_a_zero_shot_answer(predictor):
    (result,) = predictor.classify(PICTURES[:1], mode="zero_shot", labels=["moon", "sun"], templates=["{}"])
    pixels = preprocess_bytes(PICTURES[0], predictor.bundle.manifest.preprocess)[None]
    image = predictor.engine.encode_image_zero_shot(pixels)[0]
    text = predictor.engine.encode_text_zero_shot(predictor.tokenizer(["moon", "sun"]))
    for p in result.predictions:
        cosine = float(image @ text[["moon", "sun"].index(p.label)])
        assert p.cosine == pytest.approx(cosine, abs=1e-6)
        assert p.logit == pytest.approx(10.0 * cosine, abs=1e-5)
        assert p.contributions == {"class": pytest.approx(p.logit)}


def test_a_batch_gives_what_each_picture_gives_alone(predictor):
    together = predictor.classify(PICTURES)
    for whole, data in zip(together, PICTURES, strict=True):
        (alone,) = predictor.classify([data])
        assert [p.label for p in whole.predictions] == [p.label for p in alone.predictions]
        for a, b in zip(whole.predictions, alone.predictions, strict=True):
            assert a.logit == pytest.approx(b.logit, abs=1e-5)
            assert a.contributions == pytest.approx(b.contributions, abs=1e-5)


def test_a_bad_picture_does_not_fail_the_others(predictor):
    mixed = [PICTURES[0], b"not a picture", PICTURES[1], b"", PICTURES[2][:-200]]
    results = predictor.classify(mixed)
    assert [r.error.code if r.error else None for r in results] == [
        None,
        "not_an_image",
        None,
        "empty_image",
        "truncated_image",
    ]
    assert [bool(r.predictions) for r in results] == [True, False, True, False, False]
    assert [results[0], results[2]] == predictor.classify(PICTURES[:2])


def test_only_bad_pictures_and_none_at_all(predictor):
    (result,) = predictor.classify([b"x"])
    assert isinstance(result.error, ImageError)
    assert predictor.classify([]) == []
    assert predictor.embed_images([]) == []


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (2, 2), (3, 3), (99, 3)])
def test_top_k(predictor, top_k, count):
    (result,) = predictor.classify(PICTURES[:1], top_k=top_k)
    assert len(result.predictions) == count


@pytest.mark.parametrize("top_k", [0, -1, True, 2.0, "3", None])
def test_bad_top_k_even_where_no_picture_can_be_used(predictor, top_k):
    with pytest.raises(LabelError) as caught:
        predictor.classify([b"x"], top_k=top_k)
    assert caught.value.code == "bad_top_k"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"labels": []}, "no_labels"),
        ({"labels": ["a", " "]}, "empty_label"),
        ({"labels": ["a", "A"]}, "duplicate_label"),
        ({"labels": [f"class {i}" for i in range(1001)]}, "too_many_labels"),
        ({"templates": ["no place"]}, "bad_template"),
        ({"templates": []}, "bad_template"),
        ({"mode": "magic"}, "unknown_mode"),
    ],
)
def test_what_the_whole_call_cannot_use_is_raised(predictor, options, code):
    with pytest.raises(InputError) as caught:
        predictor.classify(PICTURES, **options)
    assert caught.value.code == code


def test_labels_that_are_cut_are_told(predictor):
    long = "a very long name " * 5
    for result in predictor.classify(PICTURES[:2], labels=["cat", long]):
        assert result.warnings == ["label 'a very long name a very long name a very…' was cut to 16 tokens"]


def test_limits_reach_the_decoder(fake_bundle):
    with Predictor.open(
        fake_bundle.paths.root, engine="fake", limits=ImageLimits(max_pixels=100)
    ) as predictor:
        (result,) = predictor.classify(PICTURES[:1])
    assert result.error.code == "too_many_pixels"


# Temperature, none of these, heat maps


@pytest.fixture
def calibrated(fake_bundle):
    """The fake bundle with a temperature of 2 and a threshold that about half of the pictures pass."""
    calibration = Calibration(
        temperature=2.0, threshold=0.1, ece_before=0.2, ece_after=0.1, pictures=9, source="val"
    )
    manifest = dataclasses.replace(fake_bundle.manifest, calibration=calibration)
    bundle = dataclasses.replace(fake_bundle, manifest=manifest)
    with Predictor(bundle, open_engine(bundle, "fake")) as predictor:
        yield predictor


def test_a_temperature_leaves_logits_and_contributions(predictor, calibrated):
    for plain, warm in zip(predictor.classify(PICTURES), calibrated.classify(PICTURES), strict=True):
        assert [p.logit for p in warm.predictions] == [p.logit for p in plain.predictions]
        expected = softmax(np.array([[p.logit for p in plain.predictions]], np.float32) / 2)[0]
        assert [p.probability for p in warm.predictions] == pytest.approx(expected.tolist(), abs=1e-6)
        for p in warm.predictions:
            assert sum(p.contributions.values()) == pytest.approx(p.logit, abs=1e-4)
    zero = [p.classify(PICTURES, mode="zero_shot") for p in (predictor, calibrated)]
    assert zero[0] == zero[1], "the temperature is that of the adapted model"


def test_none_of_these(predictor, calibrated):
    scale = predictor.bundle.manifest.logit_scale
    for result in calibrated.classify(PICTURES):
        assert result.none_of_these is (result.predictions[0].logit / scale < 0.1)
    for threshold, expected in ((-1.0, False), (1.0, True)):
        asked = Question(none_threshold=threshold)
        assert [r.none_of_these for r in predictor.answer(PICTURES, asked)] == [expected] * 3
    assert predictor.classify(PICTURES)[0].none_of_these is None
    assert calibrated.classify(PICTURES, mode="zero_shot")[0].none_of_these is None


@pytest.mark.parametrize("threshold", [1.5, float("nan")])
def test_a_threshold_that_is_no_cosine(threshold):
    with pytest.raises(InputError, match="none_threshold"):
        Question(none_threshold=threshold)


def test_heatmaps(predictor):
    good, bad = predictor.answer([PICTURES[0], b"x"], Question(heatmaps=True))
    assert set(good.heatmaps) == {"color", "shape"}
    assert bad.heatmaps == {}
    pixels = preprocess_bytes(PICTURES[0], predictor.bundle.manifest.preprocess)[None]
    attention = predictor.engine.explain(pixels)[0]
    with Image.open(io.BytesIO(good.heatmaps["shape"])) as image:
        assert (image.format, image.mode, image.size) == ("PNG", "RGBA", (32, 32))
        opacity = np.asarray(image)[:, :, 3]
    strongest = int(attention[1].argmax())
    row, column = divmod(strongest, 4)
    centre = opacity[row * 8 + 4, column * 8 + 4]
    assert centre == pytest.approx(200, abs=40)
    assert predictor.classify(PICTURES)[0].heatmaps == {}


def test_no_attention_is_a_clear_picture():
    with Image.open(io.BytesIO(heatmap_png(np.zeros(16, np.float32), 8))) as image:
        assert image.getchannel("A").getextrema() == (0, 0)


# Batches across calls


def test_batched_answers_equal_single_ones(fake_bundle, predictor):
    with closing(Batcher(max_rows=4)) as batcher:
        batched = Predictor(fake_bundle, open_engine(fake_bundle, "fake"), batcher=batcher)
        asked = [Question(mode=m, top_k=3) for m in ("adapted", "zero_shot")] * 6
        with ThreadPoolExecutor(8) as threads:
            together = list(threads.map(lambda q: batched.answer(PICTURES[:2], q), asked))
        batched.close()
    for question, results in zip(asked, together, strict=True):
        for whole, alone in zip(results, predictor.answer(PICTURES[:2], question), strict=True):
            assert [p.label for p in whole.predictions] == [p.label for p in alone.predictions]
            for a, b in zip(whole.predictions, alone.predictions, strict=True):
                assert a.logit == pytest.approx(b.logit, abs=1e-5)
                assert a.contributions == pytest.approx(b.contributions, abs=1e-5)


def test_batched_answers_of_real_graphs_equal_single_ones(hand_exported):
    """ONNX Runtime on pictures of several callers in one run gives what it gives each alone."""
    engine = open_engine(hand_exported, "onnx", threads=1)
    single = Predictor(hand_exported, engine)
    pictures = [picture((i * 20 % 255, i * 70 % 255, i * 5), (40 + i, 30)) for i in range(12)]
    with closing(Batcher(max_rows=8)) as batcher:
        batched = Predictor(hand_exported, engine, batcher=batcher)
        with ThreadPoolExecutor(12) as threads:
            together = list(threads.map(lambda p: batched.classify([p])[0], pictures))
    for data, whole in zip(pictures, together, strict=True):
        (alone,) = single.classify([data])
        for a, b in zip(whole.predictions, alone.predictions, strict=True):
            assert (a.label, a.logit) == (b.label, pytest.approx(b.logit, abs=1e-5))
            assert a.contributions == pytest.approx(b.contributions, abs=1e-5)
            assert sum(a.contributions.values()) == pytest.approx(a.logit, abs=1e-4)
    single.close()


# Class features


def test_class_features_are_kept_read_only_and_bounded(predictor, monkeypatch):
    calls = []
    encode = predictor.engine.encode_text
    monkeypatch.setattr(predictor.engine, "encode_text", lambda tokens: calls.append(1) or encode(tokens))
    first = predictor.class_features(["x", "y"])
    assert predictor.class_features(["x", "y"]) is first
    assert len(calls) == 1
    assert not first.flags.writeable
    assert predictor.class_features(["y", "x"]) is not first
    for i in range(70):
        predictor.class_features([f"label {i}"])
    before = len(calls)
    np.testing.assert_array_equal(predictor.class_features(["x", "y"]), first)
    assert len(calls) == before + 1, "the oldest was forgotten"


def test_modes_do_not_share_class_features(predictor):
    assert not np.array_equal(
        predictor.class_features(["x"]), predictor.class_features(["x"], mode="zero_shot")
    )


def test_the_observer_hears_of_every_step(predictor):
    class Heard:
        def __init__(self):
            self.events = []

        def stage(self, name, seconds):
            assert seconds >= 0
            self.events.append(name)

        def batch(self, kind, size):
            self.events.append((kind, size))

        def cache(self, *, hit):
            self.events.append(hit)

    predictor.observer = heard = Heard()
    predictor.classify(PICTURES)
    predictor.classify([b"x"])
    picture_events = ["preprocess", "core", ("image", 3), "postprocess"]
    assert heard.events == ["core", ("text", 6), False, *picture_events, True, "preprocess"]


def test_threads_may_share_a_predictor(predictor):
    expected = predictor.classify(PICTURES, labels=["p", "q"])
    answers = []

    def ask():
        answers.append(predictor.classify(PICTURES, labels=["p", "q"]))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [expected] * 8
