"""One run from pictures to bundle: a model a seed, its training and scores, the bundle of the first seed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from dear_serve import __version__
from dear_serve.bundle import BaseRef, BundlePaths, BundleWriter, Manifest, save_arrays
from dear_serve.dear.model import DearModel
from dear_serve.errors import DearError
from dear_serve.labels import class_features
from dear_serve.runtime.base import Float32
from training.cache import CachedTrunks, PlainTrunks
from training.config import TrainConfig
from training.data import DataSet, PictureCheck, Task, fingerprint, load_data, make_task
from training.evaluate import ModelTowers, Scores, evaluate, spread, summary
from training.loop import COLUMNS, Fit, TextSide
from training.prepare import Prepared, build_model, prepare, resolve_device
from training.readouts import build_readouts
from training.report import Report, render

__all__ = ["Console", "Options", "Result", "run"]

T = TypeVar("T")


class Console(Protocol):
    """Where a run tells how far it is."""

    def say(self, text: str) -> None:
        """A line."""

    def over(self, items: Iterable[T], title: str) -> Iterator[T]:
        """`items`, with progress."""

    def step(self, title: str, done: int, total: int, loss: float) -> None:
        """A training step was done."""


class Silent:
    """Says nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def over(self, items: Iterable[T], title: str) -> Iterator[T]:  # noqa: ARG002 (interface)
        """`items`."""
        yield from items

    def step(self, title: str, done: int, total: int, loss: float) -> None:
        """Nothing."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where and how a run is done; nothing here changes its outcome (but a device's rounding)."""

    out: Path
    resume: bool = False
    cache: Path | None = None
    """Folder of the frozen blocks' output; None: computed in every step."""
    cache_limit: int = 8 * 10**9
    """Bytes."""
    skip_unreadable: bool = False
    device: str = "cpu"

    @property
    def state(self) -> Path:
        """Folder of what a stopped run needs to go on; gone once the bundle is written."""
        return self.out.parent / f".{self.out.name}.state"


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


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run gave: per seed the numbers of `evaluate.summary`, and the seeds' results."""

    runs: list[dict[str, float]]
    seeds: list[SeedResult]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What every seed of a run shares."""

    config: TrainConfig
    options: Options
    prepared: Prepared
    data: DataSet
    check: PictureCheck
    console: Console
    should_stop: Callable[[], bool]

    def watch(self, title: str) -> Callable[[Iterable[T]], Iterator[T]]:
        """A function that gives items with progress, until a stop is asked for."""
        return partial(_watched, title=title, console=self.console, should_stop=self.should_stop)


def run(
    path: Path,
    config: TrainConfig,
    options: Options,
    *,
    console: Console | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train on the data set at `path` and write the bundle `options.out`.

    Raises:
        DearError: code "stopped", with a state to go on from, because `should_stop` said so.
        DataError, ConfigError, BaseModelError, BundleError, CheckFailedError, MissingDependencyError.
    """
    console = console or Silent()
    with BundleWriter(options.out):  # refuses a place that cannot be written before anything is computed
        pass
    data = load_data(path)
    prepared = prepare(config, device=resolve_device(options.device))
    watch = partial(_watched, title="checking pictures", console=console, should_stop=should_stop)
    check = PictureCheck(skip=options.skip_unreadable, progress=watch)
    shared = _Run(
        config=config,
        options=options,
        prepared=prepared,
        data=data,
        check=check,
        console=console,
        should_stop=should_stop,
    )
    if options.state.exists() and not options.resume:
        shutil.rmtree(options.state)
    elif options.resume and not options.state.exists():
        console.say(f"{options.out} has no stopped run to go on with: starting from the first step")
    seeds = [_one_seed(shared, seed) for seed in config.seeds]
    runs = [summary(result.scores) for result in seeds]
    _write_bundle(shared, seeds[0], runs, seeds)
    shutil.rmtree(options.state, ignore_errors=True)
    return Result(runs=runs, seeds=seeds)


def _one_seed(shared: _Run, seed: int) -> SeedResult:
    config, prepared, console = shared.config, shared.prepared, shared.console
    task = make_task(
        shared.data, protocol=config.protocol, shots=config.shots_taken, seed=seed, check=shared.check
    )
    for note in task.notes:
        console.say(f"note: {note}")
    model = build_model(prepared, seed)
    fit = Fit(
        model,
        trunks=_trunks(shared, model, task),
        labels=[item.label for item in task.train],
        text=TextSide(model, prepared.tokenizer, task.class_names, prepared.templates),
        config=config,
        seed=seed,
    )
    fit.run(
        shared.options.state / f"seed-{seed}.safetensors",
        identity=_identity(shared, task, seed),
        on_step=lambda done, loss: console.step(f"seed {seed}", done, fit.steps, loss),
        should_stop=shared.should_stop,
    )
    towers = ModelTowers(model)
    scores = evaluate(
        towers,
        task.tests,
        tokenizer=prepared.tokenizer,
        templates=prepared.templates,
        preprocess=prepared.base.config.preprocess,
        progress=shared.watch("testing"),
    )
    return SeedResult(
        seed=seed,
        adapter={name: tensor.cpu().clone() for name, tensor in model.adapter_state().items()},
        alpha=towers.alpha,
        history=fit.history,
        per_epoch=fit.per_epoch,
        scores=scores,
        class_names=task.class_names,
    )


