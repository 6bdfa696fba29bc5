"""Runs a bundle: one interface (`Engine`), three engines, and the `Predictor` that services and tools call.

Nothing here imports torch or ONNX Runtime before an engine that needs it is opened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, get_args

from dear_serve.bundle import Bundle
from dear_serve.errors import ConfigError
from dear_serve.runtime.base import Engine, EngineInfo, FusedLogits, ImageFeatures

__all__ = ["Engine", "EngineInfo", "EngineName", "FusedLogits", "ImageFeatures", "open_bundle", "open_engine"]

EngineName = Literal["onnx", "torch", "fake"]


def open_bundle(
    path: str | os.PathLike[str],
    engine: EngineName = "onnx",
    *,
    threads: int | None = None,
    providers: Sequence[str] | None = None,
    verify: bool = True,
) -> Engine:
    """Open the bundle in folder `path` and the engine that runs it.

    Args:
        path: the bundle's folder.
        engine: "onnx" (ONNX Runtime on the exported graphs), "torch" (the model itself, the reference) or
            "fake" (deterministic, without weights, for tests of whatever stands on an engine).
        threads: CPU threads within one operation; default: every CPU this process may use.
        providers: "onnx": execution providers by preference, such as ["CUDAExecutionProvider"] or ["cuda"];
            "torch": one device, such as ["cuda:0"]. Default: the best one that is installed.
        verify: compare the sha256 of every file with the manifest.

    Raises:
        BundleError: the bundle is absent, broken, or not exported (engine "onnx").
        MissingDependencyError: a package or an explicitly asked provider is not there.
    """
    return open_engine(Bundle.open(path, verify=verify), engine, threads=threads, providers=providers)


def open_engine(
    bundle: Bundle,
    engine: EngineName = "onnx",
    *,
    threads: int | None = None,
    providers: Sequence[str] | None = None,
) -> Engine:
    """The engine that runs an opened bundle; arguments as in `open_bundle`."""
    if engine not in get_args(EngineName):
        raise ConfigError(
            f"engine is {engine!r}; use one of {', '.join(get_args(EngineName))}",
            code="unknown_engine",
            field="engine",
        )
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}; 1 or more", field="threads")
    if engine == "onnx":
        from dear_serve.runtime.onnx_engine import OnnxEngine

        return OnnxEngine(bundle, threads=threads, providers=providers)
    if engine == "torch":
        from dear_serve.runtime.torch_engine import TorchEngine

        return TorchEngine(bundle, threads=threads, providers=providers)
    from dear_serve.runtime.fake_engine import FakeEngine

    return FakeEngine(bundle)
