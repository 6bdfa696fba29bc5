"""The training loop: AdamW on the adapter alone, cosine rate after one warm-up epoch, resumable bit for bit.

What a step does follows from the seed and the step's number alone (order, views) and from the state file (weights,
moments), so a run that was stopped and goes on gives the same numbers as one that wasn't. Several processes share a
step's pictures and classes (`training.distributed`).

B batch, K attributes, C classes, d tower width, D joint width.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dear_serve.dear.model import DearModel
from dear_serve.errors import CheckFailedError, DearError
from training.cache import PlainTrunks
from training.config import TrainConfig
from training.losses import Features, Losses, dear_loss
from training.memory import activation_bytes, chunk_size, in_chunks
from training.state import load_state, save_state
from training.text_side import TextSide

__all__ = ["COLUMNS", "Fit", "TextSide", "rate"]

COLUMNS = ("loss", "cross_entropy", "image_reg", "text_reg", "fusion_reg", "alpha_cls")
"""Columns of `Fit.history`, one row a step."""

_SAVE_EVERY = 60.0  # seconds: a long epoch is not lost as a whole
_NAMED = 64  # pictures that an error lists


def rate(step: int, *, per_epoch: int, epochs: int, peak: float) -> float:
    """Learning rate of a step counted from 0: linear over the first epoch, then cosine to 0 (method.md §5)."""
    if step < per_epoch and epochs > 1:
        return peak * (step + 1) / per_epoch
    warm = per_epoch if epochs > 1 else 0
    progress = (step - warm) / max(1, per_epoch * epochs - warm)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class _Batch:
    indices: list[int]
    views: list[int]


class Fit:
    """Trains one adapter.

    Args:
        model: to train, in place; only its adapter changes.
        trunks: the training pictures.
        labels: class index of each picture.
        text: the trained classes, and how the steps are computed.
        config: epochs, rate, batch size, weights of the loss.
        seed: of order and views. (The adapter's initial values are the model's own business.)
    """

    def __init__(
        self,
        model: DearModel,
        *,
        trunks: PlainTrunks,
        labels: Sequence[int],
        text: TextSide,
        config: TrainConfig,
        seed: int,
    ) -> None:
        self.model, self.trunks, self.text, self.config, self.seed = model, trunks, text, config, seed
        self.execution = text.execution
        self.labels = torch.tensor(labels, dtype=torch.int64, device=model.clip.logit_scale.device)
        self.named = {n: p for n, p in model.named_parameters() if not n.startswith("clip.")}
        decayed = [p for n, p in self.named.items() if not n.startswith("fusion.")]
        fusion = [p for n, p in self.named.items() if n.startswith("fusion.")]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": fusion, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr)
        self.history: list[list[float]] = []
        """Per step the values of `COLUMNS`."""

    @property
    def per_epoch(self) -> int:
        """Steps an epoch; the last batch of an epoch may be smaller."""
        return math.ceil(len(self.labels) / self.config.batch_size)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.per_epoch * self.config.epochs

    def run(
        self,
        state: Path,
        *,
        identity: str = "",
        on_step: Callable[[int, float], None] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train to the end, from `state` if that file is there; it is written after each epoch and once a minute.

        Args:
            state: a safetensors file.
            identity: what the run is; a state of another identity is refused.
            on_step: told the number of steps done and the loss.
            should_stop: asked after each step.

        Raises:
            DearError: code "stopped", after the state was saved, because `should_stop` said so.
            CheckFailedError: a loss or gradient that isn't finite; the state is one of an earlier step.
            ConfigError: the state is of another run.
            DataError: the state cannot be written.
        """
        if state.is_file():
            self._load(state, identity)
        saved = time.monotonic()
        for step in range(len(self.history), self.steps):
            losses = self.step(step)
            if on_step is not None:
                on_step(step + 1, losses["loss"])
            stop = self.execution.world.any(should_stop())
            late = time.monotonic() - saved > _SAVE_EVERY
            if self.execution.world.first and (stop or late or (step + 1) % self.per_epoch == 0):
                self._save(state, identity)
                saved = time.monotonic()
            if stop:
                raise DearError(
                    f"stopped after step {step + 1} of {self.steps}; go on with --resume", code="stopped"
                )

    def step(self, step: int) -> dict[str, float]:
        """One optimiser step; the parts of its loss by name."""
        batch = self._batch(step)
        losses = self._losses(batch)
        alpha_cls = float(self.model.fusion.alpha[0].detach())
        numbers = losses.numbers() | {"alpha_cls": alpha_cls}
        if not math.isfinite(numbers["loss"]):
            raise self._not_finite(f"the loss of step {step + 1} is {numbers['loss']}", batch)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step, per_epoch=self.per_epoch, epochs=self.config.epochs, peak=self.config.lr)
        self.optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        self.execution.world.average_gradients(self.named.values())
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.named.values() if p.grad is not None and p.numel()]
        )
        if not math.isfinite(norm):  # the step would spoil the weights, and the state with them
            raise self._not_finite(f"the gradient of step {step + 1} is {float(norm)}", batch)
        self.optimizer.step()
        self.history.append([numbers[c] for c in COLUMNS])
        return numbers

    def _not_finite(self, what: str, batch: _Batch) -> CheckFailedError:
        names = ", ".join(str(self.trunks.paths[i]) for i in batch.indices[:_NAMED])
        more = len(batch.indices) - _NAMED
        return CheckFailedError(
            f"{what}; lower --lr. Its pictures: {names}{f' and {more} more' if more > 0 else ''}",
            code="loss_not_finite",
        )

    def _losses(self, batch: _Batch) -> Losses:
        cls, attributes, frozen = self._images(batch)
        text = self.text.features(self.model)
        logits, _ = self.model.fuse(cls, attributes, text)
        return dear_loss(
            logits,
            self.labels[batch.indices],
            Features(
                cls=cls,
                frozen_cls=frozen,
                text=text,
                frozen_text=self.text.frozen,
                alpha_cls=self.model.fusion.alpha[0],
                attributes=self.model.fusion.attribute_side(attributes)
                if self.config.attribute_reg
                else None,
            ),
            reg=self.config.reg,
            fusion_reg=self.config.fusion_reg,
            attribute_reg=self.config.attribute_reg,
        )

    def _images(self, batch: _Batch) -> tuple[Tensor, Tensor, Tensor]:
        """f_cls (B, D), f_k (B, K, D) and frozen f_cls (B, D) of the batch; each process computes its share."""
        world, count = self.execution.world, len(batch.indices)
        share = world.share(count)
        trunk, frozen = self.trunks.batch([batch.indices[i] for i in share], [batch.views[i] for i in share])

        def run(part: Tensor) -> tuple[Tensor, Tensor]:
            with self.execution.autocast(part.device):
                return self.model.image_head(part)

        size = chunk_size(len(trunk), self._picture_bytes, keep=self.execution.keep)
        cls, attributes = in_chunks(run, trunk, size)
        return (
            world.gather(cls.float(), count),
            world.gather(attributes.float(), count),
            world.gather(frozen, count),
        )

    @property
    def _picture_bytes(self) -> int:
        """Estimated, that autograd keeps of one picture."""
        vision, config = self.model.clip.config.vision, self.model.config
        return activation_bytes(
            vision,
            tokens=self.model.originals + len(config.attributes),
            blocks=vision.layers - config.first_block + 1,
            item=2 if self.execution.precision == "bf16" else 4,
        )

    def _batch(self, step: int) -> _Batch:
        """Pictures and views of a step: each epoch every picture once, its views in turn from a random one."""
        epoch, place = divmod(step, self.per_epoch)
        count, size, views = len(self.labels), self.config.batch_size, self.config.augmentation.views
        first = np.random.default_rng((self.seed, 0)).integers(views, size=count)
        order = np.random.default_rng((self.seed, 1, epoch)).permutation(count)
        indices = order[place * size : (place + 1) * size]
        return _Batch(indices=indices.tolist(), views=((first[indices] + epoch) % views).tolist())

    # --- state ------------------------------------------------------------------------------------

    def _save(self, path: Path, identity: str) -> None:
        tensors = {"history": torch.tensor(self.history, dtype=torch.float64)}
        for name, parameter in self.named.items():
            moments = self.optimizer.state.get(parameter, {})  # none for a parameter of no elements
            tensors[f"parameter.{name}"] = parameter.detach()
            tensors[f"mean.{name}"] = moments.get("exp_avg", torch.zeros_like(parameter))
            tensors[f"square.{name}"] = moments.get("exp_avg_sq", torch.zeros_like(parameter))
        save_state(path, tensors, identity=identity)

    def _load(self, path: Path, identity: str) -> None:
        tensors = load_state(path, identity=identity)
        self.history = tensors["history"].tolist()
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(tensors[f"parameter.{name}"])
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(len(self.history))),
                    "exp_avg": tensors[f"mean.{name}"].to(parameter.device),
                    "exp_avg_sq": tensors[f"square.{name}"].to(parameter.device),
                }
