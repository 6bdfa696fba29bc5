"""Other tools' layouts: what is written loads there and gives the same numbers."""

from __future__ import annotations

import errno
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from dear_serve.backbone.weights import clip_config
from dear_serve.backbone.zoo import load_base
from dear_serve.bundle import Bundle
from dear_serve.config import ClipConfig, PreprocessConfig
from dear_serve.dear.model import DearModel
from dear_serve.errors import BundleError, ConfigError
from dear_serve.io_spec import ALL_GRAPHS
from dear_serve.runtime.tensorrt import BuildReport, PlanInfo
from export import formats
from export.formats import open_clip_config, triton_config, write_format
from export.pipeline import ExportReport

SIZES = {"S": 32, "D": 24, "K": 2, "K+1": 3, "T": 3, "N": 16}


@pytest.fixture(scope="module")
def repository(exported: tuple[Bundle, ExportReport], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_format(exported[0], "triton", tmp_path_factory.mktemp("triton") / "models")


def test_triton_has_a_model_for_every_graph(repository: Path) -> None:
    assert {p.name for p in repository.iterdir()} == {*ALL_GRAPHS, "README"}
    for name in ALL_GRAPHS:
        config = (repository / name / "config.pbtxt").read_text()
        assert f'name: "{name}"' in config
        assert 'platform: "onnxruntime_onnx"' in config
    assert "Left out" in (repository / "README").read_text()


def test_triton_models_load_and_answer_as_the_bundle(repository: Path, exported) -> None:
    pixels = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    placed = onnxruntime.InferenceSession(str(repository / "image" / "1" / "model.onnx" / "model.onnx"))
    plain = onnxruntime.InferenceSession(str(exported[0].file("onnx/image.onnx")))
    for a, b in zip(placed.run(None, {"pixels": pixels}), plain.run(None, {"pixels": pixels}), strict=True):
        np.testing.assert_array_equal(a, b)


def test_triton_leaves_the_bundle_alone(repository: Path, exported) -> None:
    weights = exported[0].file("onnx/weights.bin")
    assert weights.stat().st_nlink == 1  # `onnx` refuses weights with more
    placed = [repository / name / "1" / "model.onnx" / "weights.bin" for name in ("image", "text")]
    assert all(0 < path.stat().st_size < weights.stat().st_size for path in placed)
    assert {path.stat().st_mode for path in placed} == {weights.stat().st_mode}  # others may read them


def test_triton_config_of_a_batched_graph() -> None:
    text = triton_config("text", ALL_GRAPHS["text"], SIZES, platform="onnxruntime_onnx", batch=64)
    assert "max_batch_size: 64" in text
    assert '{ name: "tokens" data_type: TYPE_INT64 dims: [ -1 ] }' in text
    assert '{ name: "features" data_type: TYPE_FP32 dims: [ 24 ] }' in text
    assert "dynamic_batching" in text
    assert text.count("{") == text.count("}")
    assert text.count("[") == text.count("]")


def test_triton_batches_nothing_where_classes_come_in() -> None:
    text = triton_config("fusion", ALL_GRAPHS["fusion"], SIZES, platform="onnxruntime_onnx", batch=64)
    assert "max_batch_size: 0" in text
    assert '{ name: "class_features" data_type: TYPE_FP32 dims: [ -1, 24 ] }' in text
    assert '{ name: "attributes" data_type: TYPE_FP32 dims: [ -1, 2, 24 ] }' in text
    assert "dynamic_batching" not in text


def test_triton_takes_the_engine_where_there_is_one(copy: Path, tmp_path: Path, monkeypatch) -> None:
    bundle = Bundle.open(copy).replace_folder(
        "trt", lambda f: (f / "image.plan").write_bytes(b"plan") and None
    )
    plan = PlanInfo(file="image.plan", sha256="0", graph_sha256="0", weights_sha256="0")
    report = BuildReport(tensorrt="11.0", gpu="a GPU", batches=(1, 8, 32), plans={"image": plan})
    monkeypatch.setattr(formats, "read_build", lambda bundle: report)
    out = write_format(bundle, "triton", tmp_path / "models")
    config = (out / "image" / "config.pbtxt").read_text()
    assert 'platform: "tensorrt_plan"\nmax_batch_size: 32\n' in config
    assert (out / "image" / "1" / "model.plan").read_bytes() == b"plan"
    assert 'platform: "onnxruntime_onnx"' in (out / "text" / "config.pbtxt").read_text()


def test_triton_needs_graphs(tiny_bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="run: dear-export"):
        write_format(tiny_bundle, "triton", tmp_path / "models")
    assert list(tmp_path.iterdir()) == []


def test_open_clip_loads_the_frozen_part(tiny_bundle: Bundle, tiny_model: DearModel, tmp_path: Path) -> None:
    import open_clip

    out = write_format(tiny_bundle, "open_clip", tmp_path / "frozen")
    model = open_clip.create_model(f"local-dir:{out}", precision="fp32").eval()
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[49406, 320, 2368, 49407, *[0] * 12]])
    with torch.inference_mode():
        image = model.encode_image(pixels, normalize=True)
        torch.testing.assert_close(image, tiny_model.zero_shot_image(pixels), atol=2e-6, rtol=0)
        text = model.encode_text(tokens, normalize=True)
        torch.testing.assert_close(text, tiny_model.zero_shot_text(tokens), atol=2e-6, rtol=0)
    assert "Left out" in (out / "README").read_text()
    base = load_base(str(out / "open_clip_model.safetensors"))
    assert base.sha256 == tiny_bundle.manifest.base.sha256
    assert base.config == tiny_bundle.manifest.base.clip


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"quick_gelu": True},
        {"vision": {"ln_pre": False, "layer_scale": True}, "text": {"layer_scale": True}},
        {"vision": {"mlp_width": 160}},
    ],
)
def test_configuration_of_open_clip_reads_back(tiny_clip_config: ClipConfig, change) -> None:
    parts = {
        key: replace(getattr(tiny_clip_config, key), **change[key])
        for key in ("vision", "text")
        if key in change
    }
    config = replace(tiny_clip_config, quick_gelu=change.get("quick_gelu", False), **parts)
    data = open_clip_config(config)
    size = data["preprocess_cfg"]["size"]
    values = {k: data["preprocess_cfg"][k] for k in ("mean", "std", "interpolation", "resize_mode")}
    preprocess = PreprocessConfig.from_dict({"size": size[0], **values})
    assert clip_config(data["model_cfg"], preprocess=preprocess) == config


@pytest.mark.parametrize("kind", ["torchscript", ""])
def test_unknown_formats_are_refused(tiny_bundle: Bundle, tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"format is {re.escape(repr(kind))}; use one of triton, open_clip"):
        write_format(tiny_bundle, kind, tmp_path / "out")


def test_what_is_there_is_not_overwritten(tiny_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists already; name a new folder"):
        write_format(tiny_bundle, "open_clip", tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_full_disk_leaves_nothing(tiny_bundle: Bundle, tmp_path: Path, monkeypatch) -> None:
    def full(bundle: Bundle, folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(formats.FORMATS, "open_clip", full)
    with pytest.raises(
        BundleError, match=r"cannot be written .No space left on device.; nothing was left there"
    ):
        write_format(tiny_bundle, "open_clip", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
