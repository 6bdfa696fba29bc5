"""Image bytes or a PIL image to the image tower's input; Pillow and numpy only, the one implementation.

The header is looked at before the pixels, so a picture that is too costly is refused without being decoded.
Codes of the ImageError raised here:

    empty_image            no bytes at all
    not_an_image           not one of `ImageLimits.formats`
    truncated_image        one of them, but cut off or damaged
    image_too_large        more bytes than `ImageLimits.max_bytes`
    too_many_pixels        the header announces more than `ImageLimits.max_pixels`
    extreme_aspect_ratio   the header announces sides further apart than `ImageLimits.max_aspect_ratio`
"""

from __future__ import annotations

import importlib
import io
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

from dear_serve.config import PreprocessConfig
from dear_serve.errors import ImageError

__all__ = ["FORMATS", "ImageLimits", "decode_image", "preprocess", "preprocess_bytes", "thumbnail", "to_rgb"]

# Photographs and screenshots, decoded inside the process: EPS (which runs Ghostscript), PSD, WMF and the like
# are left out. AVIF needs a Pillow built with it, HEIF a plugin that the application has registered.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIF")

_PLUGINS = ("Jpeg", "Png", "WebP", "Gif", "Bmp", "Tiff", "Avif")
_ORIENTATION = 0x0112  # the EXIF tag
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What a picture may cost at most.

    The aspect ratio is bounded because resizing the shortest side to S makes the other `ratio * S` long: a
    161-byte PNG of 1 x 20,000 pixels would become 224 x 4,480,000. At 50, preprocessing costs about a third
    more than a square picture of as many pixels does.
    """

    max_bytes: int = 20 * 2**20
    max_pixels: int = 40_000_000
    max_aspect_ratio: float = 50.0
    formats: tuple[str, ...] = FORMATS


DEFAULT_LIMITS = ImageLimits()


def decode_image(data: bytes, *, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Decode `data` to an upright RGB picture (first frame; see `to_rgb`).

    Raises:
        ImageError: with one of the codes of the module docstring; nothing else, whatever the bytes are.
    """
    if len(data) == 0:
        raise ImageError("the picture is empty: 0 bytes; send the bytes of an image file", code="empty_image")
    if len(data) > limits.max_bytes:
        raise ImageError(
            f"the picture has {len(data)} bytes and {limits.max_bytes} are allowed; make it smaller",
            code="image_too_large",
        )
    image = _open_header(data, limits.formats)
    _check_size(image.size, limits)
    try:
        image.load()
        return to_rgb(image)
    except Exception as error:  # decoders raise nearly anything on damaged data, MemoryError included
        raise _damaged(image.format) from error


def to_rgb(image: Image.Image) -> Image.Image:
    """`image` as people see it: upright (EXIF orientation), 8 bits, RGB, transparent parts on white.

    16-bit grey keeps its high byte, as Pillow does for 16-bit color; floating-point grey is read as [0, 1]
    when nothing exceeds 1 and as [0, 255] otherwise. Color profiles are ignored, as open_clip ignores them.
    Applying it twice changes nothing. An upright RGB picture is returned itself, not copied.
    """
    image.load()
    orientation = _orientation(image)
    if image.mode != "RGB" or "transparency" in image.info:
        image = _opaque_rgb(image)
    if orientation in _UPRIGHT:
        image = image.transpose(_UPRIGHT[orientation])
        image.info = {}  # the orientation has been used up
    return image


def preprocess(image: Image.Image, config: PreprocessConfig) -> npt.NDArray[np.float32]:
    """The image tower's input: (3, H, W) float32, H = W = `config.size`, normalised by mean and std.

    Bit for bit open_clip's evaluation transform applied to `to_rgb(image)`: shortest side to `size` by
    Pillow's antialiased resize (torchvision's rounding of the other side), centre crop (its offsets), [0, 1],
    normalise.
    The cost grows with the aspect ratio, which `decode_image` bounds and this function doesn't.
    """
    rgb = to_rgb(image)
    width, height = rgb.size
    short, size = min(width, height), config.size
    # torchvision truncates the long side and rounds the offset half to even. The long side is never below
    # `size`, so its padding of pictures smaller than the crop cannot occur.
    resized = (int(size * width / short), int(size * height / short))
    left, top = (round((side - size) / 2.0) for side in resized)
    if resized != rgb.size:
        rgb = rgb.resize(resized, _RESAMPLING[config.interpolation])
    if resized != (size, size):
        rgb = rgb.crop((left, top, left + size, top + size))
    mean, std = _normalisation(config.mean, config.std)
    pixels = np.empty((3, size, size), dtype=np.float32)
    np.divide(np.asarray(rgb).transpose(2, 0, 1), np.float32(255), out=pixels)
    pixels -= mean
    pixels /= std
    return pixels


