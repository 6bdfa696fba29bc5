"""Class names and templates to class features, and class features to predictions; numpy only.

A name or a template is text, whatever it contains: templates are filled by plain replacement of "{}", never
by `str.format`. Codes of the LabelError raised here:

    no_labels          the list is empty, or not a list
    too_many_labels    more than the limit
    bad_label          a name that is not a text
    empty_label        a name of which nothing is left after cleaning
    duplicate_label    two names that differ in case, white space or encoding only
    bad_template       not a text, or without exactly one "{}"; no template at all, or too many
    bad_top_k          fewer than one prediction asked for
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dear_serve.errors import LabelError
from dear_serve.tokenizer import Tokenizer, clean_text, split_words, token_lengths

__all__ = [
    "DEFAULT_TEMPLATES",
    "ClassFeatureCache",
    "Prediction",
    "class_features",
    "fill",
    "fused_logits",
    "l2_normalize",
    "predictions",
    "softmax",
    "top_k",
    "validate_labels",
    "validate_templates",
    "zero_shot_logits",
]

DEFAULT_TEMPLATES = ("a photo of a {}.",)
PLACEHOLDER = "{}"
_NO_LIMIT = 2**62

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


# --- names and templates --------------------------------------------------------------------------


def validate_labels(names: Sequence[str], *, max_labels: int = 1000) -> tuple[str, ...]:
    """`names` as they are, once they can all be told apart by the text tower.

    Raises:
        LabelError: with a code of the module docstring; the message names the label and its place.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise LabelError(
            f"labels are {names!r:.80}; a list of texts is expected", code="no_labels", field="labels"
        )
    if not names:
        raise LabelError("there are no labels; give at least one", code="no_labels", field="labels")
    if len(names) > max_labels:
        raise LabelError(
            f"there are {len(names)} labels and {max_labels} are allowed; send fewer",
            code="too_many_labels",
            field="labels",
        )
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        if not isinstance(name, str):
            raise LabelError(
                f"label {i} is {name!r:.80}; a text is expected", code="bad_label", field="labels"
            )
        if next(split_words(name), None) is None:
            raise LabelError(f"label {i} is empty; name the class", code="empty_label", field="labels")
        first = seen.setdefault(clean_text(name), i)
        if first != i:
            raise LabelError(
                f"label {i} ({name!r:.80}) is label {first} again; remove one",
                code="duplicate_label",
                field="labels",
            )
    return tuple(names)


def validate_templates(templates: Sequence[str], *, max_templates: int = 100) -> tuple[str, ...]:
    """`templates` as they are, each a text with exactly one "{}". Raises LabelError "bad_template"."""
    if isinstance(templates, str) or not isinstance(templates, Sequence):
        raise _bad_template(f"templates are {templates!r:.80}; a list of texts is expected")
    if not 1 <= len(templates) <= max_templates:
        raise _bad_template(f"there are {len(templates)} templates; give 1 to {max_templates}")
    for i, template in enumerate(templates):
        if not isinstance(template, str):
            raise _bad_template(f"template {i} is {template!r:.80}; a text is expected")
        if template.count(PLACEHOLDER) != 1:
            raise _bad_template(
                f"template {i} ({template!r:.80}) needs {PLACEHOLDER} exactly once, for the label"
            )
    return tuple(templates)


def fill(template: str, name: str) -> str:
    """`template` with `name` in place of its "{}"; braces in the name stay as they are."""
    return template.replace(PLACEHOLDER, name, 1)


def _bad_template(message: str) -> LabelError:
    return LabelError(message, code="bad_template", field="templates")


# --- class features -------------------------------------------------------------------------------


def class_features(
    names: Sequence[str],
    templates: Sequence[str],
    encode: Callable[[Int64], Float32],
    tokenizer: Tokenizer,
    *,
    batch_size: int = 256,
    dynamic_length: bool = True,
) -> Float32:
    """One L2-normalised feature per class name, (C, D) float32.

    Each name is put into each template; the features of a name's texts are normalised, averaged and
    normalised again (the prompt ensemble of Radford et al. 2021, section 3.1.4). Texts of equal tokens are
    encoded once, in batches of like length.

    Args:
        encode: tokens (B, L) int64 to features (B, D) float32.
        dynamic_length: cut each batch to its longest text. The text tower is causal and reads its feature at
            end-of-text, so nothing behind that counts.

    Raises:
        LabelError: as `validate_labels` and `validate_templates` do, without their limits, which are for
            requests.
    """
    names = validate_labels(names, max_labels=_NO_LIMIT)
    templates = validate_templates(templates, max_templates=_NO_LIMIT)
    tokens = tokenizer([fill(template, name) for name in names for template in templates])
    distinct, back = np.unique(tokens, axis=0, return_inverse=True)
    order = np.argsort(token_lengths(distinct), kind="stable")
    parts = [
        _encode_batch(distinct[order[start : start + batch_size]], encode, dynamic_length=dynamic_length)
        for start in range(0, len(order), batch_size)
    ]
    features = np.empty((len(order), parts[0].shape[1]), dtype=np.float32)
    features[order] = np.concatenate(parts)
    per_text = l2_normalize(features)[back.reshape(-1)]
    return l2_normalize(per_text.reshape(len(names), len(templates), -1).mean(axis=1))


