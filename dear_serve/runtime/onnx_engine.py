"""Runs a bundle's exported graphs on ONNX Runtime: on the CPU, or on a provider that was asked for."""

from __future__ import annotations

import importlib
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, DearError, MissingDependencyError
from dear_serve.io_spec import ALL_GRAPHS, DYNAMIC, GRAPHS, TensorSpec
from dear_serve.manifest import Manifest
from dear_serve.runtime.base import (
    Engine,
    EngineInfo,
    Float32,
    FusedLogits,
    ImageFeatures,
    Int64,
    as_pixels,
    as_tokens,
    in_chunks,
)
from dear_serve.runtime.onnx_header import TensorHeader, read_header
from dear_serve.runtime.shared_sessions import frozen_key, shared_session
from dear_serve.runtime.tensorrt import largest_batch, provider_options, session_source

__all__ = ["MAX_BATCH", "OnnxEngine"]

MAX_BATCH = 64

_CPU, _CUDA, _TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
# By preference. TensorRT takes minutes to build its engines, so it runs only when it is asked for.
_DEFAULT_PROVIDERS = (_CUDA, _CPU)
_SHORT_NAMES = {"cpu": _CPU, "cuda": _CUDA, "tensorrt": _TENSORRT}
_PIP_LINES = {_CPU: 'pip install "dear-serve[cpu]"'}
_GPU_PIP_LINE = 'pip install "dear-serve[gpu]"'

_log = logging.getLogger(__name__)