def preprocess_bytes(
    data: bytes, config: PreprocessConfig, *, limits: ImageLimits = DEFAULT_LIMITS
) -> npt.NDArray[np.float32]:
    """`preprocess(decode_image(data))`: (3, H, W) float32. Raises ImageError as `decode_image` does."""
    return preprocess(decode_image(data, limits=limits), config)


def thumbnail(image: Image.Image, size: int = 256, *, quality: int = 85) -> bytes:
    """JPEG bytes of `image`, upright, longest side at most `size` pixels; never enlarged."""
    small = to_rgb(image)
    scale = size / max(small.size)
    if scale < 1:
        width, height = (max(1, round(side * scale)) for side in small.size)
        small = small.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


@lru_cache(maxsize=1)
def _load_plugins() -> None:
    for name in _PLUGINS:
        try:
            importlib.import_module(f"PIL.{name}ImagePlugin")
        except ImportError:  # AVIF came with Pillow 11.3
            continue


def _open_header(data: bytes, formats: tuple[str, ...]) -> ImageFile.ImageFile:
    """The picture with its size known and its pixels not decoded.

    Pillow's own `Image.open` isn't used because it warns of large pictures through the process's warning
    filters, while here `_check_size` refuses them.
    """
    _load_plugins()
    for name in formats:
        factory, accept = Image.OPEN.get(name, (None, None))
        if factory is None or accept is None or accept(data[:16]) is not True:
            continue
        try:
            return factory(io.BytesIO(data), "")
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise ImageError(
                "the picture has far too many pixels; make it smaller", code="too_many_pixels"
            ) from error
        except Exception as error:  # see decode_image
            # Two letters "BM" are no proof of a picture; the other signatures are.
            raise (_unknown(formats) if name == "BMP" else _damaged(name)) from error
    raise _unknown(formats)


def _check_size(size: tuple[int, int], limits: ImageLimits) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise ImageError(f"the picture is {width} x {height} pixels: it has none", code="not_an_image")
    if width * height > limits.max_pixels:
        raise ImageError(
            f"the picture is {width} x {height} pixels and {limits.max_pixels} in all are allowed; "
            "make it smaller",
            code="too_many_pixels",
        )
    if max(size) > limits.max_aspect_ratio * min(size):
        raise ImageError(
            f"the picture is {width} x {height} pixels and one side may be {limits.max_aspect_ratio:g} times "
            "the other at most; crop it",
            code="extreme_aspect_ratio",
        )


def _unknown(formats: tuple[str, ...]) -> ImageError:
    return ImageError(f"this is not a picture; send one of {', '.join(formats)}", code="not_an_image")


def _damaged(name: str | None) -> ImageError:
    return ImageError(
        f"the {name} picture is cut off or damaged; send the whole file", code="truncated_image"
    )


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1 where the EXIF data is absent or unreadable, as viewers do."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF data raises nearly anything; the pixels are still good
        return 1


def _opaque_rgb(image: Image.Image) -> Image.Image:
    """Any mode to 8-bit RGB; transparency on white. Not turned."""
    if image.mode.startswith("I") or image.mode == "F":
        rgb = _grey_from_wide(image).convert("RGB")
    elif image.has_transparency_data:
        # Pillow knows no direct way from premultiplied grey.
        rgba = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")
        rgb = Image.new("RGB", image.size, (255, 255, 255))
        rgb.paste(rgba, mask=rgba.getchannel("A"))
    else:
        rgb = image.convert("RGB")
    rgb.info = {}
    return rgb


def _grey_from_wide(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit integer (read as 16-bit) or floating-point grey to 8-bit grey."""
    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values, nan=0.0, posinf=255.0, neginf=0.0)
        values = np.rint(values * 255 if values.max() <= 1 else values)
        grey = np.clip(values, 0, 255).astype(np.uint8)
    else:
        grey = (np.clip(values, 0, 65535) >> 8).astype(np.uint8)
        transparent = image.info.get("transparency")
        if isinstance(transparent, int):
            grey[values == transparent] = 255
    return Image.fromarray(grey)


@lru_cache(maxsize=16)
def _normalisation(
    mean: tuple[float, float, float], std: tuple[float, float, float]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean and std as (3, 1, 1) float32."""
    return np.array(mean, np.float32).reshape(3, 1, 1), np.array(std, np.float32).reshape(3, 1, 1)
