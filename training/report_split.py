"""One test split in report.html: each class frozen and adapted, what is taken for what, the worst mistakes shown."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dear_serve.preprocess import decode_image, thumbnail
from training.scoring import Scores

__all__ = ["split_section"]

_CONFUSION_CLASSES = 40
_CLASSES = 60  # rows of classes; of more the ends are shown
_PAIRS = 20
_MISTAKES = 12
_PICTURE = 96  # pixels

Counts = npt.NDArray[np.int64]


def split_section(scores: Scores) -> str:
    """The split's part of the page; every text escaped."""
    matrix = _counts(scores)
    return "\n".join((_classes(scores, matrix), _confusion(scores, matrix), _mistakes(scores)))


def _counts(scores: Scores) -> Counts:
    """Pictures by true class and adapted prediction, (C, C)."""
    count = len(scores.class_names)
    matrix = np.zeros((count, count), dtype=np.int64)
    np.add.at(matrix, (scores.labels, scores.adapted), 1)
    return matrix


# --- classes --------------------------------------------------------------------------------------


def _classes(scores: Scores, matrix: Counts) -> str:
    """A row a class, from what the adaptation lost most to what it gained most."""
    names, labels = scores.class_names, scores.labels
    totals = np.maximum(matrix.sum(axis=1), 1)
    before = np.bincount(labels[scores.zero_shot == labels], minlength=len(names)) / totals
    after = np.diag(matrix) / totals
    order = np.lexsort((after, after - before)).tolist()
    rows = [
        "<tr>"
        f"<td>{html.escape(names[i])}</td><td>{matrix[i].sum()}</td><td>{100 * before[i]:.0f}</td>"
        f"<td>{100 * after[i]:.0f}</td><td>{100 * (after[i] - before[i]):+.0f}</td>"
        f'<td class="left">{_bar(before[i], "#bbb")}<br>{_bar(after[i], "#3366aa")}</td>'
        f'<td class="left">{_taken_for(names, matrix[i], i)}</td></tr>'
        for i in order
    ]
    left_out = len(rows) - _CLASSES
    if left_out > 0:
        half = _CLASSES // 2
        rows = [*rows[:half], f'<tr><td colspan="7">… {left_out} classes between …</td></tr>', *rows[-half:]]
    return (
        f"<h2>Classes: {html.escape(scores.split)}</h2><table><tr><th>class</th><th>pictures</th><th>zero-shot %</th>"
        f"<th>adapted %</th><th>difference</th><th></th><th>most often taken for</th></tr>{''.join(rows)}</table>"
    )


def _bar(share: float, color: str) -> str:
    return f'<span class="thin" style="width:{120 * share:.0f}px;background:{color}"></span>'


def _taken_for(names: Sequence[str], row: Counts, own: int) -> str:
    wrong = row.copy()
    wrong[own] = 0
    other = int(wrong.argmax())
    return f"{html.escape(names[other])} ({wrong[other]})" if wrong[other] else ""


# --- confusion ------------------------------------------------------------------------------------


def _confusion(scores: Scores, matrix: Counts) -> str:
    names, count = scores.class_names, len(scores.class_names)
    title = f"<h2>Confusion: {html.escape(scores.split)}</h2>"
    if count > _CONFUSION_CLASSES:
        return title + _pairs(names, matrix)
    head = "".join(f'<th class="top">{html.escape(name)}</th>' for name in names)
    rows = []
    for name, row in zip(names, matrix.tolist(), strict=True):
        total = max(1, sum(row))
        cells = "".join(
            f'<td style="background:hsl(210 60% {100 - 50 * v / total:.0f}%)">{v or ""}</td>' for v in row
        )
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return (
        f'{title}<table class="confusion"><tr><th></th>{head}</tr>{"".join(rows)}</table>'
        '<p class="note">Rows: true class. Columns: adapted prediction.</p>'
    )


def _pairs(names: Sequence[str], matrix: Counts) -> str:
    """The commonest mistakes, where a matrix would be too large to read."""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:_PAIRS].tolist()
    places = [divmod(place, len(names)) for place in order]
    rows = "".join(
        f'<tr><td>{html.escape(names[i])}</td><td class="left">{html.escape(names[j])}</td><td>{wrong[i, j]}</td></tr>'
        for i, j in places
        if wrong[i, j]
    )
    return f"<table><tr><th>class</th><th>taken for</th><th>pictures</th></tr>{rows}</table>"


# --- pictures -------------------------------------------------------------------------------------


def _mistakes(scores: Scores) -> str:
    wrong = np.flatnonzero(scores.adapted != scores.labels)
    worst = wrong[np.argsort(-scores.confidence[wrong], kind="stable")][:_MISTAKES].tolist()
    title = (
        f"<h2>Worst mistakes: {html.escape(scores.split)} ({len(wrong)} of {len(scores.items)} wrong)</h2>"
    )
    return title + ("".join(_figure(scores, i) for i in worst) or "<p>None.</p>")


def _figure(scores: Scores, i: int) -> str:
    item, names = scores.items[i], scores.class_names
    small = thumbnail(decode_image(item.path.read_bytes()), _PICTURE)
    data = base64.b64encode(small).decode("ascii")
    true, predicted, frozen = (
        html.escape(names[k]) for k in (item.label, scores.adapted[i], scores.zero_shot[i])
    )
    return (
        f'<figure><img alt="{html.escape(item.path.name, quote=True)}" src="data:image/jpeg;base64,{data}">'
        f"<figcaption>{true}, taken for {predicted} ({100 * scores.confidence[i]:.0f} %); zero-shot: {frozen}"
        "</figcaption></figure>"
    )
