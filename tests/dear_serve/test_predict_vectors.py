"""The predictor: embeddings, search vectors, attributes made up by the caller; on the fake engine."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, ImageError, QueryError, TextError
from dear_serve.preprocess import preprocess_bytes
from dear_serve.readout import project
from dear_serve.runtime.base import ImageFeatures
from dear_serve.runtime.predict import Predictor


def picture(color, size=(40, 30), kind="PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def predictor(fake_bundle):
    with Predictor.open(fake_bundle.paths.root, engine="fake") as predictor:
        yield predictor


PICTURES = [picture("red"), picture("green"), picture("blue", (64, 64), "JPEG")]


# Embeddings and search vectors


def test_embed_images(predictor):
    good, bad = predictor.embed_images([PICTURES[0], b"x"])
    assert isinstance(bad, ImageError)
    assert {name: v.shape for name, v in good.items()} == {"class": (24,), "color": (24,), "shape": (24,)}
    pixels = preprocess_bytes(PICTURES[0], predictor.bundle.manifest.preprocess)[None]
    np.testing.assert_array_equal(good["shape"], predictor.engine.encode_image(pixels).attributes[0, 1])


def test_embed_texts(predictor):
    first, _ = predictor.embed_texts(["a cat", "a red cup"])
    assert {name: v.shape for name, v in first.items()} == {"class": (24,), "color": (3,)}
    np.testing.assert_allclose(np.linalg.norm(first["color"]), 1.0, atol=1e-6)
    np.testing.assert_array_equal(
        first["class"], predictor.engine.encode_text(predictor.tokenizer(["a cat"]))[0]
    )
    assert predictor.embed_texts([]) == []


@pytest.mark.parametrize("text", ["", "  ", 3, None])
def test_texts_that_say_nothing(predictor, text):
    with pytest.raises(TextError) as caught:
        predictor.embed_texts(["fine", text])
    assert caught.value.code == "empty_text"


def test_text_warnings(predictor):
    assert predictor.text_warnings(["short", "word " * 30]) == [
        [],
        ["text 'word word word word word word word word …' was cut to 16 tokens"],
    ]


def test_search_vectors_of_pictures(predictor):
    """Span readouts are normalised Q f_cls, token readouts f_k (method.md §8)."""
    features, errors = predictor.image_features([PICTURES[0], b"x", PICTURES[1]])
    assert [e.code if e else None for e in errors] == [None, "not_an_image", None]
    vectors = predictor.readout(features)
    assert {name: v.shape for name, v in vectors.items()} == {
        "class": (2, 24),
        "color": (2, 3),
        "shape": (2, 24),
    }
    assert predictor.columns == {name: v.shape[1] for name, v in vectors.items()}
    projected = features.cls @ predictor.bundle.basis()["color"].T
    expected = projected / np.linalg.norm(projected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors["color"], expected, atol=1e-6)
    np.testing.assert_array_equal(vectors["shape"], features.attributes[:, 1])
    each = predictor.readout_images([PICTURES[0], b"x", PICTURES[1]])
    np.testing.assert_array_equal(each[2]["color"], vectors["color"][1])
    assert each[1].code == "not_an_image"


def test_search_vectors_of_texts_fit_the_columns(predictor):
    vectors = predictor.readout_text(["a red cup", "a tree"])
    assert {name: v.shape for name, v in vectors.items()} == {n: (2, w) for n, w in predictor.columns.items()}
    np.testing.assert_array_equal(vectors["shape"], vectors["class"])


def test_an_attribute_made_up_by_the_caller(predictor):
    basis = predictor.readout_phrases(["no rust", "light rust", "heavy rust"])
    assert basis.shape == (2, 24)
    np.testing.assert_allclose(basis @ basis.T, np.eye(2), atol=1e-6)
    tokens = predictor.tokenizer(["no rust", "light rust", "heavy rust"])
    features = predictor.engine.encode_text_zero_shot(tokens)
    centred = features - features.mean(axis=0)
    np.testing.assert_allclose(centred @ basis.T @ basis, centred, atol=1e-5)
    assert project(features, basis).shape == (3, 2)


@pytest.mark.parametrize("phrases", [["rust"], ["rust", "rust"], ["rust", " RUST "]])
def test_phrases_that_span_nothing(predictor, phrases):
    with pytest.raises(QueryError) as caught:
        predictor.readout_phrases(phrases)
    assert caught.value.code == "bad_phrases"


def test_projection_of_what_has_no_part_in_the_span_is_zero():
    basis = np.eye(2, 4, dtype=np.float32)
    np.testing.assert_array_equal(project(np.array([[0, 0, 3, 0]], np.float32), basis), [[0, 0]])


def test_readout_of_no_pictures(predictor):
    none = ImageFeatures(cls=np.zeros((0, 24), np.float32), attributes=np.zeros((0, 2, 24), np.float32))
    assert predictor.readout(none)["color"].shape == (0, 3)


def test_a_tokenizer_of_another_context_is_refused(fake_bundle, tmp_path):
    from dear_serve.tokenizer import Tokenizer

    Tokenizer.from_open_clip(context_length=9).to_file(tmp_path / "tokenizer.json")
    other = Bundle(manifest=fake_bundle.manifest, paths=type("P", (), {"root": tmp_path})())
    with pytest.raises(BundleError, match=r"context of 9 tokens; dear\.json says 16"):
        Predictor(other, engine=None)
