"""Pictures as people have them become what open_clip's transform makes; bad ones are refused by name."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image, features
from sklearn.datasets import load_sample_images

from dear_serve.config import PreprocessConfig
from dear_serve.errors import ImageError
from dear_serve.preprocess import (
    FORMATS,
    ImageLimits,
    decode_image,
    preprocess,
    preprocess_bytes,
    thumbnail,
    to_rgb,
)

ORIENTATION = 0x0112
SMALL = PreprocessConfig(size=32)


@pytest.fixture(scope="module")
def photos() -> list[Image.Image]:
    """Two real photographs, 640 x 427 RGB."""
    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def encoded(image: Image.Image, name: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def image_error(data: bytes, **limits: object) -> ImageError:
    with pytest.raises(ImageError) as caught:
        decode_image(data, limits=ImageLimits(**limits))
    return caught.value


# --- equality with open_clip's transform ----------------------------------------------------------

SIZES = [
    (640, 427),
    (427, 640),
    (333, 217),
    (224, 224),
    (225, 224),
    (97, 101),
    (31, 600),
    (1, 7),
    (223, 500),
    (7, 5),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_pixels_equal_open_clip_bit_for_bit(photos, size, interpolation):
    transform = pytest.importorskip("open_clip.transform")
    image = photos[0].resize(size)
    for side in (224, 63):
        config = PreprocessConfig(size=side, interpolation=interpolation)
        reference = transform.image_transform_v2(
            transform.PreprocessCfg(size=side, interpolation=interpolation), is_train=False
        )
        ours = preprocess(image, config)
        assert ours.dtype == np.float32
        assert ours.shape == (3, side, side)
        np.testing.assert_array_equal(ours, reference(image).numpy())


def test_grey_equals_open_clip_bit_for_bit(photos):
    transform = pytest.importorskip("open_clip.transform").image_transform(224, is_train=False)
    grey = photos[1].convert("L").crop((3, 5, 404, 300))
    np.testing.assert_array_equal(preprocess(grey, PreprocessConfig()), transform(grey).numpy())


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "CMYK", "1"])
def test_other_modes_equal_open_clip_on_upright_rgb_on_white(photos, mode):
    transform = pytest.importorskip("open_clip.transform").image_transform(224, is_train=False)
    image = photos[0].crop((0, 0, 301, 203))
    if mode in ("RGBA", "LA"):
        image = image.convert(mode)
        image.putalpha(Image.linear_gradient("L").resize(image.size))
        white = Image.new("RGBA", image.size, "white")
        reference = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    else:
        image = image.convert(mode)
        reference = image.convert("RGB")
    ours = preprocess(image, PreprocessConfig())
    std = np.array(PreprocessConfig().std, np.float32).reshape(3, 1, 1)
    # Pillow has two ways to blend, which may round a pixel differently.
    assert np.abs((ours - transform(reference).numpy()) * std).max() <= 1 / 255 + 1e-6


def test_golden_values_without_open_clip():
    ramp = Image.fromarray((np.arange(5 * 9 * 3) % 256).astype(np.uint8).reshape(5, 9, 3))
    plain = PreprocessConfig(size=3, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    ours = np.rint(preprocess(ramp, plain) * 255).astype(int)
    assert ours[0].tolist() == [[16, 22, 28], [60, 66, 72], [104, 110, 116]]
    assert ours[2].tolist() == [[18, 24, 30], [62, 68, 74], [106, 112, 118]]


def test_constant_picture_is_normalised_by_mean_and_std():
    config = PreprocessConfig(size=4, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0))
    ours = preprocess(Image.new("RGB", (9, 6), (255, 0, 51)), config)
    np.testing.assert_allclose(ours[:, 0, 0], [1.0, -1.0, 0.2], atol=1e-6)
    assert ours.flags.c_contiguous


# --- every road gives the same numbers ------------------------------------------------------------


def test_bytes_equal_picture(photos):
    data = encoded(photos[0], "PNG")
    np.testing.assert_array_equal(preprocess_bytes(data, SMALL), preprocess(photos[0], SMALL))


def test_to_rgb_is_idempotent_and_copies_nothing(photos):
    assert to_rgb(photos[0]) is photos[0]
    once = to_rgb(photos[0].convert("RGBA"))
    assert to_rgb(once) is once


def test_preprocess_leaves_the_picture_alone(photos):
    image = photos[0].convert("RGBA")
    before = image.tobytes()
    preprocess(image, SMALL)
    assert image.mode == "RGBA"
    assert image.tobytes() == before


# --- pictures as people have them -----------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied_once(orientation, name):
    corners = Image.new("RGB", (48, 32))
    corners.paste((255, 0, 0), (0, 0, 24, 16))
    corners.paste((0, 255, 0), (24, 0, 48, 16))
    corners.paste((0, 0, 255), (0, 16, 24, 32))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = corners.transpose(undo[orientation]) if orientation > 1 else corners
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    upright = decode_image(encoded(stored, name, exif=exif.tobytes()))
    assert upright.size == (48, 32)
    assert to_rgb(upright) is upright
    for at, color in (
        ((8, 8), (255, 0, 0)),
        ((40, 8), (0, 255, 0)),
        ((8, 24), (0, 0, 255)),
        ((40, 24), (0, 0, 0)),
    ):
        assert np.abs(np.subtract(upright.getpixel(at), color)).max() <= 12


# Pillow warns of it and goes on.
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_does_not_cost_the_picture(photos):
    data = encoded(photos[0], "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xffgarbage")
    assert decode_image(data).size == photos[0].size


@pytest.mark.parametrize("mode", ["RGBA", "LA", "La", "RGBa", "PA"])
def test_transparency_goes_on_white(mode):
    base = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    base.putpixel((0, 0), (0, 0, 0, 255))
    if mode == "PA":
        image = Image.new("P", base.size)
        image.putalpha(base.getchannel("A"))
    else:
        image = (base.convert("LA") if mode == "La" else base).convert(mode)
    assert image.mode == mode
    rgb = to_rgb(image)
    assert rgb.mode == "RGB"
    assert rgb.getpixel((0, 0)) == (0, 0, 0)
    assert rgb.getpixel((3, 3)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "1"])
def test_transparent_color_goes_on_white(mode):
    image = Image.new("RGB", (4, 4), (0, 0, 0)).convert(mode)
    transparent = (0, 0, 0) if mode == "RGB" else image.getpixel((0, 0))
    data = encoded(image, "PNG", transparency=transparent)
    assert decode_image(data).getpixel((2, 2)) == (255, 255, 255)


def test_sixteen_bit_grey_keeps_its_high_byte():
    values = np.array([[0, 255, 256, 0x7FFF], [0x8000, 0xFF00, 0xFFFE, 0xFFFF]], np.uint16)
    expected = (values >> 8).astype(np.uint8)
    short, wide = Image.fromarray(values), Image.fromarray(values.astype(np.int32))
    files = [encoded(short, "PNG"), encoded(short, "TIFF"), encoded(wide, "TIFF")]
    for rgb in [to_rgb(short), to_rgb(wide), *map(decode_image, files)]:
        np.testing.assert_array_equal(np.asarray(rgb), np.repeat(expected[..., None], 3, axis=2))


def test_wide_integers_are_clipped_and_transparent_grey_is_white():
    rgb = to_rgb(Image.fromarray(np.array([[-5, 70_000]], np.int32)))
    assert [rgb.getpixel((x, 0))[0] for x in (0, 1)] == [0, 255]
    grey = Image.fromarray(np.array([[7, 300]], np.uint16))
    grey.info["transparency"] = 7
    assert [to_rgb(grey).getpixel((x, 0))[0] for x in (0, 1)] == [255, 1]


def test_floating_point_grey_is_read_by_its_range():
    unit = to_rgb(Image.fromarray(np.array([[0.0, 0.5, 1.0, np.nan]], np.float32)))
    bytes_like = to_rgb(Image.fromarray(np.array([[0.0, 128.0, 255.0, 300.0]], np.float32)))
    assert [unit.getpixel((x, 0))[1] for x in range(4)] == [0, 128, 255, 0]
    assert [bytes_like.getpixel((x, 0))[1] for x in range(4)] == [0, 128, 255, 255]


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_give_their_first_frame(name):
    frames = [Image.new("RGB", (16, 16), color) for color in ((255, 0, 0), (0, 255, 0))]
    rgb = decode_image(encoded(frames[0], name, save_all=True, append_images=frames[1:]))
    red, green, _ = rgb.getpixel((8, 8))
    assert red > 240
    assert green < 15


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_every_format_is_read(photos, name):
    if name == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    small = photos[0].resize((64, 48))
    rgb = decode_image(encoded(small, name))
    assert (rgb.mode, rgb.size) == ("RGB", small.size)
    assert np.abs(np.asarray(rgb, int) - np.asarray(small, int)).mean() < 12


def test_cmyk_jpeg_is_read(photos):
    rgb = decode_image(encoded(photos[0].convert("CMYK"), "JPEG", quality=95))
    assert np.abs(np.asarray(rgb, int) - np.asarray(photos[0], int)).mean() < 6


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [b"hello", b"BM but not a picture", b"%!PS-Adobe-3.0 EPSF-3.0", b"<svg/>", b"\0" * 99]
)
def test_not_an_image(data):
    error = image_error(data)
    assert error.code == "not_an_image"
    assert "JPEG" in error.message


def test_empty_image():
    assert image_error(b"").code == "empty_image"


def test_too_many_bytes_are_refused_before_anything_is_read():
    error = image_error(b"\xff\xd8\xff" + b"\0" * 100, max_bytes=100)
    assert error.code == "image_too_large"
    assert "103" in error.message


def test_an_allowed_format_can_be_left_out(photos):
    assert image_error(encoded(photos[0], "GIF"), formats=("PNG",)).code == "not_an_image"
    assert "EPS" not in FORMATS


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_truncated_image(photos, name, share):
    data = encoded(photos[0], name)
    assert image_error(data[: int(len(data) * share)]).code == "truncated_image"


def test_a_header_alone_is_truncated():
    assert image_error(b"\x89PNG\r\n\x1a\n").code == "truncated_image"
    assert image_error(b"\xff\xd8\xff\xe0").code == "truncated_image"


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_bytes_give_a_picture_or_an_image_error(photos, name):
    good = bytearray(encoded(photos[0].resize((40, 30)), name))
    random = np.random.default_rng(0)
    outcomes = set()
    for _ in range(60):
        data = good.copy()
        for at in random.integers(4, len(data), 3 if random.random() < 0.5 else 40):
            data[at] = random.integers(256)
        try:
            outcomes.add(decode_image(bytes(data)).mode)
        except ImageError as error:
            outcomes.add(error.code)
    assert outcomes <= {"RGB", "truncated_image", "too_many_pixels", "extreme_aspect_ratio", "not_an_image"}


@pytest.mark.parametrize(
    ("size", "code"),
    [
        ((30_000, 30_000), "too_many_pixels"),
        ((12_000, 12_000), "too_many_pixels"),
        ((8_001, 5_000), "too_many_pixels"),
        ((1, 20_000), "extreme_aspect_ratio"),
        ((20_000, 1), "extreme_aspect_ratio"),
        ((101, 2), "extreme_aspect_ratio"),
    ],
)
def test_costly_pictures_are_refused_by_their_header(size, code):
    error = image_error(png_header(*size))
    assert error.code == code
    assert str(size[0]) in error.message
    assert str(size[1]) in error.message


def test_the_bounds_themselves_are_allowed():
    limits = ImageLimits(max_pixels=200, max_aspect_ratio=2.0)
    assert decode_image(encoded(Image.new("RGB", (20, 10)), "PNG"), limits=limits).size == (20, 10)


def test_a_huge_header_allocates_nothing():
    """30,000 x 30,000 RGB would be 3.6 GB; the whole process stays under 1 GB of address space."""
    code = (
        "import resource, sys\n"
        "from dear_serve.preprocess import decode_image\n"
        "from dear_serve.errors import ImageError\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try:\n"
        "    decode_image(sys.stdin.buffer.read())\n"
        "except ImageError as error:\n"
        "    sys.stdout.write(error.code)\n"
        "assert not {'torch', 'torchvision', 'open_clip'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, input=png_header(30_000, 30_000), capture_output=True, check=False)
    assert done.stderr == b""
    assert done.stdout == b"too_many_pixels"


def test_a_picture_without_pixels_is_not_an_image():
    data = bytearray(encoded(Image.new("P", (2, 2)), "GIF"))
    data[6:10] = b"\0\0\0\0"
    data = data.replace(b"\x2c\0\0\0\0\x02\0\x02\0", b"\x2c\0\0\0\0\0\0\0\0")
    assert image_error(bytes(data)).code in ("not_an_image", "truncated_image")


# --- thumbnails -----------------------------------------------------------------------------------


def test_thumbnail_fits_and_is_never_enlarged(photos):
    small = Image.open(io.BytesIO(thumbnail(photos[0], 100)))
    assert (small.format, small.mode, small.size) == ("JPEG", "RGB", (100, 67))
    same = Image.open(io.BytesIO(thumbnail(Image.new("RGBA", (9, 5)), 100)))
    assert same.size == (9, 5)
    assert min(same.getpixel((4, 2))) > 250
    assert Image.open(io.BytesIO(thumbnail(Image.new("RGB", (300, 1)), 64))).size == (64, 1)


def test_thumbnail_quality_is_respected(photos):
    assert len(thumbnail(photos[0], quality=40)) < len(thumbnail(photos[0], quality=90))
