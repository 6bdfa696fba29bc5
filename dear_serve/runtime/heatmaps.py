"""Where an attribute's token looks, as a picture to lay over the one that was sent (ours)."""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image

from dear_serve.runtime.base import Float32

__all__ = ["heatmap_png"]

_COLOR = (255, 64, 0)
_MOST = 200  # opacity of the strongest patch, of 255


def heatmap_png(attention: Float32, size: int) -> bytes:
    """A PNG of `size` x `size` pixels, RGBA: one color, the more opaque the more attention a patch gets.

    It covers what the image tower sees: the centre crop of the upright picture. The strongest patch has the same
    opacity in every map; a map without any attention is transparent.

    Args:
        attention: (N,), 0 or more, the patches row by row from the top.
        size: pixels a side.
    """
    side = math.isqrt(len(attention))
    grid = np.asarray(attention, np.float32).reshape(side, side)
    top = float(grid.max(initial=0.0))
    opacity = np.rint(grid * (_MOST / top)) if top > 0 else np.zeros_like(grid)
    smooth = Image.fromarray(opacity.astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC)
    picture = Image.new("RGB", (size, size), _COLOR)
    picture.putalpha(smooth)
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()
