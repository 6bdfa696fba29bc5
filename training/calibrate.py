"""How sure an adapted model may be: a temperature, and a threshold for "none of these", from pictures it never saw.

B validation pictures, C trained classes. Everything here is ours but the temperature and the error it mends (Guo et al.
2017, "On Calibration of Modern Neural Networks", sections 2 and 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dear_serve.config import PreprocessConfig
from dear_serve.labels import class_features, fused_logits
from dear_serve.manifest import Calibration
from dear_serve.tokenizer import Tokenizer
from training.checks import PictureCheck
from training.items import DataSet, Item, Task
from training.scoring import Towers, pixel_batches
from training.shots import few_shot

__all__ = [
    "Texts",
    "calibrate",
    "calibration_error",
    "fit_temperature",
    "fit_threshold",
    "validation_logits",
    "validation_pictures",
]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

MIN_PICTURES = 30
PER_CLASS = 20
_BINS = 15
_FOLDS = 10
_COLDEST, _HOTTEST = 0.25, 20.0  # a model that is never wrong on a few pictures must not become certain


def calibrate(logits: Float32, labels: Int64, logit_scale: float, source: str) -> Calibration:
    """Temperature, threshold and calibration errors.

    The error after, and the threshold's accuracy, are those of each tenth of the pictures (every tenth one) under what
    the others gave; what is stored is fitted on all. A temperature that makes the labels of those tenths no likelier
    than 1 does is not kept.

    Args:
        logits: fused logits (B, C) over the trained classes. labels: true class of each, (B,).
        logit_scale: tau. source: see `Calibration.source`.
    """
    scaled = np.array(logits, np.float64)
    low = np.empty(len(labels))
    for fold in range(_FOLDS):
        judged = np.arange(len(labels)) % _FOLDS == fold
        if judged.any():
            scaled[judged] /= fit_temperature(logits[~judged], labels[~judged])
            low[judged] = fit_threshold(logits[~judged], labels[~judged], logit_scale)
    several = logits.shape[1] > 1
    helps = _loss(scaled, labels) < _loss(logits, labels)
    return Calibration(
        temperature=fit_temperature(logits, labels) if helps else 1.0,
        threshold=fit_threshold(logits, labels, logit_scale) if several else None,
        threshold_accuracy=_threshold_accuracy(logits, labels, logit_scale, low) if several else None,
        ece_before=calibration_error(logits, labels),
        ece_after=calibration_error(scaled if helps else logits, labels),
        pictures=len(labels),
        source=source,
    )


def fit_temperature(logits: Float32 | Float64, labels: Int64) -> float:
    """T that makes the labels likeliest under softmax(logits / T), 0.25 to 20.

    The log-likelihood is concave in 1 / T; its slope, the mean of (logit of the label - expected logit), is bisected.
    """
    low, high = 1 / _HOTTEST, 1 / _COLDEST
    rows = np.asarray(logits, np.float64)
    true = rows[np.arange(len(rows)), labels]
    for _ in range(60):
        middle = (low + high) / 2
        slope = np.mean(true - (_softmax(rows * middle) * rows).sum(axis=1))
        low, high = (middle, high) if slope > 0 else (low, middle)
    return float(2 / (low + high))


def _loss(logits: Float32 | Float64, labels: Int64) -> float:
    """Mean negative log-likelihood of the labels."""
    rows = np.asarray(logits, np.float64)
    top = rows.max(axis=1, keepdims=True)
    total = top[:, 0] + np.log(np.exp(rows - top).sum(axis=1))
    return float(np.mean(total - rows[np.arange(len(rows)), labels]))


def calibration_error(logits: Float32 | Float64, labels: Int64) -> float:
    """Expected calibration error, 0 to 1: |accuracy - confidence| averaged over equal bins of confidence.

    15 bins; of fewer than 150 pictures one bin for every 10, as emptier ones would measure chance (ours).
    """
    probabilities = _softmax(np.asarray(logits, np.float64))
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    count = max(1, min(_BINS, len(labels) // 10))
    bins = np.minimum((confidence * count).astype(np.int64), count - 1)
    gaps = np.bincount(bins, weights=right - confidence, minlength=count)
    return float(np.abs(gaps).sum() / len(labels))


def fit_threshold(logits: Float32, labels: Int64, logit_scale: float) -> float:
    """The fused cosine (logit / tau), -1 to 1, below which the best label is none of those asked for.

    Every picture is judged twice: among all classes, where the best label should pass, and with its own class taken
    out, where the best of the others should not. Chosen is the threshold with the highest balanced accuracy, in the
    middle between the two scores beside it; the lowest where several are equal.
    """
    inside, outside = _best_scores(logits, labels, logit_scale)
    scores = np.unique(np.concatenate([inside, outside]))
    candidates = np.concatenate([scores[:1], (scores[:-1] + scores[1:]) / 2])
    passing = 1 - np.searchsorted(np.sort(inside), candidates) / len(inside)
    stopped = np.searchsorted(np.sort(outside), candidates) / len(outside)
    return float(np.clip(candidates[np.argmax(passing + stopped)], -1, 1))


def _threshold_accuracy(logits: Float32, labels: Int64, logit_scale: float, low: Float64) -> float:
    """Balanced accuracy of a threshold for each picture, 0 to 1."""
    inside, outside = _best_scores(logits, labels, logit_scale)
    return float((np.mean(inside >= low) + np.mean(outside < low)) / 2)


def _best_scores(logits: Float32, labels: Int64, logit_scale: float) -> tuple[Float64, Float64]:
    """Best fused cosine of each picture among all classes, and among those that are not its own."""
    cosines = np.asarray(logits, np.float64) / logit_scale
    others = cosines.copy()
    others[np.arange(len(others)), labels] = -np.inf
    return cosines.max(axis=1), others.max(axis=1, initial=-1.0)


def _softmax(rows: Float64) -> Float64:
    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True), np.float64)


# --- pictures -------------------------------------------------------------------------------------


def validation_pictures(
    data: DataSet, task: Task, *, seed: int, check: PictureCheck
) -> tuple[tuple[Item, ...], str]:
    """Pictures of the trained classes that no step of training saw, and where they are from.

    They are the task's validation pictures or, where there are none, at most 20 a class of the training pictures that
    were not among the shots. Fewer than 30 in all are too few, and then none are given. Test pictures are never taken.
    """
    if len(task.val) >= MIN_PICTURES:
        return task.val, "val"
    trained = {item.path for item in (*task.train, *task.val)}
    count = len(task.class_names)
    left = [item for item in data.train if item.label < count and item.path not in trained]
    chosen = few_shot(left, PER_CLASS, seed)
    if check(chosen):
        chosen = tuple(item for item in chosen if item.path not in check.bad)
    return (chosen, "train") if len(chosen) >= MIN_PICTURES else ((), "")


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What the classes are called, and in which sentences."""

    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    tokenizer: Tokenizer


def validation_logits(
    towers: Towers,
    texts: Texts,
    items: Sequence[Item],
    *,
    preprocess: PreprocessConfig,
    progress: Callable[[Sequence[Item]], Iterable[Item]] = iter,
) -> tuple[Float32, Int64]:
    """Fused logits (B, C) of the pictures over the trained classes, and their labels (B,)."""
    classes = class_features(texts.class_names, texts.templates, towers.text, texts.tokenizer)
    logits = []
    for pixels in pixel_batches(progress(items), preprocess):
        cls, attributes, _ = towers.images(pixels)
        logits.append(fused_logits(cls, attributes, classes, towers.alpha, towers.logit_scale)[0])
    return np.concatenate(logits), np.array([item.label for item in items], np.int64)
