"""What a model, in training or in a bundle, says of the pictures of test splits, frozen and adapted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from dear_serve.bundle import Bundle
from dear_serve.config import PreprocessConfig
from dear_serve.dear.model import DearModel
from dear_serve.labels import class_features, fused_logits, softmax, zero_shot_logits
from dear_serve.preprocess import preprocess_bytes
from dear_serve.runtime import Engine
from dear_serve.tokenizer import Tokenizer
from training.items import Item, Tests
from training.tables import harmonic_mean

__all__ = [
    "EngineTowers",
    "ModelTowers",
    "Scores",
    "Towers",
    "evaluate",
    "pixel_batches",
    "summary",
]

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]
BATCH = 64


class Towers(Protocol):
    """What evaluation asks of a model; every array as in `dear_serve.runtime.base`."""

    alpha: tuple[float, ...]
    logit_scale: float

    def images(self, pixels: Float32) -> tuple[Float32, Float32, Float32]:
        """Adapted class feature (B, D), attribute features (B, K, D), zero-shot feature (B, D)."""

    def text(self, tokens: Int64) -> Float32:
        """Adapted text features (B, D)."""

    def zero_shot_text(self, tokens: Int64) -> Float32:
        """Frozen text features (B, D)."""


class ModelTowers:
    """A `DearModel`, in training or loaded. Adapted and zero-shot features share one pass of the frozen blocks."""

    def __init__(self, model: DearModel) -> None:
        self._model = model
        self.alpha = tuple(model.fusion.alpha.detach().cpu().tolist())
        self.logit_scale = model.clip.tau

    def images(self, pixels: Float32) -> tuple[Float32, Float32, Float32]:
        with torch.inference_mode():
            trunk = self._model.image_trunk(self._tensor(pixels))
            cls, attributes = self._model.image_head(trunk)
            frozen = self._model.zero_shot_head(trunk)
        return cls.cpu().numpy(), attributes.cpu().numpy(), frozen.cpu().numpy()

    def text(self, tokens: Int64) -> Float32:
        with torch.inference_mode():
            features: Float32 = self._model.text_features(self._tensor(tokens)).cpu().numpy()
        return features

    def zero_shot_text(self, tokens: Int64) -> Float32:
        with torch.inference_mode():
            features: Float32 = self._model.zero_shot_text(self._tensor(tokens)).cpu().numpy()
        return features

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.clip.logit_scale.device)


class EngineTowers:
    """A bundle run by any engine."""

    def __init__(self, engine: Engine, bundle: Bundle) -> None:
        self._engine = engine
        self.alpha = bundle.manifest.alpha
        self.logit_scale = bundle.manifest.logit_scale

    def images(self, pixels: Float32) -> tuple[Float32, Float32, Float32]:
        adapted = self._engine.encode_image(pixels)
        return adapted.cls, adapted.attributes, self._engine.encode_image_zero_shot(pixels)

    def text(self, tokens: Int64) -> Float32:
        return self._engine.encode_text(tokens)

    def zero_shot_text(self, tokens: Int64) -> Float32:
        return self._engine.encode_text_zero_shot(tokens)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a model said of the pictures of one test split."""

    split: str
    class_names: tuple[str, ...]
    items: tuple[Item, ...]
    zero_shot: Int64
    """Predicted class of each picture, (n,)."""
    adapted: Int64
    """(n,)."""
    confidence: Float32
    """Adapted probability of the predicted class, (n,)."""
    features: Float32 = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """Frozen image features (n, D), from which baselines can be scored."""
    others: Mapping[str, Int64] = field(default_factory=dict)
    """Predictions (n,) of baselines, by the modes of `tables.ROWS`."""

    @property
    def labels(self) -> Int64:
        """True class of each picture, (n,)."""
        return np.array([item.label for item in self.items], dtype=np.int64)

    def has(self, mode: str) -> bool:
        """Whether there are predictions of `mode`."""
        return mode in ("zero_shot", "adapted") or mode in self.others

    def predicted(self, mode: str) -> Int64:
        """Predicted classes (n,); `mode` is "zero_shot", "adapted" or one of `others`."""
        return {"zero_shot": self.zero_shot, "adapted": self.adapted, **self.others}[mode]

    def accuracy(self, mode: str) -> float:
        """Share of right predictions of a mode, 0 to 1."""
        return float(np.mean(self.predicted(mode) == self.labels))


