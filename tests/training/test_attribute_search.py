"""The attribute-search table: precision and chance are their definitions, the better kind is chosen."""

from __future__ import annotations

import numpy as np
import pytest

from training.attribute_search import better_kinds, chance, main, precision_at


def test_precision_and_chance():
    angles = np.array([0.0, 0.01, 0.02, 3.0, 3.01, 3.02])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    assert precision_at(vectors, np.array(list("aaabbb")), k=2) == 1.0
    assert precision_at(vectors, np.array(list("ababab")), k=2) == pytest.approx(1 / 3)
    assert chance(np.array(list("aaabbb"))) == pytest.approx(12 / 30)


def test_random_vectors_score_chance():
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((600, 16)).astype(np.float32)
    labels = rng.integers(0, 5, 600)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert precision_at(vectors, labels) == pytest.approx(chance(labels), abs=0.03)


def test_the_better_kind_is_chosen():
    table = {
        "chance": {"color": 0.1, "shape": 0.1, "object": 0.0},
        "rows": {
            "token color": {"color": 0.5},
            "span color": {"color": 0.9},
            "token shape": {"shape": 0.7},
            "span shape": {"shape": 0.6},
            "token object": {"object": 0.2},
        },
    }
    assert better_kinds(table) == {"color": "span", "shape": "token", "object": "token"}


def test_a_folder_without_labels(tmp_path, tiny_bundle, capsys):
    arguments = [str(tiny_bundle.paths.root), str(tmp_path), "--engine", "torch"]
    assert main(arguments) == 2
    assert "world_data gallery" in capsys.readouterr().err
    (tmp_path / "labels.csv").write_text("path,price\na.png,3\n")
    assert main(arguments) == 2
    assert "1 rows" in capsys.readouterr().err
