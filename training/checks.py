"""What is looked at before the first step: can every picture be read, do the splits keep apart, do orders agree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dear_serve.errors import DataError, ImageError
from dear_serve.preprocess import decode_image
from training.items import DataSet, Item, some

__all__ = ["PictureCheck", "few_note", "order_note", "path_note", "same_picture_notes"]


class PictureCheck:
    """Decodes pictures, each once, to see that they can be, and takes the hash of their content.

    Args:
        skip: leave unreadable pictures out (they are in `bad`) instead of raising.
        progress: wraps the pictures about to be decoded, to show how far it is.
    """

    def __init__(
        self, *, skip: bool = False, progress: Callable[[Sequence[Item]], Iterable[Item]] = iter
    ) -> None:
        self.bad: dict[Path, str] = {}
        """Path of each unreadable picture, and why."""
        self.hashes: dict[Path, bytes] = {}
        """sha256 of each readable picture's file."""
        self._skip = skip
        self._progress = progress
        self._seen: set[Path] = set()

    def __call__(self, items: Sequence[Item]) -> bool:
        """Whether any of `items` is unreadable. Raises DataError naming them unless `skip`."""
        unseen = self._unseen(items)
        for item in self._progress(unseen) if unseen else ():
            self._seen.add(item.path)
            try:
                data = item.path.read_bytes()
                decode_image(data)
                self.hashes[item.path] = hashlib.sha256(data).digest()
            except OSError as error:
                self.bad[item.path] = error.strerror or "cannot be opened"
            except ImageError as error:
                self.bad[item.path] = error.code.replace("_", " ")
        found = list(dict.fromkeys(f"{i.path} ({self.bad[i.path]})" for i in items if i.path in self.bad))
        if found and not self._skip:
            raise DataError(
                f"{len(found)} pictures cannot be read: {some(found)}; mend or remove them, "
                "or leave them out with --skip-unreadable"
            )
        return bool(found)

    def _unseen(self, items: Sequence[Item]) -> list[Item]:
        unique = {item.path: item for item in items if item.path not in self._seen}
        return list(unique.values())


def few_note(names: Sequence[str], train: Sequence[Item], shots: int, *, repeats: bool) -> str:
    """Which classes have fewer different pictures than `shots`; "" if none."""
    different = {(item.label, item.path) for item in train}
    counts = np.bincount([label for label, _ in different], minlength=len(names))
    few = [f"{name} ({count})" for name, count in zip(names, counts, strict=True) if count < shots]
    if not few:
        return ""
    how = "some are drawn more than once" if repeats else "all of them are used"
    return f"fewer than {shots} training pictures of {some(few)}: {how}"


def path_note(data: DataSet) -> str:
    """Which files stand in two splits' lists; "" if none. (Copies under other names: `same_picture_notes`.)"""
    places: dict[Path, set[str]] = {}
    for split in ("train", "val", "test"):
        for item in getattr(data, split):
            places.setdefault(item.path, set()).add(split)
    found = [f"{path} ({', '.join(sorted(splits))})" for path, splits in places.items() if len(splits) > 1]
    return f"{len(found)} files are listed in more than one split: {some(found)}" if found else ""


def same_picture_notes(
    groups: Mapping[str, Sequence[tuple[Path, str]]], hashes: Mapping[Path, bytes]
) -> tuple[str, ...]:
    """Pictures of equal content in several groups, or under several class names; by path and names.

    Args:
        groups: split name ("train", "val", "test", …) to path and class name of each picture.
        hashes: of their contents; pictures that are not in it are passed over.
    """
    places: dict[bytes, list[tuple[str, Path, str]]] = {}
    for split, pictures in groups.items():
        for path, name in dict.fromkeys(pictures):
            if path in hashes:
                places.setdefault(hashes[path], []).append((split, path, name))
    shared, contrary = [], []
    for found in places.values():
        listed = " = ".join(f"{split} {path}" for split, path, _ in found)
        if len({split for split, _, _ in found}) > 1:
            shared.append(listed)
        if len({name for _, _, name in found}) > 1:
            contrary.append(f"{listed} ({' / '.join(dict.fromkeys(name for _, _, name in found))})")
    notes = []
    if shared:
        notes.append(f"{len(shared)} pictures stand in more than one split: {some(shared)}")
    if contrary:
        notes.append(f"{len(contrary)} pictures stand in more than one class: {some(contrary)}")
    return tuple(notes)


def order_note(data: DataSet) -> str:
    """Whether labels and the pictures' folders count in different orders; "" if not, or if folders are not classes.

    The halves of base-to-novel, and every list of numbers by label, follow the labels.
    """
    folders: dict[int, set[str]] = {}
    for item in (*data.train, *data.val, *data.test):
        folders.setdefault(item.label, set()).add(item.path.parent.name)
    if any(len(found) > 1 for found in folders.values()):
        return ""
    order = [next(iter(folders[label])) for label in sorted(folders)]
    if len(set(order)) < len(order):
        return ""
    expected = sorted(order, key=_natural)
    differing = [f"{a} is label {i}" for i, (a, b) in enumerate(zip(order, expected, strict=True)) if a != b]
    if not differing:
        return ""
    how = "count as numbers" if all(name.isdecimal() for name in order) else "sort"
    return f"labels are not in the order in which the folders {how}: {some(differing, 3)}; the labels' order is used"


def _natural(name: str) -> tuple[int, str]:
    """Folders that are all numbers are compared as numbers."""
    return (int(name), name) if name.isdecimal() else (-1, name)
