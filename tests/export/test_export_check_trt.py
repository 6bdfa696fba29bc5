"""The graphs against TensorRT's operator list: ours pass, and each kind of thing that it would refuse is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from dear_serve.bundle import Bundle
from dear_serve.dear.model import DearModel
from dear_serve.errors import BundleError, CheckFailedError
from dear_serve.io_spec import ALL_GRAPHS, GraphSpec, TensorSpec
from export.check_trt import Support, check_bundle, check_graph, load_operators
from export.to_onnx import export_graphs

SPEC = GraphSpec(
    file="g.onnx",
    inputs=(TensorSpec(name="x", dtype="float32", axes=("B", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", axes=("B", 4)),),
)


def check(
    tmp_path: Path, nodes: list, *, opset: int = 20, kind: int = TensorProto.FLOAT, **options
) -> Support:
    """Check a graph of `nodes` from x (B, 4) to y."""
    value = helper.make_tensor_value_info("x", kind, options.get("shape", ["B", 4]))
    result = helper.make_tensor_value_info("y", options.get("result", kind), options.get("to", ["B", 4]))
    graph = helper.make_graph(nodes, "g", [value], [result], options.get("constants", []))
    domains = [helper.make_opsetid("", opset), *options.get("domains", [])]
    onnx.save(helper.make_model(graph, opset_imports=domains, ir_version=10), tmp_path / "g.onnx")
    return check_graph(tmp_path / "g.onnx", "g", SPEC, options.get("operators", load_operators()))


def constant(name: str, *numbers: int) -> TensorProto:
    return helper.make_tensor(name, TensorProto.INT64, [len(numbers)], numbers)


def node(op: str, *inputs: str, **attributes) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), ["y"], name="n", **attributes)


def test_list_is_consistent() -> None:
    operators = load_operators()
    assert operators.tensorrt == "10.15"
    assert "onnx-tensorrt" in operators.source
    assert set(operators.rules) | set(operators.since) | operators.restricted <= set(operators.operators)
    assert all(types for types in operators.operators.values())
    assert len(operators.operators) > 150


@pytest.mark.parametrize("opset", [20, 23])
def test_a_plain_graph_passes(tmp_path: Path, opset: int) -> None:
    found = check(tmp_path, [node("Relu", "x")], opset=opset)
    assert found.problems == ()
    assert found.operators == ("Relu",)
    assert found.needs == {20: "10.0", 23: "10.15"}[opset]


def attention(**shapes) -> dict:
    """Attention over (B, 2, 5, 8), with a change."""
    return {"opset": 23, "shape": ["B", 2, 5, 8], "to": ["B", 2, 5, 8], **shapes}


CASES = {
    "opset": ([node("Relu", "x")], {"opset": 26}, "opset 26; the parser takes 9 to 25"),
    "operator": (
        [node("Det", "x")],
        {"shape": ["B", 4, 4], "to": ["B"]},
        "Det n: operator that the list does not support",
    ),
    "domain": (
        [node("Gelu", "x", domain="com.microsoft")],
        {"domains": [helper.make_opsetid("com.microsoft", 1)]},
        "Gelu n: operator of com.microsoft",
    ),
    "type": (
        [node("Relu", "x")],
        {"kind": TensorProto.INT8},
        "Relu n: x is INT8; the list has FP32, FP16, BF16",
    ),
    "foreign type": ([node("Abs", "x")], {"kind": TensorProto.UINT32}, "x has ONNX type 12"),
    "rank": (
        [node("Relu", "x")],
        {"shape": ["B", *[1] * 8], "to": ["B", *[1] * 8]},
        "x has 9 axes; TensorRT takes 8",
    ),
    "axis without a profile": (
        [node("Relu", "x")],
        {"shape": ["B", "N"], "to": ["B", "N"]},
        "input x axis 1 is dynamic",
    ),
    "restriction in words": (
        [node("MaxPool", "x", kernel_shape=[2])],
        {"shape": ["B", 3, 4], "to": ["B", 3, 3]},
        "MaxPool n: operator with restrictions that this check does not know",
    ),
    "values decide the shape": (
        [node("NonZero", "x")],
        {"result": TensorProto.INT64, "to": [2, None]},
        "the shape of its output depends on values",
    ),
    "axes that are computed": (
        [
            helper.make_node("Shape", ["x"], ["s"]),
            helper.make_node("Slice", ["s", "zero", "one"], ["axes"]),
            node("ReduceSum", "x", "axes"),
        ],
        {"constants": [constant("zero", 0), constant("one", 1)], "to": [None, None]},
        "ReduceSum n: input 1 must be a constant",
    ),
    "projections as they are": (
        [node("Attention", "x", "x", "x", q_num_heads=2, kv_num_heads=2)],
        {"opset": 23, "shape": ["B", 5, 16], "to": ["B", 5, 16]},
        "Attention n: input 0 has 3 axes; 4 are needed",
    ),
    "attribute": ([node("Attention", "x", "x", "x", softcap=2.0)], attention(), "attribute softcap is 2.0"),
    "past keys": (
        [node("Attention", "x", "x", "x", "", "x", "x")],
        attention(),
        "inputs after the first 4 are not supported, it has x, x",
    ),
    "second output": (
        [helper.make_node("LayerNormalization", ["x", "w"], ["y", "mean"], name="n")],
        {"constants": [helper.make_tensor("w", TensorProto.FLOAT, [4], [1.0] * 4)]},
        "outputs after the first 1 are not supported, it has mean",
    ),
}


@pytest.mark.parametrize(("nodes", "options", "message"), CASES.values(), ids=CASES)
def test_what_the_parser_would_refuse(tmp_path: Path, nodes, options, message) -> None:
    found = check(tmp_path, nodes, **options)
    assert any(message in problem for problem in found.problems), found.problems
    assert found.needs == ""


def test_four_axes_of_attention_need_a_newer_version(tmp_path: Path) -> None:
    operators = replace(load_operators(), opsets={"10.0": (9, 23)})
    found = check(tmp_path, [node("Attention", "x", "x", "x")], **attention(), operators=operators)
    assert found.problems == ()
    assert found.needs == "10.14"


def test_attribute_that_says_nothing_is_fine(tmp_path: Path) -> None:
    assert check(tmp_path, [node("Attention", "x", "x", "x", softcap=0.0)], **attention()).problems == ()


def test_a_file_that_is_no_graph(tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match=r"g\.onnx is not a graph that can be checked"):
        check_graph(tmp_path / "g.onnx", "g", SPEC, load_operators())


def test_local_functions_are_not_passed_over(tmp_path: Path) -> None:
    check(tmp_path, [node("Relu", "x")])
    model = onnx.load(tmp_path / "g.onnx")
    inner = helper.make_function(
        "d", "F", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], model.opset_import
    )
    model.functions.append(inner)
    onnx.save(model, tmp_path / "g.onnx")
    assert (
        "has 1 local functions" in check_graph(tmp_path / "g.onnx", "g", SPEC, load_operators()).problems[0]
    )


def test_every_portable_graph_passes(tiny_model: DearModel, tmp_path: Path) -> None:
    export_graphs(tiny_model, torch.eye(3, 24), tmp_path, opset=20, metadata={})
    for name, spec in ALL_GRAPHS.items():
        found = check_graph(tmp_path / spec.file, name, spec, load_operators())
        assert found.problems == ()
        assert found.needs == "10.0"


def test_all_problems_of_a_bundle_are_named_at_once(copy: Path) -> None:
    bundle = Bundle.open(copy)
    for name in ("image", "fusion"):
        path = bundle.file(f"onnx/{name}.onnx")
        model = onnx.load(path, load_external_data=False)
        model.graph.node.append(helper.make_node("Hardmax", [model.graph.output[0].name], ["z"], name="n"))
        onnx.save(model, path)
    with pytest.raises(CheckFailedError) as caught:
        check_bundle(bundle)
    lines = caught.value.message.splitlines()
    assert "TensorRT 10.15's ONNX parser would refuse" in lines[0]
    assert any("Hardmax n: operator with restrictions" in line for line in lines)
    assert "export with --opset 20" in lines[-1]


def test_a_bundle_without_graphs_is_refused(tiny_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"lists no onnx/image\.onnx; run: dear-export"):
        check_bundle(tiny_bundle)
