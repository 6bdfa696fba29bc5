"""From head outputs to roles: TEXTSPAN, clusters, entropy, thresholds (method.md §1.2 to §1.6).

L' blocks looked at, H heads, e width of one head, D joint width, M descriptions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dear_serve.config import StrictConfig
from dear_serve.dear.roles import Description, HeadRole, Role, Roles
from dear_serve.errors import ConfigError
from training.concepts import NOISE, ClusterConfig, Clusters, Lexicon, cluster_descriptions, concept_entropy
from training.head_values import HeadOutputs
from training.textspan import span_texts

__all__ = [
    "BaseIdentity",
    "Chosen",
    "Naming",
    "RoleReport",
    "RolesConfig",
    "assign",
    "assign_role",
    "choose_descriptions",
    "classify",
    "tercile_thresholds",
]

Encoder = Callable[[Sequence[str]], npt.NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class RolesConfig(StrictConfig):
    """Parameters of the roles of a base."""

    attributes: tuple[str, ...] = ("color", "shape", "texture", "object", "location")
    top_n: int = 20
    """N, descriptions a head at most."""
    rank: int = 0
    """r; 0 means the width of one head, the most directions its output can have (ours)."""
    share: Literal["variance", "count"] = "variance"
    """What P(c) is a share of (method.md §1.4): "count", the paper's, every description alike, or "variance" (ours),
    each by the variance it explains. TEXTSPAN's list is a basis: where N comes near the rank of a head's output (24 in
    dear-mini) every head gets much the same N texts and only their variances tell heads apart. Checked on an early
    base against the variance that each attribute of rendered pictures explains in a head: rank correlation of the
    entropies 0.78 by variance, 0.21 by count; dominant concept right for 88 % and 69 % of 16 heads. With few
    descriptions a head ("count" and an N of 5) the two agree."""
    thresholds: tuple[float, float] | None = None
    """Entropy in bits below and above; None for the terciles over the classified heads (ours)."""
    clusters: ClusterConfig = field(default_factory=ClusterConfig)
    phrases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Phrases of attributes of one's own, stored with the roles."""

    def __post_init__(self) -> None:
        if not self.attributes or len(set(self.attributes)) != len(self.attributes):
            raise ConfigError(
                f"attributes {list(self.attributes)}: name one or more, each once", field="attributes"
            )
        if self.top_n < 1 or self.rank < 0 or self.share not in ("variance", "count"):
            raise ConfigError(
                f"top_n {self.top_n}, rank {self.rank}, share {self.share!r}: top_n is 1 or more, rank 0 or more, "
                "share variance or count"
            )
        if self.thresholds and not 0 <= self.thresholds[0] <= self.thresholds[1]:
            raise ConfigError(
                f"thresholds {self.thresholds}: two entropies in bits, the lower one first",
                field="thresholds",
            )


@dataclass(frozen=True, kw_only=True)
class BaseIdentity:
    """What the roles are of."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Naming:
    """How descriptions get their concepts."""

    encode: Encoder
    """Sentence encoder."""
    lexicon: Lexicon
    pool: Sequence[str] = ()
    """All descriptions, for clusters over the pool."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """What TEXTSPAN found for one head."""

    descriptions: tuple[Description, ...]
    explained: float
    """Share of the head's variance that the descriptions explain, 0 to 1."""
    variance: float
    """Total variance of the head's contribution over the pictures."""