def _trunks(shared: _Run, model: DearModel, task: Task) -> PlainTrunks:
    """The cached frozen blocks, or the plain ones where there is no cache or no room."""
    paths, augmentation = [item.path for item in task.train], shared.config.augmentation
    folder, limit = shared.options.cache, shared.options.cache_limit
    if folder is None:
        return PlainTrunks(model, paths, augmentation)
    cached = CachedTrunks(model, paths, augmentation, base_sha256=shared.prepared.base.sha256, folder=folder)
    size = f"{len(paths)} pictures in {augmentation.views} views, {cached.size / 1e6:.0f} MB"
    if cached.size > limit:
        shared.console.say(
            f"no cache: {size} are more than its limit of {limit / 1e6:.0f} MB (--cache-limit)"
        )
        return PlainTrunks(model, paths, augmentation)
    shared.console.say(f"cache of the frozen blocks: {size} in {folder}")
    cached.fill(limit=limit, progress=shared.watch("computing frozen blocks"))
    return cached


def _watched(
    items: Iterable[T], title: str, *, console: Console, should_stop: Callable[[], bool]
) -> Iterator[T]:
    """`items` with progress, until a stop is asked for."""
    for item in console.over(items, title):
        if should_stop():
            raise DearError(f"stopped while {title}; go on with --resume", code="stopped")
        yield item


def _identity(shared: _Run, task: Task, seed: int) -> str:
    """What a resumed run must have in common with the stopped one, as a JSON table."""
    prepared = shared.prepared
    table = {
        "data": fingerprint(task),
        "base weights": prepared.base.sha256,
        "seed": seed,
        "templates": list(prepared.templates),
        "roles": prepared.roles.to_dict(),
        "library version": __version__,
    }
    options = shared.config.to_dict()
    for name in ("base", "seeds", "templates", "roles"):  # said above in what they came to
        del options[name]
    return json.dumps({**table, **options})


# --- the bundle -----------------------------------------------------------------------------------


def _write_bundle(
    shared: _Run, first: SeedResult, runs: Sequence[dict[str, float]], seeds: Sequence[SeedResult]
) -> None:
    prepared = shared.prepared
    model = build_model(prepared, first.seed)
    towers = ModelTowers(model)

    def encode(texts: Sequence[str]) -> Float32:
        return class_features(texts, ("{}",), towers.zero_shot_text, prepared.tokenizer)

    readouts, bases = build_readouts(prepared.dear.attributes, prepared.readout_kinds, encode)
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
        metrics=_metrics(runs),
    )
    with BundleWriter(shared.options.out) as writer:
        save_arrays(writer.paths.adapter, {n: t.numpy() for n, t in first.adapter.items()})
        if bases:
            save_arrays(writer.paths.readouts, bases)
        prepared.roles.save(writer.paths.roles)
        prepared.tokenizer.to_file(writer.paths.tokenizer)
        _write_logs(shared, writer.paths, manifest, runs, seeds)
        writer.commit(manifest)


def _metrics(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The bundle's own numbers and, of several seeds, mean and standard deviation."""
    metrics = dict(runs[0])
    if len(runs) > 1:
        mean, sd = spread(runs)
        metrics |= {f"{key}_mean": value for key, value in mean.items()}
        metrics |= {f"{key}_sd": value for key, value in sd.items()}
    return metrics


def _write_logs(
    shared: _Run,
    paths: BundlePaths,
    manifest: Manifest,
    runs: Sequence[dict[str, float]],
    seeds: Sequence[SeedResult],
) -> None:
    """metrics.jsonl (a line an epoch, a line of accuracies a seed) and report.html; no times in them."""
    lines: list[dict[str, Any]] = []
    for result, numbers in zip(seeds, runs, strict=True):
        rows = np.array(result.history).reshape(-1, result.per_epoch, len(COLUMNS)).mean(axis=1)
        for epoch, row in enumerate(rows.tolist(), 1):
            lines.append({"seed": result.seed, "epoch": epoch, **dict(zip(COLUMNS, row, strict=True))})
        lines.append({"seed": result.seed, **numbers})
    paths.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    first = seeds[0]
    report = Report(
        title=f"{shared.data.root.name}: {shared.config.protocol} on {manifest.base.name}",
        settings={k: _shown(v) for k, v in shared.config.to_dict().items()}
        | {"templates": "; ".join(manifest.templates)},
        attributes=manifest.dear.attributes,
        alpha=first.alpha,
        roles=shared.prepared.roles,
        scores=first.scores,
        history=first.history,
        runs=runs,
        seeds=shared.config.seeds,
    )
    paths.report.write_text(render(report), encoding="utf-8")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_shown(v)}" for k, v in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
