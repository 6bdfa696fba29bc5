"""A search as data: which vectors, weighted how, filtered by what; requests parsed and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dear_serve.errors import QueryError
from dear_serve.gallery.diverse import POOL
from dear_serve.runtime.base import Float32

__all__ = ["AttributeRequest", "Invented", "PhraseAttribute", "Query", "build_query", "parse_attributes"]

MAX_TOP_K = 1000
MAX_OFFSET = 10_000
MAX_NEGATIVES = 16
MAX_NEGATIVE_WEIGHT = 2.0
MAX_WEIGHT = 1e6
MAX_INVENTED = 16
MAX_PHRASES = 64
MAX_PHRASE_LENGTH = 1000


@dataclass(frozen=True, kw_only=True)
class PhraseAttribute:
    """An attribute made up in a query: its values as phrases, such as "no rust", "heavy rust"."""

    name: str
    phrases: tuple[str, ...]
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AttributeRequest:
    """What a caller asked for: weights of stored vectors, and attributes of their own."""

    weights: Mapping[str, float] = field(default_factory=lambda: {"class": 1.0})
    invented: tuple[PhraseAttribute, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Invented:
    """An attribute made up in a query, ready to search by (method.md §8, readout 3).

    Its score is cos(Q f_cls, query), from the stored class vectors alone.

    Attributes:
        name: its name in the answer's scores.
        basis: Q, (r, D) float32.
        query: what is looked for, (r,) float32; any length but zero.
        weight: 0 or more.
    """

    name: str
    basis: Float32
    query: Float32
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Query:
    """A search: score = sum of weight x part over stored vectors and invented attributes.

    A part is the cosine with what is looked for, less `negative_weight` times the mean cosine with the negative
    examples (ours).

    Attributes:
        vectors: what is looked for, by vector name, each (r_k,) float32 of any length but zero.
        weights: by vector name, 0 or more; a weight of 0 costs nothing and scores nothing.
        invented: attributes made up for this query.
        filter: see `dear_serve.gallery.filters`; None for every picture.
        top_k: 1 to 1,000.
        exclude: ids left out, such as the picture searched by.
        offset: results left out at the front, 0 to 10,000: the next page begins at offset + top_k.
        negatives: vectors of up to 16 examples to keep away from ("like this, not that"), by name as `vectors`;
            "class" for invented attributes.
        negative_weight: 0 to 2.
        diversity: from 0 (the best) to 1 (each as unlike those before it as can be), by
            `dear_serve.gallery.diverse`, among the best 1,000; then offset + top_k is at most 1,000.
    """

    vectors: Mapping[str, Float32]
    weights: Mapping[str, float] = field(default_factory=lambda: {"class": 1.0})
    invented: tuple[Invented, ...] = ()
    filter: str | None = None
    top_k: int = 10
    exclude: tuple[str, ...] = ()
    offset: int = 0
    negatives: tuple[Mapping[str, Float32], ...] = ()
    negative_weight: float = 0.5
    diversity: float = 0.0

    def check(self, columns: Mapping[str, int]) -> None:
        """Check against a gallery's vectors ({name: width}).

        Raises QueryError: bad_top_k, bad_offset, bad_diversity, unknown_attribute, bad_weights, bad_vector,
        bad_negative.
        """
        _whole("top_k", self.top_k, 1, MAX_TOP_K)
        _whole("offset", self.offset, 0, MAX_OFFSET)
        _number("diversity", self.diversity, 1.0)
        if self.diversity and self.offset + self.top_k > POOL:
            raise QueryError(
                f"offset + top_k is {self.offset + self.top_k}; a diverse answer ends at {POOL}",
                code="bad_offset",
                field="offset",
            )
        self._check_negatives(columns)
        weights = {n: _weight(n, w) for n, w in self.weights.items()}
        for name in weights:
            _known(name, columns)
            if weights[name] > 0:
                if name not in self.vectors:
                    raise QueryError(
                        f"the query has no vector for {name!r}; leave it out",
                        code="unknown_attribute",
                        field="attributes",
                    )
                _check_vector(name, self.vectors[name], columns[name])
        for item in self.invented:
            if item.name in columns:
                raise _bad_attributes(f"{item.name!r} is an attribute of the gallery; name yours otherwise")
            weights[item.name] = _weight(item.name, item.weight)
            if item.basis.ndim != 2 or item.basis.shape[1] != columns["class"]:
                raise QueryError(
                    f"{item.name!r} has a basis {item.basis.shape}; (r, {columns['class']}) is expected",
                    code="bad_vector",
                    field="attributes",
                )
            _check_vector(item.name, item.query, item.basis.shape[0])
        if not any(weights.values()):
            raise QueryError(
                "every weight is 0; give at least one above 0", code="bad_weights", field="attributes"
            )

    def _check_negatives(self, columns: Mapping[str, int]) -> None:
        _number("negative_weight", self.negative_weight, MAX_NEGATIVE_WEIGHT)
        if len(self.negatives) > MAX_NEGATIVES:
            raise QueryError(
                f"{len(self.negatives)} negative examples; at most {MAX_NEGATIVES}",
                code="bad_negative",
                field="negative",
            )
        wanted = {n for n, w in self.weights.items() if w} | ({"class"} if self.invented else set())
        for negative in self.negatives:
            for name in wanted & set(columns):
                if name not in negative:
                    raise QueryError(
                        f"a negative example has no vector for {name!r}",
                        code="bad_negative",
                        field="negative",
                    )
                _check_vector(name, negative[name], columns[name])


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise QueryError(
            f"{name} is {str(value)[:40]!a}; a whole number from {low} to {high}",
            code=f"bad_{name}",
            field=name,
        )


def _number(name: str, value: Any, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
        raise QueryError(
            f"{name} is {str(value)[:40]!a}; a number from 0 to {high:g}", code=f"bad_{name}", field=name
        )


def _bad_attributes(message: str) -> QueryError:
    return QueryError(f"attributes: {message}", code="bad_attributes", field="attributes")


def _known(name: str, known: Mapping[str, Any] | Sequence[str]) -> None:
    if name not in known:
        raise QueryError(
            f"no attribute {name[:64]!a}; known are {', '.join(known)}",
            code="unknown_attribute",
            field="attributes",
        )


def _weight(name: str, value: Any) -> float:
    """A weight as a float; QueryError (bad_weights) unless it is a finite number, 0 or more."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # The comparison comes before float(), which a huge integer overflows; NaN fails it.
    if not number or not 0 <= value <= MAX_WEIGHT:
        raise QueryError(
            f"weight of {name[:64]!a} is {str(value)[:40]!a}; a number from 0 to {MAX_WEIGHT:g}",
            code="bad_weights",
            field="attributes",
        )
    return float(value)


