"""Tasks: what a protocol makes of a data set, checked before the first step.

few-shot       some pictures of every class; tested on every class
all            every training picture of every class
base-to-novel  trained on the first half of the classes by label order (the larger one if they are odd), each half
               tested among its own classes (Zhou et al. 2022, CoCoOp)
cross-dataset  few-shot, then tested on other data sets, each among its own classes
domain         few-shot, then tested on other pictures of the same classes (or of some of them)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from dear_serve.errors import ConfigError, DataError
from dear_serve.tokenizer import clean_text
from training.checks import PictureCheck, few_note, order_note, path_note, same_picture_notes
from training.items import DataSet, Item, Task, Tests, some
from training.layouts import load_data
from training.shots import coop_shots, draw, few_shot

__all__ = [
    "TARGET_PROTOCOLS",
    "DataSet",
    "Item",
    "PictureCheck",
    "Task",
    "Tests",
    "coop_shots",
    "distinct_names",
    "few_shot",
    "fingerprint",
    "load_data",
    "make_task",
    "test_splits",
]

TARGET_PROTOCOLS = ("cross-dataset", "domain")
"""Those that test on other data sets."""


def make_task(
    data: DataSet,
    *,
    protocol: str,
    shots: int,
    seed: int,
    check: PictureCheck,
    targets: Sequence[DataSet] = (),
) -> Task:
    """The task of one protocol and seed, every picture of it decoded once to see that it can be.

    Args:
        data: what is trained on.
        protocol: of the module docstring.
        shots: training pictures a class; 0: all.
        seed: of their draw (`training.shots`).
        check: decodes the pictures; knows which are unreadable.
        targets: other data sets to test on, for "cross-dataset" and "domain" alone.

    Raises:
        DataError: unreadable pictures that `check` does not skip, a class without training or test pictures, a
            target with classes that were not trained on (domain).
        ConfigError: targets missing, or given to a protocol without any.
    """
    base = _base_count(data, protocol)
    train, val = _draw(data, base, shots, seed, check)
    tests, sources = test_splits(data, protocol, check, targets=targets)
    names = data.class_names[:base]
    _check_covered(data, names, train, tests)
    others = tuple(sources)[1:] if targets else ()
    problems = (
        *_draw_notes(data, names, (train, val), shots, check),
        *_split_notes(data, (train, val), targets, check),
    )
    return Task(
        class_names=names,
        train=train,
        val=val,
        tests=tests,
        problems=problems,
        notes=(*problems, *(note for found in (data, *targets) if (note := order_note(found)))),
        templates={name: sources[name].templates for name in others if sources[name].templates},
        targets=others,
    )


def _base_count(data: DataSet, protocol: str) -> int:
    """How many of the classes, from the first label on, are trained."""
    classes = len(data.class_names)
    if protocol != "base-to-novel":
        return classes
    absent = sorted(set(range(classes)) - {item.label for item in data.train})
    if data.sampling == "coop" and absent:
        names = some([data.class_names[i] for i in absent])
        raise DataError(
            f"{data.root}: no train pictures of {names}; the halves of this protocol are counted over trained classes"
        )
    return (classes + 1) // 2


def _draw(
    data: DataSet, base: int, shots: int, seed: int, check: PictureCheck
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Pictures left out are made up for by others, until all that were drawn can be read."""
    while True:
        drawn = draw(data, shots, seed, without=check.bad)
        train, val = (tuple(item for item in items if item.label < base) for items in drawn)
        if not check((*train, *val)):
            return train, val


# --- what is tested -------------------------------------------------------------------------------


def test_splits(
    data: DataSet, protocol: str, check: PictureCheck, *, targets: Sequence[DataSet] = ()
) -> tuple[Tests, dict[str, DataSet]]:
    """The test splits of a protocol, without unreadable pictures, and the data set that each is of.

    With targets the first split is `data`'s own.
    """
    if (protocol in TARGET_PROTOCOLS) != bool(targets):
        raise ConfigError(
            f"protocol {protocol} needs data sets to test on: give them as --test-on"
            if protocol in TARGET_PROTOCOLS
            else f"protocol {protocol} tests on its own data set alone; use cross-dataset or domain to test on others",
            field="test_on",
        )
    for found in (data, *targets):
        check(found.test)
    if protocol == "base-to-novel":
        return _halves(data, check), dict.fromkeys(("base", "novel"), data)
    if not targets:
        return {"all": (data.class_names, _readable(data, check))}, {"all": data}
    if protocol == "domain":
        for target in targets:
            _check_same_classes(data, target)
    sources = dict(
        zip(distinct_names([found.name for found in (data, *targets)]), (data, *targets), strict=True)
    )
    return {name: (found.class_names, _readable(found, check)) for name, found in sources.items()}, sources


