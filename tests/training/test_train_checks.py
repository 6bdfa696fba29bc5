"""What is said of a data set before the first step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dear_serve.errors import ConfigError, DataError
from training.checks import few_note, order_note, path_note, same_picture_notes
from training.data import PictureCheck, load_data, make_task
from training.items import DataSet, Item


def data_set(folders, **splits):
    """One picture a folder, labelled in the folders' order."""
    items = tuple(Item(path=Path(f"/x/{name}/0.png"), label=i) for i, name in enumerate(folders))
    parts = {"train": items, "val": (), "test": (), **splits}
    return DataSet(root=Path("/x"), class_names=tuple(folders), **parts)


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["a", "b", "c"], ""),
        (["a", "c", "b"], "folders sort: c is label 1, b is label 2"),
        (["0", "1", "10", "2"], "folders count as numbers: 10 is label 2, 2 is label 3"),
        (["0", "1", "2", "10"], ""),
        (["b", "a", "d", "c", "f", "e"], "and 3 more"),
    ],
)
def test_order_of_folders_against_order_of_labels(folders, words):
    note = order_note(data_set(folders))
    assert words in note
    assert bool(words) == bool(note)


def test_folders_that_are_not_classes_say_nothing_of_order():
    assert order_note(data_set(["z", "z", "a"])) == ""
    mixed = data_set(["b", "a"])
    assert order_note(data_set(["b", "a"], test=(Item(path=mixed.train[0].path, label=1),))) == ""


def test_a_file_in_two_lists_is_named():
    one = data_set(["a", "b"])
    assert path_note(one) == ""
    note = path_note(data_set(["a", "b"], test=one.train[:1]))
    assert note == "1 files are listed in more than one split: /x/a/0.png (test, train)"


def test_equal_content_is_found_by_hash():
    groups = {"train": [("a.png", "cat"), ("b.png", "cat")], "test": [("c.png", "cat"), ("d.png", "dog")]}
    hashes = {"a.png": b"1", "b.png": b"2", "c.png": b"1", "d.png": b"2"}
    assert same_picture_notes(groups, hashes) == (
        "2 pictures stand in more than one split: train a.png = test c.png, train b.png = test d.png",
        "1 pictures stand in more than one class: train b.png = test d.png (cat / dog)",
    )
    assert same_picture_notes(groups, {}) == ()


def test_repeated_draws_count_once():
    items = [
        Item(path="a", label=0),
        Item(path="a", label=0),
        Item(path="b", label=1),
        Item(path="c", label=1),
    ]
    assert few_note(("x", "y"), items, 2, repeats=True).endswith("of x (1): some are drawn more than once")


def test_a_leak_between_train_and_test_is_told_with_the_task(train_set, tmp_path):
    folder = shutil.copytree(train_set.pictures, tmp_path / "noise")
    shutil.copy(folder / "train/red_fox/0.png", folder / "test/red_fox/copy.png")
    shutil.copy(folder / "train/red_fox/1.png", folder / "test/blue_cup/copy.png")
    task = make_task(load_data(folder), protocol="few-shot", shots=0, seed=1, check=PictureCheck())
    shared, contrary = task.notes
    assert "2 pictures stand in more than one split" in shared
    assert f"train {folder}/train/red_fox/0.png = test {folder}/test/red_fox/copy.png" in shared
    assert "(red fox / blue cup)" in contrary


def test_validation_pictures_are_checked_and_their_gaps_named(train_set, tmp_path):
    folder = shutil.copytree(train_set.pictures, tmp_path / "noise")
    for name in ("red_fox", "blue_cup"):
        (folder / "val" / name).mkdir(parents=True)
        shutil.copy(folder / "test" / name / "0.png", folder / "val" / name / "v.png")
        (folder / "test" / name / "0.png").unlink()
    task = make_task(load_data(folder), protocol="few-shot", shots=2, seed=1, check=PictureCheck())
    assert [item.label for item in task.val] == [0, 3]
    assert task.notes == ("no validation pictures of green tree, grey stone",)
    (folder / "val" / "red_fox" / "v.png").write_bytes(b"no")
    with pytest.raises(DataError, match=r"val/red_fox/v\.png"):
        make_task(load_data(folder), protocol="few-shot", shots=2, seed=1, check=PictureCheck())


