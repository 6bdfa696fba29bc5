"""Picture bytes to the engine's pixels, several at once, with the error of each picture in its place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from dear_serve.config import PreprocessConfig
from dear_serve.errors import DearError, ImageError
from dear_serve.preprocess import ImageLimits, preprocess_bytes
from dear_serve.runtime.base import Float32

__all__ = ["Decoder"]


class Decoder:
    """Decodes and preprocesses at most `threads` pictures at once, whoever asks. Thread-safe.

    JPEGs are decoded in full: the draft mode of libjpeg, which decodes at a half, a quarter or an eighth, is faster and
    gives other pixels than open_clip's transform does (benchmarks/bench_service.py --draft has both figures).
    """

    def __init__(self, config: PreprocessConfig, *, limits: ImageLimits, threads: int) -> None:
        self._config = config
        self._limits = limits
        # A caller's only picture is decoded in the caller's thread, without the way to the pool and back.
        self._turn = threading.BoundedSemaphore(threads)
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="decode")

    def __call__(self, images: Sequence[bytes]) -> tuple[Float32, list[DearError | None]]:
        """Pixels (b, 3, S, S) of the b pictures that can be used, in order, and per picture its error or None."""
        decoded = (
            [self._one(d) for d in images] if len(images) < 2 else list(self._pool.map(self._one, images))
        )
        good = [d for d in decoded if isinstance(d, np.ndarray)]
        size = self._config.size
        if len(good) == 1:
            pixels = good[0][None]
        else:
            pixels = np.stack(good) if good else np.zeros((0, 3, size, size), dtype=np.float32)
        return pixels, [d if isinstance(d, DearError) else None for d in decoded]

    def close(self) -> None:
        """End the threads; calling it again does nothing."""
        self._pool.shutdown()

    def _one(self, data: bytes) -> Float32 | ImageError:
        with self._turn:
            try:
                return preprocess_bytes(data, self._config, limits=self._limits)
            except ImageError as error:
                return error
