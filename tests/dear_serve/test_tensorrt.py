"""TensorRT engines as data: their identity, the options ONNX Runtime gets, and which file and provider run."""

from __future__ import annotations

import ctypes
import json
import logging
from pathlib import Path

import numpy as np
import pytest

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, MissingDependencyError
from dear_serve.io_spec import GRAPHS
from dear_serve.runtime import onnx_engine, open_engine, tensorrt
from dear_serve.runtime.tensorrt import (
    BuildReport,
    PlanInfo,
    check_identity,
    gpu_name,
    largest_batch,
    provider_options,
    read_build,
    session_source,
    tensorrt_version,
)

GPU = "NVIDIA H200 (compute capability 9.0)"
PROFILE = {"pixels": ((1, 3, 32, 32), (2, 3, 32, 32), (4, 3, 32, 32))}


@pytest.fixture
def exported(graphs, fake_bundle, tmp_path) -> Bundle:
    """Hand-made graphs in one file each, so that a copy elsewhere still loads, and a stand-in for shared weights."""
    bundle = graphs.export(fake_bundle, tmp_path / "runs" / "flowers")

    def fill(folder: Path) -> None:
        for path in bundle.paths.onnx.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / "weights.bin").write_bytes(b"weights")

    return bundle.replace_folder("onnx", fill)


def with_engines(bundle: Bundle, *, batches=(1, 2, 4), graph_sha256: str | None = None) -> Bundle:
    """A bundle with "engines": the context file is the graph itself, so that the CPU can stand in for a GPU."""

    def fill(folder: Path) -> None:
        files, plans = bundle.manifest.files, {}
        for name in ("image", "zero_shot_image", "classifier"):
            file = f"onnx/{GRAPHS[name].file}"
            (folder / f"{name}.plan").write_bytes(b"plan")
            (folder / f"{name}.onnx").write_bytes(bundle.file(file).read_bytes())
            (folder / f"{name}.weights").write_bytes((bundle.paths.onnx / f"{name}.weights").read_bytes())
            plans[name] = PlanInfo(
                file=f"{name}.plan",
                sha256="0" * 64,
                graph_sha256=graph_sha256 or files[file].sha256,
                weights_sha256=files["onnx/weights.bin"].sha256,
                profile=PROFILE,
                context=f"{name}.onnx",
            )
        report = BuildReport(tensorrt="10.15.1", gpu=GPU, batches=batches, plans=plans)
        (folder / "build.json").write_text(json.dumps(report.to_dict()))

    return bundle.replace_folder("trt", fill)


@pytest.fixture
def here(monkeypatch) -> dict[str, str | None]:
    """What this machine says it is; the engines' own TensorRT and GPU to begin with."""
    machine: dict[str, str | None] = {"tensorrt": "10.15.1", "gpu": GPU}
    monkeypatch.setattr(tensorrt, "tensorrt_version", lambda: machine["tensorrt"])
    monkeypatch.setattr(tensorrt, "gpu_name", lambda: machine["gpu"])
    return machine


def test_a_bundle_without_engines_has_no_report(exported: Bundle) -> None:
    assert read_build(exported) is None
    assert largest_batch(exported) is None
    assert session_source(exported, "image") == exported.paths.onnx / "image.onnx"
    assert set(provider_options(exported, "image")) == {"trt_max_workspace_size", "trt_timing_cache_enable"}


def test_engines_of_this_machine_are_used(exported: Bundle, here) -> None:
    bundle = with_engines(exported)
    assert session_source(bundle, "image") == bundle.paths.trt / "image.onnx"
    assert session_source(bundle, "text") == bundle.paths.onnx / "text.onnx"
    assert largest_batch(bundle) == 4
    options = provider_options(bundle, "image")
    assert options["trt_profile_min_shapes"] == "pixels:1x3x32x32"
    assert options["trt_profile_opt_shapes"] == "pixels:2x3x32x32"
    assert options["trt_profile_max_shapes"] == "pixels:4x3x32x32"


@pytest.mark.parametrize(
    ("what", "value", "message"),
    [
        ("tensorrt", "11.5.0", r"built for TensorRT 10\.15\.1; here it is 11\.5\.0"),
        (
            "gpu",
            "NVIDIA A10 (compute capability 8.6)",
            r"built for GPU NVIDIA H200 .*; here it is NVIDIA A10",
        ),
    ],
)
def test_engines_of_another_machine_are_refused_with_the_command(
    exported, here, what, value, message
) -> None:
    bundle = with_engines(exported)
    here[what] = value
    with pytest.raises(BundleError, match=message) as caught:
        session_source(bundle, "image")
    assert caught.value.message.endswith(
        f"Build them again: dear-export {bundle.paths.root} --trt --batch 1,2,4"
    )
    assert caught.value.code == "foreign_engine"


def test_engines_of_other_graphs_are_refused(exported: Bundle, here) -> None:
    bundle = with_engines(exported, graph_sha256="1" * 64)
    with pytest.raises(BundleError, match=r"built for graph image 1111.*; here it is [0-9a-f]{64}\."):
        session_source(bundle, "image")


def test_engines_of_other_weights_are_refused(exported: Bundle) -> None:
    bundle = with_engines(exported)
    (bundle.paths.onnx / "weights.bin").unlink()
    files = {name: entry for name, entry in bundle.manifest.files.items() if name != "onnx/weights.bin"}
    report = read_build(bundle)
    assert report is not None
    object.__setattr__(bundle.manifest, "files", files)
    with pytest.raises(BundleError, match="here it is absent"):
        check_identity(bundle, report, tensorrt=None, gpu=None)