def test_a_label_with_two_names_is_refused(tmp_path):
    file = tmp_path / "split.json"
    file.write_text(json.dumps({"train": [["a.png", 0, "cat"], ["b.png", 0, "dog"]], "test": []}))
    with pytest.raises(DataError, match=r"labels 0 \(cat / dog\)"):
        load_data(file)


# --- targets --------------------------------------------------------------------------------------


@pytest.fixture
def target(train_set, tmp_path):
    """The test pictures again, as a folder of classes without splits."""
    return shutil.copytree(train_set.pictures / "test", tmp_path / "elsewhere")


def made(train_set, protocol, *targets):
    return make_task(
        load_data(train_set.pictures),
        protocol=protocol,
        shots=2,
        seed=1,
        check=PictureCheck(),
        targets=targets,
    )


def test_cross_dataset_tests_each_target_among_its_own_classes(train_set, target):
    shutil.rmtree(target / "red_fox")
    (target / "grey_stone").rename(target / "tin_can")
    task = made(train_set, "cross-dataset", load_data(target, target=True))
    assert list(task.tests) == ["noise", "elsewhere"]
    assert task.targets == ("elsewhere",)
    names, items = task.tests["elsewhere"]
    assert names == ("blue cup", "green tree", "tin can")
    assert [item.label for item in items] == [0] * 3 + [1] * 3 + [2] * 3  # no split: all of it is tested on
    assert len(task.class_names) == 4


def test_domain_takes_some_of_the_same_classes_and_no_others(train_set, target):
    shutil.rmtree(target / "red_fox")
    task = made(train_set, "domain", load_data(target, target=True))
    assert task.tests["elsewhere"][0] == ("blue cup", "green tree", "grey stone")
    (target / "grey_stone").rename(target / "tin_can")
    with pytest.raises(DataError, match=r"1 classes that .*: tin can"):
        made(train_set, "domain", load_data(target, target=True))


def test_a_leak_into_a_target_is_named(train_set, target):
    shutil.copy(made(train_set, "few-shot").train[0].path, target / "blue_cup" / "copy.png")
    task = made(train_set, "domain", load_data(target, target=True))
    assert task.problems == task.notes
    assert f"= elsewhere {target}/blue_cup/copy.png" in task.notes[0]


def test_order_is_noted_and_no_problem(train_set, target):
    file = target / "split.json"
    rows = [[f"{name}/0.png", i, name] for i, name in enumerate(("red_fox", "blue_cup"))]
    more = [[f"{name}/1.png", i, name] for i, name in enumerate(("red_fox", "blue_cup"))]
    file.write_text(json.dumps({"train": rows, "val": [], "test": more}))
    task = make_task(load_data(file), protocol="few-shot", shots=1, seed=1, check=PictureCheck())
    assert task.problems == ()
    assert "red_fox is label 0" in task.notes[0]


def test_targets_of_one_name_get_columns_of_their_own(train_set, target):
    again = load_data(target, target=True)
    task = made(train_set, "cross-dataset", again, again)
    assert list(task.tests) == ["noise", "elsewhere", "elsewhere (2)"]


def test_targets_and_protocols_belong_together(train_set, target):
    with pytest.raises(ConfigError, match="--test-on"):
        made(train_set, "domain")
    with pytest.raises(ConfigError, match="its own data set alone"):
        made(train_set, "few-shot", load_data(target, target=True))


def test_a_target_needs_no_training_pictures(train_set, tmp_path):
    folder = shutil.copytree(train_set.pictures, tmp_path / "noise")
    shutil.rmtree(folder / "train")
    assert len(load_data(folder, target=True).test) == 12
    with pytest.raises(DataError, match="expected is one of"):
        load_data(folder / "test" / "red_fox", target=True)
