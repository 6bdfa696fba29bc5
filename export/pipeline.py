"""From a bundle to the same bundle with graphs: export, check, replace, in that order."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dear_serve.bundle import Bundle, sha256_file
from dear_serve.config import StrictConfig
from dear_serve.dear.model import DearModel
from dear_serve.errors import BundleError
from dear_serve.labels import class_features
from dear_serve.manifest import Manifest
from dear_serve.runtime.base import Float32, Int64
from dear_serve.runtime.onnx_engine import graph_sizes
from dear_serve.runtime.torch_engine import load_model
from dear_serve.tokenizer import Tokenizer
from export.int8 import write_int8
from export.parity import GraphParity, check_graphs
from export.precision import precision_of
from export.quantize import QuantizationInfo
from export.samples import calibration_feeds, collect
from export.to_onnx import GraphInfo, WeightsInfo, check_opset, trace_graphs, write_graphs

__all__ = ["REPORT_VERSION", "ExportReport", "ExportSettings", "export_bundle"]

REPORT_VERSION = 1
_PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True, kw_only=True)
class ExportSettings(StrictConfig):
    """Options of an export."""

    precision: str = "fp32"
    """fp32, fp16 (CUDA, TensorRT) or int8 (CPU)."""
    opset: int | None = None
    """None: what suits the precision (`export.precision`)."""

    def __post_init__(self) -> None:
        precision_of(self.precision)
        if self.opset is not None:
            check_opset(self.opset)

    def resolved_opset(self) -> int:
        """The opset that the graphs are written in."""
        return precision_of(self.precision).opset if self.opset is None else self.opset


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
    quantization: dict[str, QuantizationInfo] = field(default_factory=dict)
    """Of int8 graphs, by tower: "image" and "text"."""


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
        traced = trace_graphs(
            model, features, opset=settings.resolved_opset(), half=settings.precision == "fp16"
        )
        quantization: dict[str, QuantizationInfo] = {}
        if settings.precision == "int8":
            feeds = calibration_feeds(bundle, images)
            graphs, weights, quantization = write_int8(traced, folder, metadata, feeds)
        else:
            graphs, weights = write_graphs(traced, folder, metadata)
        parity = check_graphs(
            folder,
            model,
            features,
            samples,
            sizes=graph_sizes(bundle.manifest),
            precision=settings.precision,
        )
        report = ExportReport(
            format_version=REPORT_VERSION,
            precision=settings.precision,
            opset=settings.resolved_opset(),
            mask=bundle.manifest.dear.mask,
            base_sha256=bundle.manifest.base.sha256,
            roles_sha256=sha256_file(bundle.paths.roles),
            bundle_sha256=bundle.sha256,
            versions={name: str(importlib.import_module(name).__version__) for name in _PACKAGES},
            weights=weights,
            graphs=graphs,
            pictures=samples.source,
            parity=parity,
            quantization=quantization,
        )
        text = json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n"
        (folder / "export.json").write_text(text, encoding="utf-8")
        reports.append(report)

    try:
        return bundle.replace_folder("onnx", write, update=lambda old: _told(old, reports[-1])), reports[-1]
    except OSError as error:
        raise BundleError(
            f"the graphs cannot be written beside {path} ({error.strerror or error}); the bundle is as it was"
        ) from error


def _told(manifest: Manifest, report: ExportReport) -> Manifest:
    """The manifest with what its graphs are worth among its metrics."""
    image, classifier = report.parity["image"], report.parity["classifier"]
    bits = {"fp32": 32.0, "fp16": 16.0, "int8": 8.0}[report.precision]
    found = {"graphs_bits": bits, "graphs_cosine": image.min_cosine, "graphs_top1": classifier.top1_agreement}
    metrics = {name: value for name, value in found.items() if value is not None}
    return replace(manifest, metrics={**manifest.metrics, **metrics})


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
