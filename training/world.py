"""The attribute world: pictures of scenes with exact attributes.

A scene is an object's icon on a badge that has a shape, a color, a texture and a place in a 64x64 picture.
Every attribute is known exactly, so captions have exact truth (`training.captions`) and any skill of a model
trained on the world can be measured attribute by attribute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dear_serve.errors import ConfigError
from training.world_masks import (
    BACKGROUND,
    BADGE_ANGLES,
    GLYPH,
    ICON_ANGLES,
    ICON_EXTENTS,
    PATCH,
    SCALES,
    TEXTURE_VARIANTS,
    background_bank,
    dilate,
    glyph_bank,
    noise_bank,
    shape_bank,
    texture_bank,
)
from training.world_scenes import (
    HELD_OUT_MODULUS,
    HELD_OUT_PAIRS,
    SPLITS,
    STYLES,
    TRAIN_STYLES,
    Scenes,
    is_held_out,
    sample_scenes,
    scenes_from,
)
from training.world_vocab import (
    ATTRIBUTES,
    COLORS,
    ICONS,
    VOCABULARY,
    object_names,
)

__all__ = [
    "HELD_OUT_MODULUS",
    "HELD_OUT_PAIRS",
    "SIZE",
    "SPLITS",
    "STYLES",
    "TRAIN_STYLES",
    "Scenes",
    "World",
    "is_held_out",
    "sample_scenes",
    "scenes_from",
]

SIZE = 64  # side of a picture, pixels
_CENTERS = np.array([18, 32, 46])
_JITTER = 2
_MARGIN = 10  # canvas beyond the picture, so that every badge's square lies on it
_CANVAS = SIZE + 2 * _MARGIN
_CHUNK = 32  # pictures composed at a time, to stay in the processor's cache

# First and second tone of each color, RGB 0..255.
_TONES = {
    "red": ((212, 28, 34), (255, 148, 140)),
    "orange": ((246, 128, 16), (255, 205, 140)),
    "yellow": ((250, 218, 30), (196, 156, 0)),
    "green": ((34, 148, 54), (150, 222, 150)),
    "blue": ((28, 84, 214), (146, 188, 255)),
    "purple": ((122, 40, 170), (206, 156, 236)),
    "pink": ((250, 112, 184), (255, 206, 230)),
    "brown": ((118, 68, 30), (190, 142, 96)),
    "black": ((22, 22, 26), (104, 104, 110)),
    "white": ((253, 253, 253), (196, 198, 202)),
    "gray": ((128, 130, 134), (186, 188, 192)),
}


@dataclass(frozen=True, kw_only=True)
class _Draw:
    """Everything random about a batch of pictures, each field (B, ...)."""

    background: np.ndarray  # (B, 3) bank index, row, column
    noise: np.ndarray  # (B, 3) bank index, row, column
    amplitude: np.ndarray  # (B,) noise, in gray levels
    gain: np.ndarray  # (B,) brightness factor
    badge: np.ndarray  # (B, 3) scale, angle, texture variant
    jitter: np.ndarray  # (B, 2) pixels
    icon: np.ndarray  # (B, 2) extent, angle
    shift: np.ndarray  # (B, 2) icon against badge, pixels
    tint: np.ndarray  # (B, 3) added to the badge's color
    ink: np.ndarray  # (B, 2) gray-level changes of ink and halo


def _draw(rng: np.random.Generator, n: int, backgrounds: int, noises: int) -> _Draw:
    room, noise_room = BACKGROUND - _CANVAS + 1, BACKGROUND - SIZE + 1
    return _Draw(
        background=rng.integers(0, [backgrounds, room, room], (n, 3)),
        noise=rng.integers(0, [noises, noise_room, noise_room], (n, 3)),
        amplitude=rng.uniform(1, 7, n).astype(np.float32),
        gain=rng.uniform(0.88, 1.06, n).astype(np.float32),
        badge=rng.integers(0, [len(SCALES), len(BADGE_ANGLES), TEXTURE_VARIANTS], (n, 3)),
        jitter=rng.integers(-_JITTER, _JITTER + 1, (n, 2)),
        icon=rng.integers(0, [len(ICON_EXTENTS), len(ICON_ANGLES)], (n, 2)),
        shift=rng.integers(-1, 2, (n, 2)),
        tint=rng.normal(0, 5, (n, 3)).astype(np.float32),
        ink=rng.uniform(0, 22, (n, 2)).astype(np.float32),
    )


def _palette() -> np.ndarray:
    """First tone, second tone and edge of each color in each style, (styles, colors, 3, 3) float32."""
    tones = np.array([_TONES[color] for color in COLORS], np.float32)
    first, second = tones[:, 0], tones[:, 1]
    light = first + (255 - first) * 0.35
    light[COLORS.index("black")] = 96
    pale = first + (255 - first) * 0.7
    pale[COLORS.index("black")], pale[COLORS.index("gray")] = 150, 196
    vivid = first.copy()
    vivid[COLORS.index("white")] = 200
    rows = {
        "print": (first, second, first * 0.62),
        "outline": (pale, vivid, first * 0.9),
        "night": (first * 0.16 + 6, light * 0.55, light),
        "dusk": (first, second, light),
    }
    return np.stack([np.stack(rows[style], axis=1) for style in STYLES])


class World:
    """Renders scenes; holds the masks, made once (a second or two).

    Args:
        n_objects: draw only the first `n_objects` objects (default: all); fewer are made faster.

    Raises:
        MissingDependencyError: the icon font isn't installed.
        ConfigError: `n_objects` is out of range.
    """

    def __init__(self, n_objects: int | None = None) -> None:
        self.n_objects = len(object_names(n_objects))
        self._fill, thin = shape_bank(1.5)
        _, thick = shape_bank(2.6)
        self._edge = np.stack([thin, thick])
        self._texture = texture_bank()
        glyphs = glyph_bank(ICONS[: self.n_objects])
        contours = dilate(glyphs, 1.0) - glyphs
        self._glyph = np.stack([glyphs, contours])
        self._halo = np.stack([dilate(glyphs, 2.3), dilate(glyphs, 3.0)])
        self._background = background_bank().reshape(-1, BACKGROUND, BACKGROUND * 3)
        self._noise = noise_bank().reshape(-1, BACKGROUND, BACKGROUND * 3)
        self._palette = _palette()
        self._dark = np.array([style in ("night", "dusk") for style in STYLES])
        self._lined = np.array([style in ("outline", "night") for style in STYLES]).astype(np.int64)

    def render(self, scenes: Scenes, rng: np.random.Generator) -> np.ndarray:
        """Pictures of `scenes`, (B, 64, 64, 3) uint8 RGB; what a scene leaves open comes from `rng`.

        Raises:
            ConfigError: an index is out of range, such as an object beyond this world's `n_objects`.
        """
        self._check(scenes)
        draw = _draw(rng, len(scenes), len(self._background), len(self._noise))
        out = np.empty((len(scenes), SIZE, SIZE, 3), np.uint8)
        for start in range(0, len(scenes), _CHUNK):
            part = slice(start, start + _CHUNK)
            cut = _Draw(**{name: value[part] for name, value in vars(draw).items()})
            out[part] = self._compose(scenes.select(part), cut)
        return out

    def _check(self, scenes: Scenes) -> None:
        sizes = {name: len(VOCABULARY[name]) for name in ATTRIBUTES} | {"object": self.n_objects}
        for name, size in (*sizes.items(), ("style", len(STYLES))):
            values = getattr(scenes, name)
            if len(values) and not 0 <= values.min() <= values.max() < size:
                raise ConfigError(
                    f"the scenes' {name} runs from {values.min()} to {values.max()}, this world has {size}: "
                    f"stay within 0..{size - 1} or make the world with more"
                )

    def _compose(self, scenes: Scenes, draw: _Draw) -> np.ndarray:
        n = len(scenes)
        rows = np.arange(n)
        dark = self._dark[scenes.style]
        crops = sliding_window_view(self._background, (_CANVAS, _CANVAS * 3), axis=(1, 2))
        index, top, left = draw.background.T
        canvas = crops[index, top, left * 3].astype(np.float32)
        canvas[dark] = 10 + (250 - canvas[dark]) * 0.42

        center = np.stack([_CENTERS[scenes.location // 3], _CENTERS[scenes.location % 3]], axis=1)
        y, x = (center + draw.jitter + _MARGIN - PATCH // 2).T
        squares = sliding_window_view(canvas, (PATCH, PATCH * 3), axis=(1, 2), writeable=True)
        patch = self._badge(squares[rows, y, x * 3].reshape(n, PATCH, PATCH, 3), scenes, draw)
        self._icon(patch, scenes, draw)
        squares[rows, y, x * 3] = patch.reshape(n, PATCH, PATCH * 3)

        inner = slice(_MARGIN, _MARGIN + SIZE)
        picture = canvas[:, inner, inner.start * 3 : inner.stop * 3] * draw.gain[:, None, None]
        fields = sliding_window_view(self._noise, (SIZE, SIZE * 3), axis=(1, 2))
        index, top, left = draw.noise.T
        picture += fields[index, top, left * 3] * draw.amplitude[:, None, None]
        np.clip(picture, 0, 255, out=picture)
        return np.asarray(picture, np.uint8).reshape(n, SIZE, SIZE, 3)

    def _badge(self, patch: np.ndarray, scenes: Scenes, draw: _Draw) -> np.ndarray:
        """`patch` (B, PATCH, PATCH, 3) float32 with the badge on it."""
        scale, angle, variant = draw.badge.T
        tones = self._palette[scenes.style, scenes.color] + draw.tint[:, None]
        first, second, edge = (tones[:, i, None, None] for i in range(3))
        pattern = _alpha(self._texture[scenes.texture, variant])
        body = first + (second - first) * pattern
        patch += (body - patch) * _alpha(self._fill[scenes.shape, scale, angle])
        rim = self._edge[self._lined[scenes.style], scenes.shape, scale, angle]
        patch += (edge - patch) * _alpha(rim)
        return patch

    def _icon(self, patch: np.ndarray, scenes: Scenes, draw: _Draw) -> None:
        """Draw icon and halo into `patch` in place."""
        n = len(scenes)
        extent, angle = draw.icon.T
        flat = patch.reshape(n, PATCH, PATCH * 3)
        squares = sliding_window_view(flat, (GLYPH, GLYPH * 3), axis=(1, 2), writeable=True)
        y, x = ((PATCH - GLYPH) // 2 + draw.shift).T
        rows = np.arange(n)
        square = squares[rows, y, x * 3].reshape(n, GLYPH, GLYPH, 3)
        dark = self._dark[scenes.style]
        low, high = 14 + draw.ink[:, 0], 252 - draw.ink[:, 1]
        ink, halo = np.where(dark, high, low), np.where(dark, low, high)
        lined = self._lined[scenes.style]
        key = (lined, scenes.object, extent, angle)
        square += (halo[:, None, None, None] - square) * _alpha(self._halo[key])
        square += (ink[:, None, None, None] - square) * _alpha(self._glyph[key])
        squares[rows, y, x * 3] = square.reshape(n, GLYPH, GLYPH * 3)


def _alpha(mask: np.ndarray) -> np.ndarray:
    """A uint8 mask (B, H, W) as opacity (B, H, W, 1) float32 in 0..1."""
    opacity: np.ndarray = mask.astype(np.float32) * np.float32(1 / 255)
    return opacity[..., None]
