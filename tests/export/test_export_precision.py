"""fp16 and int8 graphs: close to torch, typed as said, and refused where they are not close enough."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from PIL import Image

from dear_serve.bundle import Bundle
from dear_serve.dear.model import DearModel
from dear_serve.errors import CheckFailedError, ConfigError
from dear_serve.io_spec import ALL_GRAPHS
from dear_serve.runtime import open_engine
from dear_serve.runtime.onnx_engine import graph_sizes
from export.half import SENSITIVE, to_half
from export.parity import check_graphs
from export.pipeline import ExportReport, ExportSettings, export_bundle
from export.precision import PRECISIONS, precision_of
from export.samples import CALIBRATION, calibration_feeds, collect
from export.to_onnx import trace_graphs, write_graphs
from export.wrappers import wrap

Exported = tuple[Bundle, ExportReport]


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Bundle, exported: Exported) -> Exported:
    """The tiny bundle in int8, made of the fp32 graphs that are there: tracing takes seconds."""
    path = tmp_path_factory.mktemp("int8") / "tiny"
    shutil.copytree(tiny_bundle.paths.root, path)
    traced = {name: ir.load(exported[0].file(f"onnx/{spec.file}")) for name, spec in ALL_GRAPHS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("export.pipeline.trace_graphs", lambda *args, **kwargs: traced.items())
        return export_bundle(path, ExportSettings(precision="int8"))


def some(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr("export.to_onnx.ALL_GRAPHS", {name: ALL_GRAPHS[name] for name in names})


def cosines(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
    return (found * expected).sum(-1) / norms


def test_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision is 'fp8'; use one of fp32, fp16, int8"):
        precision_of("fp8")


def test_opset_follows_the_precision_unless_it_is_said() -> None:
    assert ExportSettings().resolved_opset() == 23
    assert ExportSettings(precision="fp16").resolved_opset() == 20
    assert ExportSettings(precision="fp16", opset=23).resolved_opset() == 23


# --- fp16 -------------------------------------------------------------------------------------------


def test_half_leaves_what_is_sensitive_and_the_model_alone(tiny_model: DearModel) -> None:
    module = wrap(tiny_model, torch.zeros(3, 24), fused=False)["classifier"]
    tensors = {**dict(to_half(module).named_parameters()), **dict(to_half(module).named_buffers())}
    fp32 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    assert {name.split(".")[-1] for name in fp32} >= {"proj", "attribute_proj", "class_weights"}
    assert all(SENSITIVE.intersection(name.split(".")) for name in fp32)
    assert tensors["image.blocks.0.in_weight"].dtype == torch.float16
    assert all(p.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize(("opset", "casts"), [(20, 9), (23, 3)])
def test_fp16_graphs_are_typed_and_close(
    tiny_model: DearModel, tiny_bundle: Bundle, tmp_path: Path, monkeypatch, opset: int, casts: int
) -> None:
    some(monkeypatch, *(("image",) if opset == 20 else ("image", "text")))
    write_graphs(trace_graphs(tiny_model, torch.zeros(1, 24), opset=opset, half=True), tmp_path, {})
    samples = collect(tiny_bundle, None)
    pixels = np.concatenate([samples.pixels[:8], samples.hostile])
    with torch.inference_mode():
        image = tiny_model.image_features(torch.from_numpy(pixels))
        text = (tiny_model.text_features(torch.from_numpy(samples.tokens)),)
    feeds = {"image": ({"pixels": pixels}, image), "text": ({"tokens": samples.tokens}, text)}
    for name, (feed, expected) in feeds.items():
        if name == "text" and opset == 20:
            continue
        run = onnxruntime.InferenceSession(
            str(tmp_path / f"{name}.onnx"), providers=["CPUExecutionProvider"]
        ).run
        for found, reference in zip(run(None, feed), expected, strict=True):
            assert found.dtype == np.float32
            assert cosines(found, reference.numpy()).min() > PRECISIONS["fp16"].min_cosine
    proto = onnx.load(tmp_path / "image.onnx")
    assert all(np.isfinite(numpy_helper.to_array(t)).all() for t in proto.graph.initializer)
    # Pixels, the two features, and one pair around each softmax where it is an operator of its own.
    assert sum(node.op_type == "Cast" for node in proto.graph.node) == casts
    if opset == 23:
        precisions = [a.i for n in proto.graph.node for a in n.attribute if a.name == "softmax_precision"]
        assert precisions == [TensorProto.FLOAT] * 3


# --- int8 -------------------------------------------------------------------------------------------


def test_int8_report_says_what_was_done(int8: Exported, exported: Exported) -> None:
    report = int8[1]
    assert report.precision == "int8"
    assert set(report.quantization) == {"image", "text"}
    image = report.quantization["image"]
    assert image.inputs == CALIBRATION
    assert image.cosine >= 0.995
    assert report.parity["image"].min_cosine >= PRECISIONS["int8"].min_cosine
    assert report.parity["image"].hostile_cosine is not None
    assert report.parity["classifier"].top1_agreement >= PRECISIONS["int8"].min_top1
    assert report.parity["classifier"].top1_strict is not None
    metrics = int8[0].manifest.metrics
    assert metrics["graphs_bits"] == 8
    assert metrics["graphs_cosine"] == report.parity["image"].min_cosine
    assert report.weights.size < exported[1].weights.size
    assert {p.name for p in int8[0].paths.onnx.iterdir()} == {
        p.name for p in exported[0].paths.onnx.iterdir()
    }


def test_int8_graphs_hold_integers_in_the_blocks_only(int8: Exported, exported: Exported) -> None:
    for name in ("image", "joint", "text"):
        operators, plain = int8[1].graphs[name].operators, exported[1].graphs[name].operators
        proto = onnx.load(int8[0].file(f"onnx/{name}.onnx"))
        constants = {t.name: t for t in proto.graph.initializer}
        weights = {i for n in proto.graph.node if n.op_type == "MatMul" for i in n.input if i in constants}
        assert weights <= {n for n in constants if "proj" in n}
        assert operators["QuantizeLinear"] < operators["DequantizeLinear"]
        assert operators["MatMul"] == plain["MatMul"]
        assert {constants[n].data_type for n in constants if n.endswith("_int8")} == {TensorProto.INT8}
    assert "QuantizeLinear" not in int8[1].graphs["fusion"].operators


def test_engine_runs_int8_and_says_so(int8: Exported, tiny_model: DearModel) -> None:
    engine = open_engine(int8[0], engine="onnx", threads=1)
    assert engine.info.precision == "int8"
    pixels = collect(int8[0], None).pixels[:6]
    together = engine.encode_image(pixels).attributes
    alone = np.concatenate([engine.encode_image(p[None]).attributes for p in pixels])
    np.testing.assert_allclose(together, alone, atol=1e-5)  # ranges are static: company does not matter
    with torch.inference_mode():
        expected = tiny_model.image_features(torch.from_numpy(pixels))[1].numpy()
    assert cosines(together, expected).min() > 0.99


def test_calibration_pictures_are_not_those_of_the_check(tiny_bundle: Bundle, tmp_path: Path) -> None:
    for i in range(100):
        Image.new("RGB", (32, 32), (2 * i, 255 - 2 * i, i)).save(tmp_path / f"{i:03}.png")
    seen = {p.tobytes() for p in collect(tiny_bundle, tmp_path).pixels}
    feeds = calibration_feeds(tiny_bundle, tmp_path)
    calibrated = {p.tobytes() for feed in feeds["image"] for p in feed["pixels"]}
    assert len(calibrated) == CALIBRATION
    assert not seen & calibrated
    assert sum(len(feed["tokens"]) for feed in feeds["text"]) == 64


# --- limits -----------------------------------------------------------------------------------------


def classes_of(bundle: Bundle) -> torch.Tensor:
    proto = onnx.load(bundle.paths.onnx / "classifier.onnx")
    constant = next(t for t in proto.graph.initializer if list(t.dims) == [24, 3])
    return torch.from_numpy(np.ascontiguousarray(numpy_helper.to_array(constant).T))


def test_int8_is_not_held_to_hostile_pictures_but_to_the_rest(
    int8: Exported, tiny_model: DearModel, monkeypatch
) -> None:
    bundle, samples = int8[0], collect(int8[0], None)
    monkeypatch.setattr("export.parity.ALL_GRAPHS", {"image": ALL_GRAPHS["image"]})
    settings = {"sizes": graph_sizes(bundle.manifest), "precision": "int8"}
    odd = replace(samples, hostile=samples.hostile * np.float32(1e3))
    report = check_graphs(bundle.paths.onnx, tiny_model, classes_of(bundle), odd, **settings)
    assert report["image"].min_cosine > 0.99


def test_int8_is_finite_on_hostile_pictures(int8: Exported, tiny_model: DearModel, monkeypatch) -> None:
    bundle, samples = int8[0], collect(int8[0], None)
    monkeypatch.setattr("export.parity.ALL_GRAPHS", {"zero_shot_image": ALL_GRAPHS["zero_shot_image"]})

    def run(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        with torch.inference_mode():
            found = tiny_model.zero_shot_image(torch.from_numpy(feed["pixels"])).numpy()
        return [np.full_like(found, np.nan) if len(found) == len(samples.hostile) else found]

    monkeypatch.setattr("export.parity._runner", lambda path: run)
    with pytest.raises(CheckFailedError, match=r"features at hostile pixels\[0, 0\] is nan"):
        check_graphs(
            bundle.paths.onnx,
            tiny_model,
            classes_of(bundle),
            samples,
            sizes=graph_sizes(bundle.manifest),
            precision="int8",
        )


def test_too_few_best_classes_are_a_mismatch(int8: Exported, tiny_model: DearModel, monkeypatch) -> None:
    bundle, samples = int8[0], collect(int8[0], None)
    monkeypatch.setattr("export.parity.ALL_GRAPHS", {"classifier": ALL_GRAPHS["classifier"]})
    wrong = -classes_of(bundle)  # the graph's best is torch's worst
    with pytest.raises(
        CheckFailedError, match=r"the best class is torch's in \d+ of \d+ rows; 99% is needed"
    ):
        check_graphs(
            bundle.paths.onnx,
            tiny_model,
            wrong,
            samples,
            sizes=graph_sizes(bundle.manifest),
            precision="int8",
        )
