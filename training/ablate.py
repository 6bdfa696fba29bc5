"""Which parts of DeAR earn their place: rows of options, tasks and seeds, in tables: python -m training.ablate."""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from dear_serve import __version__
from dear_serve.command import run_command
from dear_serve.errors import ConfigError
from training.ablate_bench import FOLDS, Bench, Outcome
from training.ablate_recipe import Recipe, Row, TaskSpec, known_ablations, load_ablation
from training.ablate_score import FACTORS
from training.ablate_table import figures, html_page, markdown, tables
from training.config import TrainConfig
from training.execution import Execution
from training.prepare import prepare

__all__ = ["main"]

_FORMAT = 1
_EXAMPLES = """examples:
  python -m training.ablate --recipe demo --seeds 1,2,3,4,5 --out runs/ablation
  python -m training.ablate --recipe demo --seeds 1 --tasks style --rows DeAR,layer-centric --out runs/ablation
  python -m training.ablate --recipe my.toml --out runs/mine

What is done is kept in OUT/results and not done again: the same command goes on where it was stopped.
OUT gets table.md, table.json and table.html.

exit status: 0 done; 2 bad options; 3 something is not installed."""


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """One row on one task with one seed."""

    task: TaskSpec
    row: Row
    config: TrainConfig
    seed: int


class _NotDoneError(Exception):
    """Nothing was to be computed, and this isn't there."""


class _Results:
    """Trainings that were done, a JSON file each; equal trainings of several rows are one.

    Args:
        folder: of the ablation.
        execution: how steps are computed.
        only_done: compute nothing; `_NotDoneError` for what is not there.
    """

    def __init__(self, folder: Path, execution: Execution, *, only_done: bool = False) -> None:
        self.folder, self.execution, self.only_done = folder, execution, only_done
        self._benches: dict[str, Bench] = {}
        self._keys: dict[tuple[TaskSpec, TrainConfig], str] = {}

    def figures(self, cell: _Cell) -> dict[str, float]:
        """The cell's figures, computed where they are not there."""
        if cell.row.kind == "linear-probe":
            probe = self._outcome(cell, "probe", lambda: self._bench(cell.task).probe(cell.config, cell.seed))
            return figures(probe["scores"], 1.0, "probe")
        if cell.row.kind == "zero-shot":
            frozen = self._outcome(cell, "frozen", lambda: self._train(cell, train=False))
            return figures(frozen["scores"], 1.0, "zero_shot")
        found = self._outcome(cell, "adapted", lambda: self._train(cell))
        if not cell.row.score.startswith("fitted"):
            return figures(found["scores"], found["alpha"][0], cell.row.score)
        factor = self._factor(cell)
        rule = "whole" if cell.row.score == "fitted-all" else "mix"
        return figures(found["scores"], found["alpha"][0], f"{rule} {factor}") | {"factor": factor}

    def _factor(self, cell: _Cell) -> float:
        """The interpolation factor that is best on held-back base classes, the mean of neighbors deciding ties."""
        curves = []
        for fold in range(FOLDS):
            held = self._outcome(cell, f"held-{fold}", partial(self._hold, cell, fold))
            curves.append([held["scores"]["held"][f"whole {factor}"] for factor in FACTORS])
        curve = np.mean(curves, axis=0)
        smooth = np.convolve(np.pad(curve, 1, mode="edge"), np.ones(3) / 3, mode="valid")
        return FACTORS[int(np.lexsort((smooth, curve))[-1])]

    # --- trainings --------------------------------------------------------------------------------

    def _train(self, cell: _Cell, *, train: bool = True) -> Outcome:
        return self._bench(cell.task).run(cell.config, cell.seed, self._state(cell), train=train)

    def _hold(self, cell: _Cell, fold: int) -> Outcome:
        return self._bench(cell.task).held_back(cell.config, cell.seed, fold, self._state(cell))

    def _state(self, cell: _Cell) -> Path:
        return self.folder / "results" / f".{self._key(cell)}-{cell.seed}.state"

    def _bench(self, task: TaskSpec) -> Bench:
        if task.name not in self._benches:
            self._benches[task.name] = Bench(task, self.folder, execution=self.execution)
        return self._benches[task.name]

    # --- files ------------------------------------------------------------------------------------

    def _outcome(self, cell: _Cell, kind: str, compute: Callable[[], Outcome]) -> dict[str, Any]:
        file = self.folder / "results" / cell.task.name / f"{self._key(cell)}-{cell.seed}-{kind}.json"
        if not file.is_file() and self.only_done:
            raise _NotDoneError(str(file))
        if not file.is_file():
            result = compute().to_dict()
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            about = {"row": cell.row.name, "seed": cell.seed, "kind": kind, "config": cell.config.to_dict()}
            partial.write_text(json.dumps({**about, **result}, indent=1) + "\n", encoding="utf-8")
            partial.replace(file)
        return dict(json.loads(file.read_text(encoding="utf-8")))

    def _key(self, cell: _Cell) -> str:
        """Of everything that fixes a training but its seed."""
        found = self._keys.get((cell.task, cell.config))
        if found is None:
            prepared = prepare(cell.config)
            options = cell.config.to_dict()
            for name in ("base", "seeds", "templates", "roles"):  # below in what they came to
                del options[name]
            pictures = {f.name: getattr(cell.task, f.name) for f in fields(cell.task)}
            del pictures["name"], pictures["about"]
            identity = [
                _FORMAT,
                __version__,
                self.execution.precision,
                pictures,
                prepared.base.sha256,
                prepared.roles.to_dict(),
                list(prepared.templates),
                options,
            ]
            found = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
            self._keys[(cell.task, cell.config)] = found
        return found


