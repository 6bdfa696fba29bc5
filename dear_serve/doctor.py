"""What this machine can run, and what is missing: the findings of `dear-serve doctor`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass

from dear_serve.backbone import ASSETS

__all__ = ["Finding", "examine"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One part of the installation."""

    part: str
    ok: bool
    detail: str
    remedy: str = ""
    needed: bool = False
    """Without it nothing can be served."""


_PACKAGES = (  # distribution, module, what for, extra
    ("torch", "torch", "training and export", "train"),
    ("open_clip_torch", "open_clip", "bases by open_clip name", "train"),
    ("onnx", "onnx", "export", "train"),
    ("hdbscan", "hdbscan", "head roles", "train"),
    ("sentence-transformers", "sentence_transformers", "naming head roles", "roles"),
    ("fonticon-materialdesignicons7", "fonticon_mdi7", "the demo's pictures", "world"),
)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runtime() -> list[Finding]:
    """ONNX Runtime and its execution providers."""
    if importlib.util.find_spec("onnxruntime") is None:
        remedy = 'pip install "dear-serve[cpu]", or "dear-serve[gpu]" on a machine with an NVIDIA GPU'
        return [
            Finding(part="onnxruntime", ok=False, detail="the serving engine", remedy=remedy, needed=True)
        ]
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    version = f"{onnxruntime.__version__}: {', '.join(providers)}"
    found = [Finding(part="onnxruntime", ok=True, detail=version, needed=True)]
    for name, extra in (("CUDAExecutionProvider", "gpu"), ("TensorrtExecutionProvider", "gpu")):
        there = name in providers
        remedy = "" if there else f'pip install "dear-serve[{extra}]" on a machine with an NVIDIA GPU'
        found.append(Finding(part=name, ok=there, detail="serving on a GPU", remedy=remedy))
    return found


def _gpu() -> Finding:
    """The GPU, as its driver names it."""
    tool = shutil.which("nvidia-smi")
    if tool:
        query = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
        if result.returncode == 0 and result.stdout.strip():
            return Finding(part="GPU", ok=True, detail="; ".join(result.stdout.strip().splitlines()))
    return Finding(part="GPU", ok=False, detail="no NVIDIA driver answers", remedy="not needed on a CPU")


def _serving(cpus: int) -> Finding:
    """What a server would do here without any options."""
    detail = f"{cpus} engine threads (--threads), pictures of several requests in one run (--batch)"
    if os.environ.get("OMP_NUM_THREADS"):
        detail += f"; OMP_NUM_THREADS is {os.environ['OMP_NUM_THREADS']} and does not count for ONNX Runtime"
    return Finding(part="server", ok=True, detail=detail)


def _docker() -> Finding:
    """For images only."""
    found = shutil.which("docker") or shutil.which("podman")
    return Finding(
        part="docker",
        ok=found is not None,
        detail="for bentoml containerize (dear-serve bento)",
        remedy="" if found else "not needed to serve without an image",
    )


def examine() -> list[Finding]:
    """Look at this machine; nothing is changed and no model is loaded."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    findings = [
        Finding(part="python", ok=True, detail=f"{platform.python_version()} at {sys.prefix}", needed=True),
        Finding(part="CPU", ok=True, detail=f"{cpus} for this process, {platform.machine()}", needed=True),
        *_runtime(),
        _gpu(),
    ]
    for name in ("bentoml", "lancedb", "pillow", "safetensors"):
        version = _version(name)
        remedy = "" if version else "pip install dear-serve"
        findings.append(
            Finding(part=name, ok=bool(version), detail=version or "", remedy=remedy, needed=True)
        )
    for name, module, purpose, extra in _PACKAGES:
        version = _version(name)
        there = version is not None and importlib.util.find_spec(module) is not None
        remedy = "" if there else f'pip install "dear-serve[{extra}]"'
        detail = f"{version}, for {purpose}" if there else f"for {purpose}"
        findings.append(Finding(part=name, ok=there, detail=detail, remedy=remedy))
    version = _version("tensorrt")
    detail = f"{version}, for dear-export --trt" if version else "for dear-export --trt"
    remedy = "" if version else 'pip install "dear-serve[gpu]"'
    findings.append(Finding(part="tensorrt", ok=bool(version), detail=detail, remedy=remedy))
    findings += [_serving(cpus or 1), _docker()]
    mini = (ASSETS / "dear-mini" / "open_clip_model.safetensors").is_file()
    findings.append(Finding(part="dear-mini", ok=mini, detail="the small base in this package"))
    return findings