class OnnxEngine(Engine):
    """Engine over the `onnx/` folder of a bundle.

    All graphs are checked against `io_spec` when it is opened; the image graph's session is made then, the
    others' when they are first used. More than `MAX_BATCH` rows are run in pieces.

    Args:
        bundle: an opened bundle.
        threads: CPU threads within one operation; default: every CPU this process may use.
        providers: execution providers by preference, by full or short name ("cpu", "cuda", "tensorrt"); if
            none of them is what runs, that is an error, and if a later one is, the log says so. Default: CUDA
            where it is installed, else the CPU. TensorRT takes the bundle's engines (`dear-export --trt`),
            or builds its own, which takes minutes; what it cannot take runs on CUDA or the CPU.

    Raises:
        MissingDependencyError: ONNX Runtime or an asked provider is not there.
        BundleError: the bundle has no graphs, or one is not what `io_spec` says.
    """

    def __init__(
        self, bundle: Bundle, *, threads: int | None = None, providers: Sequence[str] | None = None
    ) -> None:
        self._runtime = _import_runtime()
        self._bundle = bundle
        self._manifest = bundle.manifest
        self._threads = threads or _usable_cpus()
        self._asked = _resolve_providers(self._runtime, providers)
        self._named = frozenset(self._asked if providers else ())
        self._sizes = graph_sizes(bundle.manifest)
        self._limit = (
            min(MAX_BATCH, largest_batch(bundle) or MAX_BATCH) if _TENSORRT in self._asked else MAX_BATCH
        )
        self._sessions: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._closed = False
        if not bundle.paths.onnx.is_dir():
            raise BundleError(f"{bundle.paths.root} has no onnx folder; run: dear-export {bundle.paths.root}")
        for name, spec in ALL_GRAPHS.items():
            if name not in GRAPHS and not self.has(name):
                continue
            inputs, outputs = read_header(bundle.file(f"onnx/{spec.file}"))
            _check_tensors(spec.file, "input", spec.inputs, inputs, self._sizes)
            _check_tensors(spec.file, "output", spec.outputs, outputs, self._sizes)
        provider = self._session("image").get_providers()[0]
        precision = _exported_precision(bundle)
        self._info = EngineInfo(engine="onnx", provider=provider, precision=precision, threads=self._threads)
        _log.info("engine onnx, provider %s, precision %s, %d threads", provider, precision, self._threads)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def encode_image(self, pixels: Float32) -> ImageFeatures:
        size, width, count = (self._sizes[letter] for letter in ("S", "D", "K"))
        cls, attributes = in_chunks(
            lambda rows: self._run("image", {"pixels": rows}),
            as_pixels(pixels, size),
            limit=self._limit,
            empty=(_empty(0, width), _empty(0, count, width)),
        )
        return ImageFeatures(cls=cls, attributes=attributes)

    def encode_image_zero_shot(self, pixels: Float32) -> Float32:
        return self._rows("zero_shot_image", "pixels", as_pixels(pixels, self._sizes["S"]), self._sizes["D"])

    def encode_text(self, tokens: Int64) -> Float32:
        rows = as_tokens(tokens, self._manifest.context_length)
        return self._rows("text", "tokens", rows, self._sizes["D"])

    def encode_text_zero_shot(self, tokens: Int64) -> Float32:
        rows = as_tokens(tokens, self._manifest.context_length)
        return self._rows("zero_shot_text", "tokens", rows, self._sizes["D"])

    def fuse(self, features: ImageFeatures, class_features: Float32) -> FusedLogits:
        classes = len(class_features)
        if len(features.cls) == 0 or classes == 0:
            shape = (len(features.cls), classes)
            return FusedLogits(logits=_empty(*shape), contributions=_empty(*shape, self._sizes["K+1"]))
        logits, contributions = self._run(
            "fusion",
            {"cls": features.cls, "attributes": features.attributes, "class_features": class_features},
        )
        return FusedLogits(logits=logits, contributions=contributions)

    def classify(self, pixels: Float32) -> Float32:
        return self._rows("classifier", "pixels", as_pixels(pixels, self._sizes["S"]), self._sizes["T"])

    def has(self, graph: str) -> bool:
        return graph in ALL_GRAPHS and f"onnx/{ALL_GRAPHS[graph].file}" in self._manifest.files

    def joint(self, pixels: Float32) -> tuple[Float32, ImageFeatures]:
        if not self.has("joint"):
            return super().joint(pixels)
        size, width, count = (self._sizes[letter] for letter in ("S", "D", "K"))
        zero_shot, cls, attributes = in_chunks(
            lambda rows: self._run("joint", {"pixels": rows}),
            as_pixels(pixels, size),
            limit=self._limit,
            empty=(_empty(0, width), _empty(0, width), _empty(0, count, width)),
        )
        return zero_shot, ImageFeatures(cls=cls, attributes=attributes)

    def explain(self, pixels: Float32) -> Float32:
        if not self.has("explain"):
            return super().explain(pixels)
        size, count, patches = (self._sizes[letter] for letter in ("S", "K", "N"))
        (maps,) = in_chunks(
            lambda rows: self._run("explain", {"pixels": rows}),
            as_pixels(pixels, size),
            limit=self._limit,
            empty=(_empty(0, count, patches),),
        )
        return maps

    def close(self) -> None:
        """Free the sessions; the engine cannot be used afterwards."""
        with self._lock:
            self._sessions.clear()
            self._closed = True

    def _rows(self, graph: str, name: str, rows: Any, width: int) -> Float32:
        """One input, one output (B, `width`)."""
        (result,) = in_chunks(
            lambda part: self._run(graph, {name: part}), rows, limit=self._limit, empty=(_empty(0, width),)
        )
        return result

    def _run(self, graph: str, inputs: Mapping[str, Any]) -> tuple[Float32, ...]:
        return tuple(self._session(graph).run([o.name for o in ALL_GRAPHS[graph].outputs], dict(inputs)))

    def _session(self, graph: str) -> Any:
        session = self._sessions.get(graph)
        if session is not None:
            return session
        with self._lock:
            if self._closed:
                raise DearError("the engine is closed; open the bundle again", code="closed")
            if graph not in self._sessions:
                same = frozen_key(self._bundle, graph)
                key = None if same is None else (*same, str(self._threads), str(self._asked))
                self._sessions[graph] = shared_session(key, lambda: self._open_session(graph))
            return self._sessions[graph]

    def _open_session(self, graph: str) -> Any:
        runtime, file = self._runtime, ALL_GRAPHS[graph].file
        path, providers = self._source(graph)
        wanted = providers[0] if isinstance(providers[0], str) else providers[0][0]
        if not self._bundle.is_current():
            raise BundleError(
                f"{self._bundle.name} has been replaced since it was opened; open it again",
                code="bundle_replaced",
            )
        options = runtime.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        try:
            session = runtime.InferenceSession(str(path), sess_options=options, providers=providers)
        except Exception as error:  # ONNX Runtime's exceptions have no common ancestor below this
            raise BundleError(
                f"{file} cannot be loaded by ONNX Runtime {runtime.__version__}: {error}; run dear-export again, with "
                "--opset 20 for a version before 1.23"
            ) from error
        session.disable_fallback()
        running = session.get_providers()[0]
        if running != wanted:
            message = f"provider {wanted} cannot run here ({running} does): its libraries are missing"
            if self._named and running not in self._named:
                raise MissingDependencyError(f"{message}; {_pip_line(wanted)}", field="providers")
            _log.warning("%s; %s", message, _pip_line(wanted))
        if _TENSORRT in self._asked:
            _log.info(
                "graph %s runs on %s from %s", graph, running, path.relative_to(self._bundle.paths.root)
            )
        return session

    def _source(self, graph: str) -> tuple[Path, list[str | tuple[str, dict[str, str]]]]:
        """The file to open, and on which providers. Fusion takes any number of classes, so it gets no engine."""
        file = self._bundle.file(f"onnx/{ALL_GRAPHS[graph].file}")
        if _TENSORRT not in self._asked or graph == "fusion":
            return file, [name for name in self._asked if name != _TENSORRT] or [_CPU]
        options = provider_options(self._bundle, graph)
        fallback = [
            n for n in (_CUDA, _CPU) if n not in self._asked and n in self._runtime.get_available_providers()
        ]
        providers = [(name, options) if name == _TENSORRT else name for name in (*self._asked, *fallback)]
        return session_source(self._bundle, graph), providers


