"""Options of a training run: defaults, a recipe (TOML) over them, the command line over both."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dear_serve.config import DearConfig, StrictConfig
from dear_serve.errors import ConfigError, MissingDependencyError
from dear_serve.labels import validate_templates

__all__ = ["Augmentation", "Protocol", "TrainConfig", "read_recipe", "read_toml"]

Protocol = Literal["all", "few-shot", "base-to-novel", "cross-dataset", "domain"]


@dataclass(frozen=True, kw_only=True)
class Augmentation(StrictConfig):
    """The views of a training picture: view 0 as it is, the others random resized crops of it (ours).

    A fixed number of views a picture makes the frozen blocks' output cacheable (method.md §6). Flips are off because
    they change what "left" and every text in a picture mean.
    """

    views: int = 8
    crop: tuple[float, float] = (0.85, 1.0)
    """Smallest and largest area of a crop, as shares of the picture's. From 0.5 on, usual for photographs, half the
    icons of the demo task are cut: base accuracy was 4 points lower there (one seed)."""
    flip: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.views <= 256:
            raise ConfigError(
                f"views is {self.views}; give 1 (no augmentation) to 256", field="augmentation.views"
            )
        low, high = self.crop
        if not 0.0 < low <= high <= 1.0:
            raise ConfigError(
                f"crop is {low}, {high}; two shares of the area, above 0 and up to 1",
                field="augmentation.crop",
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(StrictConfig):
    """Everything that fixes the outcome of a run, the data set and the base's weights apart."""

    base: str = "dear-mini"
    protocol: Protocol = "few-shot"
    shots: int = 16
    """Training pictures a class, 0 for all of them. Protocol "all" takes all whatever this says."""
    seeds: tuple[int, ...] = (1,)
    epochs: int = 30
    lr: float = 3e-3
    batch_size: int = 32
    weight_decay: float = 0.01
    """Of AdamW, on tokens and projection; the fusion weights are left out, whose decay would even alpha out (ours)."""
    reg: float = 1.0
    """lambda_reg of method.md §5."""
    fusion_reg: float = 0.1
    """lambda_fusion of method.md §5."""
    attribute_reg: float = 0.0
    """Weight of holding the attribute features, as fused, to the frozen class feature (ours; 0: the paper's loss)."""
    roles: str = ""
    """A roles.json; "mixed" or "generalization" for every head; "random:SEED": the base's own, redealt; "": those."""
    templates: tuple[str, ...] = ()
    """Texts with one {}; none: the base's own, else labels.DEFAULT_TEMPLATES."""
    augmentation: Augmentation = field(default_factory=Augmentation)
    dear: DearConfig = field(default_factory=DearConfig)

    def __post_init__(self) -> None:
        for name, least in (("shots", 0), ("epochs", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; give {least} or more", field=name)
        for name in ("weight_decay", "reg", "fusion_reg", "attribute_reg"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or more", field=name)
        if not 0.0 < self.lr < float("inf"):
            raise ConfigError(f"lr is {self.lr}; give a rate above 0, such as 1e-3", field="lr")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ConfigError(f"seeds are {self.seeds}; give distinct numbers, 0 or more", field="seeds")
        if self.templates:
            validate_templates(self.templates)

    @property
    def shots_taken(self) -> int:
        """Pictures a class that the protocol really takes; 0 for all."""
        return 0 if self.protocol == "all" else self.shots

    def with_options(self, options: Mapping[str, Any]) -> TrainConfig:
        """This configuration with `options` (nested tables merge) over it; ConfigError for unknown ones."""
        return TrainConfig.from_dict(_merge(self.to_dict(), options))


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file. Raises ConfigError without one, MissingDependencyError on Python 3.10 without tomli."""
    try:
        toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError as error:
        raise MissingDependencyError("recipes need tomli on Python 3.10: pip install tomli") from error
    try:
        return dict(toml.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"recipe {path} cannot be read: {error.strerror}", field="recipe") from error
    except ValueError as error:  # not UTF-8, not TOML
        raise ConfigError(f"recipe {path} is not TOML: {error}", field="recipe") from error


def read_recipe(path: Path) -> dict[str, Any]:
    """The options in a TOML file, names as in `TrainConfig`, with tables [dear] and [augmentation].

    A table [data], how a data set lies on disk, is left to `training.recipe`.

    Raises:
        ConfigError: the file is absent, not TOML, or has an unknown option.
        MissingDependencyError: Python 3.10 without tomli.
    """
    options = {key: value for key, value in read_toml(path).items() if key != "data"}
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    for key in options:
        if key not in known:
            raise ConfigError(
                f"recipe {path} has no use for {key!r}; known are {', '.join(sorted(known))}", field=key
            )
    return options
