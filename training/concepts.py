"""Concepts that descriptions are about: the lexicon, clusters of descriptions and their names, concept entropy.

Rules of this project where the paper says only "cluster with HDBSCAN and name the clusters" (ours):

1. *Carriers.* "something red" and "a red thing" say "red": wordings listed as carriers are taken off before a
   sentence encoder sees a text, because in short phrases they otherwise outweigh what is said.
2. *Profile.* Sentence embeddings of a few hundred two-word phrases are too sparse for density clustering (a third to
   a half become noise). Descriptions are clustered by their concept profile: p_c proportional to
   exp(20 cos(embedding, mean seed embedding of concept c)), and the distance of two profiles is Hellinger's. The plain
   embeddings remain an option (`space="embedding"`).
3. *Names.* A cluster is named by the concept whose mean seed embedding is nearest, by cosine, to the mean of its
   members' embeddings; equal ones go to the concept listed first. Clusters with the same name are one concept.
4. *Noise.* What HDBSCAN assigns to no cluster is a bucket of its own, named "noise": it counts in the entropy as one
   more outcome, and it never makes an expert.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dear_serve.config import StrictConfig
from dear_serve.errors import ConfigError, MissingDependencyError

__all__ = [
    "LEXICON",
    "NOISE",
    "ClusterConfig",
    "Clusters",
    "Encoder",
    "Lexicon",
    "cluster_descriptions",
    "concept_entropy",
    "name_clusters",
]

Array = npt.NDArray[np.float64]
Encoder = Callable[[Sequence[str]], npt.NDArray[np.float32]]

LEXICON = Path(__file__).parent / "concepts.json"
NOISE = "noise"
_SHARPNESS = 20.0  # of the profile: a concept 0.05 nearer by cosine gets e times the weight


@dataclass(frozen=True, kw_only=True)
class Lexicon:
    """Concepts, each with seed phrases, and the wordings that say nothing."""

    concepts: dict[str, tuple[str, ...]]
    carriers: tuple[str, ...] = ()
    """Templates with one "{}", such as "a picture of {}"."""

    def __post_init__(self) -> None:
        empty = [name for name, seeds in self.concepts.items() if not seeds]
        if empty or len(self.concepts) < 2 or NOISE in self.concepts:
            raise ConfigError(
                f"a lexicon needs 2 or more concepts with seeds and none called {NOISE!r}; it has "
                f"{len(self.concepts)}, without seeds: {', '.join(empty) or 'none'}",
                field="concepts",
            )
        wrong = [c for c in self.carriers if c.count("{}") != 1 or c == "{}"]
        if wrong:
            raise ConfigError(f"carriers {wrong} are not texts with one {{}} in them", field="concepts")

    @classmethod
    def load(cls, path: Path = LEXICON) -> Lexicon:
        """Read {"concepts": {name: [seed, ...]}, "carriers": [...]}.

        Raises:
            ConfigError: the file is absent or not of that form.
        """
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
            concepts = {str(name): tuple(map(str, seeds)) for name, seeds in data["concepts"].items()}
            return cls(concepts=concepts, carriers=tuple(map(str, data.get("carriers", ()))))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} does not hold a lexicon: {error}", field="concepts") from error

    def with_concepts(self, phrases: Mapping[str, Sequence[str]]) -> Lexicon:
        """This lexicon with further concepts, or further seeds of those it has."""
        concepts = dict(self.concepts)
        for name, seeds in phrases.items():
            concepts[name] = (*concepts.get(name, ()), *seeds)
        return replace(self, concepts=concepts)

    def only(self, names: Container[str]) -> Lexicon:
        """This lexicon without the concepts that are not in `names`."""
        return replace(self, concepts={c: seeds for c, seeds in self.concepts.items() if c in names})

    def require(self, attributes: Sequence[str]) -> None:
        """Raise ConfigError if one of `attributes` is no concept of this lexicon."""
        if unknown := [a for a in attributes if a not in self.concepts]:
            raise ConfigError(
                f"attributes {unknown} are not concepts of the lexicon ({', '.join(self.concepts)}); give phrases for "
                "them with --phrases FILE, or seed phrases with --concepts FILE",
                field="attributes",
            )

    def without_carriers(self, text: str) -> str:
        """`text` after every carrier that matches all of it was taken off, in the order listed; never empty."""
        for carrier in self.carriers:
            head, tail = (re.escape(part) for part in carrier.split("{}"))
            if found := re.fullmatch(rf"{head}(.+){tail}", text, re.IGNORECASE):
                text = found[1]
        return text

    def centroids(self, encode: Encoder) -> Array:
        """Mean seed embedding of each concept, unit length, (number of concepts, E)."""
        texts = [self.without_carriers(s) for seeds in self.concepts.values() for s in seeds]
        flat = np.asarray(encode(texts), np.float64)
        ends = np.cumsum([len(seeds) for seeds in self.concepts.values()])
        rows = [part.mean(0) for part in np.split(flat, ends[:-1])]
        return _unit(np.stack(rows))


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(StrictConfig):
    """HDBSCAN's parameters; it draws no random numbers.

    The paper's are not published. These (ours) were chosen on two early states of the first dear-mini: by profile 9 to
    13 % of the recorded descriptions are noise and 85 % get the concept they were written for; sizes of 3 and 4 leave
    15 to 28 % and get 62 to 80 % right; plain embeddings leave 40 % or more.
    """

    space: str = "profile"
    """"profile" or "embedding", see the module docstring."""
    min_cluster_size: int = 6
    min_samples: int = 1
    method: str = "eom"
    """"eom" (excess of mass) or "leaf"."""
    over: Literal["recorded", "pool"] = "recorded"
    """What is clustered: the recorded descriptions, as in the paper, or all they were chosen from (ours). An attribute
    of few values has few recorded descriptions, too few for a cluster: of the 200 that dear-mini's heads record 5 are
    about texture, one a direction. Over the pool (1,135 phrases, sizes 8 to 12) the dominant concept of all 16 heads is
    the attribute that silencing the head costs most; over the recorded ones it was for 13 on a state shortly before."""

    def __post_init__(self) -> None:
        if self.space not in ("profile", "embedding") or self.method not in ("eom", "leaf"):
            raise ConfigError(
                f"clusters by {self.space!r} and {self.method!r}: choose profile or embedding, and eom or leaf"
            )
        if self.min_cluster_size < 2 or self.min_samples < 1:
            raise ConfigError(
                f"min_cluster_size {self.min_cluster_size} and min_samples {self.min_samples}: 2 and 1 at least"
            )


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Clusters of M descriptions."""

    labels: npt.NDArray[np.int64]
    """(M,) cluster of each description, -1 for noise."""
    names: tuple[str, ...]
    """Concept of each cluster."""
    profiles: Array
    """(M, C) share of each of the lexicon's concepts in each description, rows sum to 1: rule 2."""

    @property
    def concepts(self) -> list[str]:
        """Concept of each description, "noise" included."""
        return [self.names[i] if i >= 0 else NOISE for i in self.labels.tolist()]


