"""The pool of short descriptions that TEXTSPAN chooses from: phrases made from word lists, or a file's lines (ours).

`phrases.json` holds, by concept, templates and ";"-separated words; every word goes into every template of its group,
`{}` as it is and `{a}` with its article. The concept a phrase was made for is kept only to measure how well clusters
are named: roles never see it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from dear_serve.errors import ConfigError
from training.captions import attribute_prompts
from training.world_vocab import ATTRIBUTES, with_article

__all__ = [
    "PHRASES",
    "fill",
    "general_descriptions",
    "load_descriptions",
    "unique",
    "world_descriptions",
    "world_pool",
]

PHRASES = Path(__file__).parent / "phrases.json"
_OBJECT_WORDINGS = 2  # of the training wordings; the other attributes have fewer values and take all of them
_CAPTION_WORDS = {"and", "at", "drawing", "image", "in", "of", "on", "picture", "with"}


def general_descriptions(path: Path = PHRASES) -> dict[str, str]:
    """Phrase -> the concept it was made for, in the order of the word lists, each phrase once.

    Raises:
        ConfigError: the file is absent or isn't of the form of the module docstring.
    """
    pool: dict[str, str] = {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        for concept, groups in data.items():
            for group in groups:
                words = [w.strip() for w in group["words"].split(";")]
                for template in group["templates"]:
                    for word in words:
                        pool.setdefault(fill(template, word), concept)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} does not hold templates and words by concept: {error}") from error
    return pool


def world_descriptions(n_objects: int | None = None) -> dict[str, str]:
    """Phrase -> attribute for every value of the attribute world, worded as in dear-mini's training captions."""
    pool: dict[str, str] = {}
    for attribute in ATTRIBUTES:
        only = n_objects if attribute == "object" else None
        for row in attribute_prompts(attribute, n_objects=only):
            for text in row[:_OBJECT_WORDINGS] if attribute == "object" else row:
                pool.setdefault(text, attribute)
    return pool


def world_pool() -> dict[str, str]:
    """Phrase -> attribute for bases trained on the attribute world: its values, and general phrases in its words.

    A word that the captions never had has an untrained embedding, so what TEXTSPAN makes of it is chance: on a late
    state of dear-mini the head of color was described as "a picture of a fern". And a phrase has to say what it is
    about: "something on a star" is left out, "a star shape" stays.
    """
    world = world_descriptions()
    known = _CAPTION_WORDS.union(*(_words(text) for text in world))
    general = {
        text: concept
        for text, concept in general_descriptions().items()
        if concept in ATTRIBUTES and _words(text) <= known
    }
    return {
        text: concept
        for text, concept in {**world, **general}.items()
        if concept != "shape" or "shape" in _words(text)
    }


def _words(text: str) -> set[str]:
    return set(text.lower().replace("-", " ").split())


def load_descriptions(path: Path) -> list[str]:
    """One description a line; empty lines and lines that start with # are left out, equal ones kept once.

    Raises:
        ConfigError: the file cannot be read or holds fewer than two descriptions.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"descriptions {path} cannot be read as text: {error}", field="descriptions"
        ) from error
    texts = unique(line for line in lines if not line.lstrip().startswith("#"))
    if len(texts) < 2:
        raise ConfigError(
            f"descriptions {path} holds {len(texts)} descriptions; give one a line, at least 2 (better 1,000)",
            field="descriptions",
        )
    return texts


def unique(texts: Iterable[str]) -> list[str]:
    """Texts stripped, without empty ones, each once (whatever its case), in the order of first appearance."""
    seen: dict[str, str] = {}
    for text in texts:
        if stripped := " ".join(text.split()):
            seen.setdefault(stripped.lower(), stripped)
    return list(seen.values())


def fill(template: str, word: str) -> str:
    """`template` with `word` for {} and with its article for {a}."""
    return template.replace("{a}", with_article(word)).replace("{}", word)
