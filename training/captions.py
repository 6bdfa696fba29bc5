"""Captions of the attribute world: texts that say some attributes of a scene, and their exact truth.

A caption is a partial assignment: for every attribute an index into its names, or -1 where it says nothing.
Whether it is true of a picture follows from the scene alone, so a contrastive loss can use the whole truth
matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dear_serve.errors import ConfigError
from training.world import Scenes
from training.world_vocab import ATTRIBUTES, LOCATIONS, VOCABULARY, object_names, with_article

UNSAID = -1

_OBJECT = ATTRIBUTES.index("object")
_OTHERS = np.array([i for i, name in enumerate(ATTRIBUTES) if name != "object"])
_PREFIXES = ("a picture of ", "an image of ", "a drawing of ")
_PREFIX_WORDS = 8  # a prefix only goes before a short text: the text tower reads 16 tokens

# Wordings of one attribute alone; {} is its value, with an article where the template says {a}.
_SEEN = {
    "color": ("something {}", "{a} thing", "{a} one", "the color {}"),
    "shape": ("{a}", "something on {a}", "{a} shape", "a picture of {a}"),
    "texture": ("something {}", "{a} thing", "{a} one", "the texture {}"),
    "object": ("{a}", "a picture of {a}", "an image of {a}", "a drawing of {a}"),
    "location": ("something at the {}", "a thing at the {}", "one at the {}", "at the {}"),
}
_UNSEEN = {
    "color": ("it is {}", "this picture is {}", "a picture of something {}", "an image of {a} thing"),
    "shape": ("it is {a}", "this is {a}", "an image of something on {a}", "a thing on {a}"),
    "texture": ("it is {}", "this picture is {}", "a picture of something {}", "an image of {a} thing"),
    "object": ("it is {a}", "this is {a}", "one picture of {a}", "the {}"),
    "location": (
        "it is at the {}",
        "the {}",
        "a picture of something at the {}",
        "an image at the {}",
    ),
}
WORDINGS = {"seen": _SEEN, "unseen": _UNSEEN}


@dataclass(frozen=True, kw_only=True)
class Captions:
    """A batch of M captions: `texts`, and `parts` (M, 5) int64 in the order of ATTRIBUTES, -1 for unsaid."""

    texts: list[str]
    parts: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)


def _fill(template: str, value: str) -> str:
    return template.replace("{a}", with_article(value)).replace("{}", value)


def attribute_prompts(
    attribute: str, *, wording: str = "seen", n_objects: int | None = None
) -> list[list[str]]:
    """Zero-shot prompts: for every value of `attribute`, in order, a list of texts that say just that value.

    Args:
        attribute: one of ATTRIBUTES.
        wording: "seen" (the wordings of the training captions) or "unseen" (never among them).
        n_objects: for "object", only the first so many.

    Raises:
        ConfigError: unknown attribute or wording.
    """
    if attribute not in VOCABULARY:
        raise ConfigError(f"unknown attribute {attribute!r}; choose one of {', '.join(ATTRIBUTES)}")
    if wording not in WORDINGS:
        raise ConfigError(f"unknown wording {wording!r}; choose one of {', '.join(WORDINGS)}")
    values = object_names(n_objects) if attribute == "object" else VOCABULARY[attribute]
    return [[_fill(template, value) for template in WORDINGS[wording][attribute]] for value in values]


def _place(location: int, choice: int) -> str:
    name = LOCATIONS[location]
    if name in ("left", "right"):
        return f"{('at', 'on')[choice % 2]} the {name}"
    return f"{('at', 'in')[choice % 2]} the {name}"


def _thing(color: int, shape: int, texture: int, object_: int, choice: int) -> str:
    """The noun phrase of a caption; its location comes after it."""
    looks = [VOCABULARY[name][i] for name, i in (("color", color), ("texture", texture)) if i != UNSAID]
    if shape != UNSAID:
        badge = with_article(VOCABULARY["shape"][shape], *looks)
        if object_ == UNSAID:
            return badge if choice % 3 else f"something on {badge}"
        icon = with_article(VOCABULARY["object"][object_])
        return f"{icon} on {badge}" if choice % 3 else f"{badge} with {icon}"
    if object_ != UNSAID:
        return with_article(VOCABULARY["object"][object_], *looks)
    if not looks:
        return ("something", "a thing", "one")[choice % 3]
    if choice % 2:
        return with_article(("thing", "one")[choice // 2 % 2], *looks)
    return f"something {' and '.join(looks) if choice // 2 % 2 else ' '.join(looks)}"


def describe(parts: Sequence[int], *, choice: int = 0) -> str:
    """A text that says exactly the attributes of `parts` (5 indices as in ATTRIBUTES, -1 for unsaid).

    `choice` (0 or more) picks among the wordings; equal arguments give equal texts.

    Raises:
        ConfigError: nothing is said at all.
    """
    said = [name for name, value in zip(ATTRIBUTES, parts, strict=True) if value != UNSAID]
    if not said:
        raise ConfigError("a caption must say at least one attribute; all five parts are -1")
    if len(said) == 1:
        templates = _SEEN[said[0]]
        value = VOCABULARY[said[0]][max(parts)]
        return _fill(templates[choice % len(templates)], value)
    color, shape, texture, object_, location = parts
    text = _thing(color, shape, texture, object_, choice)
    if location != UNSAID:
        text = f"{text} {_place(location, choice // 16)}"
    prefix = choice // 64 % 8
    if prefix < len(_PREFIXES) and text.startswith(("a ", "an ")) and text.count(" ") < _PREFIX_WORDS:
        return _PREFIXES[prefix] + text
    return text


def captions_of(parts: np.ndarray, rng: np.random.Generator) -> Captions:
    """Captions for partial assignments (M, 5), with wordings drawn from `rng`."""
    choices = rng.integers(0, 1 << 12, len(parts)).tolist()
    texts = [describe(row, choice=choice) for row, choice in zip(parts.tolist(), choices, strict=True)]
    return Captions(texts=texts, parts=np.asarray(parts, np.int64))


def sample_captions(rng: np.random.Generator, scenes: Scenes) -> Captions:
    """Three true captions a scene, 3 B in all: B objects alone, B other attributes alone, B subsets.

    Captions i, B + i and 2 B + i are of scene i. A subset says two to five attributes, all such sets equally
    often.
    """
    truth = scenes.attributes()
    rows = np.arange(len(truth))
    alone, other = np.full_like(truth, UNSAID), np.full_like(truth, UNSAID)
    alone[:, _OBJECT] = truth[:, _OBJECT]
    pick = _OTHERS[rng.integers(0, len(_OTHERS), len(truth))]
    other[rows, pick] = truth[rows, pick]
    said = rng.random(truth.shape) < 0.5
    while (few := said.sum(axis=1) < 2).any():
        said[few] = rng.random((int(few.sum()), truth.shape[1])) < 0.5
    return captions_of(np.concatenate([alone, other, np.where(said, truth, UNSAID)]), rng)


def full_captions(rng: np.random.Generator, scenes: Scenes) -> Captions:
    """One caption a scene that says all five attributes."""
    return captions_of(scenes.attributes(), rng)


def merge_equal(captions: Captions, *, by: str = "parts") -> tuple[Captions, np.ndarray]:
    """One caption for each group of equal ones (its first), and for every caption its group, (M,) int64.

    Args:
        captions: M captions.
        by: "parts" merges captions that say the same, "texts" only those that are the same text.

    Raises:
        ConfigError: `by` is something else.
    """
    if by == "parts":
        _, first, group = np.unique(captions.parts, axis=0, return_index=True, return_inverse=True)
    elif by == "texts":
        _, first, group = np.unique(np.array(captions.texts), return_index=True, return_inverse=True)
    else:
        raise ConfigError(f"cannot merge captions by {by!r}; choose parts or texts")
    kept = Captions(texts=[captions.texts[i] for i in first], parts=captions.parts[first])
    return kept, group.reshape(-1)


def truth_matrix(scenes: Scenes, captions: Captions) -> np.ndarray:
    """Which caption is true of which scene, (B, M) bool: all that caption j says holds for scene i."""
    values, parts = scenes.attributes(), captions.parts
    truth = np.ones((len(values), len(parts)), bool)
    for k in range(len(ATTRIBUTES)):
        truth &= (parts[None, :, k] == UNSAID) | (values[:, None, k] == parts[None, :, k])
    return truth