def evaluate(
    towers: Towers,
    tests: Tests,
    *,
    tokenizer: Tokenizer,
    templates: Sequence[str],
    preprocess: PreprocessConfig,
    progress: Callable[[Sequence[Item]], Iterable[Item]] = iter,
) -> list[Scores]:
    """Scores on each test split, its pictures among its own class names (both modes with the same templates)."""
    return [
        _evaluate_split(
            towers,
            name,
            items,
            _Classes(
                names=names,
                adapted=class_features(names, templates, towers.text, tokenizer),
                zero_shot=class_features(names, templates, towers.zero_shot_text, tokenizer),
            ),
            pixel_batches(progress(items), preprocess),
        )
        for name, (names, items) in tests.items()
    ]


@dataclass(frozen=True, kw_only=True)
class _Classes:
    names: tuple[str, ...]
    adapted: Float32
    zero_shot: Float32


def _evaluate_split(
    towers: Towers, name: str, items: tuple[Item, ...], classes: _Classes, batches: Iterable[Float32]
) -> Scores:
    zero_shot, adapted, confidence, features = [], [], [], []
    for pixels in batches:
        cls, attributes, frozen = towers.images(pixels)
        features.append(frozen)
        zero_shot.append(zero_shot_logits(frozen, classes.zero_shot, towers.logit_scale).argmax(1))
        logits, _ = fused_logits(cls, attributes, classes.adapted, towers.alpha, towers.logit_scale)
        adapted.append(logits.argmax(1))
        confidence.append(softmax(logits).max(1))
    return Scores(
        split=name,
        class_names=classes.names,
        items=items,
        zero_shot=np.concatenate(zero_shot),
        adapted=np.concatenate(adapted),
        confidence=np.concatenate(confidence),
        features=np.concatenate(features),
    )


def pixel_batches(items: Iterable[Item], config: PreprocessConfig) -> Iterator[Float32]:
    """Batches (B, 3, S, S) of the pictures, in order."""
    batch: list[Float32] = []
    for item in items:
        batch.append(preprocess_bytes(item.path.read_bytes(), config))
        if len(batch) == BATCH:
            yield np.stack(batch)
            batch = []
    if batch:
        yield np.stack(batch)


# --- numbers --------------------------------------------------------------------------------------


def summary(scores: Sequence[Scores], *, targets: Sequence[str] = ()) -> dict[str, float]:
    """Accuracies (0 to 1) by mode and split, as in "zero_shot_base", "adapted_base", ….

    Base and novel also give their harmonic means "…_hm", and `targets`, splits that are other data sets, their
    averages "…_average". A mode that is not defined on some of the splits (a linear probe on novel classes) has
    neither.
    """
    modes = ["zero_shot", "adapted", *dict.fromkeys(mode for s in scores for mode in s.others)]
    numbers = {f"{m}_{s.split}": s.accuracy(m) for m in modes for s in scores if s.has(m)}
    for mode in modes:
        halves = [numbers.get(f"{mode}_{half}") for half in ("base", "novel")]
        if halves[0] is not None and halves[1] is not None:
            numbers[f"{mode}_hm"] = harmonic_mean(halves[0], halves[1])
        others = [numbers[f"{mode}_{target}"] for target in targets if f"{mode}_{target}" in numbers]
        if targets and len(others) == len(targets):
            numbers[f"{mode}_average"] = float(np.mean(others))
    return numbers
