"""roles.html: the map of heads and all that the roles came from, in one file.

No script and nothing loaded from elsewhere; every text is escaped. Equal input gives equal bytes.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dear_serve.dear.roles import HeadRole, Roles
from training.ablation import Cost
from training.causal import CausalCheck
from training.concepts import NOISE
from training.role_map import FILLS, LEGEND, kind_of
from training.role_pictures import Strongest
from training.role_report import RoleReport
from training.stability import Chance, Stability

__all__ = ["Page", "render"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
.map td { text-align: center; min-width: 4.4rem; border: 2px solid #fff; font-size: .8rem; line-height: 1.25; }
.map a { color: inherit; text-decoration: none; } .map small { color: #333; }
.scroll { overflow-x: auto; } .own { font-weight: 700; }
.key { display: inline-block; padding: 0 .5rem; margin-right: .5rem; }
i { display: inline-block; width: 64px; height: 64px; margin: 1px; background: no-repeat 0 0 / contain; }
summary { cursor: pointer; margin: .4rem 0; }
details { border-left: 3px solid #ddd; padding-left: .8rem; margin: .3rem 0; }
.note { color: #555; } .warn { background: #fff3d6; padding: .5rem .8rem; }
svg text { font: 11px system-ui, sans-serif; }
"""
_WIDTH = 760
_HUES = (0, 210, 130, 35, 280, 180, 60, 320, 100, 240, 20, 160, 300, 80, 200, 340, 50, 260)


@dataclass(frozen=True, kw_only=True)
class Page:
    """What the page shows."""

    report: RoleReport
    facts: dict[str, Any]
    """Parameters, in the words of the report file."""
    concepts: tuple[str, ...]
    """Of the lexicon, in the order of the profiles' columns."""
    chance: Chance
    stability: Sequence[Stability] = ()
    causal: CausalCheck | None = None
    pictures: Sequence[Strongest] = ()
    thumbnails: dict[int, bytes] = field(default_factory=dict)

    @property
    def roles(self) -> Roles:
        """The roles shown."""
        return self.report.roles


def render(page: Page, warnings: Sequence[str]) -> str:
    """The page; `warnings` come first."""
    title = f"Head roles of {page.roles.base}"
    parts = [
        f"<h1>{_t(title)}</h1>",
        *(f'<p class="warn">{_t(w)}</p>' for w in warnings),
        _map(page.roles),
        _entropies(page),
        _causal(page),
        _stability(page),
        _clusters(page),
        "<h2>Heads</h2>",
        *(_head(page, index) for index in range(len(page.roles.heads))),
        _facts(page.facts),
    ]
    images = "".join(
        f".p{p}{{background-image:url(data:image/jpeg;base64,{base64.b64encode(data).decode()})}}\n"
        for p, data in page.thumbnails.items()
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{_t(title)}</title>'
        f"<style>{_STYLE}{images}</style></head><body>\n"
        + "\n".join(p for p in parts if p)
        + "\n</body></html>\n"
    )


def _t(text: object) -> str:
    return html.escape(str(text))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{_t(c)}</th>" for c in head)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _map(roles: Roles) -> str:
    rows = []
    for layer in range(roles.layers, roles.first_block - 1, -1):
        cells = []
        for index in range(roles.heads_per_layer):
            head = roles.at(layer, index)
            cells.append(
                f'<td style="background:{FILLS[kind_of(roles, head)]}"><a href="#h{layer}-{index}">'
                f"{_t(head.concept or '-')}<br><small>{head.entropy:.2f} bits</small></a></td>"
            )
        rows.append(f"<tr><th>block {layer}</th>{''.join(cells)}</tr>")
    top = "".join(f"<th>{i}</th>" for i in range(roles.heads_per_layer))
    keys = "".join(
        f'<span class="key" style="background:{FILLS[k]}">{_t(v)}</span>' for k, v in LEGEND.items()
    )
    experts = [
        [_t(a), _t(", ".join(f"{x}.{h}" for x, h in roles.experts(a)) or "none")] for a in roles.attributes
    ]
    return (
        f'<div class="scroll"><table class="map"><tr><th>head</th>{top}</tr>{"".join(rows)}</table></div>'
        f"<p>{keys}</p>" + _table(["attribute", "experts (block.head)"], experts)
    )


