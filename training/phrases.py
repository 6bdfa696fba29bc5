"""Phrases that differ in one attribute alone, for the span readouts of a bundle (method.md §8, readout 3).

The words are those of everyday pictures and of the attribute world.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dear_serve.errors import ConfigError
from training.world_vocab import CORE_OBJECTS, object_names, with_article

__all__ = ["PHRASES", "REMAINDERS", "load_phrases"]

_COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")
_SHAPES = ("circle", "square", "triangle", "diamond", "pentagon", "star", "heart", "cross", "arch", "drop")
_TEXTURES = ("plain", "striped", "dotted", "checkered", "zigzag", "ringed")
_PLACES = (
    "top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right",
)  # fmt: skip

PHRASES: dict[str, tuple[str, ...]] = {
    "color": tuple(f"something {word}" for word in _COLORS),
    "shape": tuple(f"something on {'an' if word == 'arch' else 'a'} {word}" for word in _SHAPES),
    "texture": tuple(f"something {word}" for word in _TEXTURES),
    "object": tuple(f"a picture of {with_article(word)}" for word in object_names(CORE_OBJECTS)),
    "location": tuple(f"something at the {word}" for word in _PLACES),
}
"""Attribute to phrases; an attribute without an entry is read by its token."""

REMAINDERS = ("object",)
"""Attributes with so many values that the spans of the others are removed from theirs."""


def load_phrases(path: Path) -> dict[str, tuple[str, ...]]:
    """Attributes of one's own and their phrases: JSON {"rust": ["no rust", "light rust", ...]}.

    Raises:
        ConfigError: the file cannot be read, isn't of that form, or an attribute has fewer than two different phrases.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"phrases {path} cannot be read as JSON: {error}", field="phrases") from error
    if not isinstance(data, dict) or not data:
        raise ConfigError(
            f'phrases {path} holds no attributes; {{"NAME": ["phrase", ...]}} is expected', field="phrases"
        )
    for name, texts in data.items():
        good = isinstance(texts, list) and all(isinstance(t, str) and t.strip() for t in texts)
        if not good or len(set(texts)) < 2 or not name.strip() or name == "class":
            raise ConfigError(
                f"phrases {path}: {name!r} has {texts!r}; a name other than class and a list of 2 or more different "
                "phrases are needed",
                field="phrases",
            )
    return {name: tuple(texts) for name, texts in data.items()}
