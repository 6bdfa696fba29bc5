"""The contract of the graphs: every one is checked when a bundle is opened, from its header alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError
from dear_serve.io_spec import DYNAMIC, GRAPHS
from dear_serve.runtime import open_bundle, open_engine
from dear_serve.runtime.onnx_engine import graph_sizes
from dear_serve.runtime.onnx_header import TensorHeader, read_header

# The contract of the graphs


def test_a_bundle_without_graphs_says_how_to_get_them(fake_bundle):
    with pytest.raises(BundleError, match=r"has no onnx folder; run: dear-export .*tiny"):
        open_bundle(fake_bundle.paths.root, "onnx")


def test_a_graph_that_is_missing(hand_exported, tmp_path):
    files = {n: e for n, e in hand_exported.manifest.files.items() if n != "onnx/text.onnx"}
    partial = Bundle(
        manifest=dataclasses.replace(hand_exported.manifest, files=files), paths=hand_exported.paths
    )
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
    graphs, fake_bundle, tmp_path, graph, change, message
):
    broken = graphs.make(graph, graph_sizes(fake_bundle.manifest), change=change)
    bundle = graphs.export(fake_bundle, tmp_path / "b", replaced={graph: broken})
    with pytest.raises(BundleError, match=message):
        open_engine(bundle, "onnx")


@pytest.mark.parametrize(
    "content", [b"", b"not an onnx file", b"\x3a\xff\xff\xff\xff\x7f", b"\x00" * 64, b"\x3a\x02\x08"]
)
def test_what_is_no_graph_at_all(graphs, fake_bundle, tmp_path, content):
    bundle = graphs.export(fake_bundle, tmp_path / "b", replaced={"fusion": content or b" "})
    with pytest.raises(BundleError, match=r"fusion\.onnx is not an ONNX graph"):
        open_engine(bundle, "onnx")


def test_a_graph_with_the_right_header_that_does_not_load(graphs, fake_bundle, tmp_path):
    broken = graphs.make("image", graph_sizes(fake_bundle.manifest))
    broken.graph.node[0].op_type = "NoSuchOperator"
    bundle = graphs.export(fake_bundle, tmp_path / "b", replaced={"image": broken})
    with pytest.raises(
        BundleError, match=r"image\.onnx cannot be loaded by ONNX Runtime .*: .*NoSuchOperator"
    ):
        open_engine(bundle, "onnx")


def test_headers_are_those_the_onnx_package_reads(hand_exported):
    for name, spec in GRAPHS.items():
        path = hand_exported.paths.onnx / spec.file
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
