"""Several processes train one adapter, one a GPU (or a CPU): started by torchrun, joined here.

    torchrun --nproc-per-node 4 -m training.run DATA

Each process computes the features of its share of the batch's pictures and of the classes, then all of them gather the
features and compute the same loss of the whole batch (ours): the losses know nothing of processes, and the result is
that of one process up to rounding. Gradients are averaged before each step.

B batch, R processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dear_serve.errors import ConfigError

__all__ = ["ALONE", "World", "joined", "launched"]

_PATIENCE = timedelta(hours=24)  # the others wait while the first one tests and writes the bundle


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run: this one is `rank` of `size`. `ALONE` needs no torch.distributed."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"process {self.rank} of {self.size}; ranks go from 0 to size - 1")

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.rank == 0

    def share(self, count: int) -> list[int]:
        """Which of `count` items are this process's: equally many for each, the first ones again where they don't go
        round; `gather` leaves those out."""
        each = -(-count // self.size)
        return [i % count for i in range(self.rank * each, (self.rank + 1) * each)]

    def gather(self, local: Tensor, count: int) -> Tensor:
        """All `count` items from the processes' shares, (ceil(count / R), ...) -> (count, ...), in order.

        Its gradient is R times the share's own: the mean over the processes, which `average_gradients` takes, is then
        the gradient of the loss of all items.
        """
        if self.size == 1:
            return local
        gathered: Tensor = _Gather.apply(local.contiguous(), self.rank, self.size)
        return gathered[:count]

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Each parameter's gradient becomes the mean over the processes; one message for all."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None and p.numel()]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        flat /= self.size
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds in any process."""
        if self.size == 1:
            return flag
        votes: list[Any] = [None] * self.size
        dist.all_gather_object(votes, flag)
        return any(votes)

    def wait(self) -> None:
        """Until every process has come here."""
        if self.size > 1:
            dist.barrier()


ALONE = World()
"""One process."""


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, rank: int, size: int) -> Tensor:
        ctx.rank, ctx.size, ctx.each = rank, size, len(local)
        parts = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(parts, local)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own = gradients[0].narrow(0, ctx.rank * ctx.each, ctx.each)
        return own * ctx.size, None, None


def launched() -> bool:
    """Whether this process was started by torchrun (or a launcher that sets the same variables)."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


@contextmanager
def joined(device: str) -> Iterator[tuple[World, str]]:
    """Join the other processes, if torchrun started some; leave them at the end.

    Args:
        device: "cpu", or "cuda", which becomes the GPU of this process's number.

    Yields:
        The world, and this process's device.

    Raises:
        ConfigError: more processes than GPUs.
    """
    if not launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE, device
        return
    local = int(os.environ["LOCAL_RANK"])
    if device.startswith("cuda"):
        if local >= torch.cuda.device_count():
            raise ConfigError(
                f"process {local} has no GPU of its own, there are {torch.cuda.device_count()}: "
                f"torchrun --nproc-per-node {torch.cuda.device_count()}, or --device cpu",
                field="device",
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=_PATIENCE)
    try:
        yield World(rank=dist.get_rank(), size=dist.get_world_size()), device
    finally:
        dist.destroy_process_group()
