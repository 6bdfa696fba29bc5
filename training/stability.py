"""How far roles can be trusted: against chance, and over samples of the pictures and of the descriptions (ours).

*Against chance.* The descriptions of all heads are dealt to the heads anew at random, each place keeping the weight it
had, and concept entropies are taken again. A head is *specialized* if its own entropy is lower than those of such
deals: p is the share of deals that are as low, and the heads are judged together at a false discovery rate of 5 %
(Benjamini and Hochberg 1995). Terciles always call a third of the heads attribute heads; this says whether they are.

*Over samples.* Roles are computed again from pictures drawn with replacement, and from a pool of descriptions drawn
with replacement; a head keeps its role in a round if role and attribute are the same as those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.concepts import NOISE, Encoder
from training.role_report import RoleReport

__all__ = ["Chance", "Stability", "against_chance", "bootstrap", "remembering"]

_RATE = 0.05  # false discovery rate
Counts = npt.NDArray[np.int64]
Again = Callable[[Counts | None, Counts | None], RoleReport]
"""How often each picture, or each description, is in a sample (None: each once) -> roles from that sample."""


@dataclass(frozen=True, kw_only=True)
class Chance:
    """Per head, in the roles' order, how its entropy compares with random deals of the descriptions."""

    p: tuple[float, ...]
    expected: tuple[float, ...]
    """Mean entropy of the deals, bits."""
    specialized: tuple[bool, ...]
    draws: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {
            "draws": self.draws,
            "false_discovery_rate": _RATE,
            "specialized": sum(self.specialized),
            "p": [round(p, 4) for p in self.p],
            "expected_bits": [round(e, 4) for e in self.expected],
        }


@dataclass(frozen=True, kw_only=True)
class Stability:
    """Share of rounds, 0 to 1, in which each head kept its role and attribute, in the roles' order."""

    over: str
    """"pictures" or "descriptions"."""
    rounds: int
    kept: tuple[float, ...]
    experts: dict[str, tuple[float, ...]]
    """Per attribute and expert head of it: the share of rounds in which it was one."""

    @property
    def share(self) -> float:
        """Mean over heads."""
        return float(np.mean(self.kept))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {
            "over": self.over,
            "rounds": self.rounds,
            "share_of_heads": round(self.share, 4),
            "heads": [round(k, 4) for k in self.kept],
            "experts": {a: [round(k, 4) for k in ks] for a, ks in self.experts.items()},
        }


def against_chance(report: RoleReport, *, share: str, draws: int = 1000, seed: int = 0) -> Chance:
    """Compare each head's concept entropy with random deals of all heads' descriptions.

    Args:
        report: the roles.
        share: "variance" or "count", as the entropies were computed.
        draws: deals.
        seed: of the deals.
    """
    concept_of = dict(zip(report.descriptions, report.clusters.concepts, strict=True))
    names = sorted(set(concept_of.values()))
    place = {name: i for i, name in enumerate(names)}
    head_of, concepts, weights = [], [], []
    for index, chosen in enumerate(report.chosen):
        for d in chosen.descriptions:
            head_of.append(index)
            concepts.append(place[concept_of[d.text]])
            weights.append(d.variance if share == "variance" else 1.0)
    heads, labels, weight = np.array(head_of, int), np.array(concepts, int), np.array(weights)
    shape = (len(report.chosen), max(1, len(names)))
    observed = _entropies(heads, labels, weight, shape)
    rng, lower, total = np.random.default_rng(seed), np.zeros(shape[0]), np.zeros(shape[0])
    for _ in range(draws):
        dealt = _entropies(heads, rng.permutation(labels), weight, shape)
        lower += dealt <= observed + 1e-12
        total += dealt
    p = (1 + lower) / (1 + draws)
    meaningful = np.array([h.concept not in (NOISE, "") for h in report.roles.heads])
    found = _discoveries(p) & meaningful
    return Chance(
        p=tuple(p.tolist()),
        expected=tuple((total / max(1, draws)).tolist()),
        specialized=tuple(found.tolist()),
        draws=draws,
    )


def _entropies(
    heads: npt.NDArray[np.int_],
    labels: npt.NDArray[np.int_],
    weight: npt.NDArray[np.float64],
    shape: tuple[int, int],
) -> npt.NDArray[np.float64]:
    """Entropy in bits of each head's weights by concept."""
    table = np.bincount(heads * shape[1] + labels, weights=weight, minlength=shape[0] * shape[1]).reshape(
        shape
    )
    p = table / np.maximum(table.sum(1, keepdims=True), 1e-300)
    out: npt.NDArray[np.float64] = -(p * np.log2(np.where(p > 0, p, 1.0))).sum(1)
    return out


def _discoveries(p: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Benjamini and Hochberg's step-up rule."""
    order = np.argsort(p)
    passed = np.flatnonzero(p[order] <= _RATE * np.arange(1, len(p) + 1) / len(p))
    out = np.zeros(len(p), bool)
    if len(passed):
        out[order[: passed[-1] + 1]] = True
    return out


def remembering(encode: Encoder) -> Encoder:
    """`encode` that computes each text once: rounds ask for much the same ones."""
    known: dict[str, npt.NDArray[np.float32]] = {}

    def remembered(texts: Any) -> npt.NDArray[np.float32]:
        new = [t for t in dict.fromkeys(texts) if t not in known]
        if new:
            known.update(zip(new, encode(new), strict=True))
        return np.stack([known[t] for t in texts])

    return remembered


def bootstrap(
    whole: RoleReport,
    again: Again,
    *,
    sizes: tuple[int, int],
    rounds: int = 20,
    seed: int = 0,
    progress: Callable[[], object] | None = None,
) -> tuple[Stability, Stability]:
    """Stability over pictures and over descriptions.

    Args:
        whole: roles from all pictures and descriptions.
        again: computes them from a sample of either.
        sizes: how many pictures and descriptions there are.
        rounds: how many of each kind, 1 or more.
        seed: of the samples.
        progress: told after each round.
    """
    rng, kept = np.random.default_rng(seed), np.zeros((2, rounds, len(whole.roles.heads)), bool)
    for kind, size in enumerate(sizes):
        for number in range(rounds):
            drawn = np.bincount(rng.integers(0, size, size), minlength=size)
            kept[kind, number] = _kept(whole, again(drawn, None) if kind == 0 else again(None, drawn))
            if progress:
                progress()
    return _stability("pictures", whole, kept[0]), _stability("descriptions", whole, kept[1])


def _kept(whole: RoleReport, again: RoleReport) -> list[bool]:
    a, b = whole.roles, again.roles
    return [
        x.role == y.role and a.core_attribute(x.layer, x.head) == b.core_attribute(y.layer, y.head)
        for x, y in zip(a.heads, b.heads, strict=True)
    ]


def _stability(over: str, whole: RoleReport, kept: npt.NDArray[np.bool_]) -> Stability:
    roles = whole.roles
    shares = kept.mean(0)
    place = {(h.layer, h.head): i for i, h in enumerate(roles.heads)}
    return Stability(
        over=over,
        rounds=len(kept),
        kept=tuple(shares.tolist()),
        experts={a: tuple(float(shares[place[x]]) for x in roles.experts(a)) for a in roles.attributes},
    )
