"""A bundle's TensorRT engines as data: what they were built on, whether they run here, and how ONNX Runtime takes them.

An engine (plan) only runs on the TensorRT version and the GPU that built it, and stands for one graph: all three are
its identity (`trt/build.json`). ONNX Runtime's TensorRT provider loads a plan through a graph of one EPContext node
that names the plan's file (its documentation, "EP context cache"). No torch, and no TensorRT, is needed to read this.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
from dataclasses import dataclass, field
from pathlib import Path

from dear_serve.bundle import Bundle
from dear_serve.config import StrictConfig
from dear_serve.errors import BundleError, ConfigError
from dear_serve.io_spec import ALL_GRAPHS

__all__ = [
    "BUILD_FILE",
    "CACHE_FILE",
    "WORKSPACE_BYTES",
    "BuildReport",
    "PlanInfo",
    "check_identity",
    "gpu_name",
    "largest_batch",
    "provider_options",
    "read_build",
    "session_source",
    "tensorrt_version",
]

BUILD_FILE = "build.json"
CACHE_FILE = "timing.cache"
WORKSPACE_BYTES = 4 << 30
"""Most GPU memory that TensorRT may use for itself while it builds an engine."""
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute of the driver API


@dataclass(frozen=True, kw_only=True)
class PlanInfo(StrictConfig):
    """One engine: what it was built from and what it is."""

    file: str
    sha256: str
    graph_sha256: str
    weights_sha256: str
    profile: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Smallest, usual and largest shape of each input."""
    context: str = ""
    """The EPContext graph that names the plan, for ONNX Runtime."""


@dataclass(frozen=True, kw_only=True)
class BuildReport(StrictConfig):
    """`trt/build.json`: the identity of the engines. On another TensorRT, GPU or graph they must be built again."""

    tensorrt: str
    gpu: str
    batches: tuple[int, ...]
    plans: dict[str, PlanInfo]

    def command(self, bundle: Bundle) -> str:
        """What builds these engines again."""
        return f"dear-export {bundle.paths.root} --trt --batch {','.join(map(str, self.batches))}"


def read_build(bundle: Bundle) -> BuildReport | None:
    """What `trt/build.json` says; None if the bundle has no engines. Raises BundleError if it cannot be read."""
    name = f"trt/{BUILD_FILE}"
    if name not in bundle.manifest.files:
        return None
    try:
        return BuildReport.from_dict(json.loads(bundle.file(name).read_text(encoding="utf-8")))
    except (ValueError, ConfigError) as error:
        raise BundleError(
            f"{name} cannot be read ({error}); run: dear-export {bundle.paths.root} --trt"
        ) from error


def check_identity(bundle: Bundle, report: BuildReport, *, tensorrt: str | None, gpu: str | None) -> None:
    """Refuse engines that another TensorRT or GPU built, or that stand for other graphs.

    Args:
        bundle: with the engines.
        report: what they were built on.
        tensorrt: version that would run them; None if it is not known.
        gpu: name of the GPU that would; None if there is none or it is not known.

    Raises:
        BundleError: naming what differs, both values, and the command that builds them again.
    """
    pairs = [("TensorRT", report.tensorrt, tensorrt), ("GPU", report.gpu, gpu)]
    for name, plan in report.plans.items():
        graph = bundle.manifest.files.get(f"onnx/{ALL_GRAPHS[name].file}") if name in ALL_GRAPHS else None
        weights = bundle.manifest.files.get("onnx/weights.bin")
        pairs.append((f"graph {name}", plan.graph_sha256, graph.sha256 if graph else "absent"))
        pairs.append(("weights", plan.weights_sha256, weights.sha256 if weights else "absent"))
    for what, built, here in pairs:
        if here is not None and built != here:
            raise BundleError(
                f"the TensorRT engines of {bundle.name} were built for {what} {built}; here it is {here}. "
                f"Build them again: {report.command(bundle)}",
                code="foreign_engine",
            )


def session_source(bundle: Bundle, graph: str) -> Path:
    """The file that ONNX Runtime opens for `graph` on its TensorRT provider: the built engine where there is one.

    Engines whose smallest batch is not 1 are left to trtexec and Triton: a service has single pictures.

    Raises:
        BundleError: the engine was not built for this TensorRT, this GPU or this graph.
    """
    report = read_build(bundle)
    plan = report.plans.get(graph) if report else None
    if report is None or plan is None or not plan.context or report.batches[0] != 1:
        return bundle.file(f"onnx/{ALL_GRAPHS[graph].file}")
    check_identity(bundle, report, tensorrt=tensorrt_version(), gpu=gpu_name())
    bundle.file(f"trt/{plan.file}")
    return bundle.file(f"trt/{plan.context}")


def largest_batch(bundle: Bundle) -> int | None:
    """Most rows the engines take at once; None if there are none that `session_source` gives."""
    report = read_build(bundle)
    return report.batches[-1] if report and report.batches[0] == 1 else None


def provider_options(bundle: Bundle, graph: str) -> dict[str, str]:
    """Options of ONNX Runtime's TensorRT provider for one graph, for where it builds the engine itself.

    With engines in the bundle their ranges are used, so that what it builds takes the same batches and lengths.
    """
    options = {"trt_max_workspace_size": str(WORKSPACE_BYTES), "trt_timing_cache_enable": "1"}
    report = read_build(bundle)
    plan = report.plans.get(graph) if report else None
    if report is not None and plan is not None and report.batches[0] == 1:
        for i, key in enumerate(("min", "opt", "max")):
            shapes = (f"{name}:{'x'.join(map(str, shape[i]))}" for name, shape in plan.profile.items())
            options[f"trt_profile_{key}_shapes"] = ",".join(shapes)
    return options


def tensorrt_version() -> str | None:
    """Version of the installed TensorRT package; None if there is none."""
    for name in ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def gpu_name() -> str | None:
    """Name and compute capability of the first NVIDIA GPU, as its driver gives them; None without one."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return _describe(ctypes.CDLL(library))
        except OSError:
            continue
    return None


def _describe(cuda: ctypes.CDLL) -> str | None:
    name, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    codes = [int(cuda.cuInit(0)), int(cuda.cuDeviceGetName(name, len(name), 0))]
    for number, attribute in ((major, _CAPABILITY_MAJOR), (minor, _CAPABILITY_MINOR)):
        codes.append(int(cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)))
    if any(codes):
        return None
    return f"{name.value.decode(errors='replace')} (compute capability {major.value}.{minor.value})"
