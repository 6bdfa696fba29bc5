"""Captions of the attribute world: texts say what their assignment says, and truth is exact."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dear_serve.errors import ConfigError
from dear_serve.tokenizer import Tokenizer
from training.captions import (
    UNSAID,
    attribute_prompts,
    captions_of,
    describe,
    full_captions,
    merge_equal,
    sample_captions,
    truth_matrix,
)
from training.world import Scenes, sample_scenes
from training.world_vocab import (
    ATTRIBUTES,
    COLORS,
    LOCATIONS,
    OBJECTS,
    SHAPES,
    TEXTURES,
    VOCABULARY,
    object_names,
    with_article,
)


@pytest.fixture
def scenes() -> Scenes:
    return sample_scenes(np.random.default_rng(0), 300, n_objects=50)


def assignment(**said: str) -> list[int]:
    return [VOCABULARY[name].index(said[name]) if name in said else UNSAID for name in ATTRIBUTES]


@pytest.mark.parametrize(
    ("said", "choice", "text"),
    [
        (
            {"object": "cat", "color": "red", "texture": "striped", "shape": "heart", "location": "top left"},
            1,
            "a cat on a red striped heart at the top left",
        ),
        ({"texture": "dotted"}, 0, "something dotted"),
        ({"shape": "heart"}, 0, "a heart"),
        ({"location": "bottom right"}, 0, "something at the bottom right"),
        ({"object": "umbrella"}, 0, "an umbrella"),
        ({"object": "scissors"}, 0, "scissors"),
        ({"color": "blue", "object": "bell"}, 192, "a blue bell"),
        ({"color": "orange", "shape": "arch"}, 193, "an orange arch"),
        ({"object": "ufo", "shape": "star"}, 195, "a star with a ufo"),
    ],
)
def test_describe(said: dict[str, str], choice: int, text: str) -> None:
    assert describe(assignment(**said), choice=choice) == text


def test_describe_needs_something_to_say() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        describe([UNSAID] * 5)


def test_a_text_means_one_assignment() -> None:
    rng = np.random.default_rng(1)
    meaning: dict[str, tuple[int, ...]] = {}
    for _ in range(20):
        captions = sample_captions(rng, sample_scenes(rng, 500, split="any"))
        for text, parts in zip(captions.texts, captions.parts.tolist(), strict=True):
            assert meaning.setdefault(text, tuple(parts)) == tuple(parts), text


def test_texts_name_every_said_value(scenes: Scenes) -> None:
    captions = sample_captions(np.random.default_rng(2), scenes)
    for text, parts in zip(captions.texts, captions.parts.tolist(), strict=True):
        for name, value in zip(ATTRIBUTES, parts, strict=True):
            if value != UNSAID:
                assert VOCABULARY[name][value] in text


def test_three_captions_a_scene(scenes: Scenes) -> None:
    n = len(scenes)
    captions = sample_captions(np.random.default_rng(0), scenes)
    said = captions.parts != UNSAID
    assert len(captions) == 3 * n
    assert (said[:n] == [name == "object" for name in ATTRIBUTES]).all()
    assert (said[n : 2 * n].sum(axis=1) == 1).all()
    assert not said[n : 2 * n, ATTRIBUTES.index("object")].any()
    assert (said[2 * n :].sum(axis=1) >= 2).all()
    truth = truth_matrix(scenes, captions)
    assert truth[np.tile(np.arange(n), 3), np.arange(3 * n)].all()
    again = sample_captions(np.random.default_rng(0), scenes)
    assert again.texts == captions.texts


def test_truth_equals_the_plain_definition(scenes: Scenes) -> None:
    few = scenes.select(slice(0, 25))
    captions = sample_captions(np.random.default_rng(3), few)
    truth = truth_matrix(few, captions)
    rows = few.attributes().tolist()
    for (i, row), (j, parts) in itertools.product(enumerate(rows), enumerate(captions.parts.tolist())):
        assert truth[i, j] == all(p in (UNSAID, v) for v, p in zip(row, parts, strict=True))
    assert 0 < truth.mean() < 0.5


def test_full_captions_say_everything(scenes: Scenes) -> None:
    captions = full_captions(np.random.default_rng(0), scenes)
    np.testing.assert_array_equal(captions.parts, scenes.attributes())


@pytest.mark.parametrize("by", ["parts", "texts"])
def test_merge_equal(scenes: Scenes, by: str) -> None:
    captions = sample_captions(np.random.default_rng(4), scenes)
    kept, group = merge_equal(captions, by=by)
    assert len(kept) < len(captions)
    np.testing.assert_array_equal(kept.parts[group], captions.parts)
    keys = kept.texts if by == "texts" else [tuple(row) for row in kept.parts.tolist()]
    assert len(set(keys)) == len(kept)
    truth = truth_matrix(scenes, captions)
    np.testing.assert_array_equal(truth_matrix(scenes, kept)[:, group], truth)


def test_merge_by_something_else(scenes: Scenes) -> None:
    with pytest.raises(ConfigError, match="'words'"):
        merge_equal(sample_captions(np.random.default_rng(0), scenes), by="words")


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_prompts_seen_in_training_and_not(attribute: str) -> None:
    column = ATTRIBUTES.index(attribute)
    seen = attribute_prompts(attribute)
    unseen = attribute_prompts(attribute, wording="unseen")
    assert len(seen) == len(unseen) == len(VOCABULARY[attribute])
    rng = np.random.default_rng(0)
    for value, texts in enumerate(seen[:20]):
        parts = np.full((400, 5), UNSAID)
        parts[:, column] = value
        trained = set(captions_of(parts, rng).texts)
        assert set(texts) == trained
        assert not trained & set(unseen[value])
        assert all(VOCABULARY[attribute][value] in text for text in texts + unseen[value])
    everything = [text for texts in seen for text in texts]
    assert len(set(everything)) == len(everything)


def test_unseen_prompts_never_occur_in_training() -> None:
    rng = np.random.default_rng(5)
    texts = set(sample_captions(rng, sample_scenes(rng, 20_000, split="any")).texts)
    for attribute in ATTRIBUTES:
        for prompts in attribute_prompts(attribute, wording="unseen"):
            assert not texts & set(prompts)


def test_prompts_of_a_smaller_world_and_bad_names() -> None:
    assert len(attribute_prompts("object", n_objects=9)) == 9
    with pytest.raises(ConfigError, match="unknown attribute 'size'"):
        attribute_prompts("size")
    with pytest.raises(ConfigError, match="unknown wording 'odd'"):
        attribute_prompts("color", wording="odd")
    with pytest.raises(ConfigError, match="n_objects is 0"):
        object_names(0)


def test_the_longest_captions_fit_sixteen_tokens() -> None:
    tokenizer = Tokenizer.from_open_clip(16)

    def longest(names: tuple[str, ...], count: int) -> list[int]:
        return sorted(range(len(names)), key=lambda i: -len(tokenizer.encode(names[i])))[:count]

    texts = set()
    choices = itertools.product(
        [COLORS.index("orange"), UNSAID],
        [*longest(SHAPES, 2), UNSAID],
        [*longest(TEXTURES, 1), UNSAID],
        longest(OBJECTS, 20),
        [LOCATIONS.index("bottom right")],
        range(0, 512, 5),
    )
    for *parts, choice in choices:
        texts.add(describe(parts, choice=choice))
    for attribute in ATTRIBUTES:
        for wording in ("seen", "unseen"):
            texts |= {text for prompts in attribute_prompts(attribute, wording=wording) for text in prompts}
    assert not [text for text in sorted(texts) if tokenizer.was_truncated(text)]


def test_articles() -> None:
    assert with_article("cat", "orange") == "an orange cat"
    assert with_article("unicycle") == "a unicycle"
    assert with_article("theater masks", "red") == "red theater masks"
    assert with_article("ice cream") == "an ice cream"
