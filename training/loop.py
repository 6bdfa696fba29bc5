"""The training loop: AdamW on the adapter alone, cosine rate after one warm-up epoch, resumable bit for bit.

What a step does follows from the seed and the step's number alone (order, views) and from the state file (weights,
moments), so a run that was stopped and goes on gives the same numbers as one that wasn't.

B batch, C classes, M templates, L text length, d tower width, D joint width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dear_serve.backbone.text import end_of_text
from dear_serve.dear.model import DearModel
from dear_serve.errors import CheckFailedError, ConfigError, DearError
from dear_serve.labels import fill
from dear_serve.tokenizer import Tokenizer, token_lengths
from training.cache import PlainTrunks
from training.config import TrainConfig
from training.losses import Features, Losses, dear_loss

__all__ = ["COLUMNS", "Fit", "TextSide", "rate"]

COLUMNS = ("loss", "cross_entropy", "image_reg", "text_reg", "fusion_reg", "alpha_cls")
"""Columns of `Fit.history`, one row a step."""


class TextSide:
    """The trained classes' prompts, cut to the longest end-of-text, through the frozen text blocks once.

    Args:
        model: gives the frozen blocks.
        tokenizer: of the base.
        names: C class names.
        templates: M texts with one {}; a class feature is the normalised mean over them (as in `labels`).
    """

    def __init__(
        self, model: DearModel, tokenizer: Tokenizer, names: Sequence[str], templates: Sequence[str]
    ) -> None:
        tokens = tokenizer([fill(template, name) for name in names for template in templates])
        cut = torch.from_numpy(np.ascontiguousarray(tokens[:, : int(token_lengths(tokens).max())]))
        cut = cut.to(model.clip.logit_scale.device)
        self.templates = len(templates)
        self.position = end_of_text(cut)
        with torch.no_grad():
            self.trunk = model.text_trunk(cut)  # (C*M, L, d)
            self.frozen = self._ensemble(model.zero_shot_text(cut))  # (C, D)

    def features(self, model: DearModel) -> Tensor:
        """g, (C, D), L2-normalised, with gradients to the text tokens."""
        return self._ensemble(model.text_head(self.trunk, self.position))

    def _ensemble(self, features: Tensor) -> Tensor:
        return F.normalize(features.unflatten(0, (-1, self.templates)).mean(1), dim=-1)


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
        text: the trained classes.
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
        """Train to the end, from `state` if that file is there; it is written after each epoch.

        Args:
            state: a safetensors file.
            identity: what the run is; a state of another identity is refused.
            on_step: told the number of steps done and the loss.
            should_stop: asked after each step.

        Raises:
            DearError: code "stopped", after the state was saved, because `should_stop` said so.
            CheckFailedError: a loss that isn't a finite number; the state is that of the last whole epoch.
            ConfigError: the state is of another run.
        """
        if state.is_file():
            self._load(state, identity)
        for step in range(len(self.history), self.steps):
            losses = self.step(step)
            if on_step is not None:
                on_step(step + 1, losses["loss"])
            stop = should_stop()
            if stop or (step + 1) % self.per_epoch == 0:
                self._save(state, identity)
            if stop:
                raise DearError(
                    f"stopped after step {step + 1} of {self.steps}; go on with --resume", code="stopped"
                )

    def step(self, step: int) -> dict[str, float]:
        """One optimiser step; the parts of its loss by name."""
        batch = self._batch(step)
        trunk, frozen = self.trunks.batch(batch.indices, batch.views)
        losses = self._losses(trunk, frozen, self.labels[batch.indices])
        alpha_cls = float(self.model.fusion.alpha[0].detach())
        numbers = losses.numbers() | {"alpha_cls": alpha_cls}
        if not math.isfinite(numbers["loss"]):
            names = ", ".join(str(self.trunks.paths[i]) for i in batch.indices[:8])
            raise CheckFailedError(
                f"the loss of step {step + 1} is {numbers['loss']}; lower --lr. Its pictures: {names}…",
                code="loss_not_finite",
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step, per_epoch=self.per_epoch, epochs=self.config.epochs, peak=self.config.lr)
        self.optimizer.zero_grad(set_to_none=True)
        losses.total.backward()
        self.optimizer.step()
        self.history.append([numbers[c] for c in COLUMNS])
        return numbers

    def _losses(self, trunk: Tensor, frozen: Tensor, labels: Tensor) -> Losses:
        cls, attributes = self.model.image_head(trunk)
        text = self.text.features(self.model)
        logits, _ = self.model.fuse(cls, attributes, text)
        return dear_loss(
            logits,
            labels,
            Features(cls=cls, frozen_cls=frozen, text=text, frozen_text=self.text.frozen),
            alpha_cls=self.model.fusion.alpha[0],
            reg=self.config.reg,
            fusion_reg=self.config.fusion_reg,
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
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        plain = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, str(partial), metadata={"identity": identity})
        partial.replace(path)

    def _load(self, path: Path, identity: str) -> None:
        try:
            with safe_open(str(path), framework="pt") as stored:
                found = (stored.metadata() or {}).get("identity", "")
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
        except SafetensorError as error:
            raise ConfigError(f"{path} cannot be read ({error}); start again without --resume") from error
        if found != identity:
            raise ConfigError(
                f"the stopped run was another one: {_differences(found, identity)}; "
                "use its options, or start again without --resume",
                field="resume",
            )
        self.history = tensors["history"].tolist()
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(tensors[f"parameter.{name}"])
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(len(self.history))),
                    "exp_avg": tensors[f"mean.{name}"].to(parameter.device),
                    "exp_avg_sq": tensors[f"square.{name}"].to(parameter.device),
                }


def _differences(old: str, new: str) -> str:
    """What differs between two identities, JSON tables as `training.run` makes them."""
    try:
        a, b = json.loads(old), json.loads(new)
        return ", ".join(f"{k} was {a.get(k)!r} and is {v!r}" for k, v in b.items() if a.get(k) != v)
    except (ValueError, AttributeError):
        return f"{old[:80]!r} against {new[:80]!r}"
