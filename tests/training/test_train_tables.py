"""Tables of accuracies: text, JSON, HTML; modes and columns that are not everywhere."""

from __future__ import annotations

import json

import numpy as np
import pytest

from training.items import Item
from training.scoring import Scores, summary
from training.tables import check_places, html_table, json_table, table, write_tables


def scores(split, adapted, **others):
    items = tuple(Item(path=f"{i}", label=0) for i in range(len(adapted)))
    return Scores(
        split=split, class_names=("a", "b"), items=items, zero_shot=np.ones(len(adapted), int),
        adapted=np.array(adapted), confidence=np.ones(len(adapted), np.float32),
        others={k: np.array(v) for k, v in others.items()},
    )  # fmt: skip


RUNS = [
    summary([scores("base", [0, 0, 0, 1], linear_probe=[0, 0, 1, 1]), scores("novel", [0, 1, 1, 1])]),
    summary([scores("base", [0, 0, 0, 0], linear_probe=[0, 0, 0, 1]), scores("novel", [0, 1, 1, 1])]),
]


def test_a_mode_without_a_number_has_a_dash():
    lines = [line.split() for line in table(RUNS).splitlines()]
    assert lines[2] == ["linear", "probe", "62.5", "±", "17.7", "–", "–"]
    assert lines[3][:4] == ["adapted", "87.5", "±", "17.7"]
    assert lines[4][0] == "difference"


def test_average_is_over_the_targets_alone():
    numbers = summary([scores("here", [0, 0]), scores("x", [0, 1]), scores("y", [1, 1])], targets=("x", "y"))
    assert numbers["adapted_average"] == 0.25
    assert table([numbers]).splitlines()[0].split() == ["here", "x", "y", "average"]


def test_json_and_html(tmp_path):
    data = json_table(RUNS, title="t", seeds=[1, 2])
    assert data["columns"] == ["base", "novel", "hm"]
    assert data["rows"]["adapted"]["base"] == {
        "mean": 0.875,
        "sd": pytest.approx(0.1768, abs=1e-4),
        "values": [0.75, 1.0],
    }
    assert list(data["rows"]["linear_probe"]) == ["base"]
    page = html_table(RUNS)
    assert "<td>87.5 ± 17.7</td>" in page
    assert "<th>harmonic mean</th>" in page
    files = {"json_file": tmp_path / "new" / "t.json", "html_file": tmp_path / "t.html"}
    write_tables([("<b>", RUNS)], seeds=[1, 2], **files)
    assert json.loads(files["json_file"].read_text()) == [{**data, "title": "<b>"}]
    assert "<h2>&lt;b&gt;</h2>" in files["html_file"].read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "t.html"]


def test_places_are_tried_and_left_as_they_were(tmp_path):
    file = tmp_path / "t.json"
    check_places(file, None)
    assert list(tmp_path.iterdir()) == []
    file.write_text("old")
    check_places(file)
    assert file.read_text() == "old"
    with pytest.raises(IsADirectoryError, match="is a folder"):
        check_places(tmp_path)
    with pytest.raises(OSError, match="t\\.json"):
        check_places(file / "x.html")
