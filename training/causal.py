"""The causal check of head roles: each head, and all heads of a role, silenced on labelled pictures (ours)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dear_serve.backbone.clip import Clip
from dear_serve.dear.roles import Roles
from training.ablation import Ablation, Cost, Head, ablate_heads
from training.labelled import LabelledPictures

__all__ = ["CausalCheck", "causal_check", "groups_of"]


@dataclass(frozen=True, kw_only=True)
class CausalCheck:
    """What silencing costs."""

    what: str
    """The pictures."""
    pictures: int
    accuracy: dict[str, float]
    """Of the whole model per attribute, 0 to 1."""
    heads: tuple[Cost, ...]
    """In the roles' order."""
    groups: dict[str, tuple[tuple[Head, ...], Cost]]
    """Name -> its heads, and what silencing them together costs."""

    def agreeing(self, roles: Roles) -> dict[str, tuple[int, int]]:
        """Attribute -> its experts whose silence costs it accuracy and no other attribute as much, and all experts."""
        out = {}
        for attribute in roles.attributes:
            dearest = [
                cost.dearest()
                for head, cost in zip(roles.heads, self.heads, strict=True)
                if roles.core_attribute(head.layer, head.head) == attribute
            ]
            if attribute in self.accuracy:
                out[attribute] = dearest.count(attribute), len(dearest)
        return out

    def finding(self, roles: Roles) -> str:
        """The check in a sentence."""
        parts = [
            f"{attribute} {right} of {count}" if count else f"{attribute} has none"
            for attribute, (right, count) in self.agreeing(roles).items()
        ]
        return (
            "experts whose silence costs their own attribute most, by more than two standard errors: "
            + ", ".join(parts)
        )

    def to_dict(self, roles: Roles) -> dict[str, Any]:
        """Plain data for the report."""
        return {
            "pictures": {"what": self.what, "count": self.pictures},
            "accuracy": _rounded(self.accuracy),
            "heads": [
                {"layer": h.layer, "head": h.head, **_cost(c)}
                for h, c in zip(roles.heads, self.heads, strict=True)
            ],
            "groups": [
                {"name": name, "heads": [list(h) for h in heads], **_cost(cost)}
                for name, (heads, cost) in self.groups.items()
            ],
            "experts_that_cost_their_own_attribute_most": {
                a: {"experts": count, "agree": right} for a, (right, count) in self.agreeing(roles).items()
            },
        }


def groups_of(roles: Roles) -> dict[str, tuple[Head, ...]]:
    """The heads of each role: experts of each concept, mixed, generalization, and all of them."""
    groups: dict[str, list[Head]] = {}
    for head in roles.heads:
        core = roles.core_attribute(head.layer, head.head)
        kind = "other experts" if head.role == "attribute" else head.role
        groups.setdefault(f"experts of {core}" if core else kind, []).append((head.layer, head.head))
    order = [*(f"experts of {a}" for a in roles.attributes), "other experts", "mixed", "generalization"]
    named = {name: tuple(groups[name]) for name in order if name in groups}
    return {**named, "all heads": tuple((h.layer, h.head) for h in roles.heads)}


def causal_check(
    clip: Clip, task: LabelledPictures, roles: Roles, *, progress: Callable[[], None] | None = None
) -> CausalCheck:
    """Silence every head of `roles` alone, and the heads of each role together.

    Args:
        clip: the base.
        task: labelled pictures.
        roles: of the base.
        progress: told after each of the `len(roles.heads) + len(groups_of(roles))` measurements.
    """
    groups = groups_of(roles)
    single = [((h.layer, h.head),) for h in roles.heads]
    found: Ablation = ablate_heads(clip, task, [*single, *groups.values()], progress=progress)
    return CausalCheck(
        what=task.what,
        pictures=len(task.pixels),
        accuracy=found.accuracy,
        heads=found.costs[: len(single)],
        groups={
            name: (heads, cost)
            for (name, heads), cost in zip(groups.items(), found.costs[len(single) :], strict=True)
        },
    )


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items()}


def _cost(cost: Cost) -> dict[str, Any]:
    return {"lost": _rounded(cost.lost), "error": _rounded(cost.error), "nats": _rounded(cost.nats)}
