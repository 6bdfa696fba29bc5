"""Tables of an ablation: rows with mean and spread over seeds, where something is lost, and claims checked."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from training.ablate_recipe import Claim, Recipe, Row, TaskSpec
from training.tables import harmonic_mean

__all__ = ["COLUMNS", "Cells", "Table", "figures", "html_page", "markdown", "tables"]

COLUMNS = {
    "base": "base",
    "novel": "novel",
    "hm": "harmonic mean",
    "all": "all names",
    "old novel": "novel, old style",
    "old wide": "among 120",
    "others": "other attributes",
    "alpha_cls": "α_cls",
    "constant": "constant share",
    "factor": "factor",
}
"""Key of a figure to its title. All in % but α_cls and the factor."""

OTHERS = ("color", "shape", "texture", "location")
_PLAIN = ("alpha_cls", "factor")  # not in %
_SIDES = tuple(
    f"{image} x {text}"
    for image in ("frozen", "class", "attributes", "fused")
    for text in ("frozen", "adapted")
)

Cells = Mapping[tuple[str, str, int], Mapping[str, float]]
"""(task, row, seed) to figures; only what was run."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of texts, the first column being names."""

    title: str
    note: str
    head: tuple[str, ...]
    body: tuple[tuple[str, ...], ...]


def figures(scores: Mapping[str, Mapping[str, float]], alpha_cls: float, rule: str) -> dict[str, float]:
    """What the table shows of one training under one way of scoring: see `COLUMNS`, and "TEST: IMAGE x TEXT"."""
    found = {
        name: scores[name][rule]
        for name in ("base", "novel", "all", "old novel", "old wide")
        if name in scores
    }
    if {"base", "novel"} <= found.keys():
        found["hm"] = harmonic_mean(found["base"], found["novel"])
    if set(OTHERS) <= scores.keys():
        found["others"] = float(np.mean([scores[name][rule] for name in OTHERS]))
    if rule not in ("zero_shot", "probe"):
        found |= {"alpha_cls": alpha_cls, "constant": scores["base"]["constant"]}
        for test in ("novel", "old novel"):
            found |= {f"{test}: {key}": scores[test][key] for key in _SIDES}
    return found


def tables(recipe: Recipe, cells: Cells, seeds: Sequence[int]) -> list[Table]:
    """Per task the rows and where something is lost, then the claims."""
    found = []
    for task in recipe.tasks:
        rows = [row for row in recipe.rows_of(task.name) if _values(cells, task, row, seeds, "base")]
        if rows:
            found += [_rows(task, rows, cells, seeds), _sides(task, rows, cells, seeds)]
    claims = _claims(recipe, cells, seeds)
    return [*found, claims] if claims.body else found


def _values(cells: Cells, task: TaskSpec, row: Row, seeds: Sequence[int], key: str) -> list[float]:
    """One figure of a row, per seed that has it."""
    keys = [(task.name, row.name, seed) for seed in seeds]
    return [cells[k][key] for k in keys if k in cells and key in cells[k]]


