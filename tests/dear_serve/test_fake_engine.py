"""The fake engine answers as a real one does: shapes, dtypes, norms, batches, sums."""

from __future__ import annotations

import numpy as np
import pytest

from dear_serve.errors import ConfigError, ImageError, TextError
from dear_serve.labels import class_features
from dear_serve.runtime import open_bundle, open_engine
from dear_serve.runtime.base import Engine


@pytest.fixture
def engine(fake_bundle) -> Engine:
    return open_engine(fake_bundle, "fake")


@pytest.fixture
def pixels():
    return np.random.default_rng(1).standard_normal((5, 3, 32, 32)).astype(np.float32)


def test_shapes_dtypes_and_norms(engine, pixels, tiny_tokenizer):
    features = engine.encode_image(pixels)
    tokens = tiny_tokenizer(["cat", "a red cup"])
    for array, shape in (
        (features.cls, (5, 24)),
        (features.attributes, (5, 2, 24)),
        (engine.encode_image_zero_shot(pixels), (5, 24)),
        (engine.encode_text(tokens), (2, 24)),
        (engine.encode_text_zero_shot(tokens), (2, 24)),
    ):
        assert array.shape == shape
        assert array.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(array, axis=-1), 1.0, atol=1e-6)


def test_same_input_same_features_alone_in_a_batch_and_in_another_engine(engine, pixels, fake_bundle):
    whole = engine.encode_image(pixels).attributes
    other = open_bundle(fake_bundle.paths.root, "fake")
    for i in range(len(pixels)):
        np.testing.assert_array_equal(other.encode_image(pixels[i : i + 1]).attributes[0], whole[i])
    assert not np.array_equal(whole[0], whole[1])
    assert not np.array_equal(engine.encode_image(pixels).cls, engine.encode_image_zero_shot(pixels))


def test_padding_does_not_matter(engine, tiny_tokenizer):
    tokens = tiny_tokenizer(["cat"])
    np.testing.assert_array_equal(engine.encode_text(tokens), engine.encode_text(tokens[:, :3]))


def test_contributions_sum_to_logits_by_the_formula(engine, pixels):
    features = engine.encode_image(pixels)
    classes = engine.encode_text(np.array([[7, 1], [8, 1], [9, 1], [10, 1]]))
    fused = engine.fuse(features, classes)
    assert fused.contributions.shape == (5, 4, 3)
    np.testing.assert_allclose(fused.contributions.sum(axis=-1), fused.logits, atol=1e-6)
    expected = 10.0 * (
        0.6 * features.cls @ classes.T
        + 0.3 * features.attributes[:, 0] @ classes.T
        + 0.1 * features.attributes[:, 1] @ classes.T
    )
    np.testing.assert_allclose(fused.logits, expected, atol=1e-5)


def test_classify_is_fusion_over_the_trained_classes(engine, pixels, fake_bundle, tiny_tokenizer):
    manifest = fake_bundle.manifest
    classes = class_features(manifest.class_names, manifest.templates, engine.encode_text, tiny_tokenizer)
    logits = engine.classify(pixels)
    assert logits.shape == (5, 3)
    np.testing.assert_array_equal(logits, engine.fuse(engine.encode_image(pixels), classes).logits)


def test_no_rows_give_empty_answers(engine):
    none = engine.encode_image(np.zeros((0, 3, 32, 32), np.float32))
    assert (none.cls.shape, none.attributes.shape) == ((0, 24), (0, 2, 24))
    assert engine.encode_text(np.zeros((0, 4), np.int64)).shape == (0, 24)
    assert engine.fuse(none, engine.encode_text(np.array([[7, 1]]))).logits.shape == (0, 1)


def test_wrong_shapes_are_refused(engine):
    with pytest.raises(ImageError, match=r"pixels are \(1, 3, 31, 32\); \(B, 3, 32, 32\) is expected"):
        engine.encode_image(np.zeros((1, 3, 31, 32), np.float32))
    with pytest.raises(TextError, match=r"tokens are \(1, 17\); \(B, L\) with L up to 16"):
        engine.encode_text(np.zeros((1, 17), np.int64))


def test_info(engine):
    assert (engine.info.engine, engine.info.provider) == ("fake", "none")
    engine.close()
    engine.close()


def test_unknown_engine_and_bad_threads(fake_bundle):
    with pytest.raises(ConfigError, match="engine is 'onyx'; use one of onnx, torch, fake"):
        open_engine(fake_bundle, "onyx")
    with pytest.raises(ConfigError, match="threads is 0; 1 or more"):
        open_engine(fake_bundle, "onnx", threads=0)
