"""From a bundle to the same bundle with graphs: export, check, replace, in that order."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dear_serve import __version__
from dear_serve.bundle import Bundle, sha256_file
from dear_serve.config import StrictConfig
from dear_serve.dear.model import DearModel
from dear_serve.errors import BundleError, ConfigError
from dear_serve.labels import class_features
from dear_serve.runtime.base import Float32, Int64
from dear_serve.runtime.onnx_engine import graph_sizes
from dear_serve.runtime.torch_engine import load_model
from dear_serve.tokenizer import Tokenizer
from export.parity import GraphParity, check_graphs
from export.samples import collect
from export.to_onnx import DEFAULT_OPSET, GraphInfo, WeightsInfo, check_opset, export_graphs

__all__ = ["REPORT_VERSION", "ExportReport", "ExportSettings", "export_bundle"]

REPORT_VERSION = 1
_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True, kw_only=True)
class ExportSettings(StrictConfig):
    """Options of an export."""

    precision: str = "fp32"
    opset: int = DEFAULT_OPSET

    def __post_init__(self) -> None:
        if self.precision in ("fp16", "int8"):
            raise ConfigError(
                f"precision {self.precision} is not available in version {__version__}; use fp32",
                field="precision",
            )
        if self.precision != "fp32":
            raise ConfigError(f"precision is {self.precision!r}; use fp32", field="precision")
        check_opset(self.opset)


@dataclass(frozen=True, kw_only=True)
class ExportReport(StrictConfig):
    """`onnx/export.json`."""

    format_version: int
    precision: str
    opset: int
    mask: Literal["paper", "one-way"]
    base_sha256: str
    roles_sha256: str
    bundle_sha256: str
    """`Manifest.identity` of the bundle the graphs were made from."""
    versions: dict[str, str]
    weights: WeightsInfo
    graphs: dict[str, GraphInfo]
    pictures: str
    """Where the pictures of the check came from."""
    parity: dict[str, GraphParity]


def export_bundle(
    path: Path, settings: ExportSettings, *, images: Path | None = None
) -> tuple[Bundle, ExportReport]:
    """Add graphs to the bundle at `path`, or replace them. If anything fails, the bundle stays as it was.

    Args:
        path: of the bundle.
        settings: of the export.
        images: folder of pictures for the check; see `samples.collect`.

    Returns:
        The bundle as it is now, and what `onnx/export.json` says.

    Raises:
        BundleError: no bundle, a broken one, or a folder that cannot be written.
        BaseModelError: the base cannot be loaded here.
        CheckFailedError: the graphs are not torch's equals.
    """
    bundle = Bundle.open(path)
    samples = collect(bundle, images)
    model = load_model(bundle)
    features = _trained_classes(bundle, model)
    reports: list[ExportReport] = []

    def write(folder: Path) -> None:
        metadata = _metadata(bundle, settings)
        graphs, weights = export_graphs(model, features, folder, opset=settings.opset, metadata=metadata)
        parity = check_graphs(folder, model, features, samples, sizes=graph_sizes(bundle.manifest))
        report = ExportReport(
            format_version=REPORT_VERSION,
            precision=settings.precision,
            opset=settings.opset,
            mask=bundle.manifest.dear.mask,
            base_sha256=bundle.manifest.base.sha256,
            roles_sha256=sha256_file(bundle.paths.roles),
            bundle_sha256=bundle.sha256,
            versions={name: str(importlib.import_module(name).__version__) for name in _PACKAGES},
            weights=weights,
            graphs=graphs,
            pictures=samples.source,
            parity=parity,
        )
        text = json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n"
        (folder / "export.json").write_text(text, encoding="utf-8")
        reports.append(report)

    try:
        return bundle.replace_folder("onnx", write), reports[-1]
    except OSError as error:
        raise BundleError(
            f"the graphs cannot be written beside {path} ({error.strerror or error}); the bundle is as it was"
        ) from error


def _trained_classes(bundle: Bundle, model: DearModel) -> Tensor:
    """Adapted text features of the trained classes, (C, D)."""

    def encode(tokens: Int64) -> Float32:
        with torch.inference_mode():
            return np.asarray(model.text_features(torch.from_numpy(tokens)).numpy(), dtype=np.float32)

    manifest = bundle.manifest
    tokenizer = Tokenizer.from_file(bundle.file("tokenizer.json"))
    features = class_features(manifest.class_names, manifest.templates, encode, tokenizer, batch_size=64)
    return torch.from_numpy(features)


def _metadata(bundle: Bundle, settings: ExportSettings) -> Mapping[str, str]:
    """What every graph says of itself: no times, no places, so that the same model gives the same bytes."""
    manifest = bundle.manifest
    classes = "\n".join((*manifest.class_names, *manifest.templates))
    return {
        "dear.format_version": str(REPORT_VERSION),
        "dear.base_sha256": manifest.base.sha256,
        "dear.roles_sha256": sha256_file(bundle.paths.roles),
        "dear.bundle_sha256": bundle.sha256,
        "dear.classes_sha256": hashlib.sha256(classes.encode()).hexdigest(),
        "dear.mask": manifest.dear.mask,
        "dear.first_block": str(manifest.dear.first_block),
        "dear.precision": settings.precision,
    }
