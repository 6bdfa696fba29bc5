"""ONNX graphs of a bundle to TensorRT engines (plans), with optimisation profiles and a timing cache.

Reduced precision is decided in the ONNX graph: networks are strongly typed, by flag on TensorRT 10 and always on 11.
A plan only runs on the TensorRT version and GPU that built it, which `trt/build.json` records with the graphs' hashes
(`dear_serve.runtime.tensorrt`); `trtexec --loadEngine=image.plan` takes it as it is.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from dear_serve.bundle import Bundle, sha256_file
from dear_serve.errors import BundleError, CheckFailedError, ConfigError, MissingDependencyError
from dear_serve.io_spec import ALL_GRAPHS, GraphSpec, TensorSpec
from dear_serve.manifest import Manifest
from dear_serve.runtime.onnx_engine import graph_sizes
from dear_serve.runtime.tensorrt import (
    BUILD_FILE,
    CACHE_FILE,
    WORKSPACE_BYTES,
    BuildReport,
    PlanInfo,
    gpu_name,
)
from export.check_trt import check_bundle

__all__ = [
    "MAX_BATCH",
    "Profile",
    "build_engines",
    "context_graph",
    "creation_flags",
    "parse_batches",
    "profiles",
    "require_tensorrt",
]

MAX_BATCH = 1024
MAX_CLASSES = 1000
_ONNX_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64}
_CONTEXT_OPSET, _CONTEXT_IR = 20, 10  # of the graph around a plan; any would do
_PIP_LINE = 'pip install "dear-serve[gpu]"'

Shape = tuple[int, ...]
Profile = dict[str, tuple[Shape, Shape, Shape]]
"""Smallest, usual and largest shape of each input."""


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
    gpu = gpu_name()
    missing = []
    if importlib.util.find_spec("tensorrt") is None:
        missing.append("the Python package tensorrt is not installed")
    if gpu is None:
        missing.append("no NVIDIA GPU can be used here (its driver finds none)")
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
        CheckFailedError: TensorRT refuses a graph, or would by its operator list (`export.check_trt`).
    """
    trt, gpu = require_tensorrt()
    check_bundle(bundle)
    graphs = {name: bundle.file(f"onnx/{spec.file}") for name, spec in ALL_GRAPHS.items()}
    weights = bundle.manifest.files["onnx/weights.bin"].sha256
    shapes, sizes = profiles(bundle.manifest, batches), graph_sizes(bundle.manifest)

    def write(folder: Path) -> None:
        cache = _old_cache(bundle, str(trt.__version__), gpu)
        plans: dict[str, PlanInfo] = {}
        for name, path in graphs.items():
            plan, cache = _build(trt, path, shapes[name], cache)
            file = folder / f"{name}.plan"
            file.write_bytes(plan)
            context = folder / f"{name}.onnx"
            onnx.save(context_graph(ALL_GRAPHS[name], shapes[name], sizes, file.name, gpu), context)
            plans[name] = PlanInfo(
                file=file.name,
                sha256=sha256_file(file),
                graph_sha256=sha256_file(path),
                weights_sha256=weights,
                profile=dict(shapes[name]),
                context=context.name,
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


def context_graph(
    spec: GraphSpec, profile: Profile, sizes: Mapping[str, int], plan: str, gpu: str
) -> onnx.ModelProto:
    """The graph through which ONNX Runtime's TensorRT provider loads a plan: one EPContext node that names its file.

    Args:
        spec: of the graph the plan stands for.
        profile: of the plan; an input axis that it fixes is fixed here too.
        sizes: of the fixed axes, by letter.
        plan: file name, in the same folder.
        gpu: which built it, ending in "(compute capability M.m)".
    """
    fixed = {
        letter: low[i]
        for tensor in spec.inputs
        for low, _, high in [profile[tensor.name]]
        for i, letter in tensor.dynamic_axes().items()
        if low[i] == high[i]
    }

    def info(tensor: TensorSpec) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(
            tensor.name, _ONNX_TYPES[tensor.dtype], list(tensor.shape({**sizes, **fixed}))
        )

    node = helper.make_node(
        "EPContext",
        [t.name for t in spec.inputs],
        [t.name for t in spec.outputs],
        domain="com.microsoft",
        main_context=1,
        embed_mode=0,
        ep_cache_context=plan,
        hardware_architecture=gpu.rpartition(" ")[2].strip(")").replace(".", ""),
    )
    graph = helper.make_graph([node], plan, [info(t) for t in spec.inputs], [info(t) for t in spec.outputs])
    opsets = [helper.make_opsetid("", _CONTEXT_OPSET), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_CONTEXT_IR, producer_name="dear-serve")


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