def graph_sizes(manifest: Manifest) -> dict[str, int]:
    """Sizes of the axis letters of `io_spec` that a bundle fixes."""
    count = len(manifest.dear.attributes)
    return {
        "S": manifest.preprocess.size,
        "D": manifest.base.clip.embed_dim,
        "K": count,
        "K+1": count + 1,
        "N": manifest.base.clip.vision.patches,
        "T": len(manifest.class_names),
    }


def _import_runtime() -> Any:
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise MissingDependencyError(
            f"engine onnx needs ONNX Runtime: {_PIP_LINES[_CPU]} (or, with an NVIDIA GPU, {_GPU_PIP_LINE})",
            field="engine",
        ) from error


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _pip_line(provider: str) -> str:
    return _PIP_LINES.get(provider, _GPU_PIP_LINE)


def _resolve_providers(runtime: Any, providers: Sequence[str] | None) -> tuple[str, ...]:
    """Full names of the providers to run on; MissingDependencyError if one of `providers` is not built in."""
    available = runtime.get_available_providers()
    if providers is None:
        return tuple(name for name in _DEFAULT_PROVIDERS if name in available)
    names = tuple(_SHORT_NAMES.get(name.lower(), name) for name in providers)
    for name in names:
        if name not in available:
            raise MissingDependencyError(
                f"provider {name!r} is not in this ONNX Runtime ({', '.join(available)}); {_pip_line(name)}",
                field="providers",
            )
    return names or (_CPU,)


def _check_tensors(
    file: str,
    kind: str,
    expected: Sequence[TensorSpec],
    found: Sequence[TensorHeader],
    sizes: Mapping[str, int],
) -> None:
    """Names, dtypes and axes of one graph's inputs or outputs, each with its own error."""
    names, wanted = [t.name for t in found], [t.name for t in expected]
    if names != wanted:
        raise BundleError(f"{file} has {kind}s {names}; {wanted} are expected: run dear-export again")
    for tensor, spec in zip(found, expected, strict=True):
        if tensor.dtype != spec.dtype:
            raise BundleError(
                f"{file} has {kind} {tensor.name} of {tensor.dtype}; {spec.dtype} is expected: "
                "run dear-export again"
            )
        shape = spec.shape(sizes)
        if len(tensor.axes) != len(shape) or not all(map(_axis_fits, tensor.axes, shape)):
            raise BundleError(
                f"{file} has {kind} {tensor.name} of shape {list(tensor.axes)}; {list(shape)} is expected: "
                "run dear-export again"
            )


def _axis_fits(found: int | str, expected: int | str) -> bool:
    """A fixed axis has its size; a dynamic one is dynamic, whatever its name."""
    return isinstance(found, str) if expected in DYNAMIC else found == expected


def _exported_precision(bundle: Bundle) -> str:
    """What export.json says of the graphs' precision; "fp32" where it says nothing."""
    name = "onnx/export.json"
    if name not in bundle.manifest.files:
        return "fp32"
    try:
        data = json.loads(bundle.file(name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{name} is not JSON ({error}); run dear-export again") from error
    return str(data.get("precision", "fp32")) if isinstance(data, dict) else "fp32"


def _empty(*shape: int) -> Float32:
    return np.zeros(shape, dtype=np.float32)