def _halves(data: DataSet, check: PictureCheck) -> Tests:
    base = (len(data.class_names) + 1) // 2
    test = _readable(data, check)
    novel = tuple(replace(item, label=item.label - base) for item in test if item.label >= base)
    first = tuple(item for item in test if item.label < base)
    return {"base": (data.class_names[:base], first), "novel": (data.class_names[base:], novel)}


def _readable(data: DataSet, check: PictureCheck) -> tuple[Item, ...]:
    return tuple(item for item in data.test if item.path not in check.bad)


def _check_same_classes(data: DataSet, target: DataSet) -> None:
    known = {clean_text(name) for name in data.class_names}
    other = [name for name in target.class_names if clean_text(name) not in known]
    if other:
        raise DataError(
            f"{target.root} has {len(other)} classes that {data.root} has not: {some(other)}; the domain protocol "
            "tests the same classes on other pictures (cross-dataset: other classes)"
        )


def distinct_names(names: Sequence[str]) -> list[str]:
    """`names`, a number added to those that were there before."""
    out: list[str] = []
    for name in names:
        tries = [name, *(f"{name} ({i})" for i in range(2, len(names) + 2))]
        out.append(next(t for t in tries if t not in out))
    return out


def _check_covered(data: DataSet, names: Sequence[str], train: Sequence[Item], tests: Tests) -> None:
    groups = [("train", names, train), *(("test", classes, items) for classes, items in tests.values())]
    for split, classes, items in groups:
        missing = [classes[i] for i in sorted(set(range(len(classes))) - {item.label for item in items})]
        if missing:
            raise DataError(
                f"{data.root}: no {split} pictures of {some(missing)}; add some, or remove the class everywhere"
            )


# --- what is said ---------------------------------------------------------------------------------

Drawn = tuple[tuple[Item, ...], tuple[Item, ...]]


def _draw_notes(
    data: DataSet, names: Sequence[str], drawn: Drawn, shots: int, check: PictureCheck
) -> tuple[str, ...]:
    train, val = drawn
    notes = []
    if check.bad:
        notes.append(f"{len(check.bad)} unreadable pictures left out: {some([str(p) for p in check.bad])}")
        if data.sampling == "coop":
            notes.append(
                "with pictures left out the draw is not the one that others get from this split file"
            )
    notes.append(few_note(names, train, shots, repeats=data.sampling == "coop"))
    without = [name for i, name in enumerate(names) if i not in {item.label for item in val}]
    if val and without:
        notes.append(f"no validation pictures of {some(without)}")
    return tuple(note for note in notes if note)


def _split_notes(
    data: DataSet, drawn: Drawn, targets: Sequence[DataSet], check: PictureCheck
) -> tuple[str, ...]:
    """Notes on what stands in several lists, by path, and by content of the pictures that are used."""
    groups = {
        split: [(item.path, data.class_names[item.label]) for item in items]
        for split, items in zip(("train", "val", "test"), (*drawn, data.test), strict=True)
    }
    names = distinct_names([data.name, *(target.name for target in targets)])[1:]
    for name, target in zip(names, targets, strict=True):
        groups[name] = [(item.path, target.class_names[item.label]) for item in target.test]
    listed = path_note(data)
    return (*((listed,) if listed else ()), *same_picture_notes(groups, check.hashes))


def fingerprint(task: Task) -> str:
    """sha256 (hexadecimal) over the trained class names, the pictures learned and chosen from, and the test lists."""
    digest = hashlib.sha256()
    digest.update(json.dumps(task.class_names).encode())
    for item in (*task.train, *task.val):
        digest.update(hashlib.sha256(item.path.read_bytes()).digest() + item.label.to_bytes(4, "big"))
    for name, (classes, items) in task.tests.items():
        listed = [(item.path.name, item.label) for item in items]
        digest.update(json.dumps([name, classes, listed]).encode())
    return digest.hexdigest()