def _encode_batch(tokens: Int64, encode: Callable[[Int64], Float32], *, dynamic_length: bool) -> Float32:
    length = int(token_lengths(tokens).max()) if dynamic_length else tokens.shape[1]
    return encode(np.ascontiguousarray(tokens[:, :length]))


class ClassFeatureCache:
    """The class features used last, safe to share between threads.

    Threads that ask for the same missing entry at once wait for the one that computes it. A computation that
    fails is not kept. Arrays are handed out read-only.

    Args:
        max_entries: label sets kept; the one used least recently goes first. A set of 1,000 classes in 512
            dimensions takes 2 MB.
    """

    def __init__(self, max_entries: int = 32) -> None:
        self.max_entries = max(1, max_entries)
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[Hashable, Future[Float32]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self, engine: Hashable, names: Sequence[str], templates: Sequence[str], compute: Callable[[], Float32]
    ) -> Float32:
        """The features of `names` in `templates` under `engine`, (C, D); `compute()` where they are missing.

        `engine` must tell apart everything else the features depend on: the bundle (its hash), the mode, the
        precision.
        """
        key = (engine, tuple(names), tuple(templates))
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self.hits += 1
                self._entries.move_to_end(key)
            else:
                self.misses += 1
                mine = self._entries[key] = Future()
                while len(self._entries) > self.max_entries:
                    self._entries.popitem(last=False)
        return entry.result() if entry is not None else self._fill(key, mine, compute)

    def clear(self) -> None:
        """Forget everything; computations under way still answer those who wait for them."""
        with self._lock:
            self._entries.clear()

    def _fill(self, key: Hashable, entry: Future[Float32], compute: Callable[[], Float32]) -> Float32:
        try:
            features = compute()
        except BaseException as error:  # whoever waits must hear of it, an interrupt included
            with self._lock:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            entry.set_exception(error)
            raise
        features.setflags(write=False)
        entry.set_result(features)
        return features


# --- logits and predictions -----------------------------------------------------------------------


def l2_normalize(features: Float32) -> Float32:
    """`features` over their length along the last axis; zeros stay zeros."""
    length = np.linalg.norm(features, axis=-1, keepdims=True)
    return np.asarray(features / np.maximum(length, np.float32(1e-12)), dtype=np.float32)


def zero_shot_logits(image: Float32, class_features: Float32, logit_scale: float) -> Float32:
    """tau f.g: features (B, D) and (C, D), L2-normalised, to logits (B, C)."""
    return np.asarray(np.float32(logit_scale) * (image @ class_features.T), dtype=np.float32)


def fused_logits(
    cls: Float32, attributes: Float32, class_features: Float32, alpha: Sequence[float], logit_scale: float
) -> tuple[Float32, Float32]:
    """method.md §4 in numpy: fused logits (B, C) and what each feature contributed to them (B, C, K+1).

    Args:
        cls: f_0, (B, D), L2-normalised.
        attributes: f_1 to f_K, (B, K, D), L2-normalised.
        class_features: g, (C, D), L2-normalised.
        alpha: K+1 weights, that of the class feature first.
        logit_scale: tau, not its logarithm.
    """
    features = np.concatenate([cls[:, None], attributes], axis=1)
    weights = np.float32(logit_scale) * np.asarray(alpha, dtype=np.float32)
    contributions = np.asarray((features @ class_features.T).transpose(0, 2, 1) * weights, dtype=np.float32)
    return contributions.sum(axis=2), contributions


def softmax(logits: Float32) -> Float32:
    """Probabilities along the last axis, float32, each row summing to 1; finite for any finite logits."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=np.float32)
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True), dtype=np.float32)


def top_k(scores: Float32, k: int) -> tuple[Int64, Float32]:
    """Columns and values of the k highest scores of each row, best first; equal ones in the order given.

    Args:
        scores: (B, C).
        k: 1 or more; all C where it is more than C.

    Raises:
        LabelError: "bad_top_k" for k below 1.
    """
    if k < 1:
        raise LabelError(f"top_k is {k}; at least 1 is needed", code="bad_top_k", field="top_k")
    columns = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return columns, np.take_along_axis(scores, columns, axis=1)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One label for one picture."""

    label: str
    probability: float
    logit: float
    cosine: float
    contributions: Mapping[str, float] = field(default_factory=dict)
    """Share of "class" and of each attribute in the logit; they add up to it. Empty where unknown."""


def predictions(
    logits: Float32,
    names: Sequence[str],
    *,
    cosines: Float32,
    contributions: Mapping[str, Float32] | None = None,
    k: int = 5,
    temperature: float = 1.0,
) -> list[list[Prediction]]:
    """The k most probable labels of each picture, best first.

    Args:
        logits: (B, C); probabilities are the softmax of logits / temperature over all C.
        cosines: (B, C), what is reported as the cosine of picture and label.
        contributions: by name, "class" first, (B, C) each.

    Raises:
        LabelError: "bad_top_k" for k below 1.
    """
    probabilities = softmax(logits / np.float32(temperature))
    columns, _ = top_k(logits, k)
    return [
        [
            Prediction(
                label=names[c],
                probability=float(probabilities[row, c]),
                logit=float(logits[row, c]),
                cosine=float(cosines[row, c]),
                contributions={name: float(values[row, c]) for name, values in (contributions or {}).items()},
            )
            for c in chosen
        ]
        for row, chosen in enumerate(columns.tolist())
    ]
