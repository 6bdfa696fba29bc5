"""The exported graphs: equal to torch, masks as constants, weights shared, the same bytes again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from dear_serve.backbone.clip import Clip
from dear_serve.bundle import Bundle
from dear_serve.config import ClipConfig
from dear_serve.dear.explain import attention_maps
from dear_serve.dear.mask import block_mask
from dear_serve.dear.model import DearModel
from dear_serve.dear.roles import Roles
from dear_serve.errors import CheckFailedError, ConfigError
from dear_serve.io_spec import ALL_GRAPHS
from dear_serve.runtime import open_engine
from export.lean import BLOCKED
from export.pipeline import ExportReport
from export.to_onnx import export_graphs
from export.wrappers import wrap

Exported = tuple[Bundle, ExportReport]


def session(bundle: Bundle, name: str) -> onnxruntime.InferenceSession:
    path = bundle.file(f"onnx/{ALL_GRAPHS[name].file}")
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def load(bundle: Bundle, name: str) -> onnx.ModelProto:
    return onnx.load(bundle.file(f"onnx/{ALL_GRAPHS[name].file}"))


def texts(rows: int, length: int) -> np.ndarray:
    rng = np.random.default_rng(length)
    tokens = rng.integers(1, 49405, (rows, length))
    tokens[:, 0] = 49406
    for row, end in enumerate(rng.integers(2, length, rows)):
        tokens[row, end], tokens[row, end + 1 :] = 49407, 0
    return tokens


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_image_graphs_equal_torch(exported: Exported, tiny_model: DearModel, batch: int) -> None:
    pixels = np.random.default_rng(batch).standard_normal((batch, 3, 32, 32)).astype(np.float32)
    with torch.inference_mode():
        cls, attributes = tiny_model.image_features(torch.from_numpy(pixels))
        frozen = tiny_model.zero_shot_image(torch.from_numpy(pixels))
    found = session(exported[0], "image").run(None, {"pixels": pixels})
    np.testing.assert_allclose(found[0], cls, atol=1e-5)
    np.testing.assert_allclose(found[1], attributes, atol=1e-5)
    (plain,) = session(exported[0], "zero_shot_image").run(None, {"pixels": pixels})
    np.testing.assert_allclose(plain, frozen, atol=1e-5)


@pytest.mark.parametrize(("batch", "length"), [(1, 3), (1, 16), (7, 4), (64, 11)])
def test_text_graphs_equal_torch(exported: Exported, tiny_model: DearModel, batch: int, length: int) -> None:
    tokens = texts(batch, length)
    with torch.inference_mode():
        adapted = tiny_model.text_features(torch.from_numpy(tokens))
        frozen = tiny_model.zero_shot_text(torch.from_numpy(tokens))
    for name, expected in (("text", adapted), ("zero_shot_text", frozen)):
        (found,) = session(exported[0], name).run(None, {"tokens": tokens})
        np.testing.assert_allclose(found, expected, atol=1e-5, err_msg=name)


def test_classifier_is_image_then_fusion(exported: Exported) -> None:
    bundle, _ = exported
    pixels = np.random.default_rng(9).standard_normal((3, 3, 32, 32)).astype(np.float32)
    cls, attributes = session(bundle, "image").run(None, {"pixels": pixels})
    (logits,) = session(bundle, "classifier").run(None, {"pixels": pixels})
    constants = {t.name: numpy_helper.to_array(t) for t in load(bundle, "classifier").graph.initializer}
    (classes,) = (a.T for a in constants.values() if a.shape == (24, 3))
    feeds = {"cls": cls, "attributes": attributes, "class_features": np.ascontiguousarray(classes)}
    fused, contributions = session(bundle, "fusion").run(None, feeds)
    np.testing.assert_allclose(logits, fused, atol=1e-4)
    np.testing.assert_allclose(contributions.sum(-1), fused, atol=1e-4)


@pytest.mark.parametrize("name", ["image", "classifier", "joint"])
def test_masks_are_constants_equal_to_the_roles(exported: Exported, name: str) -> None:
    bundle, _ = exported
    manifest, roles = bundle.manifest, bundle.roles()
    masks = {
        t.name.rpartition("_")[2]: numpy_helper.to_array(t)
        for t in load(bundle, name).graph.initializer
        if "mask_block_" in t.name
    }
    assert set(masks) == {"3"}
    expected = block_mask(roles, 3, attributes=manifest.dear.attributes, originals=17)
    asking = np.r_[0, 17:19]  # nothing but CLS and the attribute tokens asks in the last block
    np.testing.assert_array_equal(masks["3"], np.where(expected[:, asking], 0, np.float32(BLOCKED)))
    assert np.isfinite(masks["3"]).all()
    assert (masks["3"] == 0).any(-1).all()


@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_graph_takes_only_what_the_contract_names(exported: Exported, name: str) -> None:
    model, spec = load(exported[0], name), ALL_GRAPHS[name]
    assert [i.name for i in model.graph.input] == [t.name for t in spec.inputs]
    assert [o.name for o in model.graph.output] == [t.name for t in spec.outputs]
    for value, tensor in zip(
        [*model.graph.input, *model.graph.output], [*spec.inputs, *spec.outputs], strict=True
    ):
        dims = value.type.tensor_type.shape.dim
        assert {i: dims[i].dim_param for i in tensor.dynamic_axes()} == tensor.dynamic_axes()
    assert {o.domain for o in model.opset_import} == {""}
    assert model.opset_import[0].version == 23


@pytest.mark.parametrize("name", ALL_GRAPHS)
def test_graph_names_its_origin_and_not_the_machine(exported: Exported, name: str) -> None:
    bundle, _ = exported
    model = load(bundle, name)
    metadata = {p.key: p.value for p in model.metadata_props}
    assert metadata["dear.graph"] == name
    assert metadata["dear.base_sha256"] == bundle.manifest.base.sha256
    assert metadata["dear.mask"] == "paper"
    assert not any(node.metadata_props or node.doc_string for node in model.graph.node)
    assert not any(value.metadata_props for value in [*model.graph.input, *model.graph.value_info])


def test_weights_are_stored_once_and_listed(exported: Exported) -> None:
    bundle, report = exported
    size = bundle.file("onnx/weights.bin").stat().st_size
    assert report.weights.size == size < 0.6 * report.weights.referenced
    assert all(bundle.file(f"onnx/{spec.file}").stat().st_size < 100_000 for spec in ALL_GRAPHS.values())
    assert json.loads(bundle.paths.export_report.read_text())["precision"] == "fp32"


def test_exporting_again_gives_the_same_bytes(exported: Exported, tiny_model: DearModel, tmp_path) -> None:
    bundle, report = exported
    constants = {t.name: t for t in load(bundle, "classifier").graph.initializer}
    classes = next(numpy_helper.to_array(t).T for t in constants.values() if list(t.dims) == [24, 3])
    props = {p.key: p.value for p in load(bundle, "image").metadata_props}
    props.pop("dear.graph")
    graphs, weights = export_graphs(
        tiny_model, torch.from_numpy(np.ascontiguousarray(classes)), tmp_path, opset=23, metadata=props
    )
    assert graphs == report.graphs
    assert weights == report.weights


def test_opset_is_checked(tiny_model: DearModel, tmp_path) -> None:
    with pytest.raises(ConfigError, match="opset is 17; use one of 18 to 23"):
        export_graphs(tiny_model, torch.zeros(1, 24), tmp_path, opset=17, metadata={})


def test_invalid_graph_is_refused(tiny_model: DearModel, tmp_path, monkeypatch) -> None:
    def refuse(path: str, full_check: bool) -> None:
        raise onnx.checker.ValidationError("node 3")

    monkeypatch.setattr("export.to_onnx.ALL_GRAPHS", {"fusion": ALL_GRAPHS["fusion"]})
    monkeypatch.setattr("onnx.checker.check_model", refuse)
    with pytest.raises(CheckFailedError, match=r"fusion\.onnx is not a valid graph: node 3"):
        export_graphs(tiny_model, torch.zeros(1, 24), tmp_path, opset=20, metadata={})


@pytest.mark.parametrize("opset", [18, 23])
def test_other_opsets_equal_torch(tiny_model: DearModel, tmp_path, monkeypatch, opset: int) -> None:
    monkeypatch.setattr("export.to_onnx.ALL_GRAPHS", {"image": ALL_GRAPHS["image"]})
    info, _ = export_graphs(tiny_model, torch.zeros(1, 24), tmp_path, opset=opset, metadata={})
    operators = info["image"].operators
    assert ("Attention" in operators) == (opset == 23)
    if opset == 23:  # heads are never moved to an axis of their own; what is left belongs to the patches
        assert operators["Transpose"] == operators["Reshape"] == 1
    assert info["image"].traced > 0
    run = onnxruntime.InferenceSession(str(tmp_path / "image.onnx"), providers=["CPUExecutionProvider"]).run
    pixels = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = tiny_model.image_features(pixels)
    for found, reference in zip(run(None, {"pixels": pixels.numpy()}), expected, strict=True):
        np.testing.assert_allclose(found, reference, atol=1e-5)


VARIANTS = {
    "one-way mask": {"dear": {"mask": "one-way"}},
    "tokens start from the class token": {
        "dear": {"token_start": "class", "first_block": 1, "text_first_block": 1}
    },
    "from the first block": {"dear": {"first_block": 1, "text_first_block": 1}},
    "no text tokens": {"dear": {"text_tokens": 0}},
    "layer scale and quick gelu": {"layer_scale": True, "quick_gelu": True},
    "no pre-norm": {"ln_pre": False},
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_wrappers_equal_the_model(
    tiny_clip_config: ClipConfig, exported: Exported, variant, fused: bool
) -> None:
    scale = variant.get("layer_scale", False)
    config = replace(
        tiny_clip_config,
        quick_gelu=variant.get("quick_gelu", False),
        vision=replace(tiny_clip_config.vision, layer_scale=scale, ln_pre=variant.get("ln_pre", True)),
        text=replace(tiny_clip_config.text, layer_scale=scale),
    )
    dear = replace(exported[0].manifest.dear, **variant.get("dear", {}))
    roles = mixed_roles(dear.first_block, dear.attributes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DearModel(Clip(config), roles, dear)
        for name, parameter in model.named_parameters():
            if name.endswith(("gamma", "bias")) or not name.startswith("clip."):
                torch.nn.init.normal_(parameter, std=0.5)
        pixels, classes = torch.randn(3, 3, 32, 32), torch.randn(4, 24)
    tokens = torch.from_numpy(texts(5, 9))
    modules = wrap(model, classes, fused=fused)
    with torch.inference_mode():
        pairs = [
            (modules["image"](pixels), model.image_features(pixels)),
            (modules["joint"](pixels), (model.zero_shot_image(pixels), *model.image_features(pixels))),
            ((modules["explain"](pixels),), (attention_maps(model, pixels),)),
            ((modules["zero_shot_image"](pixels),), (model.zero_shot_image(pixels),)),
            ((modules["text"](tokens),), (model.text_features(tokens),)),
            ((modules["zero_shot_text"](tokens),), (model.zero_shot_text(tokens),)),
        ]
    for found, expected in pairs:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=0)


def mixed_roles(first_block: int, attributes: tuple[str, ...]) -> Roles:
    """Heads of every kind in every block."""
    kinds = [("attribute", "color"), ("attribute", "shape"), ("mixed", ""), ("generalization", "")]
    roles = Roles.uniform(
        "mixed", layers=3, heads_per_layer=4, first_block=first_block, attributes=attributes
    )
    heads = tuple(
        replace(
            head, role=kinds[(head.head + head.layer) % 4][0], concept=kinds[(head.head + head.layer) % 4][1]
        )
        for head in roles.heads
    )
    return replace(roles, heads=heads)


@pytest.mark.parametrize("fused", [False, True])
def test_without_heads_that_count_the_map_is_zeros(
    tiny_clip_config: ClipConfig, exported: Exported, fused: bool
) -> None:
    dear = exported[0].manifest.dear
    roles = Roles.uniform(
        "generalization", layers=3, heads_per_layer=4, first_block=3, attributes=dear.attributes
    )
    model = DearModel(Clip(tiny_clip_config), roles, dear)
    module, pixels = wrap(model, torch.zeros(1, 24), fused=fused)["explain"], torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(module(pixels), torch.zeros(2, 2, 16))
        torch.testing.assert_close(attention_maps(model, pixels), torch.zeros(2, 2, 16))


def test_open_masks_leave_no_constant(tiny_clip_config: ClipConfig, exported: Exported) -> None:
    dear = exported[0].manifest.dear
    roles = Roles.uniform("mixed", layers=3, heads_per_layer=4, first_block=3, attributes=dear.attributes)
    module = wrap(DearModel(Clip(tiny_clip_config), roles, dear), torch.zeros(1, 24), fused=False)["image"]
    assert not [name for name, _ in module.named_buffers() if "mask_block" in name]


def test_runtime_opens_what_was_exported(exported: Exported) -> None:
    pixels = np.random.default_rng(3).standard_normal((4, 3, 32, 32)).astype(np.float32)
    onnx_engine = open_engine(exported[0], engine="onnx", threads=1)
    torch_engine = open_engine(exported[0], engine="torch")
    np.testing.assert_allclose(onnx_engine.classify(pixels), torch_engine.classify(pixels), atol=1e-4)
    assert onnx_engine.info.precision == "fp32"
    assert onnx_engine.has("joint")
    np.testing.assert_allclose(onnx_engine.explain(pixels), torch_engine.explain(pixels), atol=1e-5)
    assert onnx_engine.explain(pixels[:0]).shape == (0, 2, 16)
    (zero_shot, features), (frozen, adapted) = onnx_engine.joint(pixels), torch_engine.joint(pixels)
    np.testing.assert_allclose(zero_shot, frozen, atol=1e-5)
    np.testing.assert_allclose(features.cls, adapted.cls, atol=1e-5)
    np.testing.assert_allclose(features.attributes, adapted.attributes, atol=1e-5)
    assert onnx_engine.joint(pixels[:0])[1].attributes.shape == (0, 2, 24)
