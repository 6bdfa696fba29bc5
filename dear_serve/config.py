"""Frozen, keyword-only configuration dataclasses with a strict `from_dict` (unknown keys are refused)."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from dear_serve.errors import ConfigError

__all__ = [
    "DEFAULT_ATTRIBUTES",
    "ClipConfig",
    "DearConfig",
    "PreprocessConfig",
    "StrictConfig",
    "TextConfig",
    "VisionConfig",
    "default_first_block",
]

DEFAULT_ATTRIBUTES = ("color", "shape", "texture", "object", "location")

T = TypeVar("T", bound="StrictConfig")


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotated type, or a ConfigError that names the place."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{where} is {value!r}; use one of {', '.join(map(repr, args))}", field=where)
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(value, next(a for a in args if a is not type(None)), where)
    if origin in (tuple, dict):
        return _convert_items(value, origin, args, where)
    if isinstance(hint, type) and issubclass(hint, StrictConfig):
        return value if isinstance(value, hint) else hint.from_dict(value, where=where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and (not isinstance(value, hint) or (hint is int and isinstance(value, bool))):
        raise ConfigError(f"{where} is {value!r}; {hint.__name__} is expected", field=where)
    return value


def _convert_items(value: Any, origin: type, args: tuple[Any, ...], where: str) -> Any:
    """A list as the annotated tuple, a table as the annotated dict with text keys."""
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}; a table is expected", field=where)
        return {
            _convert(k, args[0], where): _convert(v, args[1], f"{where}[{k!r}]") for k, v in value.items()
        }
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where} is {value!r}; a list is expected", field=where)
    if args[-1] is not Ellipsis and len(value) != len(args):
        raise ConfigError(f"{where} has {len(value)} items; {len(args)} are expected", field=where)
    return tuple(_convert(v, args[0], f"{where}[{i}]") for i, v in enumerate(value))


@dataclass(frozen=True, kw_only=True)
class StrictConfig:
    """Base of all configurations: built from a mapping, strictly, and turned back into plain JSON data."""

    @classmethod
    def from_dict(cls: type[T], data: Mapping[str, Any], *, where: str = "") -> T:
        """Build from `data`; unknown or missing keys and wrong types raise ConfigError naming the key."""
        name = where or cls.__name__
        if not isinstance(data, Mapping):
            raise ConfigError(f"{name} is {data!r}; a table is expected", field=where or None)
        hints = typing.get_type_hints(cls)
        known = {f.name: f for f in dataclasses.fields(cls)}
        for key in data:
            if key not in known:
                raise ConfigError(
                    f"{name} has no option {key!r}; known are {', '.join(known)}", field=str(key)
                )
        values = {k: _convert(v, hints[k], f"{where}.{k}" if where else k) for k, v in data.items()}
        missing = [
            k
            for k, f in known.items()
            if k not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ConfigError(f"{name} lacks {', '.join(missing)}", field=missing[0])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (lists, not tuples) that `from_dict` takes back to an equal object."""
        return typing.cast("dict[str, Any]", _plain(dataclasses.asdict(self)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig(StrictConfig):
    """How pixels become the image tower's input: shortest side to `size`, centre crop, [0, 1], normalise."""

    size: int = 224
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    resize_mode: Literal["shortest"] = "shortest"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size is {self.size}; at least 1 pixel is needed", field="size")
        if min(self.std) <= 0:
            raise ConfigError(f"std is {self.std}; all three must be above 0", field="std")


@dataclass(frozen=True, kw_only=True)
class VisionConfig(StrictConfig):
    """Shape of an image tower (a ViT): `layers` blocks, `width` d, `heads` H, square patches."""

    image_size: int
    patch_size: int
    width: int
    layers: int
    heads: int
    mlp_width: int
    ln_pre: bool = True
    layer_scale: bool = False

    def __post_init__(self) -> None:
        _check_tower(self.width, self.heads, self.layers)
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}",
                field="image_size",
            )

    @property
    def patches(self) -> int:
        """N, the number of patch tokens (without CLS)."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, kw_only=True)
class TextConfig(StrictConfig):
    """Shape of a causal text tower."""

    context_length: int
    vocab_size: int
    width: int
    layers: int
    heads: int
    mlp_width: int
    layer_scale: bool = False

    def __post_init__(self) -> None:
        _check_tower(self.width, self.heads, self.layers)


@dataclass(frozen=True, kw_only=True)
class ClipConfig(StrictConfig):
    """Two towers and the joint space of width D (`embed_dim`)."""

    embed_dim: int
    vision: VisionConfig
    text: TextConfig
    quick_gelu: bool = False
    preprocess: PreprocessConfig = PreprocessConfig()


@dataclass(frozen=True, kw_only=True)
class DearConfig(StrictConfig):
    """What DeAR adds to a frozen CLIP (method.md §2 to §4).

    `first_block` is J and `text_first_block` J_t, both 1-based; 0 means the default rule L - L//3 + 1.
    """

    attributes: tuple[str, ...] = DEFAULT_ATTRIBUTES
    first_block: int = 0
    text_first_block: int = 0
    text_tokens: int = 5
    beta: float = 0.9
    mask: Literal["paper", "one-way"] = "paper"
    token_start: Literal["learned", "class"] = "learned"
    """What an attribute token is when it joins: learned (the paper's), or class: learned plus the picture's class token
    there (ours)."""
    alpha_cls: float = 0.7

    def __post_init__(self) -> None:
        if len(set(self.attributes)) != len(self.attributes) or "class" in self.attributes:
            raise ConfigError(
                f"attributes are {', '.join(self.attributes)}; names must be distinct and not 'class'",
                field="attributes",
            )
        if not 0.0 <= self.beta <= 1.0:
            raise ConfigError(f"beta is {self.beta}; it is a share between 0 and 1", field="beta")
        if not 0.0 < self.alpha_cls <= 1.0 or (self.alpha_cls == 1.0 and self.attributes):
            raise ConfigError(
                f"alpha_cls is {self.alpha_cls}; it lies strictly between 0 and 1", field="alpha_cls"
            )
        if self.text_tokens < 0:
            raise ConfigError(f"text_tokens is {self.text_tokens}; 0 or more", field="text_tokens")


def default_first_block(layers: int) -> int:
    """J for a tower of `layers` blocks: the last third joins, 9 of 12 (method.md §0; ours elsewhere)."""
    return layers - layers // 3 + 1


def _check_tower(width: int, heads: int, layers: int) -> None:
    if heads < 1 or width % heads:
        raise ConfigError(f"width {width} cannot be shared by {heads} heads", field="heads")
    if layers < 1:
        raise ConfigError(f"layers is {layers}; at least 1 block is needed", field="layers")
