"""Small bundles of made-up numbers, and ONNX graphs made by hand whose answers NumPy gives too."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dear_serve.bundle import Bundle, BundlePaths, BundleWriter, save_arrays
from dear_serve.config import DearConfig
from dear_serve.dear.roles import Roles
from dear_serve.io_spec import GRAPHS
from dear_serve.manifest import BaseRef, Manifest, Readout
from dear_serve.runtime.onnx_engine import graph_sizes

# --- bundles of made-up numbers, without a model ---------------------------------------------------


@pytest.fixture
def manifest(tiny_clip_config):
    return Manifest(
        base=BaseRef(name="tiny", sha256="0" * 64, clip=tiny_clip_config),
        dear=DearConfig(attributes=("color", "shape"), first_block=3, text_first_block=3, text_tokens=2),
        alpha=(0.5, 0.25, 0.25),
        logit_scale=14.0,
        class_names=("a red cup", "été"),
        templates=("{}",),
        preprocess=tiny_clip_config.preprocess,
        context_length=16,
        readouts=(
            Readout(
                attribute="color", kind="span", phrases=("something red", "something blue", "something green")
            ),
            Readout(attribute="shape", kind="token"),
        ),
        metrics={"base": 0.5, "novel": 1.0},
    )


SHAPES = {
    "attribute_tokens.tokens": (2, 32),
    "attribute_projection": (32, 24),
    "text_tokens.tokens": (2, 32),
    "fusion.weights": (3,),
}


def fill(paths: BundlePaths, seed: int) -> None:
    save_arrays(paths.adapter, {name: np.full(shape, seed, np.float32) for name, shape in SHAPES.items()})
    save_arrays(paths.readouts, {"color": np.eye(2, 24, dtype=np.float32)})
    roles().save(paths.roles)
    paths.tokenizer.write_text(json.dumps({"seed": seed}))


def roles(**changes) -> Roles:
    shape = {"layers": 3, "heads_per_layer": 4, "first_block": 3} | changes
    sha256 = shape.pop("base_sha256", "0" * 64)
    uniform = Roles.uniform("mixed", attributes=(), **shape)
    return dataclasses.replace(uniform, base="tiny", base_sha256=sha256)


def write(path: Path, manifest: Manifest, *, seed: int = 0) -> Bundle:
    with BundleWriter(path) as writer:
        fill(writer.paths, seed)
        return writer.commit(manifest)


@pytest.fixture
def bundle(tmp_path, manifest):
    return write(tmp_path / "flowers", manifest)


def seed_of(path: Path) -> int:
    return json.loads(Bundle.open(path).paths.tokenizer.read_text())["seed"]


def others(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


@pytest.fixture(scope="session")
def bundles():
    """The helpers above."""
    return SimpleNamespace(fill=fill, roles=roles, write=write, seed_of=seed_of, others=others, shapes=SHAPES)


# --- graphs made by hand --------------------------------------------------------------------------

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


def export_by_hand(bundle, target, *, replaced=None, report=None):
    """A copy of `bundle` at `target` with hand-made graphs."""
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


@pytest.fixture(scope="session")
def graphs():
    """The helpers and weights above."""
    return SimpleNamespace(
        make=make_graph,
        export=export_by_hand,
        pixel_weights=PIXEL_WEIGHTS,
        token_weights=TOKEN_WEIGHTS,
        class_weights=CLASS_WEIGHTS,
        alpha=ALPHA,
    )


@pytest.fixture(scope="session")
def hand_exported(fake_bundle, tmp_path_factory):
    """`fake_bundle` with graphs made by hand. Shared: read only."""
    report = json.dumps({"precision": "fp32"})
    return export_by_hand(fake_bundle, tmp_path_factory.mktemp("onnx") / "bundle", report=report)
