"""One run from pictures to bundle: a model a seed, its training and scores, the bundle of the first seed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dear_serve import __version__
from dear_serve.bundle import BundleWriter, Calibration
from dear_serve.dear.model import DearModel
from dear_serve.errors import DataError, DearError
from training.baselines import add_baselines
from training.cache import UNWRITABLE, CachedTrunks, PlainTrunks
from training.calibrate import Texts, calibrate, validation_logits, validation_pictures
from training.config import TrainConfig
from training.console import Console, Silent
from training.data import DataSet, PictureCheck, Task, fingerprint, load_data, make_task
from training.execution import Execution
from training.loop import Fit, TextSide
from training.prepare import Prepared, build_model, prepare, resolve_device
from training.results import Outcome, SeedResult, write_bundle
from training.resume import check_resumed, describe
from training.scoring import ModelTowers, Scores, evaluate, summary

__all__ = ["Console", "Options", "Result", "SeedResult", "run"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Where and how a run is done; nothing here changes what is learned (but a device's rounding)."""

    out: Path
    resume: bool = False
    cache: Path | None = None
    """Folder of the frozen blocks' output; None: computed in every step."""
    cache_limit: int = 8 * 10**9
    """Bytes."""
    skip_unreadable: bool = False
    strict: bool = False
    """Refuse a data set with problems (see `Task.problems`)."""
    baselines: bool = False
    """Add the rows of `training.baselines` to the table and the report."""
    device: str = "cpu"
    execution: Execution = field(default_factory=Execution)

    @property
    def state(self) -> Path:
        """Folder of what a stopped run needs to go on; gone once the bundle is written."""
        return self.out.parent / f".{self.out.name}.state"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run gave: per seed the numbers of `evaluate.summary`, and the seeds' results."""

    name: str
    """Of the data set."""
    runs: list[dict[str, float]]
    seeds: list[SeedResult]
    """Like `runs` empty in all processes of a run but the first."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What every seed of a run shares."""

    config: TrainConfig
    options: Options
    prepared: Prepared
    data: DataSet
    targets: tuple[DataSet, ...]
    check: PictureCheck
    console: Console
    should_stop: Callable[[], bool]

    def watch(self, title: str) -> Callable[[Iterable[T]], Iterator[T]]:
        """A function that gives items with progress, until a stop is asked for."""
        return partial(_watched, title=title, console=self.console, should_stop=self.should_stop)


