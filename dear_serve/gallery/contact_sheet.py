"""Search results to look at: one HTML page without anything from elsewhere."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

import numpy as np

from dear_serve.gallery.evaluate import Evaluation
from dear_serve.preprocess import decode_image, thumbnail

__all__ = ["contact_sheet", "text_table"]

_STYLE = """body{font:14px system-ui,sans-serif;margin:2rem;color:#222}table{border-collapse:collapse;margin:0 0 2rem}
td{padding:4px;vertical-align:top}td.name{padding-right:1rem}img{width:88px;height:88px;object-fit:contain;display:block;
border:3px solid #ccc}img.same{border-color:#2a7d2a}img.query{border-color:#222}small{color:#666}"""


def contact_sheet(evaluation: Evaluation, *, queries: int = 6, shown: int = 8, seed: int = 0) -> str:
    """An HTML page: for a few pictures the ones nearest by class feature and by each attribute's chosen readout.

    A green frame: the same value of that attribute. `seed` chooses the pictures.
    """
    count = len(evaluation.pictures.data)
    chosen = np.sort(np.random.default_rng(seed).choice(count, min(queries, count), replace=False))
    tables = [_table(evaluation, int(query), shown) for query in chosen]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Search by attribute</title>'
        f"<style>{_STYLE}</style>"
        "<h1>Search by attribute</h1><p>First the picture searched by, then the nearest others. "
        "Green: the same value of that attribute.</p>" + "".join(tables) + "</html>\n"
    )


def _table(evaluation: Evaluation, query: int, shown: int) -> str:
    rows = []
    for name, vectors in evaluation.stored.items():
        scores = vectors @ vectors[query]
        scores[query] = -np.inf
        nearest = np.argsort(-scores, kind="stable")[:shown]
        labels = evaluation.labels.get(name)
        same = [labels is not None and labels[n] == labels[query] for n in nearest]
        value = "" if labels is None else f"<br><small>{html.escape(str(labels[query]))}</small>"
        cells = "".join(_picture(evaluation, int(n), s) for n, s in zip(nearest, same, strict=True))
        rows.append(f'<tr><td class="name">{html.escape(name)}{value}</td>{cells}</tr>')
    title = html.escape(evaluation.pictures.names[query])
    first = f'<tr><td class="name">searched by<br><small>{title}</small></td>{_picture(evaluation, query, None)}</tr>'
    return f"<table>{first}{''.join(rows)}</table>"


def _picture(evaluation: Evaluation, number: int, same: bool | None) -> str:
    data = base64.b64encode(thumbnail(decode_image(evaluation.pictures.data[number]))).decode()
    kind = "query" if same is None else "same" if same else "other"
    name = html.escape(evaluation.pictures.names[number])
    return f'<td><img class="{kind}" alt="{name}" title="{name}" src="data:image/jpeg;base64,{data}"></td>'


def text_table(evaluation: Evaluation, measures: Sequence[str] = ("precision", "mean_ap", "recall")) -> str:
    """The table as text, in percent; a row's own attribute has a star."""
    columns = list(evaluation.chance)
    width = max(map(len, evaluation.rows)) + 2
    lines = [f"{'':<{width}}" + "".join(f"{c:>14}" for c in columns)]
    for name, values in (("chance", evaluation.chance), ("best possible", evaluation.highest)):
        lines.append(f"{name:<{width}}" + "".join(f"{100 * values[c]:>13.0f} " for c in columns))
    for name, row in evaluation.rows.items():
        cells = []
        for column in columns:
            found = row.get(column)
            text = "/".join(f"{100 * getattr(found, m):.0f}" for m in measures) if found else ""
            cells.append(f"{text + ('*' if column in name.replace(',', '').split() else ' '):>14}")
        lines.append(f"{name:<{width}}" + "".join(cells))
    return "\n".join(lines)
