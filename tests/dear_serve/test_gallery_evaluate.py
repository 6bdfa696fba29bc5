"""Measures against their definitions, and the evaluation's table and contact sheet on random pictures."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from dear_serve import cli
from dear_serve.errors import DataError
from dear_serve.gallery.contact_sheet import contact_sheet, text_table
from dear_serve.gallery.evaluate import evaluate, read_derived
from dear_serve.gallery.measures import chance, highest_precision, measure
from dear_serve.runtime.predict import Predictor

ANGLES = np.array([0.0, 0.01, 0.02, 3.0, 3.01, 3.02])
VECTORS = np.stack([np.cos(ANGLES), np.sin(ANGLES)], axis=1).astype(np.float32)


def test_measures_are_their_definitions():
    found = measure(VECTORS, {"a": np.array(list("aaabbb")), "b": np.array(list("ababab"))}, k=2, recall_at=2)
    assert (found["a"].precision, found["a"].mean_ap, found["a"].recall) == (1.0, 1.0, 1.0)
    assert found["b"].precision == pytest.approx(1 / 3)
    # One of its two lies among the first two for 4 of the 6, the mean of the definitions by hand:
    order = np.argsort(-(VECTORS @ VECTORS.T - 9 * np.eye(6)), axis=1, kind="stable")[:, :5]
    same = np.array(list("ababab"))[order] == np.array(list("ababab"))[:, None]
    by_hand = [np.mean([(n + 1) / (p + 1) for n, p in enumerate(np.flatnonzero(row))]) for row in same]
    assert found["b"].mean_ap == pytest.approx(np.mean(by_hand))
    assert found["b"].recall == pytest.approx(same[:, :2].sum() / 12)


def test_unlabelled_pictures_are_not_asked_and_match_nothing():
    labels = np.array(["a", "a", "", "", "b", "c"])
    found = measure(VECTORS, {"x": labels, "none": np.array(["", *"abcde"])}, k=1)
    assert set(found) == {"x"}
    assert found["x"].precision == 1.0
    assert chance(np.array(["a", "a", ""])) == pytest.approx(2 / 4)
    assert chance(np.array(list("aaabbb"))) == pytest.approx(12 / 30)
    assert highest_precision(np.array(list("aaab")), k=4) == pytest.approx(0.5)


def test_queries_of_their_own():
    queries = (np.array([[1.0, 0.0]], np.float32), {"a": np.array(["a"])})
    found = measure(VECTORS, {"a": np.array(list("aaabbb"))}, k=3, queries=queries)
    assert found["a"].precision == 1.0


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    rng = np.random.default_rng(0)
    lines = ["path,color,shape"]
    for i in range(24):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{('red', 'blue', 'green')[i % 3]},{('circle', 'square')[i % 2]}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def derived(tmp_path_factory):
    path = tmp_path_factory.mktemp("derived") / "d.json"
    item = {
        "phrases": ["a warm color", "a cold color"],
        "of": "color",
        "groups": {"warm": ["red"], "cold": ["blue"]},
    }
    path.write_text(json.dumps({"warmth": item}))
    return path


def test_every_readout_has_its_row(tiny_bundle, pictures, derived):
    with Predictor.open(tiny_bundle.paths.root, engine="torch") as predictor:
        found = evaluate(predictor, pictures, k=5, derived=read_derived(derived))
        names = predictor.bundle.manifest.dear.attributes
        spans = predictor.bundle.basis()
    assert set(found.chance) == {"color", "shape", "warmth"}
    assert {"class", "frozen class", "phrases warmth", "text color, plain CLIP", "text color, chosen"} <= set(
        found.rows
    )
    for name in names:
        assert f"token {name}" in found.rows
        assert f"chosen {name}" in found.rows
    for name in spans:
        assert found.rows[f"chosen {name}"] == found.rows[f"span {name}"]
        assert f"token span {name}" in found.rows
    assert set(found.rows["class"]) == {"color", "shape", "warmth"}
    assert set(found.rows["text shape, chosen"]) == {"shape"}
    heads = [n for n in found.rows if n.startswith("heads ")]
    assert len(heads) + sum(note.startswith("heads ") for note in found.notes) == len(names)
    text = text_table(found)
    assert len(text.splitlines()) == len(found.rows) + 3
    sheet = contact_sheet(found, queries=2, shown=3)
    assert sheet.count("<table>") == 2
    assert sheet.count('class="query"') == 2
    assert sheet.count("<img") == 2 * (1 + 3 * (1 + len(names)))
    assert "http" not in sheet


def test_the_command(tiny_bundle, pictures, derived, tmp_path, capsys):
    command = [
        "eval-search",
        str(tiny_bundle.paths.root),
        str(pictures),
        "--engine",
        "torch",
        "--derived",
        str(derived),
    ]
    sheet = tmp_path / "sheet.html"
    assert cli.main([*command, "--sheet", str(sheet)]) == 0
    assert "24 pictures" in capsys.readouterr().out
    assert sheet.read_text().startswith("<!doctype html>")
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pictures"] == 24


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ('{"a": {"phrases": []}}', "is not JSON"), ("[1]", "is not JSON")],
)
def test_bad_derived_attributes_are_refused(tmp_path, text, message):
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_derived(tmp_path / "d.json")
    with pytest.raises(DataError, match="cannot be read"):
        read_derived(tmp_path / "none.json")


def test_bad_input_is_refused(tiny_bundle, pictures, tmp_path):
    with Predictor.open(tiny_bundle.paths.root, engine="torch") as predictor:
        with pytest.raises(DataError, match="k is 24"):
            evaluate(predictor, pictures, k=24)
        (tmp_path / "labels.csv").write_text("path,color\n" + "".join(f"{i}.png,red\n" for i in range(20)))
        with pytest.raises(DataError, match="cannot be read"):
            evaluate(predictor, tmp_path)
        item = {"phrases": ["a", "b"], "of": "smell", "groups": {}}
        (tmp_path / "d.json").write_text(json.dumps({"x": item}))
        with pytest.raises(DataError, match="'smell'"):
            evaluate(predictor, pictures, derived=read_derived(tmp_path / "d.json"))
