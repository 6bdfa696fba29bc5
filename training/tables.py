"""Accuracies of several seeds as numbers, and as a table in the terminal, in JSON and in HTML."""

from __future__ import annotations

import errno
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "ROWS",
    "check_places",
    "columns",
    "harmonic_mean",
    "html_table",
    "json_table",
    "spread",
    "table",
    "write_tables",
]

ROWS = {
    "zero_shot": "zero-shot",
    "zero_shot_single": "zero-shot, one template",
    "zero_shot_ensemble": "zero-shot, ensemble",
    "linear_probe": "linear probe",
    "adapted": "adapted",
}
"""Modes in the order of a table's rows, and their titles."""
_TITLES = {"hm": "harmonic mean"}
_NONE = "–"


def harmonic_mean(a: float, b: float) -> float:
    """2ab / (a + b); 0 if either is 0."""
    return 2 * a * b / (a + b) if a > 0 and b > 0 else 0.0


def spread(runs: Sequence[dict[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Mean and standard deviation (n - 1; 0 for one run) of each number over several seeds."""
    values = {key: np.array([run[key] for run in runs]) for key in runs[0]}
    sd = {key: float(v.std(ddof=1)) if len(v) > 1 else 0.0 for key, v in values.items()}
    return {key: float(v.mean()) for key, v in values.items()}, sd


def columns(numbers: Mapping[str, float]) -> list[str]:
    """The test splits, then "hm" or "average" where there is one, in order."""
    return [key.removeprefix("adapted_") for key in numbers if key.startswith("adapted_")]


def _rows(numbers: Mapping[str, float]) -> list[str]:
    """Modes that have a number for some column."""
    return [mode for mode in ROWS if any(f"{mode}_{c}" in numbers for c in columns(numbers))]


def _title(column: str) -> str:
    return _TITLES.get(column, column)


def _cells(runs: Sequence[dict[str, float]], mode: str) -> list[str]:
    mean, sd = spread(runs)
    keys = [f"{mode}_{column}" for column in columns(mean)]
    several = len(runs) > 1
    return [
        _NONE if k not in mean else f"{100 * mean[k]:.1f}" + (f" ± {100 * sd[k]:.1f}" if several else "")
        for k in keys
    ]


def _gains(runs: Sequence[dict[str, float]]) -> list[str]:
    mean, _ = spread(runs)
    return [f"{100 * (mean[f'adapted_{c}'] - mean[f'zero_shot_{c}']):+.1f}" for c in columns(mean)]


def table(runs: Sequence[dict[str, float]]) -> str:
    """Accuracies in %: a line a mode and the gain of adapted over zero-shot, a column a split.

    Args:
        runs: per seed the numbers of `evaluate.summary`.
    """
    mean, _ = spread(runs)
    titles = [_title(c) for c in columns(mean)]
    lines = [["", *titles]]
    lines += [[ROWS[mode], *_cells(runs, mode)] for mode in _rows(mean)]
    lines.append(["difference", *_gains(runs)])
    first = max(12, *(len(line[0]) + 2 for line in lines))
    widths = [max(16, len(title) + 2) for title in titles]
    text = [
        f"{line[0]:{first}}" + "".join(f"{cell:>{w}}" for cell, w in zip(line[1:], widths, strict=True))
        for line in lines
    ]
    if len(runs) > 1:
        text.append(f"mean and standard deviation over {len(runs)} seeds")
    return "\n".join(text)


def html_table(runs: Sequence[dict[str, float]]) -> str:
    """The same as an HTML table."""
    mean, _ = spread(runs)
    head = "".join(f"<th>{html.escape(_title(c))}</th>" for c in columns(mean))
    rows = [(ROWS[mode], _cells(runs, mode)) for mode in _rows(mean)] + [("difference", _gains(runs))]
    body = "".join(
        f"<tr><td>{name}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for name, cells in rows
    )
    return f"<table><tr><th></th>{head}</tr>{body}</table>"


def json_table(runs: Sequence[dict[str, float]], *, title: str, seeds: Sequence[int]) -> dict[str, Any]:
    """The same as data: accuracies from 0 to 1 by row and column, each with mean, sd and every seed's value."""
    mean, sd = spread(runs)
    rows = {
        mode: {
            c: {"mean": mean[k], "sd": sd[k], "values": [run[k] for run in runs]}
            for c in columns(mean)
            if (k := f"{mode}_{c}") in mean
        }
        for mode in _rows(mean)
    }
    return {"title": title, "seeds": list(seeds), "columns": columns(mean), "rows": rows}


def check_places(*files: Path | None) -> None:
    """Refuse, before anything is computed, places where no file can be written (OSError naming the place)."""
    for file in files:
        if file is not None:
            if file.is_dir():
                raise IsADirectoryError(errno.EISDIR, "is a folder", str(file))
            file.parent.mkdir(parents=True, exist_ok=True)
            _partial(file).write_text("", encoding="utf-8")
            _partial(file).unlink()


def write_tables(
    tables: Sequence[tuple[str, Sequence[dict[str, float]]]],
    *,
    seeds: Sequence[int],
    json_file: Path | None,
    html_file: Path | None,
) -> None:
    """Write titled tables to files, JSON (a list of `json_table`) and HTML (one page), where a place is given.

    Raises:
        OSError: a file cannot be written; the one that was there stays.
    """
    if json_file is not None:
        data = [json_table(runs, title=title, seeds=seeds) for title, runs in tables]
        _replace(json_file, json.dumps(data, indent=1) + "\n")
    if html_file is not None:
        parts = "".join(
            f"<h2>{html.escape(title)}</h2><p>Accuracy in %.</p>{html_table(runs)}" for title, runs in tables
        )
        page = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Accuracy</title>'
            "<style>body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; } td, th { padding: .2rem .6rem; "
            "text-align: right; border-bottom: 1px solid #ddd; } td:first-child { text-align: left; }</style></head>"
            f"<body>{parts}</body></html>\n"
        )
        _replace(html_file, page)


def _replace(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    _partial(file).write_text(text, encoding="utf-8")
    _partial(file).replace(file)


def _partial(file: Path) -> Path:
    return file.with_name(f".{file.name}.partial")
