"""Phrases that differ in one attribute alone, for the span readouts of a bundle (method.md §8, readout 3).

The words are those of everyday pictures and of the attribute world.
"""

from __future__ import annotations

from training.world_vocab import CORE_OBJECTS, object_names, with_article

__all__ = ["PHRASES", "REMAINDERS"]

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
