"""Which readout finds pictures alike in one attribute, measured on labelled pictures (method.md §8).

Every picture is searched by once and the others are ranked. Rows of the table are readouts, columns what "the same"
means: a readout is good when its own column is high and the others are near chance.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dear_serve.errors import BaseModelError, DataError, MissingDependencyError
from dear_serve.gallery.measures import Labels, Quality, chance, highest_precision, measure
from dear_serve.labels import l2_normalize
from dear_serve.preprocess import preprocess_bytes
from dear_serve.readout import project, span_basis
from dear_serve.runtime.base import Float32
from dear_serve.runtime.predict import Predictor

__all__ = [
    "Derived",
    "Evaluation",
    "Features",
    "LabeledPictures",
    "evaluate",
    "picture_features",
    "read_derived",
]

_BATCH = 100


@dataclass(frozen=True, kw_only=True)
class LabeledPictures:
    """Pictures and what they show. names: their paths; data: their bytes; labels: by attribute, (n,)."""

    names: list[str]
    data: list[bytes]
    labels: dict[str, Labels]

    @classmethod
    def read(cls, folder: Path, attributes: Sequence[str]) -> LabeledPictures:
        """The pictures that `folder/labels.csv` names, with its columns that are attributes.

        Raises DataError: no labels.csv, fewer than 20 rows, none of the columns, a picture that is not there.
        """
        file = folder / "labels.csv"
        if not file.is_file():
            raise DataError(
                f"{folder} has no labels.csv (path and a column per attribute); make one: "
                f"python -m training.world_data gallery {folder}"
            )
        with file.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.DictReader(stream))
        known = [a for a in attributes if rows and a in rows[0]]
        if len(rows) < 20 or not known:
            columns = list(rows[0]) if rows else []
            raise DataError(
                f"{file} has {len(rows)} rows and the columns {columns}; "
                f"20 rows or more and one of {', '.join(attributes)} are needed"
            )
        names = [row["path"] for row in rows]
        try:
            data = [(folder / name).read_bytes() for name in names]
        except OSError as error:
            raise DataError(
                f"{file} names {error.filename}, which cannot be read: {error.strerror}"
            ) from error
        return cls(names=names, data=data, labels={a: np.array([row[a] for row in rows]) for a in known})


@dataclass(frozen=True, kw_only=True)
class Features:
    """Of n pictures, L2-normalised."""

    cls: Float32
    """Adapted class features (n, D)."""
    attributes: Float32
    """(n, K, D)."""
    frozen: Float32
    """Frozen class features (n, D)."""


@dataclass(frozen=True, kw_only=True)
class Derived:
    """An attribute that no one trained: phrases as a query would give them, and values made of a known attribute's."""

    name: str
    phrases: tuple[str, ...]
    of: str
    groups: Mapping[str, tuple[str, ...]]

    def labels(self, known: Mapping[str, Labels]) -> Labels:
        """Group of each picture, "" where it has none. Raises DataError when `of` is not a labelled attribute."""
        if self.of not in known:
            raise DataError(f"{self.name!r} is made of {self.of!r}; labels.csv has {', '.join(known)}")
        group = {value: name for name, values in self.groups.items() for value in values}
        return np.array([group.get(str(value), "") for value in known[self.of]])


def read_derived(path: Path) -> tuple[Derived, ...]:
    """Derived attributes from JSON: {NAME: {"phrases": […], "of": ATTRIBUTE, "groups": {GROUP: [value, …]}}}."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return tuple(
            Derived(
                name=name,
                phrases=tuple(item["phrases"]),
                of=item["of"],
                groups={group: tuple(values) for group, values in item["groups"].items()},
            )
            for name, item in data.items()
        )
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f'{path} is not JSON such as {{"warmth": {{"phrases": ["a warm color", "a cold color"], "of": "color", '
            f'"groups": {{"warm": ["red"], "cold": ["blue"]}}}}}} ({error})'
        ) from error


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The table: quality by row and attribute, what chance gives, and the vectors of what a gallery would store."""

    pictures: LabeledPictures
    labels: dict[str, Labels]
    chance: dict[str, float]
    """Precision of a random order."""
    highest: dict[str, float]
    """Precision of a perfect order."""
    rows: dict[str, dict[str, Quality]]
    stored: dict[str, Float32]
    """Of each attribute and "class", (n, r): what the bundle's own readouts give."""
    notes: tuple[str, ...] = ()


def picture_features(predictor: Predictor, images: Sequence[bytes]) -> Features:
    """Features of encoded pictures. Raises ImageError for one that is bad."""
    config, engine = predictor.bundle.manifest.preprocess, predictor.engine
    parts: list[tuple[Float32, Float32, Float32]] = []
    for start in range(0, len(images), _BATCH):
        pixels = np.stack([preprocess_bytes(data, config) for data in images[start : start + _BATCH]])
        adapted = engine.encode_image(pixels)
        parts.append((adapted.cls, adapted.attributes, engine.encode_image_zero_shot(pixels)))
    cls, attributes, frozen = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Features(cls=cls, attributes=attributes, frozen=frozen)


