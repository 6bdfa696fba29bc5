"""Which training pictures a run learns from: so many of each class, by seed.

Two ways, by `DataSet.sampling`:

balanced
    `shots` pictures of each class at random, in the data set's order; a class with fewer gives all it has (ours).
coop
    the items that the CoOp family of methods (Zhou et al. 2022 and those built on its code) draws from the same split
    file with the same seed. What is reproduced: one stream of Python's `random`, seeded with the run's seed alone;
    classes in order of first appearance in the list; `random.sample` of a class's pictures in list order, or
    `random.choices` (with repetition) where it has fewer than `shots`; first the training list, then, from the same
    stream, the validation list with min(shots, 4) a class. The draw is over all classes; base-to-novel keeps the base
    half of it. With 0 shots both lists are taken whole.
    What cannot be: ImageNet, whose lists that code makes in the file system's order (ours are sorted), and the
    cached draws (`split_fewshot/*.pkl`) that people share: a pickle can run code, so none is opened.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

from training.items import DataSet, Item

__all__ = ["coop_shots", "draw", "few_shot"]

COOP_VAL_SHOTS = 4


def draw(
    data: DataSet, shots: int, seed: int, *, without: Collection[Path] = ()
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Training and validation pictures of every class, as if those in `without` were not in the lists.

    Without the coop way every validation picture is taken.
    """
    train = [item for item in data.train if item.path not in without]
    val = [item for item in data.val if item.path not in without]
    if data.sampling == "coop":
        return coop_shots(train, val, shots, seed)
    return few_shot(train, shots, seed), tuple(val)


def few_shot(items: Iterable[Item], shots: int, seed: int) -> tuple[Item, ...]:
    """`shots` pictures of each class at random, in the order given; all of a class that has fewer; 0: all."""
    groups = _by_label(items)
    chosen: list[Item] = []
    for label in sorted(groups):
        found = groups[label]
        order = np.random.default_rng((seed, label)).permutation(len(found))[: shots or None]
        chosen += [found[i] for i in sorted(order.tolist())]
    return tuple(chosen)


def coop_shots(
    train: Sequence[Item], val: Sequence[Item], shots: int, seed: int
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Training and validation pictures as the CoOp family draws them (module docstring), in its order.

    Args:
        train: the split file's training list, in its order.
        val: its validation list.
        shots: pictures a class; 0: all of both lists.
        seed: of the run.
    """
    if shots < 1:
        return tuple(train), tuple(val)
    stream = random.Random(seed)
    return _sampled(train, shots, stream), _sampled(val, min(shots, COOP_VAL_SHOTS), stream)


def _sampled(items: Iterable[Item], shots: int, stream: random.Random) -> tuple[Item, ...]:
    chosen: list[Item] = []
    for found in _by_label(items).values():
        enough = len(found) >= shots
        chosen += stream.sample(found, shots) if enough else stream.choices(found, k=shots)
    return tuple(chosen)


def _by_label(items: Iterable[Item]) -> dict[int, list[Item]]:
    """Labels in order of first appearance."""
    groups: dict[int, list[Item]] = {}
    for item in items:
        groups.setdefault(item.label, []).append(item)
    return groups