def cluster_descriptions(
    texts: Sequence[str],
    *,
    encode: Encoder,
    lexicon: Lexicon,
    config: ClusterConfig | None = None,
    pool: Sequence[str] = (),
) -> Clusters:
    """Embed, cluster and name descriptions (method.md §1.3 and the rules of the module docstring).

    Args:
        texts: M different descriptions.
        encode: sentence encoder, texts -> unit-length rows (M, E).
        lexicon: concepts and carriers.
        config: of HDBSCAN.
        pool: what the descriptions were chosen from, clustered with them where `config.over` says so.

    Raises:
        MissingDependencyError: hdbscan is not installed.
    """
    config = config or ClusterConfig()
    if importlib.util.find_spec("hdbscan") is None:
        raise MissingDependencyError('clustering needs hdbscan: pip install "dear-serve[train]"')
    import hdbscan

    everything = list(dict.fromkeys([*pool, *texts] if config.over == "pool" else texts))
    place = {text: i for i, text in enumerate(everything)}
    rows = np.array([place[t] for t in texts], np.int64)
    embeddings = np.asarray(encode([lexicon.without_carriers(t) for t in everything]), np.float64)
    centroids = lexicon.centroids(encode)
    profiles = _profiles(embeddings, centroids)
    if len(everything) <= config.min_cluster_size:  # too few for any density
        return Clusters(labels=np.full(len(texts), -1, np.int64), names=(), profiles=profiles[rows])
    # Euclid between square roots of distributions is Hellinger's distance
    points = np.sqrt(profiles) if config.space == "profile" else embeddings
    labels = hdbscan.HDBSCAN(
        min_cluster_size=config.min_cluster_size,
        min_samples=config.min_samples,
        cluster_selection_method=config.method,
        algorithm="generic",
        core_dist_n_jobs=1,
    ).fit_predict(points)
    labels = np.asarray(labels, np.int64)
    names = name_clusters(embeddings, labels, centroids, list(lexicon.concepts))
    return Clusters(labels=labels[rows], names=names, profiles=profiles[rows])


def name_clusters(
    embeddings: Array, labels: npt.NDArray[np.int64], centroids: Array, concepts: Sequence[str]
) -> tuple[str, ...]:
    """Name of clusters 0..max: the concept whose centroid is nearest by cosine to the mean of the members (M, E)."""
    means = [embeddings[labels == cluster].mean(0) for cluster in range(int(labels.max(initial=-1)) + 1)]
    return tuple(concepts[int(np.argmax(centroids @ mean))] for mean in means)


def concept_entropy(counts: Sequence[float] | Counter[str]) -> float:
    """H = -sum p log2 p in bits of the distribution that `counts` (0 or more each) are proportional to.

    0 for one concept, log2 k for k equal ones (method.md §1.4).

    Raises:
        ConfigError: no count is positive, or one is negative or not finite.
    """
    values = np.array(list(counts.values() if isinstance(counts, Counter) else counts), np.float64)
    if not np.isfinite(values).all() or (values < 0).any() or not values.sum() > 0:
        raise ConfigError(
            f"counts {values.tolist()} are no distribution; some must be positive, none negative"
        )
    p = values[values > 0] / values.sum()
    return max(0.0, float(-(p * np.log2(p)).sum()))


def _profiles(embeddings: Array, centroids: Array) -> Array:
    """Each description's distribution over the concepts."""
    scores = _SHARPNESS * embeddings @ centroids.T
    p = np.exp(scores - scores.max(1, keepdims=True))
    out: Array = p / p.sum(1, keepdims=True)
    return out


def _unit(rows: Array) -> Array:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    out: Array = rows / np.where(lengths > 0, lengths, 1.0)
    return out
