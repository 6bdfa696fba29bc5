"""What the service is told: read once from the environment when it starts, never at import."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from dear_serve.errors import ConfigError

__all__ = ["Limits", "Settings"]

_MIB = 2**20
_ENGINES = ("onnx", "torch", "fake")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ORIGIN = re.compile(r"https?://[^/\s]+")


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
    total_text_chars: int = 500_000
    """Of all labels or texts of one request together."""
    label_sets: int = 64
    """Label sets that this server keeps for its callers."""
    picture_bytes: int = 20 * _MIB
    pixels: int = 40_000_000
    """Of one picture, as its header announces them."""
    waiting: int = 128
    """Requests admitted and not yet answered; more are 503 with Retry-After."""
    pictures: int = 256
    """Pictures decoded and not yet answered; requests wait for room."""
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

    bundles: Mapping[str, Path]
    """`DEAR_BUNDLE`, the only one without a default: a folder, or several with the system's path separator (":", on
    Windows ";") between them, each served under its folder's name, or under NAME where it is written NAME=FOLDER. The
    first is the default."""
    gallery: Path | None = None
    """`DEAR_GALLERY`; without it /search and /gallery answer 404 `no_gallery`. Made, for the first bundle, when it
    isn't there."""
    engine: Literal["onnx", "torch", "fake"] = "onnx"
    """`DEAR_ENGINE`."""
    threads: int | None = None
    """`DEAR_THREADS`, of the engine; without it the engine's own choice."""
    providers: tuple[str, ...] = ()
    """`DEAR_PROVIDERS`: where the engine may run, by preference, with commas between: "tensorrt,cuda,cpu" for ONNX
    Runtime, one device such as "cuda:0" for torch. Without it CUDA where ONNX Runtime has it, else the CPU."""
    batch: int | None = None
    """`DEAR_BATCH`: pictures of several requests that the engine runs at once; without it 16 on a CPU, 64 on a GPU."""
    decoders: int | None = None
    """`DEAR_DECODERS`: pictures decoded at once; without it one a CPU of this process, at most 8."""
    workers: int = 32
    """`DEAR_WORKERS`: threads that answer; most of them wait for the engine, so there are more than CPUs."""
    cors: tuple[str, ...] = ()
    """`DEAR_CORS`: origins, with commas between them, whose pages may call; "*" for any. Without it none may."""
    log: Literal["text", "json"] = "text"
    """`DEAR_LOG`."""
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
        gallery = values.get("DEAR_GALLERY")
        return cls(
            bundles=_bundles(values["DEAR_BUNDLE"]),
            gallery=Path(gallery) if gallery else None,
            engine=cast("Literal['onnx', 'torch', 'fake']", _choice(values, "DEAR_ENGINE", _ENGINES)),
            threads=_whole(values, "DEAR_THREADS"),
            providers=tuple(filter(None, (p.strip() for p in values.get("DEAR_PROVIDERS", "").split(",")))),
            batch=_whole(values, "DEAR_BATCH"),
            decoders=_whole(values, "DEAR_DECODERS"),
            workers=_whole(values, "DEAR_WORKERS") or cls.workers,
            cors=_origins(values.get("DEAR_CORS", "")),
            log=cast("Literal['text', 'json']", _choice(values, "DEAR_LOG", ("text", "json"))),
            api_key=values.get("DEAR_API_KEY"),
            limits=_limits(values),
        )


def _limits(values: Mapping[str, str]) -> Limits:
    defaults = vars(Limits())
    chosen = {
        name: _number(values, f"DEAR_MAX_{name.upper()}", float(value)) for name, value in defaults.items()
    }
    return Limits(**{name: type(defaults[name])(value) for name, value in chosen.items()})


def _bundles(text: str) -> dict[str, Path]:
    """`DEAR_BUNDLE` as name to folder."""
    found: dict[str, Path] = {}
    for part in filter(None, text.split(os.pathsep)):
        name, equals, folder = part.partition("=")
        named = equals and _NAME.fullmatch(name) and folder
        path = Path(folder if named else part)
        name = name if named else path.resolve().name
        if name in found:
            raise ConfigError(
                f"two bundles are called {name!r}; give one another name: NAME={path}", field="DEAR_BUNDLE"
            )
        found[name] = path
    return found


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(filter(None, (part.strip() for part in text.split(","))))
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"DEAR_CORS has {origin!r}; an origin such as https://example.org is expected",
                field="DEAR_CORS",
            )
    return origins


def _choice(values: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    """The first of `allowed` is the default."""
    value = values.get(name, allowed[0])
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; use one of {', '.join(allowed)}", field=name)
    return value


def _whole(values: Mapping[str, str], name: str) -> int | None:
    number = _number(values, name, 0.0)
    if name in values and number < 1:
        raise ConfigError(f"{name} is {values[name]!r}; 1 or more is expected", field=name)
    return int(number) or None


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    text = values.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise ConfigError(f"{name} is {text!r}; a number above 0 is expected", field=name)
    return number