@dataclass(frozen=True, kw_only=True)
class RoleReport:
    """Roles, and what they came from."""

    roles: Roles
    shares: tuple[dict[str, float], ...]
    """Per head in the roles' order: concept (noise included) -> P, largest first."""
    chosen: tuple[Chosen, ...]
    """Per head its descriptions, and how much they explain."""
    descriptions: tuple[str, ...]
    """All recorded descriptions, each once."""
    clusters: Clusters

    @property
    def noise(self) -> float:
        """Share of the recorded descriptions in no cluster."""
        return float((self.clusters.labels < 0).mean()) if len(self.clusters.labels) else 0.0

    def warnings(self) -> list[str]:
        """What whoever uses the roles should know."""
        roles = self.roles
        out = [
            f"no expert head for {attribute}: its token will be seen by mixed heads only"
            for attribute in roles.attributes
            if not roles.experts(attribute)
        ]
        if self.noise > 0.5:
            out.append(f"{self.noise:.0%} of the descriptions are in no cluster: entropies say little")
        if roles.thresholds[0] == roles.thresholds[1]:
            out.append(
                f"both thresholds are {roles.thresholds[0]:.3f} bits: heads do not differ enough to tell apart"
            )
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the report file: clusters with their members, and shares per head."""
        members: dict[int, list[str]] = {}
        for text, label in zip(self.descriptions, self.clusters.labels.tolist(), strict=True):
            members.setdefault(label, []).append(text)
        return {
            "noise": round(self.noise, 4),
            "clusters": [
                {"concept": self.clusters.names[k] if k >= 0 else NOISE, "descriptions": members[k]}
                for k in sorted(members, key=lambda k: (k < 0, k))
            ],
            "heads": [
                {
                    "layer": head.layer,
                    "head": head.head,
                    "variance": float(f"{chosen.variance:.6g}"),
                    "explained": round(chosen.explained, 4),
                    "shares": {k: round(v, 4) for k, v in share.items()},
                }
                for head, share, chosen in zip(self.roles.heads, self.shares, self.chosen, strict=True)
            ],
            "warnings": self.warnings(),
        }


def classify(
    outputs: HeadOutputs,
    *,
    pool: tuple[Sequence[str], npt.NDArray[np.float32]],
    encode: Encoder,
    lexicon: Lexicon,
    base: BaseIdentity,
    config: RolesConfig,
) -> RoleReport:
    """Roles of the heads whose outputs are given.

    Args:
        outputs: of L' blocks, the last ones of the tower.
        pool: M descriptions and their text features (M, D).
        encode: sentence encoder.
        lexicon: concepts; every attribute must be one of them.
        base: identity to store.
        config: parameters.

    Raises:
        ConfigError: an attribute that the lexicon lacks, or a pool that doesn't fit.
    """
    chosen = choose_descriptions(outputs, outputs.value_covariances(), pool, config)
    naming = Naming(encode=encode, lexicon=lexicon, pool=pool[0])
    return assign(outputs, chosen, naming=naming, base=base, config=config)


def choose_descriptions(
    outputs: HeadOutputs,
    covariances: npt.NDArray[np.float64],
    pool: tuple[Sequence[str], npt.NDArray[np.float32]],
    config: RolesConfig,
) -> list[Chosen]:
    """TEXTSPAN for every head, in the order of `HeadOutputs.heads`.

    Args:
        outputs: the heads.
        covariances: (L', H, e, e) of their values.
        pool: M descriptions and their text features (M, D).
        config: top_n and rank.
    """
    texts, raw = pool
    features = np.asarray(raw, np.float64)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    features = features / np.where(lengths > 0, lengths, 1.0)
    chosen = []
    for i, h in outputs.heads:
        directions, r = outputs.directions(i, h)
        covariance = r.T @ covariances[i, h] @ r
        found = span_texts(
            covariance, features @ directions.T, rank=config.rank or len(directions), steps=config.top_n
        )
        total = max(float(np.trace(covariance)), 1e-30)
        chosen.append(
            Chosen(
                descriptions=tuple(Description(text=texts[j], variance=float(f"{v:.6g}")) for j, v in found),
                explained=sum(v for _, v in found) / total,
                variance=total,
            )
        )
    return chosen


def assign(
    outputs: HeadOutputs,
    chosen: Sequence[Chosen],
    *,
    naming: Naming,
    base: BaseIdentity,
    config: RolesConfig,
) -> RoleReport:
    """Clusters, entropies, thresholds and roles from the heads' descriptions; see `classify`."""
    naming.lexicon.require(config.attributes)
    recorded = tuple(dict.fromkeys(d.text for c in chosen for d in c.descriptions))
    clusters = cluster_descriptions(
        recorded, encode=naming.encode, lexicon=naming.lexicon, config=config.clusters, pool=naming.pool
    )
    concept_of = dict(zip(recorded, clusters.concepts, strict=True))
    weights = [_weights(c.descriptions, concept_of, config.share) for c in chosen]
    entropies = [concept_entropy(list(w.values())) if w else 0.0 for w in weights]
    low, high = config.thresholds or tercile_thresholds(entropies)
    layers, count = outputs.basis.shape[:2]
    first = outputs.last_block - layers + 1
    heads = tuple(
        HeadRole(
            layer=first + i,
            head=h,
            role=assign_role(entropy, (low, high), dominant := next(iter(weight), "")),
            concept=dominant,
            entropy=round(entropy, 6),
            descriptions=c.descriptions,
        )
        for (i, h), entropy, weight, c in zip(outputs.heads, entropies, weights, chosen, strict=True)
    )
    return RoleReport(
        roles=Roles(
            base=base.name,
            base_sha256=base.sha256,
            layers=outputs.last_block,
            heads_per_layer=count,
            first_block=first,
            attributes=config.attributes,
            thresholds=(low, high),
            heads=heads,
            phrases=config.phrases,
        ),
        shares=tuple({k: v / sum(w.values()) for k, v in w.items()} for w in weights),
        chosen=tuple(chosen),
        descriptions=recorded,
        clusters=clusters,
    )


def tercile_thresholds(entropies: Sequence[float]) -> tuple[float, float]:
    """Lower and upper terciles of the classified heads' entropies, in bits (ours, method.md §1.5)."""
    low, high = np.quantile(np.asarray(entropies, np.float64), [1 / 3, 2 / 3])
    return round(float(low), 6), round(float(high), 6)


def assign_role(entropy: float, thresholds: tuple[float, float], concept: str) -> Role:
    """Up to the lower threshold an attribute head, from the upper one on a generalization head, mixed between.

    A head that mostly wrote noise, or nothing at all, is a generalization head: low entropy without a concept says
    nothing, and that role is the one that leaves a head as it is (ours).
    """
    entropy = round(
        entropy, 6
    )  # as it is stored, so that stored entropies and thresholds give the same roles
    if concept in (NOISE, "") or (entropy >= thresholds[1] and entropy > thresholds[0]):
        return "generalization"
    return "attribute" if entropy <= thresholds[0] else "mixed"


def _weights(found: Sequence[Description], concept_of: dict[str, str], share: str) -> dict[str, float]:
    """Concept -> its weight among a head's descriptions, largest first, equal ones in alphabetical order."""
    weights: dict[str, float] = {}
    for description in found:
        concept = concept_of[description.text]
        weights[concept] = weights.get(concept, 0.0) + (description.variance if share == "variance" else 1.0)
    return dict(sorted(weights.items(), key=lambda item: (-item[1], item[0])))
