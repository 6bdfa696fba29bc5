"""What range of a tensor's values 256 levels should cover, measured while a graph runs on calibration inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["LEVELS", "Range", "RangeObserver"]

LEVELS = 255
"""Steps between the smallest and the largest uint8."""
_SAMPLE = 1 << 15  # values kept of each batch
_BINS = 1024
_SHARES = np.linspace(0.2, 1.0, 17)


@dataclass(frozen=True)
class Range:
    """Values from `low` to `high`, zero among them, as uint8."""

    low: float
    high: float

    @property
    def scale(self) -> float:
        """What one step is worth."""
        return max((self.high - self.low) / LEVELS, float(np.finfo(np.float32).tiny))

    @property
    def zero_point(self) -> int:
        """The level that is exactly zero, 0 to 255."""
        return int(np.clip(round(-self.low / self.scale), 0, LEVELS))


class RangeObserver:
    """Collects a tensor's values and says which range loses least."""

    def __init__(self) -> None:
        self._low = self._high = 0.0
        self._samples: list[npt.NDArray[np.float32]] = []
        self._random = np.random.default_rng(0)

    def add(self, values: npt.NDArray[Any]) -> None:
        """Values of one batch, any shape."""
        flat = values.reshape(-1)
        if flat.size == 0:
            return
        self._low, self._high = min(self._low, float(flat.min())), max(self._high, float(flat.max()))
        chosen = self._random.integers(0, flat.size, min(_SAMPLE, flat.size))
        self._samples.append(flat[chosen].astype(np.float32))

    def range(self) -> Range:
        """The range with the least expected squared error: of rounding within it and of clipping beyond it (ours).

        Ends are tried from a fifth of the extremes seen to the extremes themselves.
        """
        if not self._samples or self._low == self._high:
            return Range(self._low, self._high)
        counts, edges = np.histogram(np.concatenate(self._samples), bins=_BINS, range=(self._low, self._high))
        centers = (edges[:-1] + edges[1:]) / 2
        best, least = Range(self._low, self._high), np.inf
        for low in self._low * _SHARES:
            for high in self._high * _SHARES:
                clipped = np.clip(centers, low, high) - centers
                error = float((counts * clipped**2).sum()) + counts.sum() * ((high - low) / LEVELS) ** 2 / 12
                if error < least:
                    best, least = Range(float(low), float(high)), error
        return best
