"""Ranges, integer products, and the search for layers that stay fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from dear_serve.errors import CheckFailedError
from export.quantize import Quantizer, layer_name, quantize
from export.ranges import Range, RangeObserver

WIDTH = 16


def test_zero_is_a_level_of_every_range() -> None:
    for span in (Range(-1.0, 3.0), Range(0.0, 2.0), Range(-5.0, 0.0), Range(0.0, 0.0)):
        assert 0 <= span.zero_point <= 255
        assert span.scale > 0
    assert Range(0.0, 2.0).zero_point == 0
    assert Range(-5.0, 0.0).zero_point == 255


def test_range_covers_what_it_saw_unless_clipping_loses_less() -> None:
    even, outlier = RangeObserver(), RangeObserver()
    values = np.linspace(-1, 2, 9999, dtype=np.float32)
    even.add(values)
    for _ in range(8):
        outlier.add(values)
    outlier.add(np.array([30.0], dtype=np.float32))
    assert even.range().low == pytest.approx(-1, abs=0.06)
    assert even.range().high == pytest.approx(2, abs=0.11)
    assert outlier.range().high < 30
    assert RangeObserver().range() == Range(0.0, 0.0)


def test_layers_are_named_alike_in_every_graph() -> None:
    assert layer_name("image.blocks.3.in_weight") == layer_name("blocks.3.in_weight") == "blocks.3.in_weight"
    assert layer_name("blocks.3.in_bias") is None
    assert layer_name("proj") is layer_name(None) is None


def write(folder: Path, weights: dict[str, np.ndarray], *, cut: str = "") -> None:
    """x through the products one after another; before `cut`, one feature is made a thousand times larger."""
    nodes, name = [], "x"
    for weight in weights:
        if weight == cut:
            nodes.append(helper.make_node("Mul", [name, "stretch"], ["stretched"]))
            name = "stretched"
        nodes.append(helper.make_node("MatMul", [name, weight], [f"{weight}_y"]))
        name = f"{weight}_y"
    stretch = np.ones(WIDTH, dtype=np.float32)
    stretch[0] = 1000
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["B", WIDTH])],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["B", WIDTH])],
        [numpy_helper.from_array(a, n) for n, a in {**weights, "stretch": stretch}.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "g.onnx")


def weights(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"blocks.{i}.in_weight": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) for i in range(count)
    }


@pytest.fixture
def feeds() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [{"x": rng.standard_normal((8, WIDTH)).astype(np.float32)} for _ in range(2)]


def test_products_become_integer_and_keep_their_values(tmp_path: Path, feeds) -> None:
    write(tmp_path, weights(2))
    plain = onnxruntime.InferenceSession(str(tmp_path / "g.onnx")).run(None, feeds[0])[0]
    ranges = Quantizer(tmp_path, feeds, threads=1).ranges("g.onnx")
    model = ir.load(tmp_path / "g.onnx")
    assert quantize(model, ranges, keep=["blocks.1.in_weight"]) == 1
    assert "blocks.0.in_weight" not in model.graph.initializers
    assert "blocks.1.in_weight" in model.graph.initializers
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto, full_check=True)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    found = onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds[0])[0]
    assert 0 < np.abs(found - plain).max() < 0.03 * np.abs(plain).max()
    run = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert "MatMulIntegerToFloat" in run  # the runtime takes the pairs as integer products


def test_search_keeps_nothing_where_nothing_is_lost(tmp_path: Path, feeds) -> None:
    write(tmp_path, weights(3))
    quantizer = Quantizer(tmp_path, feeds, threads=1)
    info = quantizer.search("g.onnx", quantizer.ranges("g.onnx"))
    assert (info.layers, info.kept, info.inputs, info.damage) == (3, (), 16, {})
    assert info.cosine > 0.999
    assert {p.name for p in tmp_path.iterdir()} == {"g.onnx"}


def test_search_keeps_the_layer_that_loses_most(tmp_path: Path, feeds) -> None:
    bad = weights(4)
    bad["blocks.2.in_weight"][0] = 0  # nothing depends on the stretched feature, and all levels go to it
    write(tmp_path, bad, cut="blocks.2.in_weight")
    quantizer = Quantizer(tmp_path, feeds, threads=1)
    info = quantizer.search("g.onnx", quantizer.ranges("g.onnx"))
    assert info.kept == ("blocks.2.in_weight",)
    assert next(iter(info.damage)) == "blocks.2.in_weight"
    assert info.cosine >= 0.995


def test_search_refuses_what_would_be_fp32_anyway(tmp_path: Path, feeds) -> None:
    bad = weights(1)
    bad["blocks.0.in_weight"][0] = 0
    write(tmp_path, bad, cut="blocks.0.in_weight")
    quantizer = Quantizer(tmp_path, feeds, threads=1)
    with pytest.raises(CheckFailedError, match=r"int8 loses too much in g\.onnx: cosine .* use fp32"):
        quantizer.search("g.onnx", quantizer.ranges("g.onnx"))
