"""The role map as a picture: every classified head, layer by head, with its role, concept and entropy."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dear_serve.dear.roles import HeadRole, Roles
from dear_serve.errors import MissingDependencyError

__all__ = ["FILLS", "LEGEND", "check_matplotlib", "draw_role_map", "kind_of"]

# Light enough for black text, apart in lightness so that the map reads without color too.
FILLS = {"attribute": "#7fbf9f", "mixed": "#f0d58c", "generalization": "#e4e4e4", "other": "#b9d4ee"}
LEGEND = {
    "attribute": "expert of an attribute",
    "other": "expert of another concept",
    "mixed": "mixed",
    "generalization": "generalization",
}
_CELL = (1.25, 0.75)  # inches


def check_matplotlib() -> None:
    """Raise MissingDependencyError when matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError('the role map needs matplotlib: pip install "dear-serve[train]"')


def draw_role_map(roles: Roles, path: Path) -> None:
    """Write the map of `roles` as a PNG: blocks from bottom to top, heads from left to right.

    Equal roles give equal bytes with one version of matplotlib.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    rows, columns = roles.layers - roles.first_block + 1, roles.heads_per_layer
    size = (columns * _CELL[0] + 1.0, rows * _CELL[1] + 1.6)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for head in roles.heads:
        x, y = head.head, head.layer - roles.first_block
        axes.add_patch(
            Rectangle((x, y), 1, 1, facecolor=FILLS[kind_of(roles, head)], edgecolor="white", lw=2)
        )
        axes.text(x + 0.5, y + 0.6, head.concept or "-", ha="center", va="center", fontsize=9)
        axes.text(x + 0.5, y + 0.28, f"{head.entropy:.2f} bits", ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, columns), ylim=(0, rows), xlabel="head", ylabel="block")
    axes.set_xticks([i + 0.5 for i in range(columns)], [str(i) for i in range(columns)])
    axes.set_yticks([i + 0.5 for i in range(rows)], [str(roles.first_block + i) for i in range(rows)])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    low, high = roles.thresholds
    axes.set_title(f"Head roles of {roles.base}, thresholds {low:.2f} and {high:.2f} bits", fontsize=10)
    figure.legend(
        handles=[Patch(facecolor=FILLS[kind], label=text) for kind, text in LEGEND.items()],
        loc="outside lower center",
        ncols=2 if columns < 6 else 4,
        fontsize=8,
        frameon=False,
    )
    FigureCanvasAgg(figure)
    figure.savefig(path, metadata={"Software": None})


def kind_of(roles: Roles, head: HeadRole) -> str:
    """Key of `FILLS` and `LEGEND`: the role, or "other" for experts of what is no attribute."""
    if head.role == "attribute" and roles.core_attribute(head.layer, head.head) is None:
        return "other"
    return head.role
