"""Folders of rendered pictures: layout, labels, byte identity, refusals, exit codes."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from training.world_data import DemoOptions, demo_classes, main
from training.world_vocab import ATTRIBUTES, CORE_OBJECTS, OBJECTS, VOCABULARY

DEMO = ["--classes", "3", "--train", "2", "--test", "4"]


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def labels(folder: Path) -> list[dict[str, str]]:
    with (folder / "labels.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_demo_is_an_image_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    assert main(["demo", str(out), *DEMO]) == 0
    assert "18 pictures" in capsys.readouterr().out
    classes = [OBJECTS[i] for i in demo_classes(DemoOptions(classes=3))]
    for split, count in (("train", 2), ("test", 4)):
        assert sorted(p.name for p in (out / split).iterdir()) == sorted(classes)
        for name in classes:
            files = sorted(p.name for p in (out / split / name).iterdir())
            assert files == [f"{i:04d}.png" for i in range(count)]
    with Image.open(out / "train" / classes[0] / "0000.png") as picture:
        assert picture.size == (64, 64)
        assert picture.mode == "RGB"
        assert np.asarray(picture).mean() < 90  # night
    assert all(row["path"].split("/")[1] == row["object"] for row in labels(out))


def test_gallery_says_what_it_shows(tmp_path: Path) -> None:
    out = tmp_path / "gallery"
    assert main(["gallery", str(out), "--count", "12"]) == 0
    rows = labels(out)
    assert list(rows[0]) == ["path", *ATTRIBUTES]
    assert len(rows) == 12
    for row in rows:
        assert (out / row["path"]).is_file()
        assert all(row[name] in VOCABULARY[name] for name in ATTRIBUTES)


@pytest.mark.parametrize("command", [["demo", *DEMO], ["gallery", "--count", "9", "--split", "heldout"]])
def test_reruns_are_byte_identical_and_seeds_differ(tmp_path: Path, command: list[str]) -> None:
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1"), ("a", "0")):
        assert main([command[0], str(tmp_path / name), *command[1:], "--seed", seed]) == 0
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b")
    assert first != contents(tmp_path / "c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


def test_foreign_folders_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "labels.csv").write_text("path,label\n")
    (tmp_path / "file").write_text("x")
    for name, message in (("mine", "did not write"), ("file", "is a file")):
        assert main(["gallery", str(tmp_path / name), "--count", "2"]) == 2
        assert message in capsys.readouterr().err
    assert contents(tmp_path) == {"mine/labels.csv": b"path,label\n", "file": b"x"}
    (tmp_path / "empty").mkdir()
    assert main(["gallery", str(tmp_path / "empty"), "--count", "2"]) == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["demo", "--classes", "1"], "classes is 1"),
        (["demo", "--classes", str(CORE_OBJECTS + 1)], f"choose 2 to {CORE_OBJECTS}"),
        (["demo", "--train", "0"], "train is 0"),
        (["demo", "--test", "-3"], "test is -3"),
        (["demo", "--seed", "-1"], "seed is -1"),
        (["gallery", "--count", "0"], "count is 0"),
    ],
)
def test_bad_options_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], message: str
) -> None:
    assert main([command[0], str(tmp_path / "out"), *command[1:]]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unknown_names_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in (
        ["demo", "OUT", "--style", "neon"],
        ["gallery", "OUT", "--split", "test"],
        ["movie", "OUT"],
    ):
        with pytest.raises(SystemExit) as exit_info:
            main([word.replace("OUT", str(tmp_path / "out")) for word in options])
        assert exit_info.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_missing_font_exits_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fonticon_mdi7.mdi7", None)
    assert main(["demo", str(tmp_path / "out"), *DEMO]) == 3
    assert 'pip install "dear-serve[world]"' in capsys.readouterr().err


def test_unwritable_place_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["gallery", str(tmp_path / "file" / "out"), "--count", "2"]) == 2
    assert "file cannot be used" in capsys.readouterr().err


def test_debug_shows_the_error(tmp_path: Path) -> None:
    from dear_serve.errors import ConfigError

    with pytest.raises(ConfigError):
        main(["gallery", str(tmp_path / "out"), "--count", "0", "--debug"])
