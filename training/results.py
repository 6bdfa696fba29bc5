"""What the seeds of a run gave, and the bundle, the logs and the report that are made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dear_serve.bundle import BaseRef, BundlePaths, BundleWriter, Calibration, Manifest, save_arrays
from dear_serve.labels import class_features
from dear_serve.runtime.base import Float32
from training.config import TrainConfig
from training.loop import COLUMNS
from training.prepare import Prepared, build_model
from training.readouts import build_readouts
from training.report import Report, render
from training.scoring import ModelTowers, Scores
from training.tables import spread

__all__ = ["Outcome", "SeedResult", "write_bundle"]


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """What one seed gave."""

    seed: int
    adapter: dict[str, Tensor]
    alpha: tuple[float, ...]
    history: list[list[float]]
    per_epoch: int
    scores: list[Scores]
    class_names: tuple[str, ...]
    targets: tuple[str, ...]
    notes: tuple[str, ...]
    calibration: Calibration | None = None
    """Of the seed whose adapter the bundle holds, where there were pictures for it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All seeds of a run; the first one's adapter is the bundle's."""

    name: str
    """Of the data set."""
    config: TrainConfig
    prepared: Prepared
    seeds: Sequence[SeedResult]
    runs: Sequence[dict[str, float]]
    """Per seed the numbers of `evaluate.summary`."""


def write_bundle(outcome: Outcome, out: Path) -> None:
    """Write the folder `out`, whole or not at all. Raises BundleError or OSError where it cannot be written."""
    prepared, first = outcome.prepared, outcome.seeds[0]
    model = build_model(prepared, first.seed)
    towers = ModelTowers(model)

    def encode(texts: Sequence[str]) -> Float32:
        return class_features(texts, ("{}",), towers.zero_shot_text, prepared.tokenizer)

    readouts, bases = build_readouts(
        prepared.dear.attributes, prepared.readout_kinds, encode, own=prepared.roles.phrases
    )
    base = prepared.base
    manifest = Manifest(
        base=BaseRef(name=base.name, sha256=base.sha256, clip=base.config),
        dear=prepared.dear,
        alpha=first.alpha,
        logit_scale=base.clip.tau,
        class_names=first.class_names,
        templates=prepared.templates,
        preprocess=base.config.preprocess,
        context_length=base.config.text.context_length,
        readouts=readouts,
        calibration=first.calibration,
        metrics=_metrics(outcome.runs),
    )
    with BundleWriter(out) as writer:
        save_arrays(writer.paths.adapter, {n: t.numpy() for n, t in first.adapter.items()})
        if bases:
            save_arrays(writer.paths.readouts, bases)
        prepared.roles.save(writer.paths.roles)
        prepared.tokenizer.to_file(writer.paths.tokenizer)
        _write_logs(outcome, writer.paths, manifest)
        writer.commit(manifest)


def _metrics(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The bundle's own numbers and, of several seeds, mean and standard deviation."""
    metrics = dict(runs[0])
    if len(runs) > 1:
        mean, sd = spread(runs)
        metrics |= {f"{key}_mean": value for key, value in mean.items()}
        metrics |= {f"{key}_sd": value for key, value in sd.items()}
    return metrics


def _write_logs(outcome: Outcome, paths: BundlePaths, manifest: Manifest) -> None:
    """metrics.jsonl (a line an epoch, a line of accuracies a seed) and report.html; no times in them."""
    lines: list[dict[str, Any]] = []
    for result, numbers in zip(outcome.seeds, outcome.runs, strict=True):
        rows = np.array(result.history).reshape(-1, result.per_epoch, len(COLUMNS)).mean(axis=1)
        for epoch, row in enumerate(rows.tolist(), 1):
            lines.append({"seed": result.seed, "epoch": epoch, **dict(zip(COLUMNS, row, strict=True))})
        lines.append({"seed": result.seed, **numbers})
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    first = outcome.seeds[0]
    report = Report(
        title=f"{outcome.name}: {outcome.config.protocol} on {manifest.base.name}",
        settings={k: _shown(v) for k, v in outcome.config.to_dict().items()}
        | {"templates": "; ".join(manifest.templates)},
        attributes=manifest.dear.attributes,
        alpha=first.alpha,
        roles=outcome.prepared.roles,
        scores=first.scores,
        history=first.history,
        runs=outcome.runs,
        seeds=outcome.config.seeds,
        notes=first.notes,
        calibration=first.calibration,
    )
    paths.report.write_text(render(report), encoding="utf-8")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
