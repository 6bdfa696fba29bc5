"""What each attention head is for: the content of `roles.json`, fixed with a checkpoint (method.md §1)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dear_serve.config import StrictConfig
from dear_serve.errors import BundleError, ConfigError

__all__ = ["ROLES_VERSION", "Description", "HeadRole", "Role", "Roles"]

ROLES_VERSION = 1
Role = Literal["attribute", "mixed", "generalization"]


@dataclass(frozen=True, kw_only=True)
class Description(StrictConfig):
    """A text that TEXTSPAN chose for a head, and the variance of the head's output along it."""

    text: str
    variance: float


@dataclass(frozen=True, kw_only=True)
class HeadRole(StrictConfig):
    """One head of the image tower."""

    layer: int
    """Block, counted from 1."""
    head: int
    """Within the block, counted from 0."""
    role: Role
    concept: str
    """The concept that dominates the head's descriptions."""
    entropy: float
    """Concept entropy in bits (method.md §1.4); 0 is one concept."""
    descriptions: tuple[Description, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Roles(StrictConfig):
    """Roles of all heads of blocks `first_block`..`layers` of one base.

    Raises (when built):
        ConfigError: a head is missing, twice, or outside the range.
    """

    base: str
    base_sha256: str
    layers: int
    heads_per_layer: int
    first_block: int
    attributes: tuple[str, ...]
    thresholds: tuple[float, float]
    """Entropy in bits: up to the first an attribute head, from the second on a generalization head."""
    heads: tuple[HeadRole, ...]
    method: str = "concept-entropy"
    version: int = ROLES_VERSION
    phrases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Attributes of one's own and their phrases, which differ in that attribute alone; search uses them too."""

    def __post_init__(self) -> None:
        if self.version != ROLES_VERSION:
            raise ConfigError(
                f"roles have version {self.version}; this library reads {ROLES_VERSION}: compute them again",
                field="version",
            )
        expected = [
            (layer, head)
            for layer in range(self.first_block, self.layers + 1)
            for head in range(self.heads_per_layer)
        ]
        if [(h.layer, h.head) for h in self.heads] != expected:
            raise ConfigError(
                f"roles list {len(self.heads)} heads; blocks {self.first_block} to {self.layers} with "
                f"{self.heads_per_layer} heads each are expected, in order",
                field="heads",
            )
        for name, phrases in self.phrases.items():
            if name not in self.attributes or len(set(phrases)) < 2:
                raise ConfigError(
                    f"phrases of {name!r}: {list(phrases)}; two or more, of an attribute of these roles, are needed",
                    field="phrases",
                )

    def at(self, layer: int, head: int) -> HeadRole:
        """The role of one head (block from 1, head from 0)."""
        return self.heads[(layer - self.first_block) * self.heads_per_layer + head]

    def core_attribute(self, layer: int, head: int) -> str | None:
        """The attribute this head is an expert (core) head of, or None (method.md §1.6)."""
        role = self.at(layer, head)
        return role.concept if role.role == "attribute" and role.concept in self.attributes else None

    def experts(self, attribute: str) -> list[tuple[int, int]]:
        """(layer, head) of the core heads of one attribute."""
        return [(h.layer, h.head) for h in self.heads if self.core_attribute(h.layer, h.head) == attribute]

    @classmethod
    def uniform(
        cls, role: Role, *, layers: int, heads_per_layer: int, first_block: int, attributes: Sequence[str]
    ) -> Roles:
        """Every head in the same role: "mixed" is the layer-centric baseline, "generalization" protects everything."""
        heads = tuple(
            HeadRole(layer=layer, head=head, role=role, concept="", entropy=0.0)
            for layer in range(first_block, layers + 1)
            for head in range(heads_per_layer)
        )
        return cls(
            base="",
            base_sha256="",
            layers=layers,
            heads_per_layer=heads_per_layer,
            first_block=first_block,
            attributes=tuple(attributes),
            thresholds=(0.0, 0.0),
            heads=heads,
            method=f"uniform-{role}",
        )

    def permuted(self, seed: int) -> Roles:
        """The same roles dealt to other heads at random: an ablation."""
        order = np.random.default_rng(seed).permutation(len(self.heads))
        heads = tuple(
            replace(self.heads[source], layer=target.layer, head=target.head)
            for source, target in zip(order, self.heads, strict=True)
        )
        return replace(self, heads=heads, method=f"permuted-{seed}")

    def save(self, path: Path) -> None:
        """Write JSON, in the form of `dear_serve/assets/roles.schema.json`."""
        data = self.to_dict()
        if not self.phrases:  # as files were before there were any
            del data["phrases"]
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Roles:
        """Read what `save` wrote.

        Raises:
            BundleError: no such file, or not roles.
        """
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
            return cls.from_dict(data)
        except (OSError, ValueError, ConfigError) as error:
            raise BundleError(f"{path} does not hold head roles: {error}", field="roles") from error