def _entropies(page: Page) -> str:
    """Each head a dot at its entropy, a tick where chance would put it, lines at the thresholds."""
    roles, chance = page.roles, page.chance
    top = max([1.0, *(h.entropy for h in roles.heads), *chance.expected, *roles.thresholds]) * 1.05
    step, parts = 12, []

    def x(bits: float) -> float:
        return 60 + (_WIDTH - 80) * bits / top

    order = sorted(range(len(roles.heads)), key=lambda i: (roles.heads[i].entropy, i))
    for row, index in enumerate(order):
        head, y = roles.heads[index], 14 + step * row
        parts.append(
            f'<text x="4" y="{y + 4}">{head.layer}.{head.head}</text>'
            f'<line x1="{x(chance.expected[index]):.1f}" x2="{x(chance.expected[index]):.1f}" y1="{y - 5}" '
            f'y2="{y + 5}" stroke="#888"/>'
            f'<circle cx="{x(head.entropy):.1f}" cy="{y}" r="5" fill="{FILLS[kind_of(roles, head)]}" stroke="#333">'
            f"<title>{head.layer}.{head.head}: {_t(head.concept or '-')}, {head.entropy:.2f} bits</title></circle>"
        )
    height = 24 + step * len(order) + 16
    for bits in roles.thresholds:
        parts.append(
            f'<line x1="{x(bits):.1f}" x2="{x(bits):.1f}" y1="4" y2="{height - 20}" stroke="#c33" '
            f'stroke-dasharray="4 3"/><text x="{x(bits) + 3:.1f}" y="{height - 6}">{bits:.2f}</text>'
        )
    parts.append(f'<text x="60" y="{height - 6}">0 bits</text>')
    return (
        f'<h2>Concept entropy</h2><svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="concept entropy of each head">{"".join(parts)}</svg>'
        f'<p class="note">Dots: heads. Gray ticks: mean of {chance.draws} random deals of all descriptions to the '
        f"heads. Red: thresholds. {chance.apart} of {len(roles.heads)} heads have concepts that one such deal "
        f"in twenty would not give (p of 5 % at most); for all heads together p = {chance.overall:.3f}.</p>"
    )


def _cost_cells(cost: Cost, dearest: str | None) -> list[str]:
    return [
        f'<span class="{"own" if name == dearest else ""}">{100 * lost:.1f}</span> '
        f'<small class="note">{cost.nats[name]:+.2f}</small>'
        for name, lost in cost.lost.items()
    ]


def _causal(page: Page) -> str:
    causal, roles = page.causal, page.roles
    if causal is None:
        return (
            '<h2>Causal check</h2><p class="warn">Absent: there were no labelled pictures (--labelled), so nothing '
            "here shows that the roles mean anything for what the model does.</p>"
        )
    names = list(causal.accuracy)
    rows = [["whole model, accuracy", "", *(f"{100 * causal.accuracy[n]:.1f}" for n in names)]]
    for head, cost in zip(roles.heads, causal.heads, strict=True):
        role = head.role + (f" ({head.concept})" if head.role == "attribute" else "")
        rows.append([f"{head.layer}.{head.head}", _t(role), *_cost_cells(cost, cost.dearest())])
    for name, (heads, cost) in causal.groups.items():
        rows.append([_t(name), f"{len(heads)} heads together", *_cost_cells(cost, cost.dearest())])
    return (
        f"<h2>Causal check</h2><p>{_t(causal.finding(roles))}.</p>"
        + _table(["silenced", "role", *names], rows)
        + f'<p class="note">{causal.pictures} {_t(causal.what)}. Points of zero-shot accuracy lost when these heads '
        "always write their mean; bold: the attribute that loses most, where that is more than two standard errors; "
        "small: rise of the cross-entropy of the true value in nats.</p>"
    )


def _stability(page: Page) -> str:
    if not page.stability:
        return '<h2>Stability</h2><p class="note">Not measured (--bootstrap 0).</p>'
    attributes = page.roles.attributes
    rows = [
        [
            f"{s.over}, {s.rounds} rounds",
            f"{100 * s.share:.0f} %",
            *(", ".join(f"{100 * k:.0f} %" for k in s.experts[a]) or "-" for a in attributes),
        ]
        for s in page.stability
    ]
    return (
        "<h2>Stability</h2>"
        + _table(
            ["drawn anew, with replacement", "heads keeping role", *(f"experts of {a}" for a in attributes)],
            rows,
        )
        + '<p class="note">Share of rounds in which a head has the role, and as an expert the attribute, that it has '
        "with everything; experts in the order of the table above.</p>"
    )


