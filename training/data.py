"""Labelled pictures on disk: image folders, CSV files and split JSON files; shots, halves, checks."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dear_serve.errors import DataError, ImageError, LabelError
from dear_serve.labels import validate_labels
from dear_serve.preprocess import decode_image

__all__ = ["DataSet", "Item", "PictureCheck", "Task", "few_shot", "fingerprint", "load_data", "make_task"]

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif")
)
SPLITS = ("train", "val", "test")
TEST_SHARE = 0.3
_TREE = """expected is one of:
  {root}/train/<class>/*.jpg and {root}/test/<class>/*.jpg (and, if there is one, {root}/val/<class>/*.jpg)
  {root}/<class>/*.jpg, which is then split 70 to 30
  a CSV file with columns path,label,split or a JSON file with lists train, val, test of [path, label, class name]"""


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


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a protocol makes of a data set: the pictures to learn from, and per test split its classes and pictures."""

    class_names: tuple[str, ...]
    """The trained classes; labels of `train` index into it."""
    train: tuple[Item, ...]
    tests: dict[str, tuple[tuple[str, ...], tuple[Item, ...]]]
    """Split name ("all", or "base" and "novel") to its class names and its pictures, labelled within them."""
    notes: tuple[str, ...] = ()
    """What the user should know: pictures left out, classes with fewer pictures than shots."""


# --- reading --------------------------------------------------------------------------------------


def load_data(path: Path, *, split_seed: int = 0) -> DataSet:
    """Read a data set's lists; no picture is opened.

    Args:
        path: an image folder (`train/[val/]test/<class>/…`, or `<class>/…` with a seeded 70 to 30 split within each
            class), a CSV file (`path,label[,split]`, paths relative to it), or a JSON file of the CoOp kind.
        split_seed: of the split, where the data set has none; not the seed of a training run.

    Returns:
        Classes in order of folder name, of first appearance in the CSV's sorted labels, or of the JSON's labels. Names
        of folders have their underscores as spaces and are otherwise untouched.

    Raises:
        DataError: nothing usable there; the message names the path and the expected tree.
    """
    if path.is_dir():
        return _check(path, _from_folder(path, split_seed))
    if not path.is_file():
        raise DataError(f"{path} does not exist; {_TREE.format(root=path)}")
    if path.suffix.lower() == ".csv":
        return _check(path, _from_csv(path, split_seed))
    if path.suffix.lower() == ".json":
        return _check(path, _from_json(path))
    raise DataError(
        f"{path} is neither a folder nor a .csv nor a .json file; {_TREE.format(root=path.parent)}"
    )


def _check(path: Path, data: DataSet) -> DataSet:
    try:
        validate_labels(data.class_names, max_labels=100_000)
    except LabelError as error:
        raise DataError(f"{path}: class names cannot be told apart: {error.message}") from error
    if len(data.class_names) < 2:
        raise DataError(f"{path} has the one class {data.class_names[0]!r}; 2 or more are needed")
    for name in ("train", "test"):
        if not getattr(data, name):
            raise DataError(f"{path} has no {name} pictures; {_TREE.format(root=path)}")
    return data


def _folders(root: Path) -> list[Path]:
    return sorted(
        (p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.name
    )


def _pictures(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())


def _from_folder(root: Path, seed: int) -> DataSet:
    folders = _folders(root)
    if "train" in {f.name for f in folders}:
        if not (root / "test").is_dir():
            raise DataError(f"{root} has train/ and no test/; {_TREE.format(root=root)}")
        lists = {s: {f.name: _pictures(f) for f in _folders(root / s)} for s in SPLITS if (root / s).is_dir()}
        names = sorted({name for split in lists.values() for name, found in split.items() if found})
    else:
        whole = {f.name: found for f in folders if (found := _pictures(f))}
        names = sorted(whole)
        lists = _split({name: whole[name] for name in names}, seed)
    if not names:
        raise DataError(f"{root} holds no pictures in class folders; {_TREE.format(root=root)}")
    return _assemble(root, names, lists, titles=[name.replace("_", " ") for name in names])


def _split(whole: dict[str, list[Path]], seed: int) -> dict[str, dict[str, list[Path]]]:
    """70 to 30 within each class, at random; a class of one picture trains."""
    lists: dict[str, dict[str, list[Path]]] = {"train": {}, "test": {}}
    for index, (name, found) in enumerate(whole.items()):
        order = np.random.default_rng((seed, index)).permutation(len(found)).tolist()
        count = min(len(found) - 1, max(1, round(TEST_SHARE * len(found))))
        lists["test"][name] = [found[i] for i in sorted(order[:count])]
        lists["train"][name] = [found[i] for i in sorted(order[count:])]
    return lists


def _assemble(
    root: Path, names: Sequence[str], lists: dict[str, dict[str, list[Path]]], *, titles: Sequence[str]
) -> DataSet:
    def items(split: str) -> tuple[Item, ...]:
        groups = lists.get(split, {})
        return tuple(Item(path=p, label=i) for i, name in enumerate(names) for p in groups.get(name, []))

    return DataSet(
        root=root, class_names=tuple(titles), train=items("train"), val=items("val"), test=items("test")
    )


def _from_csv(path: Path, seed: int) -> DataSet:
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            columns = reader.fieldnames or []
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}") from error
    if not {"path", "label"} <= set(columns):
        raise DataError(f"{path} has columns {', '.join(columns) or 'none'}; path,label[,split] are expected")
    names = sorted({row["label"] for row in rows if row["label"]})
    lists: dict[str, dict[str, list[Path]]] = {s: {n: [] for n in names} for s in (*SPLITS, "")}
    for number, row in enumerate(rows, 2):
        split = (row.get("split") or "").strip()
        if not row["label"] or not row["path"] or split not in lists:
            raise DataError(
                f"{path}, line {number}: path {row['path']!r}, label {row['label']!r}, split {split!r}; "
                f"a path, a label and one of {', '.join(SPLITS)} are expected"
            )
        lists[split][row["label"]].append(path.parent / row["path"])
    unsplit = lists.pop("")
    if "split" not in columns:
        lists = _split(unsplit, seed)
    elif any(unsplit.values()):
        raise DataError(f"{path}: some rows have no split; name one of {', '.join(SPLITS)} in every row")
    return _assemble(path.parent, names, lists, titles=names)


def _from_json(path: Path) -> DataSet:
    """Lists train, val, test of [path, label, class name], as the CoOp family of methods shares its splits."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        triples = {s: [(str(p), int(n), str(name)) for p, n, name in data.get(s, [])] for s in SPLITS}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be read as lists train, val, test of [path, label, class name]: {error}"
        ) from error
    titles = {label: name for split in triples.values() for _, label, name in split}
    if sorted(titles) != list(range(len(titles))) or not titles:
        raise DataError(f"{path} has labels {sorted(titles)[:5]}…; 0 to C-1 without gaps are expected")
    first = next(p for split in triples.values() for p, _, _ in split)
    roots = [path.parent, *_folders(path.parent)]
    root = next((r for r in roots if (r / first).is_file()), None)
    if root is None:
        raise DataError(f"{path} lists {first}, which is neither in {path.parent} nor in a folder of it")
    parts = {s: tuple(Item(path=root / p, label=n) for p, n, _ in triples[s]) for s in SPLITS}
    names = tuple(titles[i].replace("_", " ") for i in range(len(titles)))
    return DataSet(root=root, class_names=names, train=parts["train"], val=parts["val"], test=parts["test"])


# --- protocols ------------------------------------------------------------------------------------


def few_shot(items: Iterable[Item], shots: int, seed: int) -> tuple[Item, ...]:
    """`shots` pictures of each class at random, in the order given; all of a class that has fewer; 0: all."""
    groups: dict[int, list[Item]] = {}
    for item in items:
        groups.setdefault(item.label, []).append(item)
    chosen: list[Item] = []
    for label in sorted(groups):
        found = groups[label]
        order = np.random.default_rng((seed, label)).permutation(len(found))[: shots or None]
        chosen += [found[i] for i in sorted(order.tolist())]
    return tuple(chosen)


class PictureCheck:
    """Decodes pictures, each once, to see that they can be.

    Args:
        skip: leave unreadable pictures out (they are in `bad`) instead of raising.
        progress: wraps the pictures about to be decoded, to show how far it is.
    """

    def __init__(
        self, *, skip: bool = False, progress: Callable[[Sequence[Item]], Iterable[Item]] = iter
    ) -> None:
        self.bad: dict[Path, str] = {}
        """Path of each unreadable picture, and why."""
        self._skip = skip
        self._progress = progress
        self._seen: set[Path] = set()

    def __call__(self, items: Sequence[Item]) -> bool:
        """Whether any of `items` is unreadable. Raises DataError naming them unless `skip`."""
        for item in self._progress([item for item in items if item.path not in self._seen]):
            self._seen.add(item.path)
            try:
                decode_image(item.path.read_bytes())
            except OSError as error:
                self.bad[item.path] = error.strerror or "cannot be opened"
            except ImageError as error:
                self.bad[item.path] = error.code.replace("_", " ")
        found = [f"{i.path} ({self.bad[i.path]})" for i in items if i.path in self.bad]
        if found and not self._skip:
            raise DataError(
                f"{len(found)} pictures cannot be read: {_some(found)}; mend or remove them, "
                "or leave them out with --skip-unreadable"
            )
        return bool(found)


def make_task(
    data: DataSet,
    *,
    protocol: str,
    shots: int,
    seed: int,
    check: PictureCheck,
) -> Task:
    """The task of one protocol and seed, every picture of it decoded once to see that it can be.

    Base-to-novel trains on the first half of the classes by label order (the larger one if they are odd) and tests each
    half among its own classes (Zhou et al. 2022, CoCoOp).

    Raises:
        DataError: unreadable pictures that `check` does not skip, a class without training or test pictures.
    """
    classes = len(data.class_names)
    base = (classes + 1) // 2 if protocol == "base-to-novel" else classes
    pool = [item for item in data.train if item.label < base]
    train = few_shot(pool, shots, seed)
    while check(train):  # pictures left out are made up for by others, until all chosen ones can be read
        train = few_shot((i for i in pool if i.path not in check.bad), shots, seed)
    check(data.test)
    bad = check.bad
    test = tuple(item for item in data.test if item.path not in bad)
    tests = {"all": (data.class_names, test)}
    if protocol == "base-to-novel":
        novel = tuple(replace(item, label=item.label - base) for item in test if item.label >= base)
        first = tuple(item for item in test if item.label < base)
        tests = {"base": (data.class_names[:base], first), "novel": (data.class_names[base:], novel)}
    names = data.class_names[:base]
    _check_covered(data, names, train, tests)
    return Task(class_names=names, train=train, tests=tests, notes=_notes(names, train, shots, bad))


def _check_covered(
    data: DataSet,
    names: Sequence[str],
    train: Sequence[Item],
    tests: dict[str, tuple[tuple[str, ...], tuple[Item, ...]]],
) -> None:
    groups = [("train", names, train), *(("test", classes, items) for classes, items in tests.values())]
    for split, classes, items in groups:
        missing = [classes[i] for i in sorted(set(range(len(classes))) - {item.label for item in items})]
        if missing:
            raise DataError(
                f"{data.root}: no {split} pictures of {_some(missing)}; add some, or remove the class everywhere"
            )


def _notes(names: Sequence[str], train: Sequence[Item], shots: int, bad: dict[Path, str]) -> tuple[str, ...]:
    notes = []
    if bad:
        notes.append(f"{len(bad)} unreadable pictures left out: {_some([str(p) for p in bad])}")
    counts = np.bincount([item.label for item in train], minlength=len(names))
    few = [f"{name} ({count})" for name, count in zip(names, counts, strict=True) if count < shots]
    if few:
        notes.append(f"fewer than {shots} training pictures of {_some(few)}: all of them are used")
    return tuple(notes)


def _some(texts: Sequence[str], limit: int = 10) -> str:
    rest = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + rest


def fingerprint(task: Task) -> str:
    """sha256 (hexadecimal) over the trained class names, the training pictures' content and the test lists."""
    digest = hashlib.sha256()
    digest.update(json.dumps(task.class_names).encode())
    for item in task.train:
        digest.update(hashlib.sha256(item.path.read_bytes()).digest() + item.label.to_bytes(4, "big"))
    for name, (classes, items) in task.tests.items():
        listed = [(item.path.name, item.label) for item in items]
        digest.update(json.dumps([name, classes, listed]).encode())
    return digest.hexdigest()