def _cell(values: Sequence[float], *, plain: bool = False) -> str:
    if not values:
        return ""
    factor, digits = (1, 2) if plain else (100, 1)
    text = f"{factor * np.mean(values):.{digits}f}"
    return text + (f" ± {factor * np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else "")


def _rows(task: TaskSpec, rows: Sequence[Row], cells: Cells, seeds: Sequence[int]) -> Table:
    keys = [key for key in COLUMNS if any(_values(cells, task, row, seeds, key) for row in rows)]
    body = []
    for row in rows:
        count = len(_values(cells, task, row, seeds, "base"))
        values = [_cell(_values(cells, task, row, seeds, key), plain=key in _PLAIN) for key in keys]
        body.append(
            (row.name + ("" if count == len(seeds) else f" ({count} of {len(seeds)} seeds)"), *values)
        )
    return Table(
        title=f"{task.name}: accuracy in %",
        note=f"{task.about} Mean ± standard deviation over {len(seeds)} seeds.".strip(),
        head=("row", *(COLUMNS[key] for key in keys)),
        body=tuple(body),
    )


def _sides(task: TaskSpec, rows: Sequence[Row], cells: Cells, seeds: Sequence[int]) -> Table:
    """Accuracy on novel names by image side and text, new style and old."""
    body = []
    for row in rows:
        values = [
            " / ".join(
                _mean(_values(cells, task, row, seeds, f"{test}: {key}")) for test in ("novel", "old novel")
            )
            for key in _SIDES
        ]
        if row.kind == "adapted" and row.score == "fused":
            body.append((row.name, *values))
    return Table(
        title=f"{task.name}: novel classes by image side x text, new style / old style",
        note="frozen: CLIP's. class: f_0. attributes: the attribute features as fused, without f_0. fused: all.",
        head=("row", *_SIDES),
        body=tuple(body),
    )


def _mean(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.0f}" if values else "–"


def _claims(recipe: Recipe, cells: Cells, seeds: Sequence[int]) -> Table:
    body = [
        line
        for task in recipe.tasks
        for claim in recipe.claims
        if (line := _claim(task, claim, cells, seeds)) is not None
    ]
    return Table(
        title="claims",
        note="Differences of the same seeds, mean ± standard error. Within two standard errors: no difference shown.",
        head=("task", "claim", "source", "difference", "seeds", "holds"),
        body=tuple(body),
    )


def _claim(task: TaskSpec, claim: Claim, cells: Cells, seeds: Sequence[int]) -> tuple[str, ...] | None:
    pairs = [((task.name, claim.row, seed), (task.name, claim.than, seed)) for seed in seeds]
    differences = [
        cells[a][claim.column] - cells[b][claim.column]
        for a, b in pairs
        if a in cells and b in cells and claim.column in cells[a] and claim.column in cells[b]
    ]
    if not differences:
        return None
    plain = claim.column in _PLAIN
    factor, digits = (1, 2) if plain else (100, 1)
    mean = float(np.mean(differences))
    error = (
        float(np.std(differences, ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    )
    as_said = mean < 0 if claim.expect == "lower" else mean > 0
    verdict = "no difference shown" if abs(mean) <= 2 * error else ("yes" if as_said else "no: the opposite")
    shown = f"{factor * mean:+.{digits}f}" + (
        f" ± {factor * error:.{digits}f}" if math.isfinite(error) else ""
    )
    column = COLUMNS.get(claim.column, claim.column)
    text = f"{claim.row}: {column} {claim.expect} than {claim.than}"
    return task.name, text, claim.source, shown, str(len(differences)), verdict


# --- forms ----------------------------------------------------------------------------------------


def markdown(found: Sequence[Table]) -> str:
    """The tables in Markdown, readable as plain text too."""
    parts = []
    for table in found:
        rows = [table.head, *table.body]
        widths = [max(len(row[i]) for row in rows) for i in range(len(table.head))]
        lines = [_line(row, widths) for row in rows]
        rule = "|".join(["", "-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:]), ""])
        parts.append("\n".join([f"### {table.title}", "", table.note, "", lines[0], rule, *lines[1:]]))
    return "\n\n".join(parts) + "\n"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    return "| " + " | ".join([f"{first[0]:{first[1]}}", *(f"{text:>{width}}" for text, width in rest)]) + " |"


_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #1c1c1c; }
h2 { font-size: 1.1rem; } table { border-collapse: collapse; font-size: .85rem; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }"""


def html_page(title: str, found: Sequence[Table]) -> str:
    """The tables as one page, nothing loaded from elsewhere."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"]
    parts.append(f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>")
    for table in found:
        parts.append(f"<h2>{html.escape(table.title)}</h2><p>{html.escape(table.note)}</p><table>")
        parts.append(_html_row(table.head, "th") + "".join(_html_row(row, "td") for row in table.body))
        parts.append("</table>")
    return "\n".join(parts) + "\n"


def _html_row(row: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row) + "</tr>"
