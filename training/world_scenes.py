"""Scenes of the attribute world as arrays of indices, their sampling, and what is kept out of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dear_serve.errors import ConfigError
from training.world_vocab import ATTRIBUTES, COLORS, LOCATIONS, SHAPES, TEXTURES, object_names

STYLES = ("print", "outline", "night", "dusk")
TRAIN_STYLES = ("print", "outline")  # night and dusk are kept for the demo task and for tests of transfer
SPLITS = ("train", "heldout", "any")

# Pairs of attributes with combinations kept out of training, and the two factors of the rule.
HELD_OUT_PAIRS = (("object", "color", 3, 5), ("shape", "texture", 3, 2), ("location", "color", 2, 3))
HELD_OUT_MODULUS = 7


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """A batch of scenes: per attribute an index into its names, and per scene an index into STYLES.

    Every field is (B,) int64; equal lengths and ranges are the caller's promise, checked by `World.render`.
    """

    color: np.ndarray
    shape: np.ndarray
    texture: np.ndarray
    object: np.ndarray
    location: np.ndarray
    style: np.ndarray

    def __len__(self) -> int:
        return len(self.color)

    def attributes(self) -> np.ndarray:
        """The attribute indices, (B, 5) int64, columns in the order of ATTRIBUTES."""
        return np.stack([self.color, self.shape, self.texture, self.object, self.location], axis=1)

    def select(self, index: np.ndarray | slice) -> Scenes:
        """The scenes at `index`."""
        return scenes_from(self.attributes()[index], self.style[index])


def scenes_from(attributes: np.ndarray, style: np.ndarray) -> Scenes:
    """Scenes of attribute indices (B, 5), columns as in ATTRIBUTES, and styles (B,)."""
    color, shape, texture, object_, location = np.asarray(attributes, np.int64).T
    return Scenes(
        color=color,
        shape=shape,
        texture=texture,
        object=object_,
        location=location,
        style=np.asarray(style, np.int64),
    )


def is_held_out(attributes: np.ndarray) -> np.ndarray:
    """Which attribute rows (B, 5) hold a combination kept out of training; (B,) bool (rule ours).

    The rule: a pair of values (a, b) of (object, color), (shape, texture) or (location, color) is held out
    when `p * a + q * b` is divisible by 7, with (p, q) = (3, 5), (3, 2), (2, 3). That is one in seven
    combinations of each pair, spread so that every single value still occurs in training with most partners;
    a scene is held out if any of its three pairs is.
    """
    held = np.zeros(len(attributes), bool)
    for first, second, p, q in HELD_OUT_PAIRS:
        a, b = attributes[:, ATTRIBUTES.index(first)], attributes[:, ATTRIBUTES.index(second)]
        held |= (p * a + q * b) % HELD_OUT_MODULUS == 0
    return held


def _check_sampling(n: int, split: str, styles: Sequence[str]) -> None:
    if n < 0:
        raise ConfigError(f"cannot sample {n} scenes; give 0 or more")
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    unknown = [style for style in styles if style not in STYLES]
    if unknown or not styles:
        raise ConfigError(f"unknown styles {unknown}; choose from {', '.join(STYLES)}")


def sample_scenes(
    rng: np.random.Generator,
    n: int,
    *,
    split: str = "train",
    styles: Sequence[str] = TRAIN_STYLES,
    n_objects: int | None = None,
) -> Scenes:
    """`n` scenes with uniform, independent attributes, restricted to a split of the combinations.

    Args:
        rng: the source of randomness; equal states give equal scenes.
        n: number of scenes.
        split: "train" (no held-out combination), "heldout" (at least one, see `is_held_out`) or "any".
        styles: style names to draw from uniformly; a name given twice is drawn twice as often.
        n_objects: draw from the first `n_objects` objects only.

    Raises:
        ConfigError: unknown split or style, or a count out of range.
    """
    _check_sampling(n, split, styles)
    sizes = [len(COLORS), len(SHAPES), len(TEXTURES), len(object_names(n_objects)), len(LOCATIONS)]
    rows = rng.integers(0, sizes, (n, len(sizes)))
    while split != "any":
        wrong = np.flatnonzero(is_held_out(rows) != (split == "heldout"))
        if not len(wrong):
            break
        rows[wrong] = rng.integers(0, sizes, (len(wrong), len(sizes)))
    choice = np.array([STYLES.index(style) for style in styles])
    return scenes_from(rows, choice[rng.integers(0, len(choice), n)])
