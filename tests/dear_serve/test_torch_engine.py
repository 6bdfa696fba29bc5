"""The torch engine answers what the model itself gives, and refuses a base with other weights."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch

from dear_serve.bundle import Bundle
from dear_serve.errors import BaseModelError, BundleError, MissingDependencyError
from dear_serve.labels import class_features
from dear_serve.runtime import open_bundle, open_engine
from dear_serve.runtime.predict import Predictor
from dear_serve.runtime.torch_engine import load_model


@pytest.fixture(scope="module")
def engine(tiny_bundle):
    return open_engine(tiny_bundle, "torch")


@pytest.fixture(scope="module")
def model(tiny_bundle):
    return load_model(tiny_bundle)


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(1).standard_normal((5, 3, 32, 32)).astype(np.float32)


def close(found, expected):
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.detach().numpy(), atol=2e-6)


def test_answers_are_the_models(engine, model, pixels, tiny_tokenizer):
    tensor, tokens = torch.tensor(pixels), tiny_tokenizer(["cat", "a red cup"])
    with torch.inference_mode():
        cls, attributes = model.image_features(tensor)
        text = model.text_features(torch.tensor(tokens))
        logits, contributions = model.fuse(cls, attributes, text)
    features = engine.encode_image(pixels)
    close(features.cls, cls)
    close(features.attributes, attributes)
    close(engine.encode_text(tokens), text)
    close(engine.encode_image_zero_shot(pixels), model.zero_shot_image(tensor))
    close(engine.encode_text_zero_shot(tokens), model.zero_shot_text(torch.tensor(tokens)))
    fused = engine.fuse(features, engine.encode_text(tokens))
    np.testing.assert_allclose(fused.logits, logits.numpy(), atol=1e-4)
    np.testing.assert_allclose(fused.contributions, contributions.numpy(), atol=1e-4)
    np.testing.assert_allclose(fused.contributions.sum(axis=-1), fused.logits, atol=1e-4)


def test_the_manifests_alpha_and_tau_are_the_models(tiny_bundle, model):
    np.testing.assert_allclose(tiny_bundle.manifest.alpha, model.fusion.alpha.detach().numpy(), atol=1e-6)
    assert tiny_bundle.manifest.logit_scale == pytest.approx(model.clip.tau)


def test_adapted_is_not_zero_shot(engine, pixels, tiny_tokenizer):
    """The random adapter changes text and picture features, or the other tests would show little."""
    assert np.abs(engine.encode_image(pixels).cls - engine.encode_image_zero_shot(pixels)).max() > 1e-3
    tokens = tiny_tokenizer(["cat"])
    assert np.abs(engine.encode_text(tokens) - engine.encode_text_zero_shot(tokens)).max() > 1e-3


def test_more_rows_than_one_batch(engine, pixels):
    many = np.concatenate([pixels] * 27)[:131]
    features = engine.encode_image(many)
    assert features.attributes.shape == (131, 2, 24)
    np.testing.assert_allclose(features.cls[130], engine.encode_image(many[130:]).cls[0], atol=2e-6)


def test_no_rows(engine):
    none = engine.encode_image(np.zeros((0, 3, 32, 32), np.float32))
    assert (none.cls.shape, none.attributes.shape) == ((0, 24), (0, 2, 24))
    assert engine.encode_text(np.zeros((0, 3), np.int64)).shape == (0, 24)
    assert engine.encode_image_zero_shot(np.zeros((0, 3, 32, 32), np.float32)).shape == (0, 24)
    assert engine.classify(np.zeros((0, 3, 32, 32), np.float32)).shape == (0, 3)


def test_classify_over_the_trained_classes(engine, pixels, tiny_bundle, tiny_tokenizer):
    manifest = tiny_bundle.manifest
    classes = class_features(manifest.class_names, manifest.templates, engine.encode_text, tiny_tokenizer)
    expected = engine.fuse(engine.encode_image(pixels), classes).logits
    np.testing.assert_allclose(engine.classify(pixels), expected, atol=1e-4)


def test_input_arrays_are_not_written_to_and_results_are_plain(engine, pixels):
    before = pixels.copy()
    pixels.setflags(write=False)
    result = engine.encode_image(pixels).cls
    np.testing.assert_array_equal(pixels, before)
    assert result.flags.writeable


def test_info_tells_device_and_threads(engine):
    assert (engine.info.engine, engine.info.provider, engine.info.precision) == ("torch", "cpu", "fp32")
    assert engine.info.threads == torch.get_num_threads()


def test_threads_are_set(tiny_bundle):
    before = torch.get_num_threads()
    try:
        assert open_engine(tiny_bundle, "torch", threads=1).info.threads == 1
    finally:
        torch.set_num_threads(before)


def test_predictor_on_the_real_model(tiny_bundle):
    with Predictor.open(tiny_bundle.paths.root, engine="torch") as predictor:
        basis = predictor.readout_phrases(tiny_bundle.manifest.readouts[0].phrases)
        np.testing.assert_allclose(basis, tiny_bundle.basis()["color"], atol=1e-4)


# Errors


def test_a_base_with_other_weights_is_refused_with_both_hashes(tiny_bundle):
    manifest = tiny_bundle.manifest
    other = dataclasses.replace(manifest, base=dataclasses.replace(manifest.base, sha256="1" * 64))
    with pytest.raises(BaseModelError, match=rf"sha256 {manifest.base.sha256} here.* 1{{64}}"):
        load_model(Bundle(manifest=other, paths=tiny_bundle.paths))


def test_a_base_that_is_gone(tiny_bundle, tmp_path):
    manifest = tiny_bundle.manifest
    gone = dataclasses.replace(manifest.base, name=str(tmp_path / "gone.safetensors"))
    with pytest.raises(BaseModelError, match=r"gone\.safetensors"):
        load_model(Bundle(manifest=dataclasses.replace(manifest, base=gone), paths=tiny_bundle.paths))


def test_a_missing_device_is_told(tiny_bundle):
    with pytest.raises(MissingDependencyError, match="torch cannot use device 'cuda:99' here"):
        open_engine(tiny_bundle, "torch", providers=["cuda:99"])
    with pytest.raises(MissingDependencyError, match="torch cannot use device 'abacus' here"):
        open_engine(tiny_bundle, "torch", providers=["abacus"])


def test_without_torch_the_pip_line_is_given(tiny_bundle, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "dear-serve\[train\]"'):
        open_bundle(tiny_bundle.paths.root, "torch")


def test_an_adapter_of_another_model_is_refused(tiny_bundle, tmp_path, monkeypatch):
    from dear_serve.bundle import load_arrays, save_arrays

    arrays = load_arrays(tiny_bundle.paths.adapter)
    save_arrays(tmp_path / "adapter.safetensors", arrays | {"surprise": np.zeros(1, np.float32)})
    monkeypatch.setattr(
        Bundle, "file", lambda self, name: (tmp_path if "adapter" in name else self.paths.root) / name
    )
    with pytest.raises(BundleError, match="surprise"):
        load_model(tiny_bundle)
