"""What a stopped run may be gone on with: the same options, base and pictures, or an error that says what changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dear_serve.errors import ConfigError, DataError
from training.items import Item, Task, some

__all__ = ["check_resumed", "describe"]

_DATA = "data"


def describe(task: Task, hashes: Mapping[Path, bytes]) -> dict[str, Any]:
    """Classes, pictures by content and path, and test lists of a task, as JSON data.

    Args:
        task: as it is trained.
        hashes: sha256 of the training and validation pictures (see `checks.PictureCheck`).
    """

    def listed(items: tuple[Item, ...]) -> list[list[str]]:
        names = task.class_names
        return [[hashes[i.path].hex()[:24], names[i.label], str(i.path)] for i in items]

    tests = {
        name: [
            list(classes),
            hashlib.sha256(json.dumps([[i.path.name, i.label] for i in items]).encode()).hexdigest(),
        ]
        for name, (classes, items) in task.tests.items()
    }
    return {
        "classes": list(task.class_names),
        "training pictures": listed(task.train),
        "validation pictures": listed(task.val),
        "tests": tests,
    }


def check_resumed(file: Path, identity: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    """Compare a run with what `file` says of the stopped one; write that file if there is none.

    Args:
        file: in the folder of the run's state.
        identity: everything that the outcome depends on, as a JSON table; its "data" is only looked at through
            `described`.
        described: of `describe`.

    Raises:
        ConfigError: an option, the base or the data differ; the message says which and how (the data only where
            options and base are the same: others draw other pictures).
        DataError: the disk is full, or the folder cannot be written.
    """
    new = {"identity": dict(identity), _DATA: dict(described)}
    if not file.is_file():
        _write(file, json.dumps(new))
        return
    try:
        old: Any = json.loads(file.read_text(encoding="utf-8"))
        differing = _options(old["identity"], new["identity"]) or _pictures(old[_DATA], new[_DATA])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} is not what a stopped run leaves ({error}); start again without --resume", field="resume"
        ) from error
    if differing:
        raise ConfigError(
            f"the stopped run was another one: {'; '.join(differing)}. "
            "Put that back as it was, or start again without --resume",
            field="resume",
        )


def _write(file: Path, text: str) -> None:
    partial = file.with_suffix(f".partial-{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise DataError(
            f"{file} cannot be written ({error.strerror}); make room or choose another --out", field="out"
        ) from error


def _options(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> list[str]:
    """Differing entries of two tables, nested ones by their dotted names."""
    found = []
    for key in dict.fromkeys((*old, *new)):
        a, b, name = old.get(key), new.get(key), f"{where}{key}"
        if a == b or name == _DATA:
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += _options(a, b, f"{name}.")
        else:
            found.append(f"{name} was {_short(a)} and is {_short(b)}")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 70 else f"{text[:66]} …"


def _pictures(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two data sets, with the pictures' paths."""
    found = []
    if old["classes"] != new["classes"]:
        found.append(f"the classes were {some(old['classes'])} and are {some(new['classes'])}")
    for what in ("training pictures", "validation pictures"):
        if old[what] != new[what]:
            found += _changes(what, old[what], new[what])
    for name in dict.fromkeys((*old["tests"], *new["tests"])):
        if old["tests"].get(name) != new["tests"].get(name):
            found.append(f"the test list {name!r} has changed")
    return found


def _changes(what: str, old: list[list[str]], new: list[list[str]]) -> list[str]:
    """Contents gone and new, told by path; a path in both has other content now. Moved pictures are the same."""
    before, after = (Counter((content, name) for content, name, _ in rows) for rows in (old, new))
    gone = {path for content, name, path in old if (content, name) in before - after}
    added = {path for content, name, path in new if (content, name) in after - before}
    kinds = (
        ("changed", gone & added),
        ("no longer there", gone - added),
        ("new", added - gone),
    )
    found = [f"{len(paths)} {what} {kind}: {some(sorted(paths), 5)}" for kind, paths in kinds if paths]
    if not found and [row[:2] for row in old] != [row[:2] for row in new]:
        found.append(f"the {what} are in another order")
    return found
