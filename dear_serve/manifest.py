"""The paths of a bundle and its manifest, `dear.json`, as data: what is in it, what makes it valid. No torch."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from dear_serve import __version__
from dear_serve.config import ClipConfig, DearConfig, PreprocessConfig, StrictConfig
from dear_serve.errors import ConfigError

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "BaseRef",
    "BundlePaths",
    "Calibration",
    "FileEntry",
    "LabelSet",
    "Manifest",
    "Readout",
]

FORMAT_VERSION = 1
MANIFEST_NAME = "dear.json"

# What the vectors of a gallery depend on; graphs and reports may change and the gallery stays valid.
_IDENTITY_FILES = ("adapter.safetensors", "readouts.safetensors", "roles.json", "tokenizer.json")


@dataclass(frozen=True)
class BundlePaths:
    """Every path of a bundle's folder (architecture.md, "The bundle")."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / MANIFEST_NAME

    @property
    def adapter(self) -> Path:
        """What was learned: tokens, attribute projection, text tokens, fusion weights."""
        return self.root / "adapter.safetensors"

    @property
    def readouts(self) -> Path:
        """Basis matrices (r, D) float32 of the span readouts, under their attribute's name."""
        return self.root / "readouts.safetensors"

    @property
    def roles(self) -> Path:
        return self.root / "roles.json"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def onnx(self) -> Path:
        return self.root / "onnx"

    @property
    def export_report(self) -> Path:
        return self.root / "onnx" / "export.json"

    @property
    def trt(self) -> Path:
        return self.root / "trt"


@dataclass(frozen=True, kw_only=True)
class FileEntry(StrictConfig):
    """Expected content of one file: sha256 in hexadecimal, size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True, kw_only=True)
class BaseRef(StrictConfig):
    """The frozen CLIP the adapter was trained on: its name, the sha256 of its weights, its shape."""

    name: str
    sha256: str
    clip: ClipConfig


@dataclass(frozen=True, kw_only=True)
class Readout(StrictConfig):
    """How an attribute of a picture becomes a search vector (method.md §8).

    "token" is readout 1, the token feature f_k (D). "span" is readout 3, the class feature projected onto the
    span of `phrases`: normalised Q f_cls (r), with Q (r, D) from `readouts.safetensors`, made of zero-shot
    text features, the spans of the attributes in `without` removed first (ours).
    """

    attribute: str
    kind: Literal["token", "span"]
    phrases: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind == "span" and len(self.phrases) < 2:
            raise ConfigError(
                f"readout of {self.attribute!r} has {len(self.phrases)} phrases; a span needs 2 or more",
                field="phrases",
            )


@dataclass(frozen=True, kw_only=True)
class Calibration(StrictConfig):
    """How sure the adapted model may be, fitted on validation pictures (`training.calibrate`, ours).

    Probabilities are softmax(logits / temperature); logits and their contributions stay as they are. A picture whose
    best fused cosine (logit / tau) is below `threshold` is none of the labels asked for.
    """

    temperature: float = 1.0
    threshold: float | None = None
    """-1 to 1; None: not fitted."""
    threshold_accuracy: float | None = None
    """Balanced accuracy of the threshold on the pictures it was not fitted on, 0 to 1."""
    ece_before: float
    """Expected calibration error at temperature 1, 0 to 1."""
    ece_after: float
    """Of each tenth of the pictures at a temperature fitted on the others."""
    pictures: int
    source: str
    """Where the pictures are from: "val", or "train" for those that no step of training saw."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(
                f"temperature is {self.temperature}; a number above 0 is needed",
                field="calibration.temperature",
            )
        if self.threshold is not None and not -1.0 <= self.threshold <= 1.0:
            raise ConfigError(
                f"threshold is {self.threshold}; a cosine, -1 to 1", field="calibration.threshold"
            )


@dataclass(frozen=True, kw_only=True)
class LabelSet(StrictConfig):
    """Labels kept under a name, and their templates; none: the bundle's."""

    labels: tuple[str, ...]
    templates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) != len(self.labels):
            raise ConfigError("labels of a set must be distinct and at least one", field="label_sets")


@dataclass(frozen=True, kw_only=True)
class Manifest(StrictConfig):
    """`dear.json`. `files` maps relative POSIX paths to their expected content, the manifest apart."""

    format_version: int = FORMAT_VERSION
    library_version: str = __version__
    base: BaseRef
    dear: DearConfig
    """With `first_block` J and `text_first_block` J_t resolved, 1 or more."""
    alpha: tuple[float, ...]
    """Fusion weights (K+1), class feature first; they sum to 1 (method.md §4)."""
    logit_scale: float
    """tau, not its logarithm."""
    class_names: tuple[str, ...]
    """The trained classes, in the order of the classifier graph's logits."""
    templates: tuple[str, ...]
    preprocess: PreprocessConfig
    context_length: int
    readouts: tuple[Readout, ...] = ()
    calibration: Calibration | None = None
    label_sets: dict[str, LabelSet] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, FileEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = ("class", *self.dear.attributes)
        if len(self.alpha) != len(known) or abs(math.fsum(self.alpha) - 1.0) > 1e-3:
            raise ConfigError(
                f"alpha is {self.alpha}; {len(known)} weights ({', '.join(known)}) that sum to 1 are needed",
                field="alpha",
            )
        if not (math.isfinite(self.logit_scale) and self.logit_scale > 0):
            raise ConfigError(
                f"logit_scale is {self.logit_scale}; a number above 0 is needed", field="logit_scale"
            )
        if not self.class_names or len(set(self.class_names)) != len(self.class_names):
            raise ConfigError("class_names must be distinct and at least one", field="class_names")
        for readout in self.readouts:
            if readout.attribute not in self.dear.attributes:
                raise ConfigError(
                    f"readout of {readout.attribute!r}; attributes are {', '.join(self.dear.attributes)}",
                    field="readouts",
                )
        _check_blocks(self.dear, self.base.clip)
        size = self.base.clip.vision.image_size
        if self.preprocess.size != size:
            raise ConfigError(
                f"preprocess.size is {self.preprocess.size}; the base takes {size}",
                field="preprocess.size",
            )
        for name in self.files:
            _check_relative(name)

    def identity(self) -> str:
        """sha256 (hexadecimal) over what the vectors of a gallery depend on.

        That is base, adapter, roles, readouts, preprocessing and tokenizer. Graphs, reports and
        metrics are left out: adding graphs does not make a gallery stale.
        """
        kept = {name: self.files[name].sha256 for name in _IDENTITY_FILES if name in self.files}
        data = self.to_dict()
        parts = {key: data[key] for key in ("dear", "preprocess", "context_length", "readouts")}
        parts |= {"files": kept, "base_sha256": self.base.sha256, "clip": data["base"]["clip"]}
        return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def _check_blocks(dear: DearConfig, clip: ClipConfig) -> None:
    for name, block, layers in (
        ("first_block", dear.first_block, clip.vision.layers),
        ("text_first_block", dear.text_first_block, clip.text.layers),
    ):
        if not 1 <= block <= layers:
            raise ConfigError(
                f"dear.{name} is {block}; the base's tower has blocks 1 to {layers}", field=f"dear.{name}"
            )


def _check_relative(name: str) -> None:
    """Refuse a name that could lead out of the bundle's folder, on any system."""
    parts = PurePosixPath(name).parts
    unsafe = not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in name or "\0" in name
    if unsafe or "/".join(parts) != name or name == MANIFEST_NAME:
        raise ConfigError(
            f"files names {name!r}; only paths inside the bundle's folder are allowed", field="files"
        )
