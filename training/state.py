"""What a stopped run goes on from: one safetensors file with weights, moments and the steps' numbers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dear_serve.errors import ConfigError, DataError

__all__ = ["load_state", "save_state"]


def save_state(path: Path, tensors: Mapping[str, Tensor], *, identity: str) -> None:
    """Write the file whole and rename it: one that is there stays whatever happens.

    Raises:
        DataError: the disk is full or the folder cannot be written.
    """
    partial = path.with_suffix(".partial")
    content = save({n: t.cpu().contiguous() for n, t in tensors.items()}, metadata={"identity": identity})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise DataError(
            f"the state {path} cannot be written ({error.strerror}); the one of an earlier step is kept: make room "
            "and go on with --resume",
            field="out",
        ) from error


def load_state(path: Path, *, identity: str) -> dict[str, Tensor]:
    """What `save_state` wrote.

    Raises:
        ConfigError: the file cannot be read, or its run was another one; the message says what differs.
    """
    try:
        with safe_open(str(path), framework="pt") as stored:
            found = (stored.metadata() or {}).get("identity", "")
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); start again without --resume") from error
    if found != identity:
        raise ConfigError(
            f"the stopped run was another one: {_differences(found, identity)}; "
            "use its options, or start again without --resume",
            field="resume",
        )
    return tensors


def _differences(old: str, new: str) -> str:
    """What differs between two identities, JSON tables as `training.run` makes them."""
    try:
        a, b = json.loads(old), json.loads(new)
        return ", ".join(f"{k} was {a.get(k)!r} and is {v!r}" for k, v in b.items() if a.get(k) != v)
    except (ValueError, AttributeError):
        return f"{old[:80]!r} against {new[:80]!r}"
