"""Masks the world is composed of: badge shapes, textures, icon glyphs, backgrounds and noise, made once.

All banks are deterministic (a fixed seed of their own), so a rendered picture depends on the scene and the
caller's random generator alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from dear_serve.errors import MissingDependencyError
from training.world_vocab import SHAPES, TEXTURES

PATCH = 46  # side of the square a badge is drawn in, pixels
GLYPH = 30  # side of the square an icon and its halo are drawn in, pixels
BACKGROUND = 96  # side of a background field, cut to the picture's size at a random place
_SUPER = 6  # supersampling of outlines
_BANK_SEED = 20260301

# Extent of each shape in pixels at scale 1, so that all show about the same area around the icon.
_EXTENT = {
    "circle": 33.0,
    "square": 30.0,
    "triangle": 41.0,
    "diamond": 40.0,
    "pentagon": 38.0,
    "star": 44.0,
    "heart": 38.0,
    "cross": 37.0,
    "arch": 32.0,
    "drop": 38.0,
}
SCALES = (0.92, 0.97, 1.02, 1.07)
BADGE_ANGLES = (-8.0, -4.0, 0.0, 4.0, 8.0)
ICON_EXTENTS = (17.0, 18.0, 19.0)
ICON_ANGLES = (-10.0, -5.0, 0.0, 5.0, 10.0)
TEXTURE_VARIANTS = 48

Points = list[tuple[float, float]]


def _arc(radius: float, start: float, stop: float, center: tuple[float, float], n: int = 24) -> Points:
    """`n` points of an arc; degrees, clockwise from the right, y down."""
    angles = np.radians(np.linspace(start, stop, n))
    return [(center[0] + radius * math.cos(a), center[1] + radius * math.sin(a)) for a in angles]


def _star() -> Points:
    corners: Points = []
    for i in range(10):
        radius = 0.5 if i % 2 == 0 else 0.31
        angle = math.radians(-90 + 36 * i)
        corners.append((radius * math.cos(angle), radius * math.sin(angle)))
    return corners


def _heart() -> Points:
    t = np.linspace(0, 2 * math.pi, 96, endpoint=False)
    x = 16 * np.sin(t) ** 3
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    return [(float(a) / 32, float(b) / 32) for a, b in zip(x, y, strict=True)]


def _outline(shape: str) -> Points:
    """Corners of a shape in about -0.5..0.5, y down, its visual middle (where the icon goes) at 0."""
    third = 1 / 6
    corners: dict[str, Points] = {
        "circle": _arc(0.5, 0, 360, (0, 0), 72),
        "square": [(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)],
        "triangle": [(0, -0.56), (0.53, 0.36), (-0.53, 0.36)],
        "diamond": [(0, -0.5), (0.5, 0), (0, 0.5), (-0.5, 0)],
        "pentagon": _arc(0.5, -90, 198, (0, 0.02), 5),
        "star": _star(),
        "heart": _heart(),
        "cross": [
            (-third, -0.5), (third, -0.5), (third, -third), (0.5, -third), (0.5, third), (third, third),
            (third, 0.5), (-third, 0.5), (-third, third), (-0.5, third), (-0.5, -third), (-third, -third),
        ],
        "arch": [(0.5, 0.5), (-0.5, 0.5), *_arc(0.5, 180, 360, (0, -0.04))],
        "drop": [(0, -0.62), *_arc(0.44, -32, 212, (0, 0.06))],
    }  # fmt: skip
    return corners[shape]


def _draw_shape(points: Points, extent: float, angle: float, width: float) -> tuple[np.ndarray, np.ndarray]:
    """Fill and edge of one shape, each (PATCH, PATCH) uint8; `width` is the edge's, pixels."""
    side = PATCH * _SUPER
    turn = math.radians(angle)
    cos, sin = math.cos(turn), math.sin(turn)
    scale = extent * _SUPER
    corners = [
        (side / 2 + scale * (x * cos - y * sin), side / 2 + scale * (x * sin + y * cos)) for x, y in points
    ]
    fill, edge = Image.new("L", (side, side)), Image.new("L", (side, side))
    ImageDraw.Draw(fill).polygon(corners, fill=255)
    line = round(width * _SUPER)
    ImageDraw.Draw(edge).line([*corners, corners[0], corners[1]], fill=255, width=line, joint="curve")
    small = (PATCH, PATCH)
    return (
        np.asarray(fill.resize(small, Image.Resampling.BOX)),
        np.asarray(edge.resize(small, Image.Resampling.BOX)),
    )


