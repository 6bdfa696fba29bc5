"""All steps from a base and pictures to head roles, their checks and their report (method.md §1)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from dear_serve.backbone.zoo import Base, load_base
from dear_serve.config import DearConfig, default_first_block
from dear_serve.dear.roles import Roles
from dear_serve.errors import ConfigError
from training.causal import CausalCheck, causal_check, groups_of
from training.concepts import LEXICON, ClusterConfig, Encoder, Lexicon
from training.descriptions import general_descriptions, load_descriptions, unique, world_pool
from training.head_values import HeadOutputs, gather
from training.labelled import LabelledPictures, read_labelled, world_task
from training.phrases import load_phrases
from training.probe import FolderPictures, ProbePictures, WorldPictures
from training.role_html import Page
from training.role_pictures import strongest, thumbnails
from training.role_report import BaseIdentity, Naming, RoleReport, RolesConfig, assign, choose_descriptions
from training.sentences import sentence_encoder, text_features
from training.stability import Chance, Counts, Stability, against_chance, bootstrap, remembering

__all__ = ["RoleOptions", "RoleResult", "compute_roles"]


@dataclass(frozen=True, kw_only=True)
class RoleOptions:
    """What `python -m training.roles` can be told, apart from where to write."""

    base: str = "dear-mini"
    images: Path | None = None
    """Folder of pictures; None for rendered ones, which suit dear-mini and bases of its shape alone."""
    count: int = 1000
    seed: int = 0
    descriptions: Path | None = None
    concepts: Path = LEXICON
    attributes: tuple[str, ...] = ()
    """Empty: the default attributes and those of `phrases`."""
    phrases: Path | None = None
    layers: tuple[int, int] | None = None
    """J and L; None for the last third."""
    top_n: int = RolesConfig.top_n
    rank: int = 0
    share: Any = RolesConfig.share
    thresholds: tuple[float, float] | None = None
    sentence_encoder: str = "sbert"
    cluster_space: str = ClusterConfig.space
    cluster_over: Any = ClusterConfig.over
    min_cluster_size: int = ClusterConfig.min_cluster_size
    labelled: Path | None = None
    labelled_count: int = 0
    """0: 200, or 1000 rendered ones."""
    bootstrap: int = 20

    def __post_init__(self) -> None:
        for name, least in (("count", 2), ("seed", 0), ("bootstrap", 0), ("labelled_count", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: {least} at least", field=name)

    def first_block(self, layers: int) -> int:
        """J in a tower of `layers` blocks. Raises ConfigError where the range does not end at the last block."""
        first, last = self.layers or (default_first_block(layers), layers)
        if not 1 <= first <= layers or last != layers:
            raise ConfigError(
                f"--layers {first}-{last}: the image tower has blocks 1 to {layers}, and roles are needed up to the "
                "last one",
                field="layers",
            )
        return first


Skipped = Callable[[Path, str], None] | None


@dataclass(frozen=True, kw_only=True)
class _Inputs:
    """All that the roles are computed from."""

    base: Base
    first_block: int
    config: RolesConfig
    lexicon: Lexicon
    pictures: ProbePictures
    pool: list[str]
    pool_name: str
    encoder_name: str
    encode: Encoder


def _renders(base: Base) -> bool:
    """Whether rendered pictures suit this base: dear-mini, or a file of its shape."""
    return base.name == "dear-mini" or (
        base.config.vision.image_size == 64 and base.config.preprocess.mean == (0.5, 0.5, 0.5)
    )


def _inputs(options: RoleOptions, skipped: Skipped) -> _Inputs:
    base = load_base(options.base)
    first = options.first_block(base.config.vision.layers)
    phrases = load_phrases(options.phrases) if options.phrases else {}
    attributes = options.attributes or (
        *DearConfig().attributes,
        *(n for n in phrases if n not in DearConfig().attributes),
    )
    config = RolesConfig(
        attributes=attributes,
        top_n=options.top_n,
        rank=options.rank,
        share=options.share,
        thresholds=options.thresholds,
        clusters=ClusterConfig(
            space=options.cluster_space, over=options.cluster_over, min_cluster_size=options.min_cluster_size
        ),
        phrases=phrases,
    )
    lexicon = Lexicon.load(options.concepts).with_concepts(phrases)
    if options.descriptions is None and _renders(base):  # its captions are about nothing else
        lexicon = lexicon.only({*world_pool().values(), *attributes})
    lexicon.require(attributes)
    pool_name, pool = _pool(options, base, phrases)
    pictures = _pictures(options, base, skipped)
    encoder_name, encode = sentence_encoder(options.sentence_encoder, base.clip)
    return _Inputs(
        base=base,
        first_block=first,
        config=config,
        lexicon=lexicon,
        pictures=pictures,
        pool=pool,
        pool_name=pool_name,
        encoder_name=encoder_name,
        encode=remembering(encode),
    )


def _pictures(options: RoleOptions, base: Base, skipped: Skipped) -> ProbePictures:
    if options.images is not None:
        preprocess = base.config.preprocess
        return FolderPictures(options.images, options.count, preprocess, seed=options.seed, skipped=skipped)
    if not _renders(base):
        raise ConfigError(
            f"base {options.base!r} needs --images DIR, a folder of pictures like those it will be used on",
            field="images",
        )
    return WorldPictures(options.count, seed=options.seed)


def _pool(options: RoleOptions, base: Base, phrases: dict[str, tuple[str, ...]]) -> tuple[str, list[str]]:
    own = [text for texts in phrases.values() for text in texts]
    if options.descriptions is not None:
        return f"descriptions in {options.descriptions.name}", unique(
            [*own, *load_descriptions(options.descriptions)]
        )
    if _renders(base):
        return "phrases in the attribute world's words", unique([*own, *world_pool()])
    return "general phrases", unique([*own, *general_descriptions()])


def _labelled(options: RoleOptions, inputs: _Inputs) -> LabelledPictures | None:
    base, attributes = inputs.base, inputs.config.attributes
    if options.labelled is not None:
        return read_labelled(
            options.labelled, base.clip, attributes, count=options.labelled_count or 200, seed=options.seed
        )
    if options.images is None and _renders(base):
        return world_task(base.clip, options.labelled_count or 1000, seed=options.seed + 1)
    return None


@dataclass(frozen=True, kw_only=True)
class RoleResult:
    """What the command writes."""

    page: Page
    warnings: tuple[str, ...]

    @property
    def report(self) -> RoleReport:
        """The roles and what they came from."""
        return self.page.report

    def to_dict(self) -> dict[str, Any]:
        """The report file."""
        page, roles = self.page, self.page.roles
        return {
            "base": roles.base,
            "base_sha256": roles.base_sha256,
            **page.facts,
            "thresholds": list(roles.thresholds),
            **page.report.to_dict(),
            "chance": page.chance.to_dict(),
            "stability": [s.to_dict() for s in page.stability],
            "causal": page.causal.to_dict(roles) if page.causal else None,
            "warnings": list(self.warnings),
        }


def _bar(total: int, what: str, unit: str) -> tqdm[Any]:
    return tqdm(total=total, unit=unit, desc=what, disable=None)


def compute_roles(options: RoleOptions, *, state: Path | None = None, skipped: Skipped = None) -> RoleResult:
    """Everything that the command does before it writes, with progress bars on a terminal.

    Args:
        options: of the command.
        state: folder to go on from after a stop.
        skipped: told of every picture that cannot be read, and why.

    Raises:
        DearError: every kind, see `run_command`.
    """
    inputs = _inputs(options, skipped)
    task = _labelled(options, inputs)
    outputs = _gather(inputs, state)
    with _bar(len(inputs.pool), "descriptions", "text") as bar:
        features = text_features(inputs.base.clip, inputs.pool, progress=bar.update)
    again = _again(inputs, outputs, features)
    report = again(None, None)
    found = strongest(outputs, report.chosen, (inputs.pool, features))
    page = Page(
        report=report,
        facts=_facts(options, inputs, outputs),
        concepts=tuple(inputs.lexicon.concepts),
        chance=against_chance(report, share=inputs.config.share, seed=options.seed),
        stability=_stability(options, report, again, (outputs.pictures, len(inputs.pool))),
        causal=_causal(inputs.base, task, report.roles),
        pictures=found,
        thumbnails=thumbnails(inputs.pictures, found, inputs.base.config.preprocess),
    )
    return RoleResult(page=page, warnings=tuple(_warnings(page)))


def _gather(inputs: _Inputs, state: Path | None) -> HeadOutputs:
    with _bar(len(inputs.pictures), "head outputs", "picture") as bar:
        return gather(
            inputs.base.clip,
            inputs.pictures,
            first_block=inputs.first_block,
            state=state,
            key=inputs.base.sha256,
            progress=lambda seen: _advance(bar, seen),
        )


def _advance(bar: tqdm[Any], seen: int) -> None:
    bar.update(seen - bar.n)


def _again(
    inputs: _Inputs, outputs: HeadOutputs, features: npt.NDArray[np.float32]
) -> Callable[[Counts | None, Counts | None], RoleReport]:
    """Roles from a sample of the pictures and of the descriptions."""
    whole = outputs.value_covariances()

    def classify(pictures: Counts | None, descriptions: Counts | None) -> RoleReport:
        rows = np.arange(len(inputs.pool)) if descriptions is None else np.flatnonzero(descriptions)
        texts = [inputs.pool[i] for i in rows]
        chosen = choose_descriptions(
            outputs,
            whole if pictures is None else outputs.resampled_covariances(pictures),
            (texts, features[rows]),
            inputs.config,
        )
        return assign(
            outputs,
            chosen,
            naming=Naming(encode=inputs.encode, lexicon=inputs.lexicon, pool=texts),
            base=BaseIdentity(name=inputs.base.name, sha256=inputs.base.sha256),
            config=inputs.config,
        )

    return classify


def _stability(
    options: RoleOptions,
    report: RoleReport,
    again: Callable[[Counts | None, Counts | None], RoleReport],
    sizes: tuple[int, int],
) -> tuple[Stability, ...]:
    if not options.bootstrap:
        return ()
    with _bar(2 * options.bootstrap, "bootstrap", "round") as bar:
        return bootstrap(
            report, again, sizes=sizes, rounds=options.bootstrap, seed=options.seed, progress=bar.update
        )


def _causal(base: Base, task: LabelledPictures | None, roles: Roles) -> CausalCheck | None:
    if task is None:
        return None
    with _bar(len(roles.heads) + len(groups_of(roles)), "causal check", "group") as bar:
        return causal_check(base.clip, task, roles, progress=bar.update)


def _facts(options: RoleOptions, inputs: _Inputs, outputs: HeadOutputs) -> dict[str, Any]:
    return {
        "pictures": {"what": inputs.pictures.what, "count": outputs.pictures, "seed": options.seed},
        "descriptions": {"what": inputs.pool_name, "count": len(inputs.pool)},
        "sentence_encoder": inputs.encoder_name,
        "hdbscan": {"version": importlib.metadata.version("hdbscan"), "random_numbers": "none"},
        "largest_error_of_sum": float(f"{outputs.largest_error:.1e}"),
        "pictures_checked_for_it": outputs.checked,
        "config": inputs.config.to_dict(),
    }


def _warnings(page: Page) -> list[str]:
    """What whoever uses the roles should know."""
    chance, out = page.chance, page.report.warnings()
    if not chance.specialized:
        out.insert(0, _nothing(chance))
    if page.causal is None:
        out.append("no causal check: give pictures labelled per attribute with --labelled")
    return out


def _nothing(chance: Chance) -> str:
    return (
        f"nothing is specialized: the concepts of the {len(chance.p)} heads differ no more than in {chance.draws} "
        f"random deals of the descriptions (p = {chance.overall:.3f}), so these roles mean nothing; train with "
        "--roles mixed or --roles generalization"
    )
