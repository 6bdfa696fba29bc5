"""How the steps of a run are computed: by how many processes, in which precision, with how much kept in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch

from dear_serve.errors import ConfigError
from training.distributed import ALONE, World
from training.memory import KEEP

__all__ = ["Execution", "Precision", "default_keep", "resolve_precision"]

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How, not what: apart from rounding, nothing here changes the outcome."""

    world: World = ALONE
    precision: Precision = "fp32"
    """bf16: matrix products of the trained blocks in bfloat16 (autocast); features, losses and weights stay float32."""
    keep: int = KEEP
    """Bytes of activations a tower may keep before it is run in parts that are recomputed; 0: always one by one."""

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise ConfigError(
                f"activations may take {self.keep} bytes; give 0 or more", field="checkpoint_above"
            )

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """The context of the blocks."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")


def resolve_precision(name: str, device: str) -> Precision:
    """ "auto" as bf16 on a GPU that computes in it, else fp32; the others as they are."""
    if name in ("fp32", "bf16"):
        return "bf16" if name == "bf16" else "fp32"
    return "bf16" if device.startswith("cuda") and torch.cuda.is_bf16_supported() else "fp32"


def default_keep(device: str) -> int:
    """`Execution.keep` for a device: a quarter of a GPU's memory, 2 GB on a CPU (ours)."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_properties(device).total_memory // 4
    return KEEP
