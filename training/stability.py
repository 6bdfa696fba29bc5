"""How far roles can be trusted: against chance, and over samples of the pictures and of the descriptions (ours).

*Against chance.* The descriptions of all heads are dealt to the heads anew at random, each place keeping the weight it
had. How far a head's shares of the concepts lie from those of all descriptions together (Kullback and Leibler's
divergence) is compared with such deals: p is the share of deals that lie as far. A base is *specialized* if the mean
over its heads is farther than in 99 % of the deals. The divergence and not the entropy, because a concept that half of
all descriptions are about gives low entropies by chance, and a rare one does not. Terciles always call a third of the
heads attribute heads; this says whether anything is.

*Over samples.* Roles are computed again from pictures drawn with replacement, and from a pool of descriptions drawn
with replacement; a head keeps its role in a round if role and attribute are the same as those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.concepts import Encoder
from training.role_report import RoleReport

__all__ = ["Chance", "Stability", "against_chance", "bootstrap", "remembering"]

_LEVEL, _HEAD_LEVEL = 0.01, 0.05  # of p, for the base and for one head
Counts = npt.NDArray[np.int64]
Again = Callable[[Counts | None, Counts | None], RoleReport]
"""How often each picture, or each description, is in a sample (None: each once) -> roles from that sample."""


@dataclass(frozen=True, kw_only=True)
class Chance:
    """How the concepts of heads compare with random deals of the descriptions."""

    overall: float
    """p of the mean over all heads."""
    p: tuple[float, ...]
    """Per head, in the roles' order."""
    expected: tuple[float, ...]
    """Per head the mean entropy of the deals, bits."""
    draws: int

    @property
    def specialized(self) -> bool:
        """Whether the heads together differ more than chance."""
        return self.overall <= _LEVEL

    @property
    def apart(self) -> int:
        """Heads with p of 5 % at most; one in twenty is by chance."""
        return sum(p <= _HEAD_LEVEL for p in self.p)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {
            "draws": self.draws,
            "specialized": self.specialized,
            "p_overall": round(self.overall, 4),
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
    """Compare each head's concepts with random deals of all heads' descriptions.

    Args:
        report: the roles.
        share: "variance" or "count", as the shares were computed.
        draws: deals, 1 or more.
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
    common = np.log2(np.maximum(np.bincount(labels, minlength=shape[1]) / max(1, len(labels)), 1e-300))
    observed, _ = _divergences(heads, labels, weight, common, shape[0])
    rng, farther, total, overall = np.random.default_rng(seed), np.zeros(shape[0]), np.zeros(shape[0]), 0
    for _ in range(draws):
        dealt, entropies = _divergences(heads, rng.permutation(labels), weight, common, shape[0])
        farther += dealt >= observed - 1e-12
        overall += int(dealt.mean() >= observed.mean() - 1e-12)
        total += entropies
    return Chance(
        overall=(1 + overall) / (1 + draws),
        p=tuple(((1 + farther) / (1 + draws)).tolist()),
        expected=tuple((total / draws).tolist()),
        draws=draws,
    )


def _divergences(
    heads: npt.NDArray[np.int_],
    labels: npt.NDArray[np.int_],
    weight: npt.NDArray[np.float64],
    common: npt.NDArray[np.float64],
    count: int,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Of each head's weights by concept: divergence from `common` (log2 of shares), and entropy, both in bits."""
    kinds = len(common)
    table = np.bincount(heads * kinds + labels, weights=weight, minlength=count * kinds).reshape(count, kinds)
    p = table / np.maximum(table.sum(1, keepdims=True), 1e-300)
    entropy = -(p * np.log2(np.where(p > 0, p, 1.0))).sum(1)
    return -entropy - p @ common, entropy


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
