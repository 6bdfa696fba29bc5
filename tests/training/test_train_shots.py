"""Draws of training pictures: ours, and the CoOp family's from a split file, item for item."""

from __future__ import annotations

import json
import random

import pytest

from training.data import PictureCheck, load_data, make_task
from training.items import Item
from training.shots import coop_shots, draw, few_shot

# What that family's code gives for these lists (class b first, in order of appearance) with seeds 1 and 2.
DRAWN = {
    (4, 1): ("b1 b4 b0 b5 a0 a3 a4 a1 c1 c1 c0 c0", "B0 B0 B0 B0 A1 A2 A0 A2 C2 C0 C3 C4"),
    (1, 2): ("b0 a0 c0", "B0 A0 C2"),
}


def items(letters, counts):
    return [Item(path=f"{x}{i}", label="abc".index(x.lower())) for x in letters for i in range(counts[x])]


def lists():
    """Class c has fewer pictures than 4 shots; so has b of validation pictures."""
    return items("bac", {"b": 6, "a": 6, "c": 2}), items("BAC", {"A": 3, "B": 1, "C": 5})


@pytest.mark.parametrize(("shots", "seed"), DRAWN)
def test_coop_draw(shots, seed):
    drawn = coop_shots(*lists(), shots, seed)
    assert tuple(" ".join(item.path for item in found) for found in drawn) == DRAWN[shots, seed]


@pytest.mark.parametrize("shots", [1, 2, 4, 8, 16])
def test_coop_draw_is_one_stream_of_the_seed(shots):
    """The same calls on Python's own stream, as that code makes them."""
    state = random.getstate()
    try:
        random.seed(3)
        expected = []
        for source, count in zip(lists(), (shots, min(shots, 4)), strict=True):
            drawn = []
            for label in dict.fromkeys(item.label for item in source):
                found = [item for item in source if item.label == label]
                drawn += (
                    random.sample(found, count) if len(found) >= count else random.choices(found, k=count)
                )
            expected.append(tuple(drawn))
    finally:
        random.setstate(state)
    assert coop_shots(*lists(), shots, 3) == tuple(expected)


def test_coop_without_shots_takes_both_lists():
    train, val = lists()
    assert coop_shots(train, val, 0, 1) == (tuple(train), tuple(val))


def test_balanced_shots_are_seeded():
    chosen = few_shot([Item(path=f"{i}", label=i % 3) for i in range(30)], 4, 1)
    assert [i.label for i in chosen] == [0] * 4 + [1] * 4 + [2] * 4


# --- a split file of five classes, from list to task ----------------------------------------------


@pytest.fixture
def split(tmp_path, train_set):
    """Labels in another order than the names; pictures are copies of one another's class with another last byte."""
    source = sorted((train_set.pictures / "train" / "red_fox").glob("*.png"))[0].read_bytes()
    names = ["sea_lake", "forest", "river", "pasture", "highway"]
    parts = {}
    for split, count in (("train", 6), ("val", 3), ("test", 2)):
        parts[split] = []
        for i in range(count):  # pictures of all classes in turn, as such files may have them
            for label, name in enumerate(names):
                path = tmp_path / "images" / f"{split}-{name}-{i}.png"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(source + f"{split}{label}{i}".encode())
                parts[split].append([path.name, label, name])
    file = tmp_path / "split_zhou_Land.json"
    file.write_text(json.dumps(parts))
    return file


def reference(file, shots, seed):
    """Paths and new labels of train, val, test for base and new, straight from the protocol's description."""
    data = json.loads(file.read_text())
    stream = random.Random(seed)
    drawn = {"test": data["test"]}
    for part, count in (("train", shots), ("val", min(shots, 4))):
        drawn[part] = []
        for label in dict.fromkeys(row[1] for row in data[part]):
            rows = [row for row in data[part] if row[1] == label]
            drawn[part] += stream.sample(rows, count) if len(rows) >= count else stream.choices(rows, k=count)
    out = {}
    for name, selected in (("base", [0, 1, 2]), ("new", [3, 4])):  # ceil(5 / 2) base classes
        for part, rows in drawn.items():
            out[name, part] = [(row[0], selected.index(row[1])) for row in rows if row[1] in selected]
    return out


@pytest.mark.parametrize(("shots", "seed"), [(1, 1), (2, 1), (4, 2), (4, 3), (8, 1), (16, 1)])
def test_split_file_gives_the_protocols_items_and_classes(split, shots, seed):
    data = load_data(split)
    assert data.sampling == "coop"
    assert data.class_names == ("sea lake", "forest", "river", "pasture", "highway")
    task = make_task(data, protocol="base-to-novel", shots=shots, seed=seed, check=PictureCheck())
    expected = reference(split, shots, seed)
    found = {
        ("base", "train"): task.train,
        ("base", "val"): task.val,
        ("base", "test"): task.tests["base"][1],
        ("new", "test"): task.tests["novel"][1],
    }
    for part, chosen in found.items():
        assert [(item.path.name, item.label) for item in chosen] == expected[part], part
    assert task.class_names == task.tests["base"][0] == ("sea lake", "forest", "river")
    assert task.tests["novel"][0] == ("pasture", "highway")
    repeats = [note for note in task.notes if "more than once" in note]
    assert bool(repeats) == (shots > 6)


def test_few_shot_of_a_split_file_draws_over_all_classes(split):
    task = make_task(load_data(split), protocol="few-shot", shots=2, seed=1, check=PictureCheck())
    assert sorted({item.label for item in task.train}) == [0, 1, 2, 3, 4]
    assert (len(task.train), len(task.val), len(task.tests["all"][1])) == (10, 10, 10)


def test_left_out_pictures_are_drawn_again(split):
    data = load_data(split)
    first = draw(data, 2, 1)[0][0]
    first.path.write_bytes(b"broken")
    task = make_task(data, protocol="few-shot", shots=2, seed=1, check=PictureCheck(skip=True))
    assert first not in task.train
    assert task.train == draw(data, 2, 1, without=[first.path])[0]
    assert any("not the one that others get" in note for note in task.notes)
