"""Labelled pictures on disk: image folders, CSV files and split JSON files to lists of every split; none is opened."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dear_serve.errors import DataError, LabelError
from dear_serve.labels import validate_labels
from training.items import DataSet, Item, some

__all__ = ["check_names", "load_data", "pictures", "read_split", "split_data"]

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif")
)
SPLITS = ("train", "val", "test")
TEST_SHARE = 0.3
_TREE = """expected is one of:
  {root}/train/<class>/*.jpg and {root}/test/<class>/*.jpg (and, if there is one, {root}/val/<class>/*.jpg)
  {root}/<class>/*.jpg, which is then split 70 to 30
  a CSV file with columns path,label,split or a JSON file with lists train, val, test of [path, label, class name]"""


# --- reading --------------------------------------------------------------------------------------


def load_data(path: Path, *, split_seed: int = 0, target: bool = False) -> DataSet:
    """Read a data set's lists; no picture is opened.

    Args:
        path: an image folder (`train/[val/]test/<class>/…`, or `<class>/…` with a seeded 70 to 30 split within each
            class), a CSV file (`path,label[,split]`, paths relative to it), or a JSON file of the CoOp kind.
        split_seed: of the split, where the data set has none; not the seed of a training run.
        target: only to be tested on: it needs no training pictures, and where it has no splits all of it is tested on.

    Returns:
        Classes in order of folder name, of first appearance in the CSV's sorted labels, or of the JSON's labels. Names
        of folders have their underscores as spaces and are otherwise untouched.

    Raises:
        DataError: nothing usable there; the message names the path and the expected tree.
    """
    if path.is_dir():
        data = _from_folder(path, split_seed, target)
    elif not path.is_file():
        raise DataError(f"{path} does not exist; {_TREE.format(root=path)}")
    elif path.suffix.lower() == ".csv":
        data = _from_csv(path, split_seed, target)
    elif path.suffix.lower() == ".json":
        data = _from_json(path)
    else:
        raise DataError(
            f"{path} is neither a folder nor a .csv nor a .json file; {_TREE.format(root=path.parent)}"
        )
    named = replace(data, name=path.stem if path.is_file() else path.resolve().name)
    return check_names(path, named, target=target, tree=_TREE.format(root=path))


def check_names(path: Path, data: DataSet, *, target: bool, tree: str) -> DataSet:
    """`data`, once its classes can be told apart and no split that is needed is empty; DataError showing `tree`."""
    try:
        validate_labels(data.class_names, max_labels=100_000)
    except LabelError as error:
        raise DataError(f"{path}: class names cannot be told apart: {error.message}") from error
    if len(data.class_names) < 2:
        raise DataError(f"{path} has the one class {data.class_names[0]!r}; 2 or more are needed")
    for name in ("test",) if target else ("train", "test"):
        if not getattr(data, name):
            raise DataError(f"{path} has no {name} pictures; {tree}")
    return data


def _folders(root: Path) -> list[Path]:
    return sorted(
        (p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.name
    )


def pictures(folder: Path) -> list[Path]:
    """Every picture in `folder` and below, sorted."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())


def _from_folder(root: Path, seed: int, target: bool) -> DataSet:
    folders = _folders(root)
    splits = {f.name for f in folders} & set(SPLITS)
    if splits >= {"train"} or (target and splits >= {"test"}):
        if "test" not in splits:
            raise DataError(f"{root} has train/ and no test/; {_TREE.format(root=root)}")
        lists = {s: {f.name: pictures(f) for f in _folders(root / s)} for s in SPLITS if s in splits}
        names = sorted({name for split in lists.values() for name, found in split.items() if found})
    else:
        whole = {f.name: found for f in folders if (found := pictures(f))}
        names = sorted(whole)
        whole = {name: whole[name] for name in names}
        lists = {"test": whole} if target else _split(whole, seed)
    if not names:
        raise DataError(f"{root} holds no pictures in class folders; {_TREE.format(root=root)}")
    return _assemble(root, names, lists, titles=[name.replace("_", " ") for name in names])


def _split(whole: Mapping[str, list[Path]], seed: int) -> dict[str, dict[str, list[Path]]]:
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


def _from_csv(path: Path, seed: int, target: bool) -> DataSet:
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
        lists = {"test": unsplit} if target else _split(unsplit, seed)
    elif any(unsplit.values()):
        raise DataError(f"{path}: some rows have no split; name one of {', '.join(SPLITS)} in every row")
    return _assemble(path.parent, names, lists, titles=names)


def _from_json(path: Path) -> DataSet:
    names, lists = read_split(path)
    first = next(p for split in lists.values() for p, _ in split)
    roots = [path.parent, *_folders(path.parent)]
    root = next((r for r in roots if (r / first).is_file()), None)
    if root is None:
        raise DataError(f"{path} lists {first}, which is neither in {path.parent} nor in a folder of it")
    return split_data(root, names, lists)


def read_split(path: Path) -> tuple[tuple[str, ...], dict[str, list[tuple[str, int]]]]:
    """A JSON file of lists train, val, test of [path, label, class name], as the CoOp family of methods shares them.

    Returns:
        Class names by label, untouched; per split the paths, as written, and labels, in the file's order.

    Raises:
        DataError: not such a file, labels with gaps, a label with two names; the message names it.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        triples = {s: [(str(p), int(n), str(name)) for p, n, name in data.get(s, [])] for s in SPLITS}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be read as lists train, val, test of [path, label, class name]: {error}"
        ) from error
    titles: dict[int, dict[str, None]] = {}
    for split in triples.values():
        for _, label, name in split:
            titles.setdefault(label, {})[name] = None
    if sorted(titles) != list(range(len(titles))) or not titles:
        raise DataError(f"{path} has labels {sorted(titles)[:5]}…; 0 to C-1 without gaps are expected")
    several = [f"{label} ({' / '.join(found)})" for label, found in titles.items() if len(found) > 1]
    if several:
        raise DataError(f"{path} gives more than one class name to labels {some(several)}; correct the file")
    names = tuple(next(iter(titles[i])) for i in range(len(titles)))
    return names, {s: [(p, label) for p, label, _ in triples[s]] for s in SPLITS}


def split_data(
    root: Path,
    names: Sequence[str],
    lists: Mapping[str, Sequence[tuple[str, int]]],
    spellings: Mapping[str, str] | None = None,
) -> DataSet:
    """The data set of a split file whose paths start at `root`, shots drawn the CoOp way.

    Class names are spelled as `spellings` says, underscores as spaces where it says nothing.
    """
    train, val, test = (tuple(Item(path=root / p, label=n) for p, n in lists[s]) for s in SPLITS)
    titles = tuple((spellings or {}).get(name, name.replace("_", " ")) for name in names)
    return DataSet(root=root, class_names=titles, train=train, val=val, test=test, sampling="coop")
