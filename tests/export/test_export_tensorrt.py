"""TensorRT: what can be checked without it, and the whole of it where a GPU is at hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dear_serve.bundle import Bundle, sha256_file
from dear_serve.errors import BundleError, ConfigError, MissingDependencyError
from export import cli, pipeline, to_tensorrt
from export.to_tensorrt import build_engines, creation_flags, parse_batches, profiles, require_tensorrt


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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MissingDependencyError) as caught:
        require_tensorrt()
    for part in ("tensorrt is not installed", "no NVIDIA GPU", 'pip install "dear-serve[gpu]"'):
        assert part in caught.value.message


def test_old_tensorrt_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(to_tensorrt, "_gpu_name", lambda: "a GPU")
    monkeypatch.setattr(to_tensorrt.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        to_tensorrt.importlib, "import_module", lambda name: SimpleNamespace(__version__="8.6.1")
    )
    with pytest.raises(MissingDependencyError, match=r"TensorRT is 8\.6\.1; 10 or newer is needed"):
        require_tensorrt()


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU: nothing is missing")
def test_trt_without_a_gpu_is_exit_3_and_keeps_the_graphs(copy: Path, monkeypatch, capsys, exported) -> None:
    graphs = {p.name: sha256_file(p) for p in (copy / "onnx").iterdir()}
    monkeypatch.setattr(pipeline, "export_bundle", lambda *args, **kwargs: (Bundle.open(copy), exported[1]))
    assert cli.main([str(copy), "--trt"]) == 3
    captured = capsys.readouterr()
    assert 'pip install "dear-serve[gpu]"' in captured.err
    assert "max |Δ|" in captured.out
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
    bundle = build_engines(Bundle.open(copy), (1, 2, 4))
    report = json.loads((bundle.paths.trt / "build.json").read_text())
    assert (report["tensorrt"], report["gpu"], report["batches"]) == ("11.0", "a GPU", [1, 2, 4])
    assert report["plans"]["image"]["graph_sha256"] == sha256_file(bundle.paths.onnx / "image.onnx")
    assert bundle.file("trt/image.plan").read_bytes() == b"plan of image.onnx"
    bundle = build_engines(bundle, (1, 2, 4))
    assert seen[8] == b"........"  # the same TensorRT and GPU: its timings are used again
    gpu[0] = "another GPU"
    build_engines(bundle, (1, 2, 4))
    assert seen[16] == b""


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("tensorrt") is None,
    reason="needs an NVIDIA GPU and the tensorrt package",
)
def test_every_engine_builds_and_loads(copy: Path) -> None:
    import tensorrt as trt

    bundle = build_engines(Bundle.open(copy), (1, 2, 4))
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    for plan in bundle.paths.trt.glob("*.plan"):
        engine = runtime.deserialize_cuda_engine(plan.read_bytes())
        assert engine is not None, plan.name
        assert engine.num_io_tensors >= 2