def evaluate(
    predictor: Predictor, folder: Path, *, k: int = 10, derived: Sequence[Derived] = ()
) -> Evaluation:
    """Every readout on labelled pictures.

    Rows, all by picture unless they say "text": "class" and "frozen class"; per attribute "token A" (readout 1),
    "heads A" (2: the frozen class feature's part from the attribute's core heads; needs torch and the base), "span A"
    (3) and "token span A" (4); "chosen A", what the bundle records and a gallery stores; "text A, plain CLIP"
    and "text A, chosen" search by one text per value ("something red"); "phrases D" is a derived attribute's span.

    Raises DataError, ImageError.
    """
    names = predictor.bundle.manifest.dear.attributes
    pictures = LabeledPictures.read(Path(folder), names)
    if not 1 <= k < len(pictures.data):
        raise DataError(
            f"k is {k}; 1 to {len(pictures.data) - 1} for {len(pictures.data)} pictures", field="k"
        )
    features = picture_features(predictor, pictures.data)
    labels = pictures.labels | {d.name: d.labels(pictures.labels) for d in derived}
    vectors, notes = _vectors(predictor, pictures, features)
    for item in derived:
        vectors[f"phrases {item.name}"] = project(features.cls, predictor.readout_phrases(item.phrases))
    rows = {name: measure(l2_normalize(v), labels, k=k) for name, v in vectors.items()}
    stored = {"class": features.cls} | {n: vectors[f"chosen {n}"] for n in names}
    rows |= _by_text(predictor, pictures.labels, features, stored, k)
    return Evaluation(
        pictures=pictures,
        labels=labels,
        chance={a: chance(values) for a, values in labels.items()},
        highest={a: highest_precision(values, k=k) for a, values in labels.items()},
        rows=rows,
        stored=stored,
        notes=notes,
    )


def _vectors(
    predictor: Predictor, pictures: LabeledPictures, features: Features
) -> tuple[dict[str, Float32], tuple[str, ...]]:
    """Vectors (n, r) of the readouts by row name, and what was left out, in words."""
    manifest = predictor.bundle.manifest
    bases = predictor.bundle.basis()
    for readout in manifest.readouts:
        if readout.attribute not in bases and len(readout.phrases) > 1:
            bases[readout.attribute] = span_basis(predictor.text_features(readout.phrases, "zero_shot"))
    vectors = {"class": features.cls, "frozen class": features.frozen}
    notes = []
    try:
        heads = _head_contributions(predictor, pictures.data)
    except (MissingDependencyError, BaseModelError) as error:
        heads, notes = {}, [f"rows of heads left out: {error.message}"]
    for k, name in enumerate(manifest.dear.attributes):
        token = np.ascontiguousarray(features.attributes[:, k])
        vectors[f"token {name}"] = token
        if name in heads:
            vectors[f"heads {name}"] = heads[name]
        elif heads:
            notes.append(f"heads {name}: no core head")
        if name in bases:
            vectors[f"span {name}"] = project(features.cls, bases[name])
            vectors[f"token span {name}"] = project(token, bases[name])
        else:
            notes.append(f"span {name}: the bundle records no phrases")
        chosen = {r.attribute: r.kind for r in manifest.readouts}.get(name, "token")
        vectors[f"chosen {name}"] = vectors[f"{chosen} {name}"]
    return vectors, tuple(notes)


def _head_contributions(predictor: Predictor, images: Sequence[bytes]) -> dict[str, Float32]:
    """Readout 2 by attribute, (n, D), where there are core heads.

    Only torch can say what a head adds, so this readout is measured and not served.
    """
    from dear_serve.runtime.torch_engine import core_head_features

    run, config = core_head_features(predictor.bundle), predictor.bundle.manifest.preprocess
    parts = [
        run(np.stack([preprocess_bytes(data, config) for data in images[start : start + _BATCH]]))
        for start in range(0, len(images), _BATCH)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _by_text(
    predictor: Predictor,
    labels: Mapping[str, Labels],
    features: Features,
    stored: Mapping[str, Float32],
    k: int,
) -> dict[str, dict[str, Quality]]:
    """Rows of the searches by text: one text per value of each attribute."""
    phrases = {r.attribute: r.phrases for r in predictor.bundle.manifest.readouts}
    rows = {}
    for name, values in labels.items():
        known = np.unique(values[values != ""])
        texts = [_said(str(value), phrases.get(name, ())) for value in known]
        plain = predictor.text_features(texts, "zero_shot")
        chosen = predictor.readout_text(texts)[name]
        for label, queries, vectors in (
            ("plain CLIP", plain, features.frozen),
            ("chosen", chosen, stored[name]),
        ):
            found = measure(l2_normalize(vectors), labels, k=k, queries=(queries, {name: known}))
            rows[f"text {name}, {label}"] = found
    return rows


def _said(value: str, phrases: Sequence[str]) -> str:
    """The shortest phrase that holds a value's words, or the value itself."""
    holding = [p for p in phrases if f" {value} " in f" {p} "]
    return min(holding, key=len, default=value)