def _cells(recipe: Recipe, args: argparse.Namespace) -> Iterator[_Cell]:
    """What is to be run: task by task, and within it seed by seed, so that a stopped table is whole for some seeds."""
    for task in recipe.tasks:
        if args.tasks and task.name not in args.tasks:
            continue
        for seed in args.seeds:
            for row in recipe.rows_of(task.name):
                if not args.rows or row.name in args.rows:
                    over = {"base": args.base} if args.base else {}
                    yield _Cell(
                        task=task, row=row, config=recipe.config(task.name, row.name, **over), seed=seed
                    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.ablate",
        description="Train DeAR with parts taken away, changed or added, on rendered tasks, and write the table.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--recipe",
        default="demo",
        help=f"{', '.join(known_ablations())}, or a TOML file (default: %(default)s)",
    )
    add("--seeds", type=_numbers, default=(1, 2, 3), help="default: 1,2,3")
    add("--out", type=Path, default=Path("runs/ablation"), help="folder of results (default: %(default)s)")
    add("--tasks", type=_names, help="only these, as a,b")
    add("--rows", type=_names, help="only these, as a,b")
    add("--base", help="instead of the recipe's")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="of the trained blocks' products")
    add("--threads", type=int, help="of the processor (default: torch's choice)")
    add("--done", action="store_true", help="compute nothing: tables of what is done")
    add("--quiet", action="store_true", help="no progress")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _check_names(recipe: Recipe, args: argparse.Namespace) -> None:
    for option, known in (("tasks", recipe.tasks), ("rows", recipe.rows)):
        names = [item.name for item in known]
        for name in getattr(args, option) or ():
            if name not in names:
                raise ConfigError(f"no {option[:-1]} {name!r}; known are {', '.join(names)}", field=option)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def _run(args: argparse.Namespace) -> None:
    recipe = load_ablation(args.recipe)
    _check_names(recipe, args)
    if args.threads:
        torch.set_num_threads(args.threads)
    signal.signal(signal.SIGTERM, _interrupt)
    results = _Results(args.out, Execution(precision=args.precision), only_done=args.done)
    todo, cells = list(_cells(recipe, args)), {}
    bar = tqdm(todo, file=sys.stderr, disable=args.quiet, mininterval=5)
    try:
        for cell in bar:
            bar.set_postfix_str(f"{cell.task.name}, {cell.row.name}, seed {cell.seed}")
            with suppress(_NotDoneError) if args.done else nullcontext():
                cells[cell.task.name, cell.row.name, cell.seed] = results.figures(cell)
    finally:
        if cells:
            print(_write(args.out, recipe, cells, args.seeds), end="")


def _write(
    out: Path, recipe: Recipe, cells: dict[tuple[str, str, int], dict[str, float]], seeds: Sequence[int]
) -> str:
    """Write the tables of what there is; their text."""
    found = tables(recipe, cells, seeds)
    text = markdown(found)
    lines = [
        {"task": task, "row": row, "seed": seed, **numbers} for (task, row, seed), numbers in cells.items()
    ]
    (out / "table.md").write_text(text, encoding="utf-8")
    (out / "table.json").write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    (out / "table.html").write_text(html_page(f"ablation: {recipe.name}", found), encoding="utf-8")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args), debug=args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
