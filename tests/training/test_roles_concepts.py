"""Concept lexicon, clusters, names and entropy; description pools; sentence encoders."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dear_serve.backbone.clip import Clip
from dear_serve.config import ClipConfig
from dear_serve.errors import ConfigError, MissingDependencyError
from training.concepts import (
    NOISE,
    ClusterConfig,
    Lexicon,
    cluster_descriptions,
    concept_entropy,
    name_clusters,
)
from training.descriptions import (
    general_descriptions,
    load_descriptions,
    unique,
    world_descriptions,
    world_pool,
)
from training.sentences import sentence_encoder, text_features

LEXICON = Lexicon(
    concepts={"color": ("red", "blue"), "shape": ("circle", "square")}, carriers=("something {}",)
)


def encode(texts: Sequence[str]) -> np.ndarray:
    """Color words near (1, 0, 0), shape words near (0, 1, 0), the rest scattered around the circle between."""
    groups = {
        "color": ("red", "blue", "green", "pink", "gray"),
        "shape": ("circle", "square", "star", "cross", "arch"),
    }
    rows = []
    for i, text in enumerate(texts):
        wiggle = 0.02 * math.sin(len(text) + ord(text[0]))
        angle = next(
            (k * math.pi / 2 for k, words in enumerate(groups.values()) if text in words), 0.4 + 0.11 * i
        )
        rows.append((math.cos(angle + wiggle), math.sin(angle + wiggle), 0.0))
    return np.array(rows, np.float32)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 12])
def test_entropy_of_k_equal_concepts_is_log2_k(k: int) -> None:
    assert concept_entropy([7] * k) == pytest.approx(math.log2(k), abs=1e-12)
    assert concept_entropy(Counter({str(i): 3 for i in range(k)})) == pytest.approx(math.log2(k), abs=1e-12)


def test_entropy_follows_the_formula() -> None:
    assert concept_entropy([5]) == 0.0
    assert math.copysign(1, concept_entropy([5])) == 1.0  # no minus zero in a file
    assert concept_entropy([4, 0, 0]) == 0.0
    assert concept_entropy([1, 3]) == pytest.approx(2 - 0.75 * math.log2(3))
    assert concept_entropy([0.1, 0.1, 0.2]) == pytest.approx(1.5)


@pytest.mark.parametrize("counts", [[], [0, 0], [2, -1], [float("nan")], [float("inf"), 1]])
def test_entropy_of_no_distribution_is_refused(counts: list[float]) -> None:
    with pytest.raises(ConfigError, match="no distribution"):
        concept_entropy(counts)


def test_clusters_are_named_by_the_nearest_mean_seed() -> None:
    centroids = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    embeddings = np.array([[0.9, 0.1], [0.6, 0.8], [0.1, 0.9], [0.0, 1.0], [1.0, 1.0]])
    labels = np.array([0, 0, 1, 1, -1])
    # the mean of cluster 0 is (0.75, 0.45), though one of its members is nearer to the second concept
    assert name_clusters(embeddings, labels, centroids, ["a", "b", "c"]) == ("a", "b")
    assert name_clusters(embeddings, np.full(5, -1), centroids, ["a", "b", "c"]) == ()


@pytest.mark.parametrize("space", ["profile", "embedding"])
def test_clusters_find_the_concepts_and_keep_noise_apart(space: str) -> None:
    colors, shapes = ["red", "blue", "green", "pink", "gray"], ["circle", "square", "star", "cross", "arch"]
    texts = [f"something {w}" for w in colors] + shapes + ["else", "other"]
    found = cluster_descriptions(
        texts, encode=encode, lexicon=LEXICON, config=ClusterConfig(space=space, min_cluster_size=4)
    )
    assert found.concepts[:5] == ["color"] * 5
    assert found.concepts[5:10] == ["shape"] * 5
    assert set(found.names) == {"color", "shape"}
    again = cluster_descriptions(
        texts, encode=encode, lexicon=LEXICON, config=ClusterConfig(space=space, min_cluster_size=4)
    )
    np.testing.assert_array_equal(found.labels, again.labels)


def test_clusters_over_the_pool_hold_what_is_too_few_alone() -> None:
    colors, shapes = ["red", "blue", "green", "pink", "gray"], ["circle", "square", "star", "cross", "arch"]
    few = ["star", "red", "blue", "green", "pink", "gray"]
    alone = ClusterConfig(min_cluster_size=4)
    over = ClusterConfig(min_cluster_size=4, over="pool")
    pool = [*colors, *shapes]
    assert (
        cluster_descriptions(few, encode=encode, lexicon=LEXICON, config=alone, pool=pool).concepts[0]
        != "shape"
    )
    found = cluster_descriptions(few, encode=encode, lexicon=LEXICON, config=over, pool=pool)
    assert found.concepts == ["shape", *["color"] * 5]
    assert found.profiles.shape == (6, 2)


def test_dear_minis_pool_is_in_its_captions_words() -> None:
    pool = world_pool()
    assert len(pool) > 900
    assert set(pool.values()) == {"color", "shape", "texture", "object", "location"}
    assert "a star shape" in pool
    for text in ("something on a star", "a picture of a fern", "the color mint green"):
        assert text not in pool


def test_too_few_descriptions_are_noise() -> None:
    found = cluster_descriptions(["red", "circle"], encode=encode, lexicon=LEXICON)
    assert found.concepts == [NOISE, NOISE]
    assert found.names == ()


def test_carriers_are_taken_off() -> None:
    lexicon = Lexicon.load()
    for text, bare in {
        "something red": "red",
        "a striped thing": "striped",
        "A picture of something at the top left": "at the top left",
        "a thing on a star": "a star",
        "a cat": "a cat",
        "something": "something",
        "a (thing": "a (thing",
    }.items():
        assert lexicon.without_carriers(text) == bare


def test_lexicon_that_ships_has_the_attributes() -> None:
    lexicon = Lexicon.load()
    assert list(lexicon.concepts)[:5] == ["color", "shape", "texture", "object", "location"]
    assert len(lexicon.concepts) >= 12


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "does not hold a lexicon"),
        ("{", "does not hold a lexicon"),
        ('{"concepts": {"a": ["x"]}}', "2 or more"),
        ('{"concepts": {"a": ["x"], "b": []}}', "without seeds: b"),
        ('{"concepts": {"a": ["x"], "noise": ["y"]}}', "called 'noise'"),
        ('{"concepts": {"a": ["x"], "b": ["y"]}, "carriers": ["a thing"]}', "a thing"),
    ],
)
def test_broken_lexicons_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        Lexicon.load(tmp_path / "c.json")
    with pytest.raises(ConfigError, match=r"absent\.json"):
        Lexicon.load(tmp_path / "absent.json")


def test_lexicon_with_and_without_concepts() -> None:
    more = LEXICON.with_concepts({"rust": ["no rust", "much rust"], "color": ["green"]})
    assert more.concepts == {
        "color": ("red", "blue", "green"),
        "shape": ("circle", "square"),
        "rust": ("no rust", "much rust"),
    }
    assert more.carriers == LEXICON.carriers
    assert list(more.only({"rust", "shape"}).concepts) == ["shape", "rust"]
    with pytest.raises(ConfigError, match="give phrases for them"):
        LEXICON.require(("color", "rust"))


@pytest.mark.parametrize(
    "options", [{"over": "x"}, {"space": "x"}, {"method": "x"}, {"min_cluster_size": 1}, {"min_samples": 0}]
)
def test_wrong_cluster_parameters_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ClusterConfig.from_dict(options)


def test_clustering_needs_hdbscan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install \"dear-serve\[train\]\""):
        cluster_descriptions(["red"], encode=encode, lexicon=LEXICON)


def test_pools_are_large_unique_and_about_known_concepts() -> None:
    general, world = general_descriptions(), world_descriptions()
    texts = unique([*world, *general])
    assert len(unique(general)) >= 3000
    assert not any(len(set(w)) < len(w) for w in (t.lower().split()[-2:] for t in general))
    assert len({t.lower() for t in texts}) == len(texts)
    assert max(len(t.split()) for t in texts) <= 9
    assert not any("{" in t or t != t.strip() for t in texts)
    concepts = set(Lexicon.load().concepts)
    assert set(general.values()) == concepts
    assert Counter(world.values()).keys() == {"color", "shape", "texture", "object", "location"}
    assert "an olive green thing" in general
    assert "a red one" in world
    assert len(world_descriptions(3)) < len(world)


def test_description_files(tmp_path: Path) -> None:
    path = tmp_path / "d.txt"
    path.write_text("# a comment\n\n  A red   hat \na red hat\nrust\n")
    assert load_descriptions(path) == ["A red hat", "rust"]
    path.write_text("rust\n")
    with pytest.raises(ConfigError, match="holds 1 descriptions"):
        load_descriptions(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_descriptions(path)
    with pytest.raises(ConfigError, match="cannot be read as text"):
        load_descriptions(tmp_path / "absent")
    path.write_text('{"color": [{"templates": ["{}"]}]}')
    with pytest.raises(ConfigError, match="templates and words"):
        general_descriptions(path)


def test_the_base_itself_encodes_sentences(tiny_clip_config: ClipConfig) -> None:
    clip = Clip(tiny_clip_config).eval()
    name, encoder = sentence_encoder("clip", clip)
    rows = encoder(["a cat", "something red at the top left " * 9])
    assert "text tower" in name
    assert rows.shape == (2, tiny_clip_config.embed_dim)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(text_features(clip, ["a cat"]), rows[:1], atol=1e-6)  # alone = in a batch


def test_sentence_encoders_that_are_not_there(
    tmp_path: Path, tiny_clip_config: ClipConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = Clip(tiny_clip_config)
    with pytest.raises(ConfigError, match="neither sbert, clip nor a folder"):
        sentence_encoder("nowhere", clip)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install \"dear-serve\[roles\]\""):
        sentence_encoder("sbert", clip)
    with pytest.raises(MissingDependencyError, match="sentence_transformers"):
        sentence_encoder(str(tmp_path), clip)
