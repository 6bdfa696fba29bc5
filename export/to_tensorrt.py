"""ONNX graphs of a bundle to TensorRT engines (plans), with optimisation profiles and a timing cache.

Reduced precision is decided in the ONNX graph: networks are strongly typed, by flag on TensorRT 10 and always on 11.
A plan only runs on the TensorRT version and GPU that built it, which `trt/build.json` records with the graphs' hashes.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dear_serve.bundle import Bundle, sha256_file
from dear_serve.config import StrictConfig
from dear_serve.errors import BundleError, CheckFailedError, ConfigError, MissingDependencyError
from dear_serve.io_spec import ALL_GRAPHS
from dear_serve.manifest import Manifest
from dear_serve.runtime.onnx_engine import graph_sizes

__all__ = [
    "MAX_BATCH",
    "BuildReport",
    "PlanInfo",
    "Profile",
    "build_engines",
    "creation_flags",
    "parse_batches",
    "profiles",
    "require_tensorrt",
]

MAX_BATCH = 1024
MAX_CLASSES = 1000
BUILD_FILE = "build.json"
CACHE_FILE = "timing.cache"
WORKSPACE_BYTES = 4 << 30
_PIP_LINE = 'pip install "dear-serve[gpu]"'

Shape = tuple[int, ...]
Profile = dict[str, tuple[Shape, Shape, Shape]]
"""Smallest, usual and largest shape of each input."""


@dataclass(frozen=True, kw_only=True)
class PlanInfo(StrictConfig):
    """One engine: what it was built from and what it is."""

    file: str
    sha256: str
    graph_sha256: str
    weights_sha256: str


@dataclass(frozen=True, kw_only=True)
class BuildReport(StrictConfig):
    """`trt/build.json`: the identity of the engines. On another TensorRT, GPU or graph they must be built again."""

    tensorrt: str
    gpu: str
    batches: tuple[int, ...]
    plans: dict[str, PlanInfo]


def parse_batches(text: str) -> tuple[int, int, int]:
    """ "1,8,64" as smallest, usual and largest batch; a single number is all three.

    Raises:
        ConfigError: not one or three numbers, not rising, or outside 1 to `MAX_BATCH`.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--batch is {text!r}; write numbers, such as 1,8,64", field="batch") from error
    if len(numbers) == 1:
        numbers *= 3
    if len(numbers) != 3:
        raise ConfigError(
            f"--batch has {len(numbers)} numbers; give one, or smallest,usual,largest such as 1,8,64",
            field="batch",
        )
    low, usual, high = numbers
    if not 1 <= low <= usual <= high <= MAX_BATCH:
        raise ConfigError(f"--batch is {text!r}; numbers must rise, from 1 to {MAX_BATCH}", field="batch")
    return low, usual, high


def profiles(manifest: Manifest, batches: tuple[int, int, int]) -> dict[str, Profile]:
    """The optimisation profile of every graph.

    Text lengths go from 3 (start, one token, end) to the context; class counts to `MAX_CLASSES`.
    """
    context, classes = manifest.context_length, len(manifest.class_names)
    ranges: dict[str, tuple[int, int, int]] = {
        "B": batches,
        "L": (3, max(3, min(16, context)), max(3, context)),
        "C": (1, min(classes, MAX_CLASSES), MAX_CLASSES),
    }
    sizes = graph_sizes(manifest)
    result: dict[str, Profile] = {}
    for name, spec in ALL_GRAPHS.items():
        result[name] = {}
        for tensor in spec.inputs:
            low, usual, high = (
                tuple(
                    int(n) for n in tensor.shape({**sizes, **{letter: r[i] for letter, r in ranges.items()}})
                )
                for i in range(3)
            )
            result[name][tensor.name] = (low, usual, high)
    return result


