"""The recipe of an ablation: tasks, rows as options of one training and of its scoring, and claims to be checked.

A TOML file with these tables; `options` are those of `TrainConfig`, the row's over the task's over the recipe's:

    [options]
    [[tasks]]    name, about, then either how it is rendered (`TaskSpec`), and its options
    [[rows]]     name, about, kind, score, tasks, and its options
    [[claims]]   that a row's figure in a column is lower (or higher) than another row's, and who says so
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from dear_serve.config import StrictConfig
from dear_serve.errors import ConfigError
from training.config import TrainConfig, read_toml

__all__ = ["Claim", "Recipe", "Row", "TaskSpec", "known_ablations", "load_ablation"]

FOLDER = Path(__file__).parent / "ablations"

S = TypeVar("S", bound=StrictConfig)


@dataclass(frozen=True, kw_only=True)
class TaskSpec(StrictConfig):
    """A task of rendered pictures, as `training.world_data demo` makes them; the first half of its classes is base."""

    name: str
    about: str = ""
    classes: int = 24
    styles: tuple[str, ...] = ("night",)
    """Of training and test pictures, in equal shares."""
    old_style: str = "print"
    """One that the base was trained on: the same classes in it show what was forgotten."""
    train: int = 20
    """Pictures a class to draw shots from, a multiple of the number of styles."""
    test: int = 30
    """Test pictures a class, likewise."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.styles or self.train % len(self.styles) or self.test % len(self.styles):
            raise ConfigError(
                f"task {self.name!r} has {self.train} training and {self.test} test pictures a class for "
                f"{len(self.styles)} styles; give multiples of the number of styles, and one style or more",
                field="styles",
            )


@dataclass(frozen=True, kw_only=True)
class Row(StrictConfig):
    """One line of the table: a training's options, and how names outside the trained classes are scored."""

    name: str
    about: str = ""
    kind: Literal["adapted", "zero-shot", "linear-probe"] = "adapted"
    score: Literal["fused", "class", "fitted", "fitted-all"] = "fused"
    """fused: as trained (the paper's). Ours: class: by the class feature alone. fitted: by features between frozen and
    adapted ones, by a factor fitted on held-back base classes; fitted-all: the trained classes too."""
    tasks: tuple[str, ...] = ()
    """Names of the tasks it is run on; none: all."""


@dataclass(frozen=True, kw_only=True)
class Claim(StrictConfig):
    """That `row`'s figure in `column` is lower (higher) than that of row `than`."""

    row: str
    than: str
    column: str
    expect: Literal["lower", "higher"]
    source: str = "paper"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe, read and checked."""

    name: str
    tasks: tuple[TaskSpec, ...]
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    _options: Mapping[str, Mapping[str, Any]]
    """Of the recipe (""), of tasks and of rows, by name."""

    def config(self, task: str, row: str, **over: Any) -> TrainConfig:
        """The training of one cell: defaults, then the recipe's, the task's and the row's options, then `over`."""
        config = TrainConfig(protocol="base-to-novel")
        for options in (self._options[""], self._options[f"task {task}"], self._options[f"row {row}"], over):
            config = config.with_options(options)
        return config

    def rows_of(self, task: str) -> list[Row]:
        """The rows that are run on one task, in order."""
        return [row for row in self.rows if not row.tasks or task in row.tasks]


def known_ablations() -> list[str]:
    """Names of the recipes that ship with this package."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load_ablation(name: str) -> Recipe:
    """A shipped recipe by name, or a TOML file.

    Raises:
        ConfigError: no such recipe, or something in it cannot be used; the message names it.
    """
    file = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not name.endswith(".toml") and not file.is_file():
        raise ConfigError(
            f"no ablation recipe {name!r}: give {', '.join(known_ablations())}, or a TOML file",
            field="recipe",
        )
    data = read_toml(file)
    unknown = sorted(set(data) - {"options", "tasks", "rows", "claims"})
    if unknown:
        raise ConfigError(
            f"{file} has no use for {unknown[0]!r}; options, tasks, rows and claims are known", field="recipe"
        )
    options: dict[str, Mapping[str, Any]] = {"": data.get("options", {})}
    tasks = _tables(data.get("tasks", []), TaskSpec, "task", options)
    rows = _tables(data.get("rows", []), Row, "row", options)
    claims = [Claim.from_dict(table) for table in data.get("claims", [])]
    recipe = Recipe(
        name=file.stem, tasks=tuple(tasks), rows=tuple(rows), claims=tuple(claims), _options=options
    )
    _check(recipe, file)
    return recipe


def _tables(
    tables: Sequence[Mapping[str, Any]], kind: type[S], title: str, options: dict[str, Mapping[str, Any]]
) -> list[S]:
    """Each table as `kind`, its `options` put aside under "task NAME" or "row NAME"."""
    found = []
    for table in tables:
        item = kind.from_dict({key: value for key, value in table.items() if key != "options"})
        key = f"{title} {getattr(item, 'name', '')}"
        if key in options:
            raise ConfigError(f"there are two tables of the {key}: give each its name", field="name")
        options[key] = table.get("options", {})
        found.append(item)
    return found


def _check(recipe: Recipe, file: Path) -> None:
    """Every option can be used and every name is somebody's."""
    tasks, rows = {task.name for task in recipe.tasks}, {row.name for row in recipe.rows}
    if not tasks or not rows:
        raise ConfigError(f"{file} needs [[tasks]] and [[rows]]: there is nothing to run", field="recipe")
    for row in recipe.rows:
        for name in row.tasks:
            if name not in tasks:
                raise ConfigError(
                    f"row {row.name!r} names the task {name!r}; known are {', '.join(sorted(tasks))}",
                    field="tasks",
                )
        for task in tasks:
            recipe.config(task, row.name)
    for claim in recipe.claims:
        for name in (claim.row, claim.than):
            if name not in rows:
                raise ConfigError(
                    f"a claim names the row {name!r}, which {file} does not have", field="claims"
                )