def _check_vector(name: str, vector: Float32, width: int) -> None:
    if vector.shape != (width,):
        raise QueryError(
            f"vector {name!r} has shape {vector.shape}; ({width},) is expected",
            code="bad_vector",
            field="attributes",
        )
    norm = float(np.linalg.norm(vector))
    if not math.isfinite(norm) or norm == 0.0:
        raise QueryError(
            f"vector {name!r} is zero or not finite and points nowhere", code="bad_vector", field="attributes"
        )


def _parse_phrases(name: str, phrases: Any) -> tuple[str, ...]:
    if not isinstance(phrases, (list, tuple)) or not 2 <= len(phrases) <= MAX_PHRASES:
        raise _bad_attributes(f"{name!a} needs a list of 2 to {MAX_PHRASES} phrases")
    for phrase in phrases:
        if not isinstance(phrase, str) or not phrase.strip() or len(phrase) > MAX_PHRASE_LENGTH:
            raise _bad_attributes(f"each phrase of {name!a} is text of 1 to {MAX_PHRASE_LENGTH} characters")
    if len(set(phrases)) != len(phrases):
        raise _bad_attributes(f"the phrases of {name!a} are not all different")
    return tuple(phrases)


def _parse_item(item: Any, known: Sequence[str]) -> tuple[str, float] | PhraseAttribute:
    if not isinstance(item, Mapping) or not isinstance(item.get("name"), str) or not item["name"].strip():
        raise _bad_attributes('each item of the list is an object such as {"name": "color", "weight": 1.0}')
    name = item["name"]
    unknown = set(item) - {"name", "phrases", "weight"}
    if unknown or len(name) > 64:
        raise _bad_attributes(
            f"{name[:64]!a} has a name over 64 characters or keys besides name, phrases and weight"
        )
    weight = _weight(name, item.get("weight", 1.0))
    if item.get("phrases") is None:
        _known(name, known)
        return name, weight
    if name in known:
        raise _bad_attributes(
            f"{name!a} is an attribute of the gallery; give yours another name, or no phrases"
        )
    return PhraseAttribute(name=name, phrases=_parse_phrases(name, item["phrases"]), weight=weight)


