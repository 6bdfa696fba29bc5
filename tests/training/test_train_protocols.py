"""The two commands with every protocol: recipes by name, other data sets, baselines, files of tables."""

from __future__ import annotations

import json
import shutil

import pytest

from dear_serve.bundle import Bundle
from training import evaluate
from training.run import main


@pytest.fixture(scope="module")
def data_root(train_set, tmp_path_factory):
    """The small pictures laid out as three known data sets, and as ImageNet with a variant of three of its classes."""
    root = tmp_path_factory.mktemp("root")
    classes = sorted(p.name for p in (train_set.pictures / "train").iterdir())
    for folder, images, split in (
        ("oxford_pets", "images", "split_zhou_OxfordPets.json"),
        ("dtd", "images", "split_zhou_DescribableTextures.json"),
    ):
        shutil.copytree(train_set.pictures, root / folder / images)
        rows = {
            part: [
                [f"{part}/{c}/{i}.png", label, c]
                for label, c in enumerate(classes)
                for i in range({"train": 5, "test": 3}[part])
            ]
            for part in ("train", "test")
        }
        rows["val"] = [row for row in rows["train"] if row[0].endswith("4.png")]
        rows["train"] = [row for row in rows["train"] if not row[0].endswith("4.png")]
        (root / folder / split).write_text(json.dumps(rows))
    imagenet, sketch = root / "imagenet", root / "imagenet-sketch"
    for part, name in (("train", "train"), ("test", "val")):
        shutil.copytree(train_set.pictures / part, imagenet / "images" / name)
    shutil.copytree(train_set.pictures / "test", sketch / "images")
    shutil.rmtree(sketch / "images" / classes[0])
    for folder in (imagenet, sketch):
        (folder / "classnames.txt").write_text("".join(f"{c} {c.replace('_', ' ')}\n" for c in classes))
    return root


