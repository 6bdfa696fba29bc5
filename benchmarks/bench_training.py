"""Training steps with cached frozen blocks against a plain loop. Claims: 3 times the steps on ViT-B-16, 2 on dear-mini.

    python benchmarks/bench_training.py [--threads 2] [--quick]

Three loops take the same steps in turn, from the same seed, on 64 pictures of 10 classes:

    plain      nothing kept: each step decodes its pictures, runs every block of the image tower, and every block of
               the text tower on prompts of the full context length
    no cache   `training.run --no-cache`: prompts cut at end-of-text, their frozen blocks once
    cached     as training.run does: the image tower's frozen blocks from disk too

Then 100 classes of 16 pictures on ViT-B-16: a few cached steps with the prompts of all classes, the time of an epoch
from them, and the highest resident memory of that process. Weights of ViT-B-16 are random and every head is open, the
most that a step can cost.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dear_serve.backbone.text import end_of_text
from dear_serve.dear.model import DearModel
from dear_serve.labels import fill
from training.cache import CachedTrunks, PlainTrunks
from training.config import Augmentation, TrainConfig
from training.loop import Fit, TextSide
from training.prepare import Prepared, build_model, prepare

PICTURES, CLASSES, VIEWS = 64, 10, 1


class PlainText(TextSide):
    """Prompts of the full context length, through every block in every step."""

    def __init__(self, model: DearModel, prepared: Prepared, names: list[str]) -> None:
        super().__init__(model, prepared.tokenizer, names, prepared.templates)
        texts = [fill(template, name) for name in names for template in prepared.templates]
        self.tokens = torch.from_numpy(prepared.tokenizer(texts))
        self.position = end_of_text(self.tokens)

    def features(self, model: DearModel) -> Tensor:
        """(C, D), L2-normalised."""
        with torch.no_grad():
            self.trunk = model.text_trunk(self.tokens)
        return super().features(model)


@dataclass(frozen=True)
class Task:
    """Noise pictures in a folder and what they are trained on."""

    prepared: Prepared
    config: TrainConfig
    paths: list[Path]
    labels: list[int]
    names: list[str]
    folder: Path

    def trunks(self, model: DearModel, *, cached: bool) -> PlainTrunks:
        """Of the task's pictures."""
        if not cached:
            return PlainTrunks(model, self.paths, self.config.augmentation)
        sha256 = self.prepared.base.sha256
        return CachedTrunks(
            model, self.paths, self.config.augmentation, base_sha256=sha256, folder=self.folder / "cache"
        )

    def fit(self, kind: str) -> Fit:
        """A loop before its first step: "plain", "no cache" or "cached"."""
        model = build_model(self.prepared, 1)
        trunks = self.trunks(model, cached=kind == "cached")
        if isinstance(trunks, CachedTrunks):
            trunks.fill(limit=10**11)
        if kind == "plain":
            text: TextSide = PlainText(model, self.prepared, self.names)
        else:
            text = TextSide(model, self.prepared.tokenizer, self.names, self.prepared.templates)
        return Fit(model, trunks=trunks, labels=self.labels, text=text, config=self.config, seed=1)


def make_task(base: str, folder: Path, *, pictures: int, classes: int, batch: int) -> Task:
    """JPEG files of smooth noise, of a photograph's size for ViT-B-16 and an icon's for dear-mini."""
    size = (72, 72) if base == "dear-mini" else (640, 480)
    roles = "" if base == "dear-mini" else "mixed"
    config = TrainConfig(
        base=base, roles=roles, batch_size=batch, epochs=100, augmentation=Augmentation(views=VIEWS)
    )
    prepared = prepare(config)
    rng, paths = np.random.default_rng(0), []
    for number in range(pictures):
        small = Image.fromarray(rng.integers(0, 255, (12, 16, 3), dtype=np.uint8))
        paths.append(folder / f"{number}.jpg")
        small.resize(size, Image.Resampling.BICUBIC).save(paths[-1], quality=90)
    names = [f"kind {number} of thing" for number in range(classes)]
    labels = [number % classes for number in range(pictures)]
    return Task(prepared, config, paths, labels, names, folder)