def _clusters(page: Page) -> str:
    """Descriptions between the concepts, which stand on a circle."""
    radius, cx, cy = 210.0, _WIDTH / 2, 245.0
    count, clusters = len(page.concepts), page.report.clusters
    angle = [2 * math.pi * i / count for i in range(count)]
    parts = []
    for name, a in zip(page.concepts, angle, strict=True):
        anchor = "middle" if abs(math.cos(a)) < 0.3 else ("start" if math.cos(a) > 0 else "end")
        parts.append(
            f'<text x="{cx + (radius + 10) * math.cos(a):.1f}" y="{cy + (radius + 10) * math.sin(a) + 4:.1f}" '
            f'text-anchor="{anchor}">{_t(name)}</text>'
        )
    fills = {name: f"hsl({_HUES[i % len(_HUES)]} 60% 55%)" for i, name in enumerate(page.concepts)}
    for text, concept, profile in zip(
        page.report.descriptions, clusters.concepts, clusters.profiles.tolist(), strict=True
    ):
        px = cx + radius * sum(p * math.cos(a) for p, a in zip(profile, angle, strict=True))
        py = cy + radius * sum(p * math.sin(a) for p, a in zip(profile, angle, strict=True))
        parts.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{fills.get(concept, "#bbb")}" fill-opacity=".75">'
            f"<title>{_t(text)}: {_t(concept)}</title></circle>"
        )
    members: dict[int, list[str]] = {}
    for text, label in zip(page.report.descriptions, clusters.labels.tolist(), strict=True):
        members.setdefault(label, []).append(text)
    lists = "".join(
        f"<details><summary>{_t(clusters.names[k] if k >= 0 else NOISE)}: {len(members[k])}</summary>"
        f"<p>{_t('; '.join(members[k]))}</p></details>"
        for k in sorted(members, key=lambda k: (k < 0, k))
    )
    return (
        f'<h2>Clusters of descriptions</h2><svg viewBox="0 0 {_WIDTH} 490" width="{_WIDTH}" height="490" role="img" '
        f'aria-label="descriptions between concepts">{"".join(parts)}</svg>'
        f'<p class="note">{len(clusters.names)} clusters; {page.report.noise:.0%} of {len(page.report.descriptions)} '
        "descriptions in none (noise, gray). Each description stands at the mean of the concepts, weighted by how much "
        f"it resembles them.</p>{lists}"
    )


def _pictures(page: Page, index: int) -> str:
    if not page.pictures:
        return ""
    found = page.pictures[index]
    rows = [("farthest from its mean", found.overall), *((f"“{t}”", ps) for t, ps in found.along.items())]
    return "".join(
        f"<p>{''.join(f'<i class=p{p} role=img aria-label=picture></i>' for p in positions)}<br>"
        f'<span class="note">{_t(label)}</span></p>'
        for label, positions in rows
    )


def _head(page: Page, index: int) -> str:
    head: HeadRole = page.roles.heads[index]
    chosen, shares = page.report.chosen[index], page.report.shares[index]
    by_concept = ", ".join(f"{name} {100 * p:.0f} %" for name, p in shares.items()) or "none"
    rows = [[_t(d.text), f"{100 * d.variance / chosen.variance:.1f} %"] for d in head.descriptions]
    notes = [f"random deals give {page.chance.expected[index]:.2f} bits (p = {page.chance.p[index]:.3f})"]
    notes += [
        f"keeps its role in {100 * s.kept[index]:.0f} % of rounds over {s.over}" for s in page.stability
    ]
    return (
        f'<details id="h{head.layer}-{head.head}"><summary>{head.layer}.{head.head}: {_t(head.role)}, '
        f"{_t(head.concept or '-')}, {head.entropy:.2f} bits</summary><p>Concepts: {_t(by_concept)}. "
        f"{_t('; '.join(notes))}.</p>{_pictures(page, index)}"
        + _table(["description", "variance explained"], [*rows, ["all", f"{100 * chosen.explained:.1f} %"]])
        + "</details>"
    )


def _facts(facts: dict[str, Any]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{k} {shown(v)}" for k, v in value.items())
        return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

    rows = "".join(f"<dt>{_t(k)}</dt><dd>{_t(shown(v))}</dd>" for k, v in facts.items())
    return f"<h2>Parameters</h2><dl>{rows}</dl>"