def run(
    source: Path | DataSet,
    config: TrainConfig,
    options: Options,
    *,
    targets: Sequence[DataSet] = (),
    console: Console | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train on a data set and write the bundle `options.out`.

    Args:
        source: the data set, or where it is.
        config: what is learned and how.
        options: where, and how it is computed.
        targets: other data sets to test on (protocols cross-dataset and domain).
        console: where progress is told.
        should_stop: asked between steps.

    Raises:
        DearError: code "stopped", with a state to go on from, because `should_stop` said so.
        DataError, ConfigError, BaseModelError, BundleError, CheckFailedError, MissingDependencyError.
    """
    console = console or Silent()
    world = options.execution.world
    if world.first:
        with BundleWriter(options.out):  # refuses a place that cannot be written before anything is computed
            pass
    data = load_data(source) if isinstance(source, Path) else source
    prepared = prepare(config, device=resolve_device(options.device))
    watch = partial(_watched, title="checking pictures", console=console, should_stop=should_stop)
    check = PictureCheck(skip=options.skip_unreadable, progress=watch)
    shared = _Run(
        config=config,
        options=options,
        prepared=prepared,
        data=data,
        targets=tuple(targets),
        check=check,
        console=console,
        should_stop=should_stop,
    )
    if options.state.exists() and not options.resume and world.first:
        shutil.rmtree(options.state)
    elif options.resume and not options.state.exists():
        console.say(f"{options.out} has no stopped run to go on with: starting from the first step")
    world.wait()
    seeds = [result for seed in config.seeds if (result := _one_seed(shared, seed)) is not None]
    if not world.first:
        return Result(name=data.name, runs=[], seeds=[])
    runs = [summary(result.scores, targets=result.targets) for result in seeds]
    write_bundle(
        Outcome(name=data.name, config=config, prepared=prepared, seeds=seeds, runs=runs), options.out
    )
    shutil.rmtree(options.state, ignore_errors=True)
    return Result(name=data.name, runs=runs, seeds=seeds)


def _checked_task(shared: _Run, seed: int) -> Task:
    """The seed's task, what there is to note of it said, or refused."""
    task = make_task(
        shared.data,
        protocol=shared.config.protocol,
        shots=shared.config.shots_taken,
        seed=seed,
        check=shared.check,
        targets=shared.targets,
    )
    if task.problems and shared.options.strict:
        raise DataError(f"{shared.data.root} is refused (--strict): {'; '.join(task.problems)}")
    for note in task.notes:
        shared.console.say(f"note: {note}")
    return task


def _one_seed(shared: _Run, seed: int) -> SeedResult | None:
    """Train and test with one seed; None in a process that isn't the first, which only helps to train."""
    config, prepared, console = shared.config, shared.prepared, shared.console
    task = _checked_task(shared, seed)
    identity = _identity(shared, task, seed)
    execution = shared.options.execution
    if execution.world.first:
        check_resumed(
            shared.options.state / f"seed-{seed}.json", identity, describe(task, shared.check.hashes)
        )
    model = build_model(prepared, seed)
    fit = Fit(
        model,
        trunks=_trunks(shared, model, task),
        labels=[item.label for item in task.train],
        text=TextSide(model, prepared.tokenizer, task.class_names, prepared.templates, execution=execution),
        config=config,
        seed=seed,
    )
    fit.run(
        shared.options.state / f"seed-{seed}.safetensors",
        identity=json.dumps(identity),
        on_step=lambda done, loss: console.step(f"seed {seed}", done, fit.steps, loss),
        should_stop=shared.should_stop,
    )
    if not execution.world.first:
        return None
    towers = ModelTowers(model)
    scores = _scores(shared, task, towers)
    return SeedResult(
        seed=seed,
        adapter={name: tensor.cpu().clone() for name, tensor in model.adapter_state().items()},
        alpha=towers.alpha,
        history=fit.history,
        per_epoch=fit.per_epoch,
        scores=scores,
        class_names=task.class_names,
        targets=task.targets,
        notes=task.notes,
        calibration=_calibration(shared, task, towers) if seed == config.seeds[0] else None,
    )


def _calibration(shared: _Run, task: Task, towers: ModelTowers) -> Calibration | None:
    """How sure the model may be, from pictures that no step saw; None where there are too few."""
    prepared = shared.prepared
    pictures, source = validation_pictures(shared.data, task, seed=shared.config.seeds[0], check=shared.check)
    if not pictures:
        shared.console.say("no calibration: there are too few validation or unused training pictures")
        return None
    texts = Texts(class_names=task.class_names, templates=prepared.templates, tokenizer=prepared.tokenizer)
    logits, labels = validation_logits(
        towers,
        texts,
        pictures,
        preprocess=prepared.base.config.preprocess,
        progress=shared.watch("calibrating"),
    )
    return calibrate(logits, labels, towers.logit_scale, source)


def _scores(shared: _Run, task: Task, towers: ModelTowers) -> list[Scores]:
    """On every test split, each with its own templates where it has some; baselines too if they are asked for."""
    prepared = shared.prepared
    preprocess = prepared.base.config.preprocess
    scores = [
        found
        for split, pictures in task.tests.items()
        for found in evaluate(
            towers,
            {split: pictures},
            tokenizer=prepared.tokenizer,
            templates=task.split_templates(split, prepared.templates),
            preprocess=preprocess,
            progress=shared.watch("testing"),
        )
    ]
    if shared.options.baselines:
        scores = add_baselines(
            scores,
            task,
            towers,
            tokenizer=prepared.tokenizer,
            templates=prepared.templates,
            preprocess=preprocess,
        )
    return [replace(found, features=found.features[:0]) for found in scores]  # needed no more, and large


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
    try:
        cached.fill(
            limit=limit,
            progress=shared.watch("computing frozen blocks"),
            world=shared.options.execution.world,
        )
    except DataError as error:
        if error.code != UNWRITABLE:
            raise
        shared.console.say(f"no cache: {error}. The frozen blocks are computed in every step")
        return PlainTrunks(model, paths, augmentation)
    return cached


def _watched(
    items: Iterable[T], title: str, *, console: Console, should_stop: Callable[[], bool]
) -> Iterator[T]:
    """`items` with progress, until a stop is asked for."""
    for item in console.over(items, title):
        if should_stop():
            raise DearError(f"stopped while {title}; go on with --resume", code="stopped")
        yield item


def _identity(shared: _Run, task: Task, seed: int) -> dict[str, Any]:
    """What a resumed run must have in common with the stopped one, as a JSON table."""
    prepared = shared.prepared
    table = {
        "data": fingerprint(task),
        "base weights": prepared.base.sha256,
        "seed": seed,
        "templates": list(prepared.templates),
        "roles": prepared.roles.to_dict(),
        "library version": __version__,
        "precision": shared.options.execution.precision,
    }
    options = shared.config.to_dict()
    for name in ("base", "seeds", "templates", "roles"):  # said above in what they came to
        del options[name]
    return {**table, **options}