@pytest.fixture(scope="module")
def quick(train_set):
    return [
        "--base", train_set.base, "--epochs", "1", "--batch-size", "6", "--shots", "2", "--views", "1", "--seed", "1",
        "--quiet", "--device", "cpu", "--no-cache",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def pets(quick, data_root, tmp_path_factory):
    """A bundle of base-to-novel on a known data set by name, and where its tables are."""
    folder = tmp_path_factory.mktemp("pets")
    out = folder / "bundle"
    args = ["oxford_pets", "--root", str(data_root), *quick, "--out", str(out), "--baselines"]
    assert main([*args, "--json", str(folder / "t.json"), "--html", str(folder / "t.html")]) == 0
    return folder


def test_a_recipe_by_name(pets):
    manifest = Bundle.open(pets / "bundle").manifest
    assert manifest.class_names == ("blue cup", "green tree")  # base-to-novel, as the recipe says
    assert manifest.templates == ("a photo of a {}, a type of pet.",)
    (table,) = json.loads((pets / "t.json").read_text())
    assert table["columns"] == ["base", "novel", "hm"]
    assert set(table["rows"]) == {
        "zero_shot", "zero_shot_single", "zero_shot_ensemble", "linear_probe", "adapted",
    }  # fmt: skip
    assert list(table["rows"]["linear_probe"]) == ["base"]
    for row, column in (("adapted", "novel"), ("linear_probe", "base")):
        assert table["rows"][row][column]["mean"] == manifest.metrics[f"{row}_{column}"]
    assert "linear probe" in (pets / "t.html").read_text()


def test_a_template_of_the_command_line_goes_over_the_recipes(data_root, quick, tmp_path):
    args = [
        "oxford_pets",
        "--root",
        str(data_root),
        *quick,
        "--template",
        "the {}",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main([*args, "--out", str(tmp_path / "b"), "--baselines"]) == 0
    (table,) = json.loads((tmp_path / "r.json").read_text())
    assert table["rows"]["zero_shot"] == table["rows"]["zero_shot_single"]
    again = [str(tmp_path / "b"), "oxford_pets", "--root", str(data_root), "--protocol", "base-to-novel"]
    assert evaluate.main([*again, "--template", "the {}", "--json", str(tmp_path / "e.json")]) == 0
    (found,) = json.loads((tmp_path / "e.json").read_text())
    for row in ("zero_shot", "adapted"):
        assert found["rows"][row]["hm"]["mean"] == pytest.approx(table["rows"][row]["hm"]["mean"])


def test_evaluate_gives_the_same_rows(pets, data_root, tmp_path, capsys):
    args = [str(pets / "bundle"), "oxford_pets", "--root", str(data_root), "--protocol", "base-to-novel"]
    file = tmp_path / "e.json"
    assert evaluate.main([*args, "--baselines", "--shots", "2", "--json", str(file)]) == 0
    assert "linear probe" in capsys.readouterr().out
    (found,), (expected,) = json.loads(file.read_text()), json.loads((pets / "t.json").read_text())
    assert found["rows"] == {
        row: {
            column: {**numbers, "mean": pytest.approx(numbers["mean"]), "values": [pytest.approx(numbers["mean"])]}
            for column, numbers in columns.items()
        }
        for row, columns in expected["rows"].items()
    }  # fmt: skip


def test_cross_dataset(quick, data_root, train_set, tmp_path, capsys):
    out = tmp_path / "b"
    args = ["oxford_pets", "--root", str(data_root), *quick, "--out", str(out), "--protocol", "cross-dataset"]
    targets = ["--test-on", "dtd", "--test-on", str(train_set.pictures)]
    assert main([*args, *targets]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["oxford_pets", "dtd", "noise", "average"]
    metrics = Bundle.open(out).manifest.metrics
    both = (metrics["adapted_dtd"] + metrics["adapted_noise"]) / 2
    assert metrics["adapted_average"] == pytest.approx(both)
    again = [
        str(out),
        "dtd",
        str(train_set.pictures),
        "--root",
        str(data_root),
        "--json",
        str(tmp_path / "t.json"),
    ]
    assert evaluate.main([*again, "--protocol", "cross-dataset"]) == 0
    (table,) = json.loads((tmp_path / "t.json").read_text())
    assert table["columns"] == ["dtd", "noise", "average"]
    for column in table["columns"]:
        for row in ("adapted", "zero_shot"):
            assert table["rows"][row][column]["mean"] == pytest.approx(metrics[f"{row}_{column}"])


def test_domain(quick, data_root, tmp_path, capsys):
    out = tmp_path / "b"
    args = ["imagenet", "--root", str(data_root), *quick, "--out", str(out), "--protocol", "domain"]
    assert main([*args, "--test-on", "imagenet_sketch", "--baselines"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["imagenet", "imagenet_sketch", "average"]
    assert (
        len(next(line for line in lines if line.startswith("linear probe")).split()) == 5
    )  # the same classes
    assert evaluate.main([str(out), "imagenet_sketch", "--root", str(data_root), "--protocol", "domain"]) == 0
    assert evaluate.main([str(out), "dtd", "--root", str(data_root), "--protocol", "domain"]) == 0


def test_domain_of_other_classes_is_refused(pets, data_root, capsys):
    args = [str(pets / "bundle"), "imagenet_sketch", "--root", str(data_root), "--protocol", "domain"]
    assert evaluate.main(args) == 2
    assert "grey stone, red fox" in capsys.readouterr().err


def test_strict_refuses_what_is_else_noted(quick, train_set, tmp_path, capsys):
    folder = shutil.copytree(train_set.pictures, tmp_path / "noise")
    for i in range(5):
        shutil.copy(folder / f"train/red_fox/{i}.png", folder / f"test/red_fox/copy{i}.png")
    args = [str(folder), *quick, "--out", str(tmp_path / "b")]
    assert main([*args, "--strict"]) == 2
    assert "stand in more than one split" in capsys.readouterr().err
    assert main(args) == 0
    assert "stand in more than one split" in (tmp_path / "b" / "report.html").read_text()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["oxford_pets"], "give --root"),
        (["oxford_cats", "--root", "."], "recipes are caltech101"),
        (["flowers102", "--root", "."], "(missing)"),
        (["imagenet_a", "--root", "."], "not found"),
        (["DATA", "--protocol", "cross-dataset"], "--test-on"),
        (["DATA", "--test-on", "DATA"], "its own data set alone"),
        (["DATA", "--json", "/dev/null/t.json"], "cannot be used"),
    ],
)
def test_bad_sources(args, words, quick, train_set, tmp_path, capsys):
    args = [str(train_set.pictures) if a == "DATA" else a for a in args]
    expected = "--test-on" if args[0] == "imagenet_a" else words
    assert main([*args, *quick, "--out", str(tmp_path / "b")]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert "Traceback" not in err


def test_a_recipe_file_without_data_and_the_list(data_root, quick, tmp_path, capsys):
    assert main(["--list-recipes"]) == 0
    assert capsys.readouterr().out.split()[0] == "caltech101"
    file = tmp_path / "mine.toml"
    table = '[data]\nlayout = "split-json"\nfolder = "dtd"\nimages = "images"\n'
    file.write_text(f'protocol = "all"\n{table}split = "split_zhou_DescribableTextures.json"\n')
    assert main(["--recipe", str(file), "--root", str(data_root), *quick, "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.startswith("mine: accuracy")
    assert len(Bundle.open(tmp_path / "b").manifest.class_names) == 4
