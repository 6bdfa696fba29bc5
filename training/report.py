"""report.html: a run's accuracies, curves, fusion weights, head roles, and each test split in detail, in one file.

No script and nothing loaded from elsewhere; every text is escaped. Equal runs give equal bytes.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dear_serve.dear.roles import HeadRole, Roles
from dear_serve.manifest import Calibration
from training.loop import COLUMNS
from training.report_split import split_section
from training.scoring import Scores
from training.tables import html_table

__all__ = ["Report", "render"]

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
.thin { display: inline-block; height: .35rem; } .left { text-align: left; }
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
    notes: Sequence[str] = ()
    """Of the data (`Task.notes`)."""
    calibration: Calibration | None = None


def render(report: Report) -> str:
    """The page."""
    title = html.escape(report.title)
    parts = [
        f"<h1>{title}</h1>",
        _accuracies(report),
        _notes(report.notes),
        _curves(report.history),
        _alphas(report),
        _calibration(report.calibration),
        _role_map(report.roles),
    ]
    for scores in report.scores:
        parts.append(split_section(scores))
    parts.append(_settings(report.settings))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _accuracies(report: Report) -> str:
    seeds = ", ".join(map(str, report.seeds))
    several = (
        f"Mean and standard deviation over seeds {seeds}; below, seed {report.seeds[0]}. "
        if len(report.runs) > 1
        else ""
    )
    return (
        f"<h2>Accuracy in %</h2>{html_table(report.runs)}"
        f'<p class="note">{several}Each split among its own classes; nothing was chosen on test pictures.</p>'
    )


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<h2>Of the data</h2><ul>{items}</ul>" if notes else ""


def _curves(history: Sequence[Sequence[float]]) -> str:
    rows = np.array(history, dtype=np.float64).reshape(len(history), len(COLUMNS))
    charts = (
        ("Loss", (("loss", "total", "#3366aa"), ("cross_entropy", "cross-entropy", "#dd7722"))),
        ("Away from the base", (("image_reg", "image", "#3366aa"), ("text_reg", "text", "#dd7722"))),
        ("Weight of the class feature", (("alpha_cls", "α of the class feature", "#3366aa"),)),
    )
    return "".join(_chart(rows, title, lines) for title, lines in charts)


def _chart(rows: npt.NDArray[np.float64], title: str, lines: Sequence[tuple[str, str, str]]) -> str:
    """Some columns of the history as lines from 0 to the largest value."""
    steps = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _POINTS)).astype(int))
    top = max(*(float(rows[:, COLUMNS.index(column)].max()) for column, _, _ in lines), 1e-6)
    drawn = []
    for column, _, color in lines:
        values = rows[steps, COLUMNS.index(column)]
        points = " ".join(
            f"{_WIDTH * s / max(1, len(rows) - 1):.1f},{_HEIGHT * (1 - v / top):.1f}"
            for s, v in zip(steps, values, strict=True)
        )
        drawn.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{points}"/>')
    named = "; ".join(f'<span style="color:{color}">{name}</span>' for _, name, color in lines)
    return (
        f"<h2>{title}</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{title}">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#f6f6f6"/>{"".join(drawn)}</svg>'
        f'<p class="note">Steps 1 to {len(rows)}, 0 to {top:.3g}: {named}.</p>'
    )


def _alphas(report: Report) -> str:
    rows = "".join(
        f'<tr><td>{html.escape(name)}</td><td>{value:.3f}</td><td style="text-align:left">'
        f'<span class="bar" style="width:{300 * value:.0f}px"></span></td></tr>'
        for name, value in zip(("class", *report.attributes), report.alpha, strict=True)
    )
    return f"<h2>Fusion weights α</h2><table>{rows}</table>"


def _calibration(found: Calibration | None) -> str:
    if found is None:
        return (
            '<h2>Calibration</h2><p class="note">None: there were too few validation or unused pictures.</p>'
        )
    where = "of the val split" if found.source == "val" else "of the train split that no step saw"
    rows = [
        ("temperature", f"{found.temperature:.3f}"),
        ("expected calibration error, before", f"{100 * found.ece_before:.1f} %"),
        ("expected calibration error, after", f"{100 * found.ece_after:.1f} %"),
    ]
    if found.threshold is not None and found.threshold_accuracy is not None:
        rows += [
            ("none of these: fused cosine below", f"{found.threshold:.3f}"),
            ("its balanced accuracy", f"{100 * found.threshold_accuracy:.1f} %"),
        ]
    cells = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows)
    return (
        f"<h2>Calibration</h2><table>{cells}</table>"
        f'<p class="note">On {found.pictures} pictures {where}; the error after and the accuracy are those of each '
        "tenth under what the others gave.</p>"
    )


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


def _settings(settings: Mapping[str, str]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in settings.items()
    )
    return f"<h2>Settings</h2><table>{rows}</table>"
