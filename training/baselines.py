"""What the adapted model is to be compared with, on the same base and pictures: other prompts, and a linear probe.

All of them see the frozen image features alone. Rows, as in `training.tables`:

    zero_shot_single     the first template alone
    zero_shot_ensemble   the templates there are, if several; else that one and the seven of `ensemble.txt`, those
                         that OpenAI's CLIP repository recommends of its eighty for ImageNet
    linear_probe         multinomial logistic regression on the training pictures' features (Radford et al. 2021 §3.2),
                         of use for the trained classes alone; its L2 strength is chosen on validation pictures, else
                         by cross-validation on the training pictures, never on test pictures (ours)

n pictures, D joint width, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from dear_serve.config import PreprocessConfig
from dear_serve.labels import class_features
from dear_serve.tokenizer import Tokenizer, clean_text
from training.items import Item, Task
from training.prepare import read_templates
from training.scoring import Scores, Towers, pixel_batches

__all__ = ["LinearProbe", "add_baselines", "ensemble", "fit_probe"]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

STRENGTHS = (0.1, 1.0, 10.0, 100.0, 1000.0, 10000.0)
"""Inverse weights of the penalty, as scikit-learn's C, of features of unit length."""
_FOLDS = 4
_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """A linear classifier of frozen image features."""

    weight: Float32
    """(C, D)."""
    bias: Float32
    """(C,)."""
    class_names: tuple[str, ...]
    strength: float
    """Of `STRENGTHS`, as chosen."""

    def predict(self, features: Float32, names: Sequence[str]) -> Int64 | None:
        """The best of `names` for each of the features (n, D), as indices (n,); None if one was not trained."""
        places = {clean_text(name): i for i, name in enumerate(self.class_names)}
        columns = [places.get(clean_text(name), -1) for name in names]
        if -1 in columns:
            return None
        logits = features @ self.weight[columns].T + self.bias[columns]
        return np.asarray(logits.argmax(1), dtype=np.int64)


def fit_probe(
    features: Float32,
    labels: Int64,
    class_names: Sequence[str],
    *,
    val: tuple[Float32, Int64] | None = None,
) -> LinearProbe:
    """Fit a probe; deterministic on the CPU.

    Args:
        features: of the training pictures, (n, D), L2-normalised.
        labels: their classes, (n,), indices into `class_names`.
        class_names: C of them.
        val: features and labels of validation pictures, on which the strength is chosen; without them by
            cross-validation, or 100 if some class has one picture.
    """
    x, y = torch.from_numpy(features).double(), torch.from_numpy(labels)
    classes = len(class_names)
    if val is not None and len(val[1]):
        held = torch.from_numpy(val[0]).double(), torch.from_numpy(val[1])
        best = _choose([(x, y, *held)], classes)
    else:
        best = _choose(_folds(x, y, classes), classes)
    fit = _start(x, classes)
    for strength in STRENGTHS[: best + 1]:
        fit = _fit(x, y, *fit, strength)
    return LinearProbe(
        weight=fit[0].float().numpy(),
        bias=fit[1].float().numpy(),
        class_names=tuple(class_names),
        strength=STRENGTHS[best],
    )


Fit = tuple[Tensor, Tensor]
Held = tuple[Tensor, Tensor, Tensor, Tensor]
"""Features and labels to fit, features and labels to judge by."""


def _choose(parts: Sequence[Held], classes: int) -> int:
    """The strength, as its place in the list, of the lowest mean loss on what was held back.

    Each fit starts from that of the strength before; the search ends where the loss rises, for the weakest penalties
    take longest. Without parts: 100.
    """
    if not parts:
        return STRENGTHS.index(100.0)
    fits = [_start(part[0], classes) for part in parts]
    losses: list[float] = []
    for strength in STRENGTHS:
        fits = [_fit(x, y, *fit, strength) for fit, (x, y, _, _) in zip(fits, parts, strict=True)]
        held = [_loss(fit, x, y) for fit, (_, _, x, y) in zip(fits, parts, strict=True)]
        losses.append(float(np.mean(held)))
        if len(losses) > 1 and losses[-1] > losses[-2]:
            break
    return int(np.argmin(losses))  # of equals the strongest penalty


def _start(x: Tensor, classes: int) -> Fit:
    return torch.zeros(classes, x.shape[1], dtype=x.dtype), torch.zeros(classes, dtype=x.dtype)


def _fit(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, strength: float) -> Fit:
    """Minimise strength * sum of cross-entropies + |W|^2 / 2, by L-BFGS."""
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = weight.square().sum() / (2 * strength * len(y))
        loss = F.cross_entropy(x @ weight.T + bias, y) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight.detach(), bias.detach()


def _loss(fit: Fit, x: Tensor, y: Tensor) -> float:
    weight, bias = fit
    return float(F.cross_entropy(x @ weight.T + bias, y))


def _folds(x: Tensor, y: Tensor, classes: int) -> list[Held]:
    """Parts of the training pictures, each class spread over them; none if some class has one picture."""
    folds = min(_FOLDS, int(torch.bincount(y, minlength=classes).min()))
    if folds < 2:
        return []
    place = torch.zeros_like(y)
    for label in range(classes):
        found = torch.nonzero(y == label).squeeze(1)
        place[found] = torch.arange(len(found)) % folds
    return [(x[place != fold], y[place != fold], x[place == fold], y[place == fold]) for fold in range(folds)]


# --- on a task ------------------------------------------------------------------------------------


def ensemble(templates: Sequence[str]) -> tuple[str, ...]:
    """The templates of the ensemble row."""
    more = () if len(templates) > 1 else read_templates(Path(__file__).with_name("ensemble.txt"))
    return tuple(dict.fromkeys((*templates, *more)))


def add_baselines(
    scores: Sequence[Scores],
    task: Task,
    towers: Towers,
    *,
    tokenizer: Tokenizer,
    templates: tuple[str, ...],
    preprocess: PreprocessConfig,
) -> list[Scores]:
    """`scores` with the predictions of every baseline.

    Args:
        scores: on the task's test splits, as `evaluate` gives them.
        task: with validation pictures if there are any; without training pictures there is no linear probe.
        towers: of the model that was scored.
        tokenizer: of its base.
        templates: of splits without templates of their own.
        preprocess: of the base.
    """

    def frozen(items: Sequence[Item]) -> Float32:
        return np.concatenate([towers.images(pixels)[2] for pixels in pixel_batches(items, preprocess)])

    def labels(items: Sequence[Item]) -> Int64:
        return np.array([item.label for item in items], dtype=np.int64)

    val = (frozen(task.val), labels(task.val)) if task.val else None
    probe = (
        fit_probe(frozen(task.train), labels(task.train), task.class_names, val=val) if task.train else None
    )
    out = []
    for split in scores:
        own = task.split_templates(split.split, templates)
        others = dict(split.others)
        for mode, texts in (("zero_shot_single", own[:1]), ("zero_shot_ensemble", ensemble(own))):
            classes = class_features(split.class_names, texts, towers.zero_shot_text, tokenizer)
            others[mode] = np.asarray((split.features @ classes.T).argmax(1), dtype=np.int64)
        predicted = None if probe is None else probe.predict(split.features, split.class_names)
        if predicted is not None:
            others["linear_probe"] = predicted
        out.append(replace(split, others=others))
    return out
