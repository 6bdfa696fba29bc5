"""What the parity check feeds to the graphs: real pictures, hostile ones, the classes' prompts and odd texts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter

from dear_serve.bundle import Bundle
from dear_serve.config import PreprocessConfig
from dear_serve.errors import DataError, ImageError
from dear_serve.labels import fill
from dear_serve.preprocess import decode_image, preprocess
from dear_serve.tokenizer import Tokenizer

__all__ = ["CALIBRATION", "PICTURES", "Samples", "calibration_feeds", "collect"]

PICTURES = 64
TEXTS = 64
CALIBRATION = 32
_BATCH = 8
_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
_ODD_TEXTS = (
    "a",
    "!?",
    "naïve café über straße",
    "一只红色的猫",
    "🙂🎉",
    "0 1 2 3 4 5 6 7 8 9",
    "a very long sentence that goes on and on " * 5,
    "<|endoftext|> {0} %s ../..",
)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Inputs of the check."""

    pixels: npt.NDArray[np.float32]
    """(64, 3, S, S), preprocessed pictures."""
    hostile: npt.NDArray[np.float32]
    """(5, 3, S, S): black, white, noise, a checkerboard of both, ten times the usual range."""
    tokens: npt.NDArray[np.int64]
    """(64, L), 0-padded to the context length; the first is the shortest, one fills the context."""
    source: str
    """Where the pictures came from, for the report."""


def collect(bundle: Bundle, images: Path | None) -> Samples:
    """Samples for a bundle.

    Args:
        images: a folder of pictures, searched through; default: the bundle's own `samples/`, or drawn ones.

    Raises:
        DataError: `images` holds no picture that can be read.
    """
    config = bundle.manifest.preprocess
    pictures, source = _pictures(bundle, images)
    pixels = np.stack([preprocess(picture, config) for picture in pictures])
    return Samples(
        pixels=pixels[np.arange(PICTURES) % len(pixels)],
        hostile=_hostile(config),
        tokens=_tokens(bundle),
        source=source,
    )


def calibration_feeds(bundle: Bundle, images: Path | None) -> dict[str, list[dict[str, npt.NDArray[Any]]]]:
    """Inputs that int8's ranges are measured on, in batches, by tower.

    Args:
        bundle: whose preprocessing and prompts to use.
        images: as for `collect`; other pictures of that folder than the check's, where it holds enough.

    Returns:
        "image": float32 pixels, `CALIBRATION` pictures; "text": int64 tokens, the prompts and texts of the check.

    Raises:
        DataError: `images` holds no picture that can be read.
    """
    config = bundle.manifest.preprocess
    paths = _paths(bundle, images)
    rest = sorted(set(paths) - set(_spread(paths, PICTURES)))
    pictures = _readable(_spread(rest if len(rest) >= CALIBRATION // 2 else paths, CALIBRATION))
    if not pictures:
        rng = np.random.default_rng(2)
        pictures = [_drawn(rng) for _ in range(CALIBRATION)]
    pixels = np.stack([preprocess(picture, config) for picture in pictures])
    tokens = _tokens(bundle)
    return {
        "image": [{"pixels": pixels[i : i + _BATCH]} for i in range(0, len(pixels), _BATCH)],
        "text": [{"tokens": tokens[i : i + _BATCH]} for i in range(0, len(tokens), _BATCH)],
    }


def _paths(bundle: Bundle, images: Path | None) -> list[Path]:
    """Picture files of the folder, or of the bundle; none if there are none."""
    if images is not None:
        if not images.is_dir():
            raise DataError(f"{images} is not a folder; give one with pictures", field="images")
        return sorted(p for p in images.rglob("*") if p.suffix.lower() in _SUFFIXES)
    names = [n for n in bundle.manifest.files if n.startswith("samples/")]
    return [bundle.file(n) for n in sorted(names) if Path(n).suffix.lower() in _SUFFIXES]


def _spread(paths: list[Path], count: int) -> list[Path]:
    """At most `count` of them, spread over the whole, so that every class has its turn."""
    return [paths[i * len(paths) // count] for i in range(count)] if len(paths) > count else paths


def _pictures(bundle: Bundle, images: Path | None) -> tuple[list[Image.Image], str]:
    pictures = _readable(_spread(_paths(bundle, images), PICTURES))
    if images is not None and not pictures:
        raise DataError(f"{images} holds no picture that can be read; give another folder", field="images")
    if pictures:
        source = f"of {images.name}" if images is not None else "the bundle was trained with"
        return pictures, f"{len(pictures)} pictures {source}"
    rng = np.random.default_rng(0)
    return [_drawn(rng) for _ in range(PICTURES)], f"{PICTURES} drawn pictures"


def _readable(paths: list[Path]) -> list[Image.Image]:
    pictures = []
    for path in paths:
        try:
            pictures.append(decode_image(path.read_bytes()))
        except (ImageError, OSError):
            continue
    return pictures


def _drawn(rng: np.random.Generator) -> Image.Image:
    """A picture with what photographs have: a gradient, edges, blur, grain, any size."""
    width, height = (int(n) for n in rng.integers(48, 320, 2))
    corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    image = Image.fromarray(corners).resize((width, height), Image.Resampling.BILINEAR)
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(2, 9))):
        x, y = int(rng.integers(0, width)), int(rng.integers(0, height))
        w, h = (int(n) for n in rng.integers(8, 160, 2))
        color = tuple(int(c) for c in rng.integers(0, 256, 3))
        shape = (draw.ellipse, draw.rectangle, draw.line)[int(rng.integers(0, 3))]
        shape((x, y, x + w, y + h), fill=color)
    image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 2))))
    grain = rng.normal(0, 4, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8))


def _hostile(config: PreprocessConfig) -> npt.NDArray[np.float32]:
    size = config.size
    mean, std = (np.asarray(v, np.float32)[:, None, None] for v in (config.mean, config.std))
    rng, full = np.random.default_rng(1), np.ones((3, size, size), np.float32)
    board = (np.indices((size, size)).sum(0) % 2).astype(np.float32) * full
    levels = np.stack([0 * full, full, rng.random((3, size, size), dtype=np.float32), board])
    extreme = 10 * rng.standard_normal((1, 3, size, size)).astype(np.float32)
    return np.concatenate([(levels - mean) / std, extreme]).astype(np.float32)


def _tokens(bundle: Bundle) -> npt.NDArray[np.int64]:
    manifest = bundle.manifest
    prompts = [fill(t, name) for name in manifest.class_names for t in manifest.templates]
    texts = list(islice(cycle([*_ODD_TEXTS, *prompts]), TEXTS))
    return Tokenizer.from_file(bundle.file("tokenizer.json"))(texts)
