"""The ONNX engine on small hand-made graphs whose answers NumPy gives too: contract checks, batches, providers.

That exported graphs equal the model is the exporter's own test.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap
import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, DearError, ImageError, MissingDependencyError
from dear_serve.io_spec import DYNAMIC, GRAPHS
from dear_serve.runtime import onnx_engine, open_bundle, open_engine
from dear_serve.runtime.base import ImageFeatures
from dear_serve.runtime.onnx_engine import OnnxEngine, graph_sizes
from dear_serve.runtime.onnx_header import TensorHeader, read_header

TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "float16": TensorProto.FLOAT16}
RNG = np.random.default_rng(0)
PIXEL_WEIGHTS = RNG.standard_normal((3 * 32 * 32, 24 * 3)).astype(np.float32)
TOKEN_WEIGHTS = RNG.standard_normal((1, 24)).astype(np.float32)
CLASS_WEIGHTS = RNG.standard_normal((24, 3)).astype(np.float32)
ALPHA = np.array([6, 3, 1], np.float32)

# One line per node: outputs = op(inputs) {attributes}. W_* and S_* are weights and shapes below.
NODES = {
    "image": [
        ("Reshape", ["pixels", "S_flat"], ["flat"], {}),
        ("MatMul", ["flat", "W_pixels"], ["all"], {}),
        ("Reshape", ["all", "S_features"], ["split"], {}),
        ("LpNormalization", ["split"], ["unit"], {"axis": -1}),
        ("Slice", ["unit", "S_0", "S_1", "S_1"], ["first"], {}),
        ("Reshape", ["first", "S_width"], ["cls"], {}),
        ("Slice", ["unit", "S_1", "S_3", "S_1"], ["attributes"], {}),
    ],
    "zero_shot_image": [
        ("Reshape", ["pixels", "S_flat"], ["flat"], {}),
        ("Slice", ["W_pixels", "S_0", "S_24", "S_1"], ["w"], {}),
        ("MatMul", ["flat", "w"], ["raw"], {}),
        ("LpNormalization", ["raw"], ["features"], {"axis": -1}),
    ],
    "text": [
        ("Cast", ["tokens"], ["float"], {"to": TensorProto.FLOAT}),
        ("ReduceSum", ["float", "S_1"], ["sum"], {"keepdims": 1}),
        ("Cos", ["sum"], ["cos"], {}),
        ("MatMul", ["cos", "W_tokens"], ["raw"], {}),
        ("LpNormalization", ["raw"], ["features"], {"axis": -1}),
    ],
    "fusion": [
        ("Unsqueeze", ["cls", "S_1"], ["c"], {}),
        ("Concat", ["c", "attributes"], ["all"], {"axis": 1}),
        ("Transpose", ["class_features"], ["g"], {"perm": [1, 0]}),
        ("MatMul", ["all", "g"], ["cosines"], {}),
        ("Transpose", ["cosines"], ["turned"], {"perm": [0, 2, 1]}),
        ("Mul", ["turned", "W_alpha"], ["contributions"], {}),
        ("ReduceSum", ["contributions", "S_2"], ["logits"], {"keepdims": 0}),
    ],
    "classifier": [
        ("Reshape", ["pixels", "S_flat"], ["flat"], {}),
        ("Slice", ["W_pixels", "S_0", "S_24", "S_1"], ["w"], {}),
        ("MatMul", ["flat", "w"], ["raw"], {}),
        ("MatMul", ["raw", "W_classes"], ["logits"], {}),
    ],
}
NODES["zero_shot_text"] = NODES["text"]
WEIGHTS = {
    "W_pixels": PIXEL_WEIGHTS,
    "W_tokens": TOKEN_WEIGHTS,
    "W_classes": CLASS_WEIGHTS,
    "W_alpha": ALPHA,
    "S_flat": np.array([-1, 3 * 32 * 32]),
    "S_features": np.array([-1, 3, 24]),
    "S_width": np.array([-1, 24]),
}
WEIGHTS |= {f"S_{i}": np.array([i]) for i in (0, 1, 2, 3, 24)}
# Slices of "unit" are along axis 1, those of W_pixels too: S_1 names the axis there.


def make_graph(name, sizes, *, change=None):
    """The ONNX model of one graph; `change` edits its inputs' and outputs' (name, dtype, axes) by tensor name."""
    spec, change = GRAPHS[name], change or {}

    def value(tensor):
        n, dtype, axes = change.get(tensor.name, (tensor.name, tensor.dtype, tensor.shape(sizes)))
        return helper.make_tensor_value_info(n, TYPES[dtype], list(axes))

    nodes = [helper.make_node(op, i, o, **attributes) for op, i, o, attributes in NODES[name]]
    used = {i for node in nodes for i in node.input}
    weights = [numpy_helper.from_array(WEIGHTS[key], key) for key in WEIGHTS if key in used]
    graph = helper.make_graph(
        nodes, name, [value(t) for t in spec.inputs], [value(t) for t in spec.outputs], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def export(bundle, target, *, replaced=None, report=None):
    """A copy of `bundle` at `target` with hand-made graphs."""
    import shutil

    shutil.copytree(bundle.paths.root, target)
    sizes = graph_sizes(bundle.manifest)

    def fill(folder):
        for name, spec in GRAPHS.items():
            model = (replaced or {}).get(name) or make_graph(name, sizes)
            if isinstance(model, bytes):
                (folder / spec.file).write_bytes(model)
            else:
                onnx.save_model(
                    model,
                    folder / spec.file,
                    save_as_external_data=True,
                    all_tensors_to_one_file=True,
                    location=f"{name}.weights",
                    size_threshold=256,
                )
        if report is not None:
            (folder / "export.json").write_text(report)

    return Bundle.open(target).replace_folder("onnx", fill)


@pytest.fixture(scope="module")
def exported(fake_bundle, tmp_path_factory):
    return export(
        fake_bundle, tmp_path_factory.mktemp("onnx") / "bundle", report=json.dumps({"precision": "fp32"})
    )


@pytest.fixture(scope="module")
def engine(exported):
    return open_engine(exported, "onnx", threads=1)


@pytest.fixture(scope="module")
def pixels():
    return np.random.default_rng(1).standard_normal((7, 3, 32, 32)).astype(np.float32)


def expected_features(pixels):
    features = (pixels.reshape(len(pixels), -1) @ PIXEL_WEIGHTS).reshape(-1, 3, 24)
    return features / np.linalg.norm(features, axis=-1, keepdims=True)


# Answers


def test_answers_of_every_graph(engine, pixels):
    features, expected = engine.encode_image(pixels), expected_features(pixels)
    np.testing.assert_allclose(features.cls, expected[:, 0], atol=1e-5)
    np.testing.assert_allclose(features.attributes, expected[:, 1:], atol=1e-5)
    np.testing.assert_allclose(engine.encode_image_zero_shot(pixels), expected[:, 0], atol=1e-5)
    tokens = np.array([[7, 1, 0], [8, 9, 1]])
    text = np.cos(tokens.sum(axis=1, keepdims=True).astype(np.float32)) @ TOKEN_WEIGHTS
    text /= np.linalg.norm(text, axis=1, keepdims=True)
    np.testing.assert_allclose(engine.encode_text(tokens), text, atol=1e-5)
    np.testing.assert_allclose(engine.encode_text_zero_shot(tokens), text, atol=1e-5)
    fused = engine.fuse(features, text)
    np.testing.assert_allclose(
        fused.contributions, np.einsum("bkd,cd->bck", expected, text) * ALPHA, atol=1e-5
    )
    np.testing.assert_allclose(fused.contributions.sum(axis=-1), fused.logits, atol=1e-5)
    flat = pixels.reshape(7, -1) @ PIXEL_WEIGHTS[:, :24] @ CLASS_WEIGHTS
    np.testing.assert_allclose(engine.classify(pixels), flat, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("batch", [1, 2, 63, 64, 65, 130])
def test_any_batch_row_by_row(engine, pixels, batch):
    rows = np.concatenate([pixels] * 19)[:batch]
    features = engine.encode_image(rows)
    assert features.cls.shape == (batch, 24)
    np.testing.assert_allclose(features.attributes, expected_features(rows)[:, 1:], atol=1e-5)
    assert engine.classify(rows).shape == (batch, 3)


def test_no_rows_need_no_session(exported):
    engine = open_engine(exported, "onnx", threads=1)
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


def test_sessions_are_made_when_first_used(exported, monkeypatch):
    opened = []
    original = OnnxEngine._open_session
    monkeypatch.setattr(
        OnnxEngine, "_open_session", lambda self, graph: opened.append(graph) or original(self, graph)
    )
    engine = open_engine(exported, "onnx", threads=1)
    assert opened == ["image"]
    for _ in range(2):
        engine.encode_text(np.array([[7, 1]]))
    assert opened == ["image", "text"]


def test_threads_share_one_engine_and_one_session(exported, pixels, monkeypatch):
    opened = []
    original = OnnxEngine._open_session
    monkeypatch.setattr(
        OnnxEngine, "_open_session", lambda self, graph: opened.append(graph) or original(self, graph)
    )
    engine = open_engine(exported, "onnx", threads=1)
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


def test_graphs_of_a_bundle_that_has_been_replaced_are_not_mixed_in(fake_bundle, tmp_path, pixels):
    bundle = export(fake_bundle, tmp_path / "b")
    engine = open_engine(bundle, "onnx", threads=1)
    engine.encode_image_zero_shot(pixels)
    bundle.replace_folder("trt", lambda folder: None)
    assert engine.encode_image_zero_shot(pixels).shape == (7, 24), "what is loaded goes on"
    with pytest.raises(BundleError, match="b has been replaced since it was opened"):
        engine.encode_text(np.array([[7, 1]]))


def test_info_and_close(exported):
    engine = open_engine(exported, "onnx", threads=2)
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


def test_default_threads_are_the_cpus_of_this_process(exported):
    import os

    assert open_engine(exported, "onnx").info.threads == len(os.sched_getaffinity(0))


def test_precision_is_what_the_export_says(fake_bundle, tmp_path):
    assert open_engine(export(fake_bundle, tmp_path / "a"), "onnx").info.precision == "fp32"
    fp16 = export(fake_bundle, tmp_path / "b", report='{"precision": "fp16"}')
    assert open_engine(fp16, "onnx").info.precision == "fp16"
    with pytest.raises(BundleError, match=r"onnx/export\.json is not JSON"):
        open_engine(export(fake_bundle, tmp_path / "c", report="{"), "onnx")


# The contract of the graphs


def test_a_bundle_without_graphs_says_how_to_get_them(fake_bundle):
    with pytest.raises(BundleError, match=r"has no onnx folder; run: dear-export .*tiny"):
        open_bundle(fake_bundle.paths.root, "onnx")


def test_a_graph_that_is_missing(exported, tmp_path):
    files = {n: e for n, e in exported.manifest.files.items() if n != "onnx/text.onnx"}
    partial = Bundle(manifest=dataclasses.replace(exported.manifest, files=files), paths=exported.paths)
    with pytest.raises(BundleError, match=r"lists no onnx/text\.onnx; run: dear-export"):
        open_engine(partial, "onnx")


@pytest.mark.parametrize(
    ("graph", "change", "message"),
    [
        (
            "image",
            {"cls": ("class", "float32", ("B", 24))},
            r"image\.onnx has outputs \['class', 'attributes'\]",
        ),
        ("text", {"tokens": ("ids", "int64", ("B", "L"))}, r"text\.onnx has inputs \['ids'\]; \['tokens'\]"),
        ("text", {"features": ("features", "float16", ("B", 24))}, "output features of float16; float32"),
        (
            "image",
            {"pixels": ("pixels", "float32", (1, 3, 32, 32))},
            r"shape \[1, 3, 32, 32\]; \['B', 3, 32, 32\]",
        ),
        ("zero_shot_text", {"tokens": ("tokens", "int64", ("B", 16))}, r"shape \['B', 16\]; \['B', 'L'\]"),
        ("fusion", {"logits": ("logits", "float32", ("B", 3))}, r"logits of shape \['B', 3\]; \['B', 'C'\]"),
        (
            "classifier",
            {"logits": ("logits", "float32", ("B", 4))},
            r"logits of shape \['B', 4\]; \['B', 3\]",
        ),
        ("image", {"attributes": ("attributes", "float32", ("B", 5, 24))}, r"\['B', 5, 24\]; \['B', 2, 24\]"),
        ("image", {"cls": ("cls", "float32", ("B", 1, 24))}, r"\['B', 1, 24\]; \['B', 24\]"),
    ],
)
def test_graphs_are_checked_on_opening_each_with_its_own_message(
    fake_bundle, tmp_path, graph, change, message
):
    broken = make_graph(graph, graph_sizes(fake_bundle.manifest), change=change)
    bundle = export(fake_bundle, tmp_path / "b", replaced={graph: broken})
    with pytest.raises(BundleError, match=message):
        open_engine(bundle, "onnx")


@pytest.mark.parametrize(
    "content", [b"", b"not an onnx file", b"\x3a\xff\xff\xff\xff\x7f", b"\x00" * 64, b"\x3a\x02\x08"]
)
def test_what_is_no_graph_at_all(fake_bundle, tmp_path, content):
    bundle = export(fake_bundle, tmp_path / "b", replaced={"fusion": content or b" "})
    with pytest.raises(BundleError, match=r"fusion\.onnx is not an ONNX graph"):
        open_engine(bundle, "onnx")


def test_a_graph_with_the_right_header_that_does_not_load(fake_bundle, tmp_path):
    broken = make_graph("image", graph_sizes(fake_bundle.manifest))
    broken.graph.node[0].op_type = "NoSuchOperator"
    bundle = export(fake_bundle, tmp_path / "b", replaced={"image": broken})
    with pytest.raises(BundleError, match=r"image\.onnx cannot be loaded by ONNX Runtime: .*NoSuchOperator"):
        open_engine(bundle, "onnx")


def test_headers_are_those_the_onnx_package_reads(exported):
    for name, spec in GRAPHS.items():
        path = exported.paths.onnx / spec.file
        graph = onnx.load(path, load_external_data=False).graph
        for found, values, declared in zip(
            read_header(path), (graph.input, graph.output), spec_of(name), strict=True
        ):
            assert [t.name for t in found] == [v.name for v in values] == [t.name for t in declared]
            for tensor, value in zip(found, values, strict=True):
                dims = value.type.tensor_type.shape.dim
                assert tensor.axes == tuple(
                    d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims
                )
                assert (
                    tensor.dtype
                    == onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name
                )


def spec_of(name):
    return GRAPHS[name].inputs, GRAPHS[name].outputs


def test_header_of_a_graph_with_weights_inside_and_an_unnamed_axis(tmp_path):
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 300, "B"])
    weight = numpy_helper.from_array(np.zeros((1000, 300), np.float32), "w")
    model = helper.make_model(helper.make_graph([], "g", [value], [value], [weight]))
    onnx.save_model(model, tmp_path / "x.onnx")
    expected = [TensorHeader("x", "float32", ("", 300, "B"))]
    assert read_header(tmp_path / "x.onnx") == (expected, expected)


def test_the_dynamic_letters_cover_what_graphs_leave_open():
    sizes = {"S": 32, "D": 24, "K": 2, "K+1": 3, "T": 3}
    for spec in GRAPHS.values():
        for tensor in (*spec.inputs, *spec.outputs):
            assert all(isinstance(axis, int) or axis in DYNAMIC for axis in tensor.shape(sizes))


# Providers


def test_a_provider_that_is_not_built_in_is_an_error_with_the_pip_line(exported):
    with pytest.raises(
        MissingDependencyError, match=r'CUDAExecutionProvider.*pip install "dear-serve\[gpu\]"'
    ):
        open_engine(exported, "onnx", providers=["cuda", "cpu"])
    with pytest.raises(MissingDependencyError, match="'NoSuchProvider' is not in this ONNX Runtime"):
        open_engine(exported, "onnx", providers=["NoSuchProvider"])


def test_the_cpu_by_either_name(exported):
    for name in ("cpu", "CPU", "CPUExecutionProvider"):
        assert open_engine(exported, "onnx", providers=[name]).info.provider == "CPUExecutionProvider"


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


def test_a_quiet_fall_back_to_the_cpu_is_an_error_when_cuda_was_asked_for(exported, monkeypatch):
    monkeypatch.setattr(onnx_engine, "_import_runtime", Pretender)
    with pytest.raises(
        MissingDependencyError, match=r"CUDAExecutionProvider cannot run here .CPUExecutionProvider does"
    ):
        open_engine(exported, "onnx", providers=["cuda"])


def test_and_a_warning_with_the_truth_in_info_when_it_was_not(exported, monkeypatch, caplog):
    monkeypatch.setattr(onnx_engine, "_import_runtime", Pretender)
    engine = open_engine(exported, "onnx")
    assert engine.info.provider == "CPUExecutionProvider"
    assert "CUDAExecutionProvider cannot run here" in caplog.text


def test_without_onnxruntime_the_pip_line_is_given(exported, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "dear-serve\[cpu\]"'):
        open_engine(exported, "onnx")


def test_no_torch_and_no_onnx_package_in_a_serving_process(exported):
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
        [sys.executable, "-c", script, exported.paths.root], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_fusing_for_no_pictures_or_no_classes(engine):
    some = ImageFeatures(cls=np.ones((2, 24), np.float32), attributes=np.ones((2, 2, 24), np.float32))
    assert engine.fuse(some, np.zeros((0, 24), np.float32)).logits.shape == (2, 0)
