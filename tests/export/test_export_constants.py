"""What the exported graphs hold as constants: one mask per masked block, as the roles say, and nothing left to fold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
from onnxscript.optimizer import fold_constants

from dear_serve.backbone.clip import Clip
from dear_serve.bundle import Bundle
from dear_serve.config import ClipConfig
from dear_serve.dear.mask import block_mask
from dear_serve.dear.model import DearModel
from dear_serve.dear.roles import HeadRole, Roles
from dear_serve.io_spec import ALL_GRAPHS
from export.lean import BLOCKED
from export.pipeline import ExportReport
from export.to_onnx import export_graphs

KINDS = (("attribute", "color"), ("attribute", "shape"), ("mixed", ""), ("generalization", ""))


def dealt(first_block: int, attributes: tuple[str, ...], *, open_block: int) -> Roles:
    """Heads of every kind in every block, but for one block whose heads are all open."""
    roles = Roles.uniform(
        "mixed", layers=3, heads_per_layer=4, first_block=first_block, attributes=attributes
    )

    def deal(head: HeadRole) -> HeadRole:
        role, concept = KINDS[(head.head + head.layer) % 4]
        return head if head.layer == open_block else replace(head, role=role, concept=concept)

    return replace(roles, heads=tuple(deal(head) for head in roles.heads))


@pytest.mark.parametrize("variant", ["paper", "one-way"])
def test_one_mask_for_each_masked_block(
    tiny_clip_config: ClipConfig, exported: tuple[Bundle, ExportReport], tmp_path: Path, monkeypatch, variant
) -> None:
    dear = replace(exported[0].manifest.dear, first_block=1, mask=variant)
    roles = dealt(1, dear.attributes, open_block=2)
    model = DearModel(Clip(tiny_clip_config), roles, dear).eval()
    name = "image" if variant == "paper" else "joint"
    monkeypatch.setattr("export.to_onnx.ALL_GRAPHS", {name: ALL_GRAPHS[name]})
    export_graphs(model, torch.zeros(1, 24), tmp_path, opset=20, metadata={"dear.mask": variant})
    graph = onnx.load(tmp_path / f"{name}.onnx")
    if variant == "one-way":  # CLS sees no attribute token: its feature is the frozen one
        pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        run = onnxruntime.InferenceSession(str(tmp_path / "joint.onnx")).run
        frozen, cls, attributes = run(None, {"pixels": pixels.numpy()})
        np.testing.assert_array_equal(frozen, cls)
        with torch.inference_mode():
            np.testing.assert_allclose(frozen, model.zero_shot_image(pixels), atol=1e-5)
            np.testing.assert_allclose(attributes, model.image_features(pixels)[1], atol=1e-5)
    assert {p.key: p.value for p in graph.metadata_props}["dear.mask"] == variant
    masks = {
        int(t.name.rpartition("_")[2]): numpy_helper.to_array(t)
        for t in graph.graph.initializer
        if "mask_block_" in t.name
    }
    expected = {
        layer: block_mask(roles, layer, attributes=dear.attributes, originals=17, variant=variant)
        for layer in (1, 2, 3)
    }
    assert set(masks) == {layer for layer, mask in expected.items() if not mask.all()}
    assert set(masks) == ({1, 3} if variant == "paper" else {1, 2, 3})
    for layer, mask in masks.items():
        seen = expected[layer] if layer < 3 else expected[layer][:, np.r_[0, 17:19]]
        np.testing.assert_array_equal(mask.reshape(seen.shape), np.where(seen, 0, np.float32(BLOCKED)))


@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_folding_finds_nothing_more(exported: tuple[Bundle, ExportReport], name: str) -> None:
    path = exported[0].file(f"onnx/{ALL_GRAPHS[name].file}")
    constants = {t.name for t in onnx.load(path, load_external_data=False).graph.initializer}
    model = ir.load(path)
    before = [node.name for node in model.graph.all_nodes()]
    for node in model.graph.all_nodes():
        assert any(value is not None and value.name not in constants for value in node.inputs), node.name
    fold_constants(model)
    RemoveUnusedNodesPass()(model)
    CommonSubexpressionEliminationPass()(model)
    assert [node.name for node in model.graph.all_nodes()] == before


@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_shapes_are_asked_for_only_where_they_vary(exported: tuple[Bundle, ExportReport], name: str) -> None:
    """Shape of a batch or a text length is arithmetic that stays; nothing else may be computed from shapes."""
    path = exported[0].file(f"onnx/{ALL_GRAPHS[name].file}")
    model = onnx.shape_inference.infer_shapes(onnx.load(path, load_external_data=False), data_prop=True)
    known = {v.name: v for v in (*model.graph.input, *model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        if node.op_type == "Shape":
            start = next((a.i for a in node.attribute if a.name == "start"), 0)
            dims = known[node.input[0]].type.tensor_type.shape.dim
            end = next((a.i for a in node.attribute if a.name == "end"), len(dims))
            assert any(not dim.HasField("dim_value") for dim in dims[start:end]), node.name
