"""One task of an ablation: its pictures, their frozen blocks, and what a training on it scores.

Rows of equal J share the frozen blocks of training pictures (on disk) and of test pictures (in memory).
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dear_serve.dear.model import DearModel
from dear_serve.preprocess import preprocess_bytes
from training.ablate_recipe import TaskSpec
from training.ablate_score import Question, Sides, image_sides, score
from training.baselines import fit_probe
from training.cache import CachedTrunks, PlainTrunks
from training.captions import WORDINGS
from training.config import TrainConfig
from training.data import DataSet, Item, PictureCheck, Task, load_data, make_task
from training.execution import Execution
from training.loop import Fit, TextSide
from training.prepare import Prepared, build_model, prepare
from training.world_data import LABELS, DemoOptions, write_demo
from training.world_vocab import ATTRIBUTES, CORE_OBJECTS, OBJECTS, VOCABULARY

__all__ = ["FOLDS", "Bench", "Outcome"]

FOLDS = 2
"""Parts of the base classes, each held back once to fit the interpolation factor."""

_CACHE_LIMIT = 8 * 10**9  # bytes
_BATCH = 64
OTHERS = tuple(name for name in ATTRIBUTES if name != "object")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one training gave: plain data, as the results file holds it."""

    scores: dict[str, dict[str, float]]
    """Question ("base", "novel", …) to `score`'s figures."""
    alpha: tuple[float, ...]
    loss: float
    """Of the last epoch, mean; 0 without training."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class _Ask:
    """A question about some of a test's pictures: which of these names?"""

    names: Sequence[str]
    trained: int = 0
    """The first so many names were trained on."""
    templates: Sequence[str] | None = None
    """None: the base's."""
    rows: Sequence[int]
    """The pictures."""
    labels: Sequence[int]
    """Of those pictures, into `names`."""


@dataclass(frozen=True, kw_only=True)
class _Test:
    """Pictures, and what is asked about them."""

    items: tuple[Item, ...]
    asks: dict[str, _Ask]


@dataclass(frozen=True)
class _Job:
    seed: int
    state: Path
    train: bool = True