def require_tensorrt() -> tuple[Any, str]:
    """The tensorrt module and the GPU's name.

    Raises:
        MissingDependencyError: naming exactly what is missing and what to install.
    """
    gpu = _gpu_name()
    missing = []
    if importlib.util.find_spec("tensorrt") is None:
        missing.append("the Python package tensorrt is not installed")
    if gpu is None:
        missing.append("no NVIDIA GPU can be used here (torch.cuda finds none)")
    if missing or gpu is None:
        raise MissingDependencyError(
            f"TensorRT engines need a GPU and TensorRT: {' and '.join(missing)}. On a machine with an NVIDIA GPU and "
            f"its driver: {_PIP_LINE}",
            field="trt",
        )
    trt = importlib.import_module("tensorrt")
    if _major(trt) < 10:
        raise MissingDependencyError(
            f"TensorRT is {trt.__version__}; 10 or newer is needed: {_PIP_LINE}", field="trt"
        )
    return trt, gpu


def _gpu_name() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    return f"{torch.cuda.get_device_name(0)} (compute capability {major}.{minor})"


def _major(trt: Any) -> int:
    return int(str(trt.__version__).split(".", maxsplit=1)[0])


def creation_flags(trt: Any) -> int:
    """Flags of a strongly typed network: asked for on TensorRT 10; from 11 on there is no other kind."""
    if _major(trt) >= 11:
        return 0
    return 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)


def build_engines(bundle: Bundle, batches: tuple[int, int, int]) -> Bundle:
    """Build an engine for each exported graph into the bundle's `trt/`; on failure the old ones stay.

    Args:
        bundle: with graphs.
        batches: smallest, usual and largest batch.

    Returns:
        The bundle as it is now.

    Raises:
        MissingDependencyError: TensorRT or a GPU is missing.
        BundleError: the bundle has no graphs, or cannot be written.
        CheckFailedError: TensorRT refuses a graph.
    """
    trt, gpu = require_tensorrt()
    graphs = {name: bundle.file(f"onnx/{spec.file}") for name, spec in ALL_GRAPHS.items()}
    weights = bundle.manifest.files["onnx/weights.bin"].sha256
    shapes = profiles(bundle.manifest, batches)

    def write(folder: Path) -> None:
        cache = _old_cache(bundle, str(trt.__version__), gpu)
        plans: dict[str, PlanInfo] = {}
        for name, path in graphs.items():
            plan, cache = _build(trt, path, shapes[name], cache)
            file = folder / f"{name}.plan"
            file.write_bytes(plan)
            plans[name] = PlanInfo(
                file=file.name,
                sha256=sha256_file(file),
                graph_sha256=sha256_file(path),
                weights_sha256=weights,
            )
        (folder / CACHE_FILE).write_bytes(cache)
        report = BuildReport(tensorrt=str(trt.__version__), gpu=gpu, batches=batches, plans=plans)
        (folder / BUILD_FILE).write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")

    try:
        return bundle.replace_folder("trt", write)
    except OSError as error:
        raise BundleError(
            f"engines cannot be written ({error.strerror or error}); the bundle is as it was"
        ) from error


def _old_cache(bundle: Bundle, version: str, gpu: str) -> bytes:
    """The timing cache of the last build, if this TensorRT and GPU made it; nothing otherwise."""
    report, cache = bundle.paths.trt / BUILD_FILE, bundle.paths.trt / CACHE_FILE
    if not (report.is_file() and cache.is_file()):
        return b""
    data: Mapping[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return cache.read_bytes() if (data.get("tensorrt"), data.get("gpu")) == (version, gpu) else b""


def _build(trt: Any, path: Path, profile: Profile, cache: bytes) -> tuple[bytes, bytes]:
    """One graph as a serialized engine, and the timing cache grown by it."""
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network = builder.create_network(creation_flags(trt))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        errors = "; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))
        raise CheckFailedError(f"TensorRT {trt.__version__} cannot read {path.name}: {errors}")
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE_BYTES)
    timings = config.create_timing_cache(cache)
    config.set_timing_cache(timings, False)
    shapes = builder.create_optimization_profile()
    for name, (low, usual, high) in profile.items():
        shapes.set_shape(name, low, usual, high)
    config.add_optimization_profile(shapes)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise CheckFailedError(f"TensorRT {trt.__version__} cannot build {path.name}; its log above says why")
    return bytes(plan), bytes(config.get_timing_cache().serialize())
