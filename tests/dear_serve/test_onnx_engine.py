"""The ONNX engine on small hand-made graphs whose answers NumPy gives too: contract checks, batches, providers.

That exported graphs equal the model is the exporter's own test.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from dear_serve.errors import BundleError, DearError, ImageError, MissingDependencyError
from dear_serve.runtime import onnx_engine, open_engine
from dear_serve.runtime.base import ImageFeatures
from dear_serve.runtime.onnx_engine import OnnxEngine


@pytest.fixture(scope="module")
def engine(hand_exported):
    return open_engine(hand_exported, "onnx", threads=1)


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(1).standard_normal((7, 3, 32, 32)).astype(np.float32)


def expected_features(graphs, pixels):
    features = (pixels.reshape(len(pixels), -1) @ graphs.pixel_weights).reshape(-1, 3, 24)
    return features / np.linalg.norm(features, axis=-1, keepdims=True)


# Answers


def test_answers_of_every_graph(graphs, engine, pixels):
    features, expected = engine.encode_image(pixels), expected_features(graphs, pixels)
    np.testing.assert_allclose(features.cls, expected[:, 0], atol=1e-5)
    np.testing.assert_allclose(features.attributes, expected[:, 1:], atol=1e-5)
    np.testing.assert_allclose(engine.encode_image_zero_shot(pixels), expected[:, 0], atol=1e-5)
    tokens = np.array([[7, 1, 0], [8, 9, 1]])
    text = np.cos(tokens.sum(axis=1, keepdims=True).astype(np.float32)) @ graphs.token_weights
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    np.testing.assert_allclose(engine.encode_text(tokens), text, atol=1e-5)
    np.testing.assert_allclose(engine.encode_text_zero_shot(tokens), text, atol=1e-5)
    fused = engine.fuse(features, text)
    np.testing.assert_allclose(
        fused.contributions, np.einsum("bkd,cd->bck", expected, text) * graphs.alpha, atol=1e-5
    )
    np.testing.assert_allclose(fused.contributions.sum(axis=-1), fused.logits, atol=1e-5)
    flat = pixels.reshape(7, -1) @ graphs.pixel_weights[:, :24] @ graphs.class_weights
    np.testing.assert_allclose(engine.classify(pixels), flat, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("batch", [1, 2, 63, 64, 65, 130])
def test_any_batch_row_by_row(graphs, engine, pixels, batch):
    rows = np.concatenate([pixels] * 19)[:batch]
    features = engine.encode_image(rows)
    assert features.cls.shape == (batch, 24)
    np.testing.assert_allclose(features.attributes, expected_features(graphs, rows)[:, 1:], atol=1e-5)
    assert engine.classify(rows).shape == (batch, 3)


def test_no_rows_need_no_session(hand_exported):
    engine = open_engine(hand_exported, "onnx", threads=1)
    none = engine.encode_image(np.zeros((0, 3, 32, 32), np.float32))
    assert (none.cls.shape, none.attributes.shape) == ((0, 24), (0, 2, 24))
    assert engine.encode_text(np.zeros((0, 5), np.int64)).shape == (0, 24)
    assert engine.classify(np.zeros((0, 3, 32, 32), np.float32)).shape == (0, 3)
    fused = engine.fuse(none, np.zeros((4, 24), np.float32))
    assert (fused.logits.shape, fused.contributions.shape) == ((0, 4), (0, 4, 3))


def test_inputs_of_other_dtypes_and_layouts(engine, pixels):
    expected = engine.encode_image(pixels).cls
    np.testing.assert_allclose(engine.encode_image(pixels.astype(np.float64)).cls, expected, atol=1e-5)
    turned = np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(engine.encode_image(turned).cls, expected, atol=1e-5)
    with pytest.raises(ImageError, match="is expected"):
        engine.encode_image(pixels[0])


def test_sessions_are_made_when_first_used(hand_exported, monkeypatch):
    opened = []
    original = OnnxEngine._open_session
    monkeypatch.setattr(
        OnnxEngine, "_open_session", lambda self, graph: opened.append(graph) or original(self, graph)
    )
    engine = open_engine(hand_exported, "onnx", threads=1)
    assert opened == ["image"]
    for _ in range(2):
        engine.encode_text(np.array([[7, 1]]))
    assert opened == ["image", "text"]


def test_threads_share_one_engine_and_one_session(hand_exported, pixels, monkeypatch):
    opened = []
    original = OnnxEngine._open_session
    monkeypatch.setattr(
        OnnxEngine, "_open_session", lambda self, graph: opened.append(graph) or original(self, graph)
    )
    engine = open_engine(hand_exported, "onnx", threads=1)
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(engine.encode_image_zero_shot(pixels)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened.count("zero_shot_image") == 1
    assert len(answers) == 8
    for answer in answers:
        np.testing.assert_array_equal(answer, answers[0])


def test_graphs_of_a_bundle_that_has_been_replaced_are_not_mixed_in(graphs, fake_bundle, tmp_path, pixels):
    bundle = graphs.export(fake_bundle, tmp_path / "b")
    engine = open_engine(bundle, "onnx", threads=1)
    engine.encode_image_zero_shot(pixels)
    bundle.replace_folder("trt", lambda folder: None)
    assert engine.encode_image_zero_shot(pixels).shape == (7, 24), "what is loaded goes on"
    with pytest.raises(BundleError, match="b has been replaced since it was opened"):
        engine.encode_text(np.array([[7, 1]]))


def test_info_and_close(hand_exported):
    engine = open_engine(hand_exported, "onnx", threads=2)
    info = engine.info
    assert (info.engine, info.provider, info.precision, info.threads) == (
        "onnx",
        "CPUExecutionProvider",
        "fp32",
        2,
    )
    engine.close()
    engine.close()
    with pytest.raises(DearError, match="the engine is closed"):
        engine.encode_text(np.array([[7, 1]]))


def test_default_threads_are_the_cpus_of_this_process(hand_exported):
    import os

    assert open_engine(hand_exported, "onnx").info.threads == len(os.sched_getaffinity(0))


def test_precision_is_what_the_export_says(graphs, fake_bundle, tmp_path):
    assert open_engine(graphs.export(fake_bundle, tmp_path / "a"), "onnx").info.precision == "fp32"
    fp16 = graphs.export(fake_bundle, tmp_path / "b", report='{"precision": "fp16"}')
    assert open_engine(fp16, "onnx").info.precision == "fp16"
    with pytest.raises(BundleError, match=r"onnx/export\.json is not JSON"):
        open_engine(graphs.export(fake_bundle, tmp_path / "c", report="{"), "onnx")


# Providers


def test_a_provider_that_is_not_built_in_is_an_error_with_the_pip_line(hand_exported):
    with pytest.raises(
        MissingDependencyError, match=r'CUDAExecutionProvider.*pip install "dear-serve\[gpu\]"'
    ):
        open_engine(hand_exported, "onnx", providers=["cuda", "cpu"])
    with pytest.raises(MissingDependencyError, match="'NoSuchProvider' is not in this ONNX Runtime"):
        open_engine(hand_exported, "onnx", providers=["NoSuchProvider"])


def test_the_cpu_by_either_name(hand_exported):
    for name in ("cpu", "CPU", "CPUExecutionProvider"):
        assert open_engine(hand_exported, "onnx", providers=[name]).info.provider == "CPUExecutionProvider"


class Pretender:
    """An ONNX Runtime with CUDA built in whose libraries are missing: its sessions quietly run on the CPU."""

    def __init__(self):
        import onnxruntime

        self._real = onnxruntime
        self.SessionOptions = onnxruntime.SessionOptions

    def get_available_providers(self):
        return ["CUDAExecutionProvider", "CPUExecutionProvider"]

    def InferenceSession(self, path, *, sess_options, providers):  # noqa: N802 (ONNX Runtime's name)
        assert providers[0] == "CUDAExecutionProvider"
        return self._real.InferenceSession(
            path, sess_options=sess_options, providers=["CPUExecutionProvider"]
        )


def test_a_quiet_fall_back_to_the_cpu_is_an_error_when_cuda_was_asked_for(hand_exported, monkeypatch):
    monkeypatch.setattr(onnx_engine, "_import_runtime", Pretender)
    with pytest.raises(
        MissingDependencyError, match=r"CUDAExecutionProvider cannot run here .CPUExecutionProvider does"
    ):
        open_engine(hand_exported, "onnx", providers=["cuda"])


def test_and_a_warning_with_the_truth_in_info_when_it_was_not(hand_exported, monkeypatch, caplog):
    monkeypatch.setattr(onnx_engine, "_import_runtime", Pretender)
    engine = open_engine(hand_exported, "onnx")
    assert engine.info.provider == "CPUExecutionProvider"
    assert "CUDAExecutionProvider cannot run here" in caplog.text


def test_without_onnxruntime_the_pip_line_is_given(hand_exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "dear-serve\[cpu\]"'):
        open_engine(hand_exported, "onnx")


def test_no_torch_and_no_onnx_package_in_a_serving_process(hand_exported):
    script = textwrap.dedent(
        """
        import sys
        import numpy as np
        from dear_serve.runtime.predict import Predictor
        with Predictor.open(sys.argv[1], engine="onnx", threads=1) as predictor:
            predictor.class_features(["a", "b"])
        loaded = {m for m in ("torch", "torchvision", "open_clip", "onnx") if m in sys.modules}
        sys.exit(str(loaded) if loaded else 0)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, hand_exported.paths.root], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_fusing_for_no_pictures_or_no_classes(engine):
    some = ImageFeatures(cls=np.ones((2, 24), np.float32), attributes=np.ones((2, 2, 24), np.float32))
    assert engine.fuse(some, np.zeros((0, 24), np.float32)).logits.shape == (2, 0)
