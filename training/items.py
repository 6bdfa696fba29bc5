"""What a labelled picture, a data set, and a task made of one are; nothing is read here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["DataSet", "Item", "Sampling", "Task", "Tests", "some"]

Sampling = Literal["balanced", "coop"]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One picture and the index of its class."""

    path: Path
    label: int


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Class names in label order, and the pictures of each split."""

    root: Path
    class_names: tuple[str, ...]
    train: tuple[Item, ...]
    val: tuple[Item, ...]
    test: tuple[Item, ...]
    sampling: Sampling = "balanced"
    """How shots are drawn (`training.shots`): "coop" where the data set comes as a CoOp split."""
    name: str = ""
    """For titles and columns: the folder's, the file's or the recipe's."""
    templates: tuple[str, ...] = ()
    """Texts with one {} that a recipe gives for this data set; none: the run's."""


Tests = dict[str, tuple[tuple[str, ...], tuple[Item, ...]]]
"""Split name to its class names and its pictures, labelled within them."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a protocol makes of a data set: the pictures to learn from, and per test split its classes and pictures."""

    class_names: tuple[str, ...]
    """The trained classes; labels of `train` and `val` index into it."""
    train: tuple[Item, ...]
    tests: Tests
    """By "all", by "base" and "novel", or by the data sets' names."""
    notes: tuple[str, ...] = ()
    """What the user should know of the data, with names; `problems` and what is merely worth knowing."""
    problems: tuple[str, ...] = ()
    """Pictures left out, classes with fewer pictures than shots, pictures in several splits or classes."""
    val: tuple[Item, ...] = ()
    """Validation pictures of the trained classes, where there are any: what may be chosen, is chosen on these."""
    templates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Templates of test splits that do not use the run's: other data sets with some of their own."""
    targets: tuple[str, ...] = ()
    """The test splits that are other data sets: those an average is taken over."""

    def split_templates(self, split: str, default: tuple[str, ...]) -> tuple[str, ...]:
        """Templates to test a split with, `default` where it has none of its own."""
        return self.templates.get(split) or default


def some(texts: Sequence[str], limit: int = 10) -> str:
    """The first `limit` of `texts`, and how many more there are."""
    rest = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + rest
