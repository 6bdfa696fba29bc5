"""What a run needs besides pictures: the base, its head roles, templates and readouts.

A base's folder may carry, beside the weights, files that say what suits that base:

    roles.json       head roles (python -m training.roles)
    templates.txt    default templates, one a line
    readouts.json    attribute to "token" or "span": which readout search uses (method.md §8), by measurement
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from dear_serve.backbone.zoo import ASSETS, Base, load_base
from dear_serve.config import DEFAULT_ATTRIBUTES, DearConfig
from dear_serve.dear.model import DearModel, resolve
from dear_serve.dear.roles import Roles
from dear_serve.errors import BaseModelError, ConfigError
from dear_serve.labels import DEFAULT_TEMPLATES, validate_templates
from dear_serve.tokenizer import Tokenizer
from training.config import TrainConfig
from training.phrases import PHRASES

__all__ = ["Prepared", "build_model", "prepare", "resolve_device"]

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A base made ready for training."""

    base: Base
    dear: DearConfig
    """With J and J_t as numbers."""
    roles: Roles
    templates: tuple[str, ...]
    tokenizer: Tokenizer
    readout_kinds: dict[str, str]


def base_folder(name: str) -> Path | None:
    """The folder of a base's weights, if it is a local one."""
    if name == "dear-mini":
        return ASSETS / "dear-mini"
    path = Path(name)
    if not path.is_file():  # ARCHITECTURE/path/to/weights
        path = Path(name.partition("/")[2])
    return path.parent if path.is_file() else None


def prepare(config: TrainConfig, *, device: str = "cpu") -> Prepared:
    """Load the base and find what belongs to it.

    Raises:
        BaseModelError: the base, or its roles, are absent or do not fit.
        ConfigError: unusable options.
        MissingDependencyError: what the base needs isn't installed.
    """
    base = load_base(config.base)
    dear = resolve(config.dear, base.clip)
    roles = choose_roles(config.roles, base, dear)
    dear = _with_their_attributes(dear, roles)
    folder = base_folder(config.base)
    tokenizer = Tokenizer.from_open_clip(context_length=base.config.text.context_length)
    if tokenizer.vocab_size != base.config.text.vocab_size:
        raise BaseModelError(
            f"base {base.name!r} has {base.config.text.vocab_size} token embeddings; CLIP's tokenizer has "
            f"{tokenizer.vocab_size} and is the only one supported",
            field="base",
        )
    base.clip.to(device)
    return Prepared(
        base=base,
        dear=dear,
        roles=roles,
        templates=config.templates or _default_templates(folder),
        tokenizer=tokenizer,
        readout_kinds={**dict.fromkeys(roles.phrases, "span"), **_readout_kinds(folder)},
    )


def _with_their_attributes(dear: DearConfig, roles: Roles) -> DearConfig:
    """`dear` with the attributes of the roles, unless it names others than the default ones itself."""
    if dear.attributes != DEFAULT_ATTRIBUTES or not roles.attributes:
        return dear
    return replace(dear, attributes=roles.attributes)


def resolve_device(name: str) -> str:
    """ "auto" as "cuda" where there is one, else "cpu"; others as they are. Raises ConfigError without that device."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
        raise ConfigError(f"device {name!r} cannot be used here: {error}; use cpu", field="device") from error
    return name


def choose_roles(option: str, base: Base, dear: DearConfig) -> Roles:
    """The roles that `--roles` names, marked as this base's (see `TrainConfig.roles`).

    Raises:
        BaseModelError: the base has none of its own, or the file's are of other weights.
        ConfigError: random:SEED without a number.
    """
    if option in ("mixed", "generalization"):
        role: Literal["mixed", "generalization"] = "mixed" if option == "mixed" else "generalization"
        vision = base.config.vision
        roles = Roles.uniform(
            role,
            layers=vision.layers,
            heads_per_layer=vision.heads,
            first_block=dear.first_block,
            attributes=dear.attributes,
        )
        return replace(roles, base=base.name, base_sha256=base.sha256)
    kind, _, seed = option.partition(":")
    if kind == "random":
        if not seed.isdecimal():
            raise ConfigError(f"roles are {option!r}; give a seed, as in random:1", field="roles")
        return _from_block(_own_roles(base), dear.first_block).permuted(int(seed))
    roles = _fitting(Roles.load(Path(option)), base, option) if option else _own_roles(base)
    return _from_block(roles, dear.first_block)


def _from_block(roles: Roles, first_block: int) -> Roles:
    """Roles of a later J, the heads of earlier blocks left out; as they are where there is nothing to leave out."""
    if roles.first_block >= first_block:
        return roles
    heads = tuple(head for head in roles.heads if head.layer >= first_block)
    return replace(roles, first_block=first_block, heads=heads)


def _own_roles(base: Base) -> Roles:
    folder = base_folder(base.name)
    file = folder / "roles.json" if folder else None
    if file is None or not file.is_file():
        raise BaseModelError(
            f"base {base.name!r} has no head roles: compute them with python -m training.roles --base {base.name} "
            "and give the file as --roles FILE (or train with every head open: --roles mixed)",
            field="roles",
        )
    return _fitting(Roles.load(file), base, str(file))


def _fitting(roles: Roles, base: Base, name: str) -> Roles:
    if roles.base_sha256 != base.sha256:
        raise BaseModelError(
            f"{name} holds roles of weights {roles.base_sha256[:16]}…; base {base.name!r} has {base.sha256[:16]}…: "
            f"compute them again with python -m training.roles --base {base.name}",
            field="roles",
        )
    return roles


def _default_templates(folder: Path | None) -> tuple[str, ...]:
    file = folder / "templates.txt" if folder else None
    if file is None or not file.is_file():
        return DEFAULT_TEMPLATES
    return read_templates(file)


def read_templates(file: Path) -> tuple[str, ...]:
    """Templates of a text file, one a line, empty lines skipped. Raises ConfigError or LabelError naming it."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"templates {file} cannot be read: {error}", field="templates") from error
    return validate_templates([line.strip() for line in lines if line.strip()])


def _readout_kinds(folder: Path | None) -> dict[str, str]:
    file = folder / "readouts.json" if folder else None
    if file is None or not file.is_file():
        return dict.fromkeys(PHRASES, "span")
    try:
        kinds: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BaseModelError(f"{file} is not JSON: {error}", field="base") from error
    if not isinstance(kinds, dict) or not set(kinds.values()) <= {"token", "span"}:
        raise BaseModelError(
            f'{file} holds {kinds!r}; attribute to "token" or "span" is expected', field="base"
        )
    return kinds


def build_model(prepared: Prepared, seed: int) -> DearModel:
    """A model with the adapter's initial values drawn from `seed`, on the base's device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DearModel(prepared.base.clip, prepared.roles, prepared.dear)
    return model.to(prepared.base.clip.logit_scale.device)