class Bench:
    """Trains and tests on one task.

    Args:
        spec: the task; its pictures are rendered into `folder` unless they are there.
        folder: of the ablation.
        execution: how steps are computed.

    Raises:
        MissingDependencyError: the icon font isn't installed.
    """

    def __init__(self, spec: TaskSpec, folder: Path, *, execution: Execution) -> None:
        self.spec, self.execution = spec, execution
        self.cache = folder / "cache"
        pictures, share = folder / "pictures", len(spec.styles)
        old = DemoOptions(classes=spec.classes, train=1, test=spec.test, style=spec.old_style, seed=spec.seed)
        new = replace(old, train=spec.train // share, test=spec.test // share)
        self.old = _rendered(pictures, old)
        self.data = _merged([_rendered(pictures, replace(new, style=style)) for style in spec.styles])
        self.check = PictureCheck()
        self._trunks: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._texts: dict[tuple[object, ...], TextSide] = {}

    # --- what is run ------------------------------------------------------------------------------

    def run(self, config: TrainConfig, seed: int, state: Path, *, train: bool = True) -> Outcome:
        """Train with `seed` (or not at all) and ask everything.

        Args:
            config: of the training.
            seed: of shots, initial values, order and views.
            state: file to go on from, and to leave nothing in.
            train: False: the adapter as initialised, for the frozen figures.
        """
        prepared = prepare(config)
        task = self._task(config, seed)
        return self._run(prepared, config, task, self._tests(task), _Job(seed, state, train=train))

    def held_back(self, config: TrainConfig, seed: int, fold: int, state: Path) -> Outcome:
        """Train on the base classes that are not in `fold`; the training pictures of those that are ask "held".

        Nothing of the test pictures or the novel classes is touched: this is what may choose a factor.
        """
        task = self._task(config, seed)
        part = [c for c in range(len(task.class_names)) if c % FOLDS == fold]
        rest = [c for c in range(len(task.class_names)) if c % FOLDS != fold]
        held = _only(task.train, part)
        names = [task.class_names[c] for c in part]
        test = _Test(items=held, asks={"held": _about(held, names)})
        smaller = replace(
            task,
            class_names=tuple(task.class_names[c] for c in rest),
            train=_only(task.train, rest),
        )
        return self._run(prepare(config), config, smaller, [test], _Job(seed, state))

    def probe(self, config: TrainConfig, seed: int) -> Outcome:
        """A linear probe of frozen features on the same shots: "base" alone, it has no other names."""
        start = time.monotonic()
        prepared, task = prepare(config), self._task(config, seed)
        model = build_model(prepared, seed)
        names, items = task.tests["base"]
        train, test = (
            torch.cat([feature for _, feature in self._batches(prepared, model, part)]).numpy()
            for part in (task.train, items)
        )
        probe = fit_probe(train, np.array([item.label for item in task.train]), names)
        right = probe.predict(test, names) == np.array([item.label for item in items])
        accuracy = float(np.mean(right))
        return Outcome(
            scores={"base": {"probe": accuracy}}, alpha=(), loss=0.0, seconds=time.monotonic() - start
        )

    # --- parts ------------------------------------------------------------------------------------

    def _task(self, config: TrainConfig, seed: int) -> Task:
        return make_task(
            self.data, protocol=config.protocol, shots=config.shots_taken, seed=seed, check=self.check
        )

    def _tests(self, task: Task) -> list[_Test]:
        """Base, novel and all names in the new style; in the old one novel pictures among novel names, among those of
        all objects that a task can have, and their other attributes."""
        names, base = self.data.class_names, len(task.class_names)
        new, old = self.data.test, tuple(item for item in self.old.test if item.label >= base)
        truth = _attribute_labels(self.old)
        others = {
            name: _Ask(
                names=VOCABULARY[name],
                templates=[template.replace("{a}", "a {}") for template in WORDINGS["seen"][name]],
                rows=range(len(old)),
                labels=[truth[item.path][name] for item in old],
            )
            for name in OTHERS
        }
        asks = {
            "base": _about(new, names[:base], trained=base),
            "novel": _about(new, names[base:], first=base),
            "all": _about(new, names, trained=base),
        }
        many = OBJECTS[:CORE_OBJECTS]
        wide = _Ask(names=many, rows=range(len(old)), labels=[many.index(names[item.label]) for item in old])
        olds = {"old novel": _about(old, names[base:], first=base), "old wide": wide, **others}
        return [
            _Test(items=new, asks=asks),
            _Test(items=old, asks=olds),
        ]

    def _run(
        self, prepared: Prepared, config: TrainConfig, task: Task, tests: Sequence[_Test], job: _Job
    ) -> Outcome:
        start = time.monotonic()
        model = build_model(prepared, job.seed)
        loss = self._fit(prepared, config, model, task, job) if job.train else 0.0
        scores: dict[str, dict[str, float]] = {}
        for test in tests:
            sides: Sides = image_sides(model, self._batches(prepared, model, test.items))
            for name, ask in test.asks.items():
                templates = tuple(ask.templates or prepared.templates)
                question = Question(
                    text=self._text(prepared, model, tuple(ask.names), templates),
                    trained=torch.arange(len(ask.names)) < ask.trained,
                    labels=torch.tensor(ask.labels),
                )
                scores[name] = score(model, sides.rows(ask.rows), question)
        return Outcome(
            scores=scores,
            alpha=tuple(model.fusion.alpha.detach().tolist()),
            loss=loss,
            seconds=time.monotonic() - start,
        )

    def _fit(self, prepared: Prepared, config: TrainConfig, model: DearModel, task: Task, job: _Job) -> float:
        """Train `model` in place; mean loss of the last epoch."""
        fit = Fit(
            model,
            trunks=self._filled(prepared, model, config, task),
            labels=[item.label for item in task.train],
            text=TextSide(
                model, prepared.tokenizer, task.class_names, prepared.templates, execution=self.execution
            ),
            config=config,
            seed=job.seed,
        )
        fit.run(job.state, identity=str(job.seed))
        job.state.unlink(missing_ok=True)
        return float(np.mean([row[0] for row in fit.history[-fit.per_epoch :]]))

    def _filled(self, prepared: Prepared, model: DearModel, config: TrainConfig, task: Task) -> CachedTrunks:
        trunks = CachedTrunks(
            model,
            [item.path for item in task.train],
            config.augmentation,
            base_sha256=prepared.base.sha256,
            folder=self.cache,
        )
        trunks.fill(limit=_CACHE_LIMIT)
        return trunks

    def _batches(
        self, prepared: Prepared, model: DearModel, items: Sequence[Item]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Trunks and frozen features of pictures as they are, kept in memory for the next row of the same J."""
        plain = PlainTrunks(model, [item.path for item in items], TrainConfig().augmentation)
        preprocess = prepared.base.config.preprocess
        for start in range(0, len(items), _BATCH):
            paths = plain.paths[start : start + _BATCH]
            key = (prepared.base.sha256, model.config.first_block, *paths)
            if key not in self._trunks:
                pixels = np.stack([preprocess_bytes(path.read_bytes(), preprocess) for path in paths])
                self._trunks[key] = plain.compute(pixels)
            yield self._trunks[key]

    def _text(
        self, prepared: Prepared, model: DearModel, names: tuple[str, ...], templates: tuple[str, ...]
    ) -> TextSide:
        key = (prepared.base.sha256, model.config.text_first_block, names, templates)
        if key not in self._texts:
            self._texts[key] = TextSide(model, prepared.tokenizer, names, templates)
        return self._texts[key]


def _only(items: Sequence[Item], classes: Sequence[int]) -> tuple[Item, ...]:
    """The pictures of `classes`, labelled by their place in it."""
    place = {label: i for i, label in enumerate(classes)}
    return tuple(replace(item, label=place[item.label]) for item in items if item.label in place)


def _about(items: Sequence[Item], names: Sequence[str], *, first: int = 0, trained: int = 0) -> _Ask:
    """Which of `names`, the classes from number `first` on: asked about those of `items` that show one of them."""
    rows = [i for i, item in enumerate(items) if first <= item.label < first + len(names)]
    return _Ask(names=names, trained=trained, rows=rows, labels=[items[i].label - first for i in rows])


def _rendered(root: Path, options: DemoOptions) -> DataSet:
    """The data set of `options` below `root`, rendered unless it is there."""
    name = "-".join(map(str, asdict(options).values()))
    folder = root / name
    if not (folder / LABELS).is_file():
        write_demo(folder, options)
    return load_data(folder)


def _merged(parts: Sequence[DataSet]) -> DataSet:
    """Data sets of equal classes as one."""
    first, *_ = parts
    train = tuple(item for part in parts for item in part.train)
    return replace(first, train=train, test=tuple(item for part in parts for item in part.test))


def _attribute_labels(data: DataSet) -> dict[Path, dict[str, int]]:
    """Per picture the index of each attribute's value, of the labels that were rendered with it."""
    with (data.root / LABELS).open(encoding="utf-8", newline="") as file:
        return {
            data.root / row["path"]: {name: VOCABULARY[name].index(row[name]) for name in OTHERS}
            for row in csv.DictReader(file)
        }
