"""Data sets on disk: what is read, in which order, and what is said when it cannot be used."""

from __future__ import annotations

import json
import shutil

import pytest

from dear_serve.errors import DataError
from training.data import Item, PictureCheck, few_shot, fingerprint, load_data, make_task

NAMES = ("blue cup", "green tree", "grey stone", "red fox")


@pytest.fixture
def folder(train_set, tmp_path):
    return shutil.copytree(train_set.pictures, tmp_path / "noise")


def task(data, protocol="few-shot", shots=2, seed=1, **check):
    return make_task(data, protocol=protocol, shots=shots, seed=seed, check=PictureCheck(**check))


def test_folder_with_splits(folder):
    data = load_data(folder)
    assert data.class_names == NAMES
    assert (len(data.train), len(data.val), len(data.test)) == (20, 0, 12)
    assert data.train[5] == Item(path=folder / "train" / "green_tree" / "0.png", label=1)


def test_folder_of_classes_is_split_by_seed(folder):
    whole = folder / "train"
    data = load_data(whole)
    assert data.class_names == NAMES
    assert (len(data.train), len(data.test)) == (12, 8)  # 30 % of 5 is 2
    assert not {i.path for i in data.train} & {i.path for i in data.test}
    assert load_data(whole) == data
    assert load_data(whole, split_seed=1) != data


def test_csv(folder):
    file = folder / "list.csv"
    rows = ["path,label,split", "train/red_fox/0.png,fox_1,train", "train/blue_cup/0.png,cup,train"]
    rows += ["test/red_fox/0.png,fox_1,test", "test/blue_cup/0.png,cup,test"]
    file.write_text("\n".join(rows))
    data = load_data(file)
    assert data.class_names == ("cup", "fox_1")
    assert [i.label for i in data.train] == [0, 1]
    assert task(data).tests["all"][1][1].path == folder / "test/red_fox/0.png"


def test_csv_without_split(folder):
    file = folder / "list.csv"
    rows = [f"train/{c}/{i}.png,{c}" for c in ("red_fox", "blue_cup") for i in range(5)]
    file.write_text("\n".join(["path,label", *rows]))
    data = load_data(file)
    assert (len(data.train), len(data.test)) == (6, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "path,label"),
        ("path,label,split\nx.png,cat,dev\n", "line 2"),
        ("path,label,split\nx.png,,train\n", "line 2"),
        ("path,label,split\nx.png,cat,train\ny.png,dog,\n", "no split"),
    ],
)
def test_bad_csv(tmp_path, text, words):
    file = tmp_path / "list.csv"
    file.write_text(text)
    with pytest.raises(DataError, match=words):
        load_data(file)


def test_split_json(folder):
    parts = {
        s: [[f"{s}/{c}/0.png", i, c] for i, c in enumerate(("red_fox", "blue_cup"))]
        for s in ("train", "test")
    }
    file = folder.parent / "split.json"
    file.write_text(json.dumps({**parts, "val": []}))
    data = load_data(file)  # pictures are in a folder beside it
    assert data.class_names == ("red fox", "blue cup")
    assert data.train[0].path == folder / "train/red_fox/0.png"


@pytest.mark.parametrize(
    "content",
    ["[", "{}", '{"train": [["a", 0]]}', '{"train": [["a.png", 1, "x"]]}', '{"train": [["no.png", 0, "x"]]}'],
)
def test_bad_json(tmp_path, content):
    file = tmp_path / "split.json"
    file.write_text(content)
    with pytest.raises(DataError, match=r"split\.json"):
        load_data(file)