def shape_bank(edge_width: float) -> tuple[np.ndarray, np.ndarray]:
    """Fill and edge of every badge: two (shapes, scales, angles, PATCH, PATCH) uint8 arrays."""
    size = (len(SHAPES), len(SCALES), len(BADGE_ANGLES), PATCH, PATCH)
    fills, edges = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    for i, shape in enumerate(SHAPES):
        points = _outline(shape)
        for j, scale in enumerate(SCALES):
            for k, angle in enumerate(BADGE_ANGLES):
                fills[i, j, k], edges[i, j, k] = _draw_shape(
                    points, _EXTENT[shape] * scale, angle, edge_width
                )
    return fills, edges


def _wave(phase: np.ndarray, sharpness: float = 2.5) -> np.ndarray:
    """A soft square wave in 0..1 of a phase in turns."""
    wave: np.ndarray = np.clip(0.5 + sharpness * np.sin(2 * math.pi * phase), 0, 1)
    return wave


def _texture(name: str, rng: np.random.Generator) -> np.ndarray:
    """One field of a texture, (PATCH, PATCH) float in 0..1: the share of the second tone."""
    y, x = np.mgrid[:PATCH, :PATCH] - (PATCH - 1) / 2
    dx, dy = rng.uniform(0, 8, 2)
    field: np.ndarray = np.zeros((PATCH, PATCH))
    if name == "striped":
        angle = math.radians(rng.uniform(35, 55)) * rng.choice([-1, 1])
        field = _wave((x * math.cos(angle) + y * math.sin(angle) + dx) / rng.uniform(5.5, 6.5))
    elif name == "dotted":
        period = rng.uniform(5.2, 6.2)
        u, v = (x + dx) / period, (y + dy) / period
        u = u + 0.5 * (np.floor(v) % 2)
        distance = np.hypot(u - np.floor(u) - 0.5, v - np.floor(v) - 0.5) * period
        field = np.clip(2.3 - distance, 0, 1)
    elif name == "checkered":
        period = rng.uniform(7.0, 8.5)
        product = np.sin(2 * math.pi * (x + dx) / period) * np.sin(2 * math.pi * (y + dy) / period)
        field = np.clip(0.5 + 4 * product, 0, 1)
    elif name == "zigzag":
        period = rng.uniform(8.0, 9.5)
        fold = np.abs((x + dx) / period - np.floor((x + dx) / period) - 0.5) * 2
        field = _wave((y + dy + 4.2 * fold) / rng.uniform(5.5, 6.5))
    elif name == "ringed":
        field = _wave((np.hypot(x, y) + dx) / rng.uniform(5.0, 6.0))
    return field


def texture_bank() -> np.ndarray:
    """Texture fields, (textures, TEXTURE_VARIANTS, PATCH, PATCH) uint8."""
    rng = np.random.default_rng(_BANK_SEED)
    fields = [[_texture(name, rng) for _ in range(TEXTURE_VARIANTS)] for name in TEXTURES]
    return (np.asarray(fields) * 255).astype(np.uint8)


def icon_font() -> tuple[Path, dict[str, str]]:
    """Path of the icon font and its table from icon name to character.

    Raises:
        MissingDependencyError: the package that carries the font isn't installed.
    """
    try:
        from fonticon_mdi7.mdi7 import FONTS, MDI7  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependencyError(
            'the attribute world draws icons from a font: pip install "dear-serve[world]"'
        ) from error
    return Path(FONTS) / "materialdesignicons-webfont.ttf", dict(vars(MDI7))


def _glyph_extent(width: float, height: float, extent: float) -> float:
    """Longest side to draw a glyph at: long thin ones get more than blocky ones, to look equally large."""
    slim = max(width, height) / min(width, height)
    return min(extent * 1.12, extent * float(slim**0.3))


def glyph_bank(icons: Sequence[str]) -> np.ndarray:
    """Glyphs of `icons` cropped, scaled and turned, (icons, extents, angles, GLYPH, GLYPH) uint8."""
    path, characters = icon_font()
    font = ImageFont.truetype(str(path), 128)
    bank = np.zeros((len(icons), len(ICON_EXTENTS), len(ICON_ANGLES), GLYPH, GLYPH), np.uint8)
    for i, icon in enumerate(icons):
        canvas = Image.new("L", (176, 176))
        ImageDraw.Draw(canvas).text((88, 88), characters[icon], font=font, fill=255, anchor="mm")
        left, top, right, bottom = canvas.getbbox() or (0, 0, 176, 176)
        width, height = right - left, bottom - top
        middle = ((left + right) / 2, (top + bottom) / 2)
        for j, extent in enumerate(ICON_EXTENTS):
            zoom = max(width, height) / _glyph_extent(width, height, extent)
            for k, angle in enumerate(ICON_ANGLES):
                bank[i, j, k] = _place_glyph(canvas, middle, zoom, angle)
    return bank


