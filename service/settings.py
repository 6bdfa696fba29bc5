"""What the service is told: read once from the environment when it starts, never at import."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from dear_serve.errors import ConfigError

__all__ = ["Limits", "Settings"]

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request, and all of them together, may cost. Every one is an option, `DEAR_MAX_...`."""

    body_bytes: int = 64 * _MIB
    """Of one request; more is 413, counted while it streams in."""
    buffered_bytes: int = 512 * _MIB
    """Of all requests that are being read or answered; more is 503."""
    images: int = 64
    labels: int = 1000
    templates: int = 100
    prompts: int = 10_000
    """Labels times templates: texts that one /classify may have encoded."""
    texts: int = 256
    text_chars: int = 10_000
    waiting: int = 64
    """Requests admitted and not yet answered; more are 503 with Retry-After."""
    read_seconds: float = 30.0
    """For a request's body to arrive; longer is 408."""
    answer_seconds: float = 60.0
    """For the answer, waiting included; longer is 503."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0 or not math.isfinite(value):
                raise ConfigError(f"limit {name} is {value}; it must be above 0", field=name)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything the service can be told.

    Raises:
        ConfigError: from `from_env`, for a variable that is missing or is not what it should be.
    """

    bundle: Path
    """`DEAR_BUNDLE`, the only one without a default."""
    gallery: Path | None = None
    """`DEAR_GALLERY`; without it /search and /gallery answer 404 `no_gallery`. Made when it isn't there."""
    engine: Literal["onnx", "torch", "fake"] = "onnx"
    """`DEAR_ENGINE`."""
    threads: int | None = None
    """`DEAR_THREADS`, of the engine; without it the engine's own choice."""
    workers: int = 2
    """`DEAR_WORKERS`: requests that are decoded and answered at the same time."""
    api_key: str | None = field(default=None, repr=False)
    """`DEAR_API_KEY`; where set, everything but the page and the probes needs it."""
    limits: Limits = Limits()

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Settings from `env` (default: the process's environment); an empty value counts as not set."""
        values = {
            k: v for k, v in (os.environ if env is None else env).items() if k.startswith("DEAR_") and v
        }
        if "DEAR_BUNDLE" not in values:
            raise ConfigError(
                "DEAR_BUNDLE is not set; set it to the folder of an exported bundle", field="DEAR_BUNDLE"
            )
        engine = values.get("DEAR_ENGINE", "onnx")
        if engine not in ("onnx", "torch", "fake"):
            raise ConfigError(f"DEAR_ENGINE is {engine!r}; use onnx, torch or fake", field="DEAR_ENGINE")
        gallery = values.get("DEAR_GALLERY")
        threads = _number(values, "DEAR_THREADS", 0.0)
        return cls(
            bundle=Path(values["DEAR_BUNDLE"]),
            gallery=Path(gallery) if gallery else None,
            engine=cast("Literal['onnx', 'torch', 'fake']", engine),
            threads=int(threads) or None,
            workers=int(_number(values, "DEAR_WORKERS", float(max(2, os.cpu_count() or 1)))),
            api_key=values.get("DEAR_API_KEY"),
            limits=_limits(values),
        )


def _limits(values: Mapping[str, str]) -> Limits:
    defaults = vars(Limits())
    chosen = {
        name: _number(values, f"DEAR_MAX_{name.upper()}", float(value)) for name, value in defaults.items()
    }
    return Limits(**{name: type(defaults[name])(value) for name, value in chosen.items()})


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    text = values.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < (1 if name in ("DEAR_THREADS", "DEAR_WORKERS") else 0):
        raise ConfigError(f"{name} is {text!r}; a number above 0 is expected", field=name)
    return number