def test_absent_and_empty_places_show_the_expected_tree(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "train").mkdir()
    (tmp_path / "notes.txt").write_text("")
    for path in (tmp_path / "none", tmp_path / "empty", tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(DataError, match="train/<class>") as raised:
            load_data(path)
        assert str(path) in str(raised.value)


def test_class_names_that_cannot_be_told_apart(folder):
    for split in ("train", "test"):
        (folder / split / "red_fox").rename(folder / split / "blue cup")
    with pytest.raises(DataError, match="blue cup"):
        load_data(folder)


def test_one_class_is_refused(folder):
    for split in ("train", "test"):
        for name in ("red_fox", "blue_cup", "grey_stone"):
            shutil.rmtree(folder / split / name)
    with pytest.raises(DataError, match="one class"):
        load_data(folder)


def test_shots_are_seeded_and_balanced():
    items = [Item(path=f"{i}", label=i % 3) for i in range(30)]
    chosen = few_shot(items, 4, 1)
    assert [i.label for i in chosen] == [0] * 4 + [1] * 4 + [2] * 4
    assert few_shot(items, 4, 1) == chosen
    assert few_shot(items, 4, 2) != chosen
    assert sorted(i.path for i in few_shot(items, 0, 1)) == sorted(i.path for i in items)


def test_base_to_novel_halves(folder):
    made = task(load_data(folder), "base-to-novel")
    assert made.class_names == NAMES[:2]
    assert {i.label for i in made.train} == {0, 1}
    assert list(made.tests) == ["base", "novel"]
    names, items = made.tests["novel"]
    assert names == NAMES[2:]
    assert {i.label for i in items} == {0, 1}
    assert {i.path.parent.name for i in items} == {"grey_stone", "red_fox"}


def test_an_odd_number_of_classes_gives_the_larger_half_to_base(folder):
    for split in ("train", "test"):
        shutil.rmtree(folder / split / "red_fox")
    made = task(load_data(folder), "base-to-novel")
    assert (made.class_names, made.tests["novel"][0]) == (NAMES[:2], NAMES[2:3])


def test_novel_classes_need_no_training_pictures(folder):
    shutil.rmtree(folder / "train" / "red_fox")
    assert len(task(load_data(folder), "base-to-novel").train) == 4
    with pytest.raises(DataError, match="no train pictures of red fox"):
        task(load_data(folder))


def test_classes_without_test_pictures_are_named(folder):
    shutil.rmtree(folder / "test" / "grey_stone")
    with pytest.raises(DataError, match="no test pictures of grey stone"):
        task(load_data(folder))


def test_few_pictures_are_said(folder):
    (folder / "train" / "red_fox" / "0.png").unlink()
    assert task(load_data(folder), shots=5).notes == (
        "fewer than 5 training pictures of red fox (4): all of them are used",
    )


def test_unreadable_pictures_are_named_and_refused(folder):
    (folder / "train" / "red_fox" / "1.png").write_bytes(b"not a picture")
    (folder / "test" / "blue_cup" / "2.png").write_bytes(b"")
    data = load_data(folder)
    with pytest.raises(DataError, match=r"red_fox/1\.png \(not an image\).*--skip-unreadable"):
        task(data, shots=0)
    with pytest.raises(DataError, match=r"blue_cup/2\.png \(empty image\)"):
        task(data, shots=1, seed=3 if _avoids(data, 3) else 4)


def _avoids(data, seed):
    return all(i.path.name != "1.png" for i in few_shot(data.train, 1, seed) if i.label == 3)


def test_unreadable_pictures_are_left_out_and_replaced_on_request(folder):
    for i in range(3):
        (folder / "train" / "red_fox" / f"{i}.png").write_bytes(b"not a picture")
    (folder / "test" / "blue_cup" / "2.png").unlink()
    (folder / "test" / "blue_cup" / "2.png").symlink_to("nowhere.png")
    data = load_data(folder)
    made = task(data, shots=2, skip=True)
    assert {i.path.name for i in made.train if i.label == 3} == {"3.png", "4.png"}
    assert "unreadable pictures left out" in made.notes[0]


def test_fingerprint_knows_pictures_and_lists(folder):
    data = load_data(folder)
    before = fingerprint(task(data, shots=0))
    assert fingerprint(task(load_data(folder), shots=0)) == before
    shutil.copy(folder / "train/red_fox/0.png", folder / "train/red_fox/1.png")
    changed = fingerprint(task(data, shots=0))
    (folder / "test/red_fox/0.png").unlink()
    assert len({before, changed, fingerprint(task(load_data(folder), shots=0))}) == 3