def _place_glyph(canvas: Image.Image, middle: tuple[float, float], zoom: float, angle: float) -> np.ndarray:
    """The glyph around `middle`, shrunk by `zoom` and turned by `angle` degrees; (GLYPH, GLYPH) uint8."""
    oversample = 3
    side = GLYPH * oversample
    step = zoom / oversample
    cos, sin = math.cos(math.radians(angle)) * step, math.sin(math.radians(angle)) * step
    half = side / 2
    matrix = (cos, sin, middle[0] - half * (cos + sin), -sin, cos, middle[1] - half * (cos - sin))
    large = canvas.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    return np.asarray(large.resize((GLYPH, GLYPH), Image.Resampling.BOX))


def dilate(masks: np.ndarray, radius: float) -> np.ndarray:
    """Grow uint8 masks (..., H, W) by a disc of `radius` pixels (grayscale dilation)."""
    reach = math.floor(radius)
    height, width = masks.shape[-2:]
    padded = np.pad(masks, [(0, 0)] * (masks.ndim - 2) + [(reach, reach)] * 2)
    grown: np.ndarray = masks.copy()
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            if dx * dx + dy * dy <= radius * radius:
                moved = padded[..., reach + dy : reach + dy + height, reach + dx : reach + dx + width]
                np.maximum(grown, moved, out=grown)
    return grown


def _clutter(rng: np.random.Generator, base: np.ndarray) -> np.ndarray:
    """`base` (3,) covered with small faint marks; (BACKGROUND, BACKGROUND, 3) float."""
    image = Image.new("RGB", (BACKGROUND, BACKGROUND), tuple(int(v) for v in base))
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(18, 60))):
        x, y = rng.uniform(0, BACKGROUND, 2)
        dx, dy = rng.uniform(-5, 5, 2)
        tone = tuple(int(v) for v in np.clip(base - rng.uniform(15, 60) + rng.uniform(-18, 18, 3), 0, 255))
        if rng.random() < 0.5:
            draw.line([x, y, x + dx, y + dy], fill=tone, width=1)
        else:
            size = rng.uniform(0.5, 1.8)
            draw.ellipse([x - size, y - size, x + size, y + size], fill=tone)
    return np.asarray(image, float)


def background_bank(count: int = 384) -> np.ndarray:
    """Light backgrounds, plain, gradient, smooth noise and clutter in turn; (count, side, side, 3) uint8."""
    rng = np.random.default_rng(_BANK_SEED + 1)
    ramp = np.linspace(-1, 1, BACKGROUND)
    bank = np.zeros((count, BACKGROUND, BACKGROUND, 3), np.uint8)
    for i in range(count):
        base = np.clip(rng.uniform(178, 226) + rng.uniform(-14, 14, 3), 160, 232)
        field = np.broadcast_to(base, (BACKGROUND, BACKGROUND, 3))
        if i % 4 == 1:
            angle = rng.uniform(0, 2 * math.pi)
            slope = ramp[None, :] * math.cos(angle) + ramp[:, None] * math.sin(angle)
            field = base + slope[..., None] * rng.uniform(15, 40, 3)
        elif i % 4 == 2:
            coarse = rng.integers(70, 186, (12, 12, 1)) + rng.integers(-25, 26, (12, 12, 3))
            coarse = coarse.astype(np.uint8)
            smooth = Image.fromarray(coarse).resize((BACKGROUND, BACKGROUND), Image.Resampling.BICUBIC)
            smooth = smooth.filter(ImageFilter.GaussianBlur(2))
            field = base + (np.asarray(smooth, float) - 128) * rng.uniform(0.2, 0.6)
        elif i % 4 == 3:
            field = _clutter(rng, base)
        bank[i] = np.clip(field, 120, 240).astype(np.uint8)
    return bank


def noise_bank(count: int = 48) -> np.ndarray:
    """Standard normal noise, (count, BACKGROUND, BACKGROUND, 3) float32."""
    rng = np.random.default_rng(_BANK_SEED + 2)
    return rng.standard_normal((count, BACKGROUND, BACKGROUND, 3), dtype=np.float32)