def parse_attributes(value: Any, known: Sequence[str]) -> AttributeRequest:
    """What a request's `attributes` asks for.

    Args:
        value: None (the class feature alone), {"color": 1.0, …}, or a list mixing {"name", "weight"} and
            {"name", "phrases", "weight"} (weight 1.0 where absent).
        known: the gallery's vectors, "class" among them.

    Raises QueryError: bad_attributes, unknown_attribute, bad_weights.
    """
    if value is None:
        return AttributeRequest()
    if isinstance(value, Mapping):
        items: list[Any] = [{"name": name, "weight": weight} for name, weight in value.items()]
    elif isinstance(value, (list, tuple)):
        items = list(value)
    else:
        raise _bad_attributes('weights such as {"color": 1.0} or a list are expected')
    weights: dict[str, float] = {}
    invented: dict[str, PhraseAttribute] = {}
    for parsed in (_parse_item(item, known) for item in items):
        name = parsed.name if isinstance(parsed, PhraseAttribute) else parsed[0]
        if name in weights or name in invented:
            raise _bad_attributes(f"{name!a} is given twice")
        if isinstance(parsed, PhraseAttribute):
            invented[name] = parsed
        else:
            weights[name] = parsed[1]
    if len(invented) > MAX_INVENTED:
        raise _bad_attributes(f"{len(invented)} attributes of your own; at most {MAX_INVENTED}")
    if not any(weights.values()) and not any(i.weight for i in invented.values()):
        raise QueryError(
            "every weight is 0; give at least one above 0", code="bad_weights", field="attributes"
        )
    return AttributeRequest(weights=weights, invented=tuple(invented.values()))


def build_query(
    request: AttributeRequest,
    vectors: Mapping[str, Float32],
    bases: Mapping[str, Float32],
    *,
    filter: str | None = None,  # noqa: A002 - the request's name
    top_k: int = 10,
    exclude: tuple[str, ...] = (),
) -> Query:
    """A search from a parsed request.

    Args:
        request: from `parse_attributes`.
        vectors: of the picture, text or stored id searched by, each (r_k,) float32; "class" (D,) among them.
        bases: Q (r, D) float32 of each invented attribute, made from its phrases.

    Raises QueryError (bad_vector) when the class vector has nothing along an invented attribute.
    """
    invented = []
    for item in request.invented:
        basis = np.asarray(bases[item.name], dtype=np.float32)
        invented.append(
            Invented(name=item.name, basis=basis, query=basis @ vectors["class"], weight=item.weight)
        )
    return Query(
        vectors=vectors,
        weights=request.weights,
        invented=tuple(invented),
        filter=filter,
        top_k=top_k,
        exclude=exclude,
    )
