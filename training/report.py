"""report.html: a run's accuracies, curves, fusion weights, head roles, confusions and worst mistakes, in one file.

No script and nothing loaded from elsewhere; every text is escaped. Equal runs give equal bytes.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dear_serve.dear.roles import HeadRole, Roles
from dear_serve.preprocess import decode_image, thumbnail
from training.loop import COLUMNS
from training.scoring import Scores
from training.tables import spread

__all__ = ["Report", "render"]

_CONFUSION_CLASSES = 40
_MISTAKES = 12
_PICTURE = 96  # pixels
_POINTS = 400  # of a curve
_WIDTH, _HEIGHT = 640, 200
_HUES = {"color": 0, "shape": 210, "texture": 130, "object": 35, "location": 280}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
.map td { text-align: center; min-width: 4.2rem; border: 2px solid #fff; font-size: .8rem; }
.confusion td, .confusion th { padding: 0 .25rem; font-size: .7rem; border: 1px solid #eee; }
.confusion .top { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left; }
.bar { display: inline-block; height: .8rem; background: #3366aa; }
figure { display: inline-block; margin: 0 .8rem .8rem 0; font-size: .8rem; width: 8rem; vertical-align: top; }
figure img { image-rendering: auto; display: block; border: 1px solid #ccc; }
.note { color: #555; }
"""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the report shows; scores, curves and alpha are of the seed whose adapter the bundle holds."""

    title: str
    settings: Mapping[str, str]
    attributes: tuple[str, ...]
    alpha: tuple[float, ...]
    roles: Roles
    scores: Sequence[Scores]
    history: Sequence[Sequence[float]]
    """Per step the values of `loop.COLUMNS`."""
    runs: Sequence[dict[str, float]]
    """Per seed the numbers of `evaluate.summary`."""
    seeds: tuple[int, ...]


def render(report: Report) -> str:
    """The page."""
    title = html.escape(report.title)
    parts = [
        f"<h1>{title}</h1>",
        _accuracies(report),
        _curves(report.history),
        _alphas(report),
        _role_map(report.roles),
    ]
    for scores in report.scores:
        parts += [_confusion(scores), _mistakes(scores)]
    parts.append(_settings(report.settings))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _accuracies(report: Report) -> str:
    mean, sd = spread(report.runs)
    splits = [key.removeprefix("adapted_") for key in mean if key.startswith("adapted_")]
    head = "".join(f"<th>{html.escape('harmonic mean' if s == 'hm' else s)}</th>" for s in splits)
    several = len(report.runs) > 1
    rows = []
    for mode, name in (("zero_shot", "zero-shot"), ("adapted", "adapted")):
        cells = "".join(
            f"<td>{100 * mean[f'{mode}_{s}']:.1f}"
            + (f" ± {100 * sd[f'{mode}_{s}']:.1f}" if several else "")
            + "</td>"
            for s in splits
        )
        rows.append(f"<tr><td>{name}</td>{cells}</tr>")
    seeds = ", ".join(map(str, report.seeds))
    note = (
        f"Mean and standard deviation over seeds {seeds}; below, seed {report.seeds[0]}." if several else ""
    )
    return (
        f"<h2>Accuracy in %</h2><table><tr><th></th>{head}</tr>{''.join(rows)}</table>"
        f'<p class="note">{note} Each split among its own classes; nothing was chosen on test pictures.</p>'
    )


def _curves(history: Sequence[Sequence[float]]) -> str:
    rows = np.array(history, dtype=np.float64).reshape(len(history), len(COLUMNS))
    steps = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _POINTS)).astype(int))
    top = max(float(rows[:, :2].max()), 1e-6)
    lines = []
    for column, color in (("loss", "#3366aa"), ("cross_entropy", "#dd7722")):
        values = rows[steps, COLUMNS.index(column)]
        points = " ".join(
            f"{_WIDTH * s / max(1, len(rows) - 1):.1f},{_HEIGHT * (1 - v / top):.1f}"
            for s, v in zip(steps, values, strict=True)
        )
        lines.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{points}"/>')
    return (
        "<h2>Loss</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="loss">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#f6f6f6"/>{"".join(lines)}</svg>'
        f'<p class="note">Steps 1 to {len(rows)}, 0 to {top:.2f}. Blue: total; orange: cross-entropy.</p>'
    )


def _alphas(report: Report) -> str:
    rows = "".join(
        f'<tr><td>{html.escape(name)}</td><td>{value:.3f}</td><td style="text-align:left">'
        f'<span class="bar" style="width:{300 * value:.0f}px"></span></td></tr>'
        for name, value in zip(("class", *report.attributes), report.alpha, strict=True)
    )
    return f"<h2>Fusion weights α</h2><table>{rows}</table>"


def _role_map(roles: Roles) -> str:
    head = "".join(f"<th>head {i}</th>" for i in range(roles.heads_per_layer))
    rows = []
    for layer in range(roles.layers, roles.first_block - 1, -1):
        cells = "".join(_role_cell(roles, roles.at(layer, head)) for head in range(roles.heads_per_layer))
        rows.append(f"<tr><td>block {layer}</td>{cells}</tr>")
    return (
        f'<h2>Head roles</h2><table class="map"><tr><th></th>{head}</tr>{"".join(rows)}</table>'
        '<p class="note">Colored: core heads of an attribute. Dark grey: experts of something else. '
        "Light grey: mixed. White: generalization. Numbers: concept entropy in bits.</p>"
    )


def _role_cell(roles: Roles, head: HeadRole) -> str:
    core = roles.core_attribute(head.layer, head.head)
    if core is not None:
        background, name = f"hsl({_HUES.get(core, 60)} 70% 82%)", core
    elif head.role == "attribute":
        background, name = "#c4c4c4", head.concept
    else:
        background, name = ("#ececec" if head.role == "mixed" else "#ffffff"), head.role
    tip = html.escape("; ".join(d.text for d in head.descriptions[:5]), quote=True)
    return f'<td style="background:{background}" title="{tip}">{html.escape(name)}<br>{head.entropy:.2f}</td>'


def _confusion(scores: Scores) -> str:
    names, count = scores.class_names, len(scores.class_names)
    if count > _CONFUSION_CLASSES:
        return f'<p class="note">Confusion of {html.escape(scores.split)}: left out for {count} classes.</p>'
    matrix = np.zeros((count, count), dtype=np.int64)
    np.add.at(matrix, (scores.labels, scores.adapted), 1)
    head = "".join(f'<th class="top">{html.escape(name)}</th>' for name in names)
    rows = []
    for name, row in zip(names, matrix.tolist(), strict=True):
        total = max(1, sum(row))
        cells = "".join(
            f'<td style="background:hsl(210 60% {100 - 50 * v / total:.0f}%)">{v or ""}</td>' for v in row
        )
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    return (
        f"<h2>Confusion: {html.escape(scores.split)}</h2>"
        f'<table class="confusion"><tr><th></th>{head}</tr>{"".join(rows)}</table>'
        '<p class="note">Rows: true class. Columns: adapted prediction.</p>'
    )


def _mistakes(scores: Scores) -> str:
    wrong = np.flatnonzero(scores.adapted != scores.labels)
    worst = wrong[np.argsort(-scores.confidence[wrong], kind="stable")][:_MISTAKES].tolist()
    figures = []
    for i in worst:
        item = scores.items[i]
        small = thumbnail(decode_image(item.path.read_bytes()), _PICTURE)
        data = base64.b64encode(small).decode("ascii")
        names = scores.class_names
        predicted, true = html.escape(names[scores.adapted[i]]), html.escape(names[item.label])
        figures.append(
            f'<figure><img alt="{html.escape(item.path.name, quote=True)}" src="data:image/jpeg;base64,{data}">'
            f"<figcaption>{true}, taken for {predicted} ({100 * scores.confidence[i]:.0f} %)</figcaption></figure>"
        )
    title = (
        f"<h2>Worst mistakes: {html.escape(scores.split)} ({len(wrong)} of {len(scores.items)} wrong)</h2>"
    )
    return title + ("".join(figures) or "<p>None.</p>")


def _settings(settings: Mapping[str, str]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in settings.items()
    )
    return f"<h2>Settings</h2><table>{rows}</table>"