def compare(base: str, folder: Path, *, batch: int, steps: int) -> dict[str, float]:
    """Seconds a step of the three loops, their ratios, and the largest difference of a loss."""
    task = make_task(base, folder, pictures=PICTURES, classes=CLASSES, batch=batch)
    fits = {kind: task.fit(kind) for kind in ("plain", "no cache", "cached")}
    times: dict[str, list[float]] = {kind: [] for kind in fits}
    for step in range(steps):
        for kind, fit in fits.items():
            start = time.perf_counter()
            fit.step(step)
            times[kind].append(time.perf_counter() - start)
    losses = np.array([[row[0] for row in fit.history] for fit in fits.values()])
    middle = {kind: statistics.median(t[1:]) for kind, t in times.items()}
    ratios = [a / b for a, b in zip(times["plain"][1:], times["cached"][1:], strict=True)]
    return {
        **{f"{kind.replace(' ', '_')}_s": round(value, 4) for kind, value in middle.items()},
        "speedup": round(middle["plain"] / middle["cached"], 2),
        "speedup_lowest": round(min(ratios), 2),
        "speedup_highest": round(max(ratios), 2),
        "speedup_over_no_cache": round(middle["no cache"] / middle["cached"], 2),
        "loss_difference": float(np.abs(losses - losses[-1]).max()),
    }


def epoch(base: str, *, steps: int, classes: int, shots: int) -> dict[str, float]:
    """Time of an epoch from a few steps, and this process's highest resident memory."""
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(base, Path(folder), pictures=32, classes=classes, batch=32)
        start = time.perf_counter()
        task.trunks(build_model(task.prepared, 1), cached=True).batch(range(8), [0] * 8)
        fill_s = (time.perf_counter() - start) / 8
        fit, times = task.fit("cached"), []
        for step in range(steps):
            start = time.perf_counter()
            fit.step(step)
            times.append(time.perf_counter() - start)
    seconds = statistics.median(times[1:])
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "step_s": round(seconds, 3),
        "epoch_min": round(seconds * -(-classes * shots // 32) / 60, 2),
        "fill_min_a_view": round(fill_s * classes * shots / 60, 2),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 2),
    }


def in_own_process(arguments: argparse.Namespace) -> dict[str, float]:
    """`epoch` where nothing else has used memory."""
    command = [sys.executable, __file__, "--epoch-only", "--threads", str(arguments.threads)]
    if arguments.quick:
        command.append("--quick")
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers: dict[str, float] = json.loads(output.splitlines()[-1])
    return numbers


def main() -> None:
    """Print two tables, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="dear-mini alone, few steps")
    parser.add_argument("--epoch-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    big = "dear-mini" if args.quick else "ViT-B-16/random"
    if args.epoch_only:
        print(json.dumps(epoch(big, steps=3, classes=100, shots=16)))
        return
    cases = [("dear-mini", 32, 4 if args.quick else 12)]
    if not args.quick:
        cases += [("ViT-B-16/random", 4, 6), ("ViT-B-16/random", 32, 4)]
    print(f"{PICTURES} pictures, {CLASSES} classes, {args.threads} thread(s), seconds a step, medians")
    print(
        f"{'base':<16}{'batch':>6}{'plain':>8}{'no cache':>10}{'cached':>8}{'plain / cached':>23}{'loss differs':>14}"
    )
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for base, batch, steps in cases:
            row = rows[f"{base}, batch {batch}"] = compare(base, Path(folder), batch=batch, steps=steps)
            spread = f"{row['speedup']:.2f} ({row['speedup_lowest']:.2f} to {row['speedup_highest']:.2f})"
            print(
                f"{base:<16}{batch:>6}{row['plain_s']:>8.3f}{row['no_cache_s']:>10.3f}{row['cached_s']:>8.3f}"
                f"{spread:>23}{row['loss_difference']:>14.1e}",
                flush=True,
            )
    numbers = in_own_process(args)
    print(
        f"100 classes of 16 pictures on {big}: {numbers['step_s']:.2f} s a step, "
        f"{numbers['epoch_min']:.1f} min an epoch, "
        f"{numbers['fill_min_a_view']:.1f} min to fill the cache once with a view of each picture, "
        f"{numbers['peak_gb']:.2f} GB at most"
    )
    print(json.dumps({"bench": "training", "threads": args.threads, "loops": rows, "epoch": numbers}))


if __name__ == "__main__":
    main()