def test_what_is_not_known_is_not_held_against_them(exported: Bundle, here) -> None:
    here.update(tensorrt=None, gpu=None)
    bundle = with_engines(exported)
    assert session_source(bundle, "image").parent.name == "trt"


def test_engines_without_batch_1_are_left_to_others(exported: Bundle, here) -> None:
    bundle = with_engines(exported, batches=(8, 8, 8))
    assert session_source(bundle, "image").parent.name == "onnx"
    assert largest_batch(bundle) is None
    assert "trt_profile_min_shapes" not in provider_options(bundle, "image")


def test_a_report_that_cannot_be_read(exported: Bundle) -> None:
    bundle = exported.replace_folder("trt", lambda folder: (folder / "build.json").write_text("{") and None)
    with pytest.raises(BundleError, match=r"trt/build\.json cannot be read"):
        read_build(bundle)


class Pretender:
    """An ONNX Runtime with every provider built in; `runs` says which one its sessions report."""

    def __init__(self, runs: str) -> None:
        import onnxruntime

        self._real, self.runs = onnxruntime, runs
        self.SessionOptions = onnxruntime.SessionOptions
        self.opened: list[tuple[str, list]] = []

    def get_available_providers(self) -> list[str]:
        return ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]

    def InferenceSession(self, path, *, sess_options, providers):  # noqa: N802 (ONNX Runtime's name)
        self.opened.append((path, providers))
        session = self._real.InferenceSession(
            path, sess_options=sess_options, providers=["CPUExecutionProvider"]
        )
        first = providers[0] if isinstance(providers[0], str) else providers[0][0]
        session.get_providers = lambda: [self.runs if "Tensorrt" in first else first]
        return session


def pretend(monkeypatch, runs: str) -> Pretender:
    runtime = Pretender(runs)
    monkeypatch.setattr(onnx_engine, "_import_runtime", lambda: runtime)
    return runtime


def test_the_service_takes_the_engine_with_cuda_and_cpu_behind_it(
    exported, here, monkeypatch, caplog
) -> None:
    bundle, runtime = with_engines(exported), pretend(monkeypatch, "TensorrtExecutionProvider")
    with caplog.at_level(logging.INFO, logger="dear_serve.runtime.onnx_engine"):
        engine = open_engine(bundle, "onnx", threads=1, providers=["tensorrt"])
    path, providers = runtime.opened[0]
    assert path == str(bundle.paths.trt / "image.onnx")
    assert providers[0][0] == "TensorrtExecutionProvider"
    assert providers[0][1]["trt_profile_max_shapes"] == "pixels:4x3x32x32"
    assert providers[1:] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert "graph image runs on TensorrtExecutionProvider from trt/image.onnx" in caplog.text
    assert engine.info.provider == "TensorrtExecutionProvider"
    pixels = np.random.default_rng(1).standard_normal((7, 3, 32, 32)).astype(np.float32)
    plain = open_engine(exported, "fake")
    assert (
        engine.encode_image(pixels).cls.shape == plain.encode_image(pixels).cls.shape
    )  # 7 rows, 4 at a time


def test_fusion_gets_no_engine(exported, here, monkeypatch) -> None:
    runtime = pretend(monkeypatch, "TensorrtExecutionProvider")
    engine = open_engine(with_engines(exported), "onnx", threads=1, providers=["tensorrt"])
    pixels = np.zeros((1, 3, 32, 32), np.float32)
    pixels[0, 0, 0, 0] = 1
    features = engine.encode_image(pixels)
    engine.fuse(features, features.cls)
    assert runtime.opened[-1][0].endswith("onnx/fusion.onnx")
    assert runtime.opened[-1][1] == ["CPUExecutionProvider"]


def test_a_later_provider_that_was_named_may_run_and_the_log_says_so(exported, monkeypatch, caplog) -> None:
    pretend(monkeypatch, "CUDAExecutionProvider")
    engine = open_engine(exported, "onnx", threads=1, providers=["tensorrt", "cuda"])
    assert engine.info.provider == "CUDAExecutionProvider"
    assert "TensorrtExecutionProvider cannot run here (CUDAExecutionProvider does)" in caplog.text


def test_one_that_was_not_named_may_not(exported, monkeypatch) -> None:
    pretend(monkeypatch, "CPUExecutionProvider")
    with pytest.raises(MissingDependencyError, match="TensorrtExecutionProvider cannot run here"):
        open_engine(exported, "onnx", threads=1, providers=["tensorrt"])


class Driver:
    """The three calls of NVIDIA's driver that `gpu_name` makes."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def cuInit(self, flags: int) -> int:  # noqa: N802 (the driver's name)
        return self.code

    def cuDeviceGetName(self, buffer, length: int, device: int) -> int:  # noqa: N802
        buffer.value = b"NVIDIA H200"
        return self.code

    def cuDeviceGetAttribute(self, number, attribute: int, device: int) -> int:  # noqa: N802
        ctypes.cast(number, ctypes.POINTER(ctypes.c_int))[0] = {75: 9, 76: 0}[attribute]
        return self.code


def test_the_gpu_as_its_driver_names_it(monkeypatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert gpu_name() == GPU
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(code=100))
    assert gpu_name() is None


def test_no_driver_is_no_gpu(monkeypatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert gpu_name() is None


def test_version_of_the_package(monkeypatch) -> None:
    versions = {"tensorrt-cu12": "10.15.1"}

    def version(name: str) -> str:
        if name not in versions:
            raise tensorrt.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(tensorrt.importlib.metadata, "version", version)
    assert tensorrt_version() == "10.15.1"
    versions.clear()
    assert tensorrt_version() is None
