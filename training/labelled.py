"""Pictures labelled per attribute, for the causal check of head roles: rendered ones, a CSV file, or folders.

labels.csv      columns path (relative to the file) and one per attribute; an empty cell says nothing
DIR/<attribute>/<value>/picture.jpg
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dear_serve.backbone.clip import Clip
from dear_serve.errors import DataError, ImageError
from dear_serve.preprocess import preprocess_bytes
from training.captions import WORDINGS, attribute_prompts
from training.descriptions import fill
from training.mini import pixels_from
from training.probe import SUFFIXES
from training.sentences import text_features
from training.world import World, sample_scenes
from training.world_vocab import ATTRIBUTES

__all__ = ["LabelledPictures", "read_labelled", "world_task"]

_WORDINGS = ("{}", "something {}", "a picture of {a}")  # of attributes that have none of their own


@dataclass(frozen=True, kw_only=True)
class LabelledPictures:
    """Pictures with a label per attribute, and the text features that zero-shot classification uses."""

    pixels: Tensor
    """(n, 3, S, S) float32."""
    labels: dict[str, npt.NDArray[np.int64]]
    """attribute -> (n,) index of the value, -1 where it isn't known."""
    classes: dict[str, npt.NDArray[np.float32]]
    """attribute -> (C, D) text features of its values, L2-normalised."""
    what: str = ""
    """For a report: where the pictures come from."""


def world_task(
    clip: Clip, count: int = 1000, *, seed: int = 1, n_objects: int | None = None
) -> LabelledPictures:
    """Rendered pictures of held-out combinations, labelled, with zero-shot prompts averaged over wordings."""
    rng = np.random.default_rng(seed)
    scenes = sample_scenes(rng, count, split="heldout", n_objects=n_objects)
    prompts = {
        name: attribute_prompts(name, n_objects=n_objects if name == "object" else None)
        for name in ATTRIBUTES
    }
    return LabelledPictures(
        pixels=pixels_from(World(n_objects).render(scenes, rng)),
        labels=dict(zip(ATTRIBUTES, scenes.attributes().T.astype(np.int64), strict=True)),
        classes={name: _class_features(clip, rows) for name, rows in prompts.items()},
        what="rendered pictures of held-out combinations",
    )


def read_labelled(
    path: Path, clip: Clip, attributes: Sequence[str], *, count: int = 200, seed: int = 0
) -> LabelledPictures:
    """At most `count` pictures of a CSV file or of folders (module docstring), drawn with `seed`.

    Args:
        path: the file or folder.
        clip: the base; encodes the values' prompts.
        attributes: names that may be labelled; others are left out.
        count: pictures at most.
        seed: of the choice.

    Raises:
        DataError: nothing there, no picture that can be read, or no attribute of these with two values.
    """
    rows = _csv_rows(path, attributes) if path.is_file() else _folder_rows(path, attributes)
    order = np.random.default_rng(seed).permutation(len(rows))[:count]
    pixels, kept = [], []
    for index in sorted(order.tolist()):
        try:
            pixels.append(preprocess_bytes(rows[index][0].read_bytes(), clip.config.preprocess))
            kept.append(rows[index][1])
        except (ImageError, OSError):
            continue
    labels, classes = {}, {}
    for name in attributes:
        values = sorted({row[name] for row in kept if row.get(name)})
        if len(values) > 1:
            place = {value: i for i, value in enumerate(values)}
            labels[name] = np.array([place.get(row.get(name, ""), -1) for row in kept], np.int64)
            templates = WORDINGS["seen"].get(name, _WORDINGS)
            classes[name] = _class_features(clip, [[fill(t, v) for t in templates] for v in values])
    if not labels:
        raise DataError(
            f"{path} has {len(rows)} labelled pictures, {len(kept)} of them looked at and readable, and no attribute "
            f"with two values among {', '.join(attributes)}; see python -m training.roles --help",
            field="labelled",
        )
    return LabelledPictures(
        pixels=torch.from_numpy(np.stack(pixels)),
        labels=labels,
        classes=classes,
        what=f"pictures of {path.name}",
    )


def _csv_rows(path: Path, attributes: Sequence[str]) -> list[tuple[Path, dict[str, str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            table = list(csv.DictReader(stream))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}", field="labelled") from error
    if not table or "path" not in table[0]:
        raise DataError(
            f"{path} has no column path; path and a column per attribute are needed", field="labelled"
        )
    return [
        (path.parent / row["path"], {a: (row.get(a) or "").strip() for a in attributes})
        for row in table
        if row["path"]
    ]


def _folder_rows(path: Path, attributes: Sequence[str]) -> list[tuple[Path, dict[str, str]]]:
    if not path.is_dir():
        raise DataError(f"{path} is neither a CSV file nor a folder", field="labelled")
    return [
        (file, {attribute: value.name.replace("_", " ")})
        for attribute in attributes
        for value in sorted((path / attribute).glob("*"))
        for file in sorted(value.glob("*"))
        if file.suffix.lower() in SUFFIXES
    ]


def _class_features(clip: Clip, prompts: Sequence[Sequence[str]]) -> npt.NDArray[np.float32]:
    """Mean text feature of each value's prompts, unit length."""
    flat = text_features(clip, [text for row in prompts for text in row])
    rows = flat.reshape(len(prompts), -1, flat.shape[-1]).mean(1)
    out: npt.NDArray[np.float32] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return out
