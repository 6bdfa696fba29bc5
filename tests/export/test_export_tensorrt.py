"""TensorRT: what can be checked without it, and the whole of it where a GPU is at hand."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from dear_serve.bundle import Bundle, sha256_file
from dear_serve.errors import BundleError, CheckFailedError, ConfigError, MissingDependencyError
from dear_serve.io_spec import ALL_GRAPHS, GraphSpec
from dear_serve.runtime.onnx_engine import graph_sizes
from dear_serve.runtime.tensorrt import read_build
from export import cli, pipeline, to_tensorrt
from export.to_tensorrt import (
    build_engines,
    context_graph,
    creation_flags,
    parse_batches,
    profiles,
    require_tensorrt,
)


def test_batches() -> None:
    assert parse_batches("1,8,64") == (1, 8, 64)
    assert parse_batches("4") == (4, 4, 4)
    with pytest.raises(ConfigError, match="from 1 to 1024"):
        parse_batches("1,8,2048")


def test_profiles_cover_every_dynamic_axis(tiny_bundle: Bundle) -> None:
    found = profiles(tiny_bundle.manifest, (1, 8, 64))
    assert found["image"] == {"pixels": ((1, 3, 32, 32), (8, 3, 32, 32), (64, 3, 32, 32))}
    assert found["text"] == {"tokens": ((1, 3), (8, 16), (64, 16))}
    assert found["fusion"]["class_features"] == ((1, 24), (3, 24), (1000, 24))
    assert found["fusion"]["attributes"][1] == (8, 2, 24)


@pytest.mark.parametrize(("version", "flags"), [("10.7.0", 2), ("10.14.1", 2), ("11.3.0", 0)])
def test_networks_are_strongly_typed(version: str, flags: int) -> None:
    module = SimpleNamespace(
        __version__=version, NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1)
    )
    assert creation_flags(module) == flags


def test_what_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(to_tensorrt, "gpu_name", lambda: None)
    with pytest.raises(MissingDependencyError) as caught:
        require_tensorrt()
    for part in ("tensorrt is not installed", "no NVIDIA GPU", 'pip install "dear-serve[gpu]"'):
        assert part in caught.value.message


def test_old_tensorrt_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(to_tensorrt, "gpu_name", lambda: "a GPU")
    monkeypatch.setattr(to_tensorrt.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        to_tensorrt.importlib, "import_module", lambda name: SimpleNamespace(__version__="8.6.1")
    )
    with pytest.raises(MissingDependencyError, match=r"TensorRT is 8\.6\.1; 10 or newer is needed"):
        require_tensorrt()


def test_trt_without_a_gpu_is_exit_3_before_anything_is_exported(copy: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(to_tensorrt, "gpu_name", lambda: None)
    graphs = {p.name: sha256_file(p) for p in (copy / "onnx").iterdir()}
    monkeypatch.setattr(pipeline, "export_bundle", lambda *args, **kwargs: pytest.fail("must not export"))
    assert cli.main([str(copy), "--trt"]) == 3
    assert 'pip install "dear-serve[gpu]"' in capsys.readouterr().err
    assert {p.name: sha256_file(p) for p in (copy / "onnx").iterdir()} == graphs
    assert not (copy / "trt").exists()


def test_engines_need_graphs(tiny_bundle: Bundle, monkeypatch) -> None:
    monkeypatch.setattr(
        to_tensorrt, "require_tensorrt", lambda: (SimpleNamespace(__version__="11.0"), "a GPU")
    )
    with pytest.raises(BundleError, match=r"lists no onnx/image\.onnx"):
        build_engines(tiny_bundle, (1, 2, 4))


def test_engines_carry_their_identity(copy: Path, monkeypatch) -> None:
    seen: list[bytes] = []

    def build(trt, path: Path, profile, cache: bytes) -> tuple[bytes, bytes]:
        seen.append(cache)
        return b"plan of " + path.name.encode(), cache + b"."

    gpu = ["a GPU"]
    monkeypatch.setattr(
        to_tensorrt, "require_tensorrt", lambda: (SimpleNamespace(__version__="11.0"), gpu[0])
    )
    monkeypatch.setattr(to_tensorrt, "_build", build)
    monkeypatch.setattr(to_tensorrt, "check_bundle", lambda bundle: [])
    bundle = build_engines(Bundle.open(copy), (1, 2, 4))
    report = json.loads((bundle.paths.trt / "build.json").read_text())
    assert (report["tensorrt"], report["gpu"], report["batches"]) == ("11.0", "a GPU", [1, 2, 4])
    assert report["plans"]["image"]["graph_sha256"] == sha256_file(bundle.paths.onnx / "image.onnx")
    assert bundle.file("trt/image.plan").read_bytes() == b"plan of image.onnx"
    built = read_build(bundle)
    assert built is not None
    assert built.plans["text"].profile == {"tokens": ((1, 3), (2, 16), (4, 16))}
    assert built.command(bundle) == f"dear-export {copy} --trt --batch 1,2,4"
    assert onnx.load(bundle.file("trt/text.onnx")).graph.node[0].op_type == "EPContext"
    bundle = build_engines(bundle, (1, 2, 4))
    assert seen[8] == b"........"  # the same TensorRT and GPU: its timings are used again
    gpu[0] = "another GPU"
    build_engines(bundle, (1, 2, 4))
    assert seen[16] == b""


def test_graphs_that_the_operator_list_refuses_are_not_built(copy: Path, monkeypatch) -> None:
    def refuse(bundle: Bundle) -> None:
        raise CheckFailedError("image: Det n: operator that the list does not support")

    monkeypatch.setattr(
        to_tensorrt, "require_tensorrt", lambda: (SimpleNamespace(__version__="11.0"), "a GPU")
    )
    monkeypatch.setattr(to_tensorrt, "check_bundle", refuse)
    monkeypatch.setattr(to_tensorrt, "_build", lambda *args: pytest.fail("must not be built"))
    with pytest.raises(CheckFailedError, match="Det n"):
        build_engines(Bundle.open(copy), (1, 2, 4))


def test_context_graph_names_the_plan_and_keeps_the_contract() -> None:
    spec = ALL_GRAPHS["image"]
    sizes = {"S": 32, "D": 24, "K": 2}
    profile = {"pixels": ((1, 3, 32, 32), (2, 3, 32, 32), (4, 3, 32, 32))}
    model = context_graph(spec, profile, sizes, "image.plan", "NVIDIA H200 (compute capability 9.0)")
    (node,) = model.graph.node
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    assert (node.domain, node.op_type) == ("com.microsoft", "EPContext")
    assert attributes["ep_cache_context"] == b"image.plan"
    assert attributes["embed_mode"] == 0
    assert attributes["hardware_architecture"] == b"90"
    dims = model.graph.output[1].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in dims] == ["B", 2, 24]
    fixed = {"pixels": ((8, 3, 32, 32),) * 3}
    model = context_graph(spec, fixed, sizes, "image.plan", "a GPU")
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 8


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("tensorrt") is None,
    reason="needs an NVIDIA GPU and the tensorrt package",
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_engine_builds_runs_and_equals_torch(
    tiny_bundle: Bundle, tmp_path: Path, precision: str
) -> None:
    import tensorrt as trt

    path = tmp_path / "tiny"
    shutil.copytree(tiny_bundle.paths.root, path)
    bundle, _ = pipeline.export_bundle(path, pipeline.ExportSettings(precision=precision, opset=20))
    bundle = build_engines(bundle, (1, 2, 4))
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    for name, spec in ALL_GRAPHS.items():
        engine = runtime.deserialize_cuda_engine(bundle.file(f"trt/{name}.plan").read_bytes())
        assert engine is not None, name
        plain = onnxruntime.InferenceSession(
            str(bundle.file(f"onnx/{spec.file}")), providers=["CPUExecutionProvider"]
        )
        for batch in (1, 2, 4):
            feeds = inputs_of(spec, bundle, batch)
            expected = plain.run([o.name for o in spec.outputs], feeds)
            for found, reference, output in zip(
                run_engine(engine, spec, feeds), expected, spec.outputs, strict=True
            ):
                scale = max(1.0, float(np.abs(reference).max()))
                limit = (1e-3 if precision == "fp32" else 2e-2) * scale  # TF32 and fp16 products
                np.testing.assert_allclose(found, reference, atol=limit, err_msg=f"{name} {output.name}")


def inputs_of(spec: GraphSpec, bundle: Bundle, batch: int) -> dict[str, np.ndarray]:
    """Random inputs of one graph, features L2-normalised."""
    rng, sizes = np.random.default_rng(batch), graph_sizes(bundle.manifest)
    feeds = {}
    for tensor in spec.inputs:
        shape = tensor.shape({**sizes, "B": batch, "L": 9, "C": 3})
        if tensor.dtype == "int64":
            tokens = rng.integers(1, 49405, shape)
            tokens[:, 0], tokens[:, -1] = 49406, 49407
            feeds[tensor.name] = tokens
        else:
            array = rng.standard_normal(shape).astype(np.float32)
            feeds[tensor.name] = (
                array if tensor.name == "pixels" else array / np.linalg.norm(array, axis=-1)[..., None]
            )
    return feeds


def run_engine(engine, spec: GraphSpec, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """One run of a deserialized engine, with torch's memory."""
    context = engine.create_execution_context()
    held = {name: torch.from_numpy(np.ascontiguousarray(array)).cuda() for name, array in feeds.items()}
    for name, tensor in held.items():
        assert context.set_input_shape(name, tuple(tensor.shape))
    for output in spec.outputs:
        held[output.name] = torch.empty(tuple(context.get_tensor_shape(output.name)), device="cuda")
    for name, tensor in held.items():
        assert context.set_tensor_address(name, tensor.data_ptr())
    stream = torch.cuda.Stream()
    assert context.execute_async_v3(stream.cuda_stream)
    stream.synchronize()
    return [held[output.name].cpu().numpy() for output in spec.outputs]
