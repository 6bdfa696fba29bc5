"""Head roles of a base by concept entropy: roles.json, a report and a picture (method.md §1).

    python -m training.roles --base dear-mini --out roles.json
    python -m training.roles --base ViT-B-16/openai --images photos/ --out roles/vit-b-16.json
    python -m training.roles --base dear-mini --sentence-encoder clip --thresholds 0.5,1.5 --out roles.json

Beside OUT.json it writes OUT.report.json (parameters, clusters with their descriptions, shares per head, warnings) and
OUT.png (the map of layers and heads). Equal input gives equal bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from dear_serve.backbone.zoo import Base, load_base
from dear_serve.command import run_command
from dear_serve.config import DearConfig, default_first_block
from dear_serve.dear.roles import Roles
from dear_serve.errors import ConfigError
from training.concepts import LEXICON, ClusterConfig, Lexicon
from training.descriptions import general_descriptions, load_descriptions, unique, world_descriptions
from training.probe import folder_pictures, head_outputs, world_pictures
from training.role_map import check_matplotlib, draw_role_map
from training.role_report import BaseIdentity, RoleReport, RolesConfig, classify
from training.sentences import sentence_encoder, text_features

__all__ = ["main", "table"]


def _parser() -> argparse.ArgumentParser:
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(
        prog="python -m training.roles",
        description=doc.splitlines()[0],
        epilog="examples:\n" + "\n".join(x for x in doc.splitlines() if x.startswith("    python")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--base",
        default="dear-mini",
        help="dear-mini, MODEL/TAG of open_clip, or a weights file (default: %(default)s)",
    )
    add("--images", type=Path, help="folder of pictures (default for dear-mini's world: rendered ones)")
    add("--count", type=int, default=1000, help="pictures at most (default: %(default)s)")
    add("--descriptions", type=Path, help="file with one description a line (default: the pool that ships)")
    add("--concepts", type=Path, default=LEXICON, help="concept lexicon (default: the one that ships)")
    add("--attributes", type=_words, default=DearConfig().attributes, help="comma-separated concepts")
    add(
        "--top-n",
        type=int,
        default=RolesConfig.top_n,
        help="descriptions a head at most (default: %(default)s)",
    )
    add("--rank", type=int, default=0, help="directions of a head's output kept (default: a head's width)")
    add(
        "--share",
        default=RolesConfig.share,
        choices=("variance", "count"),
        help="what P(c) counts (default: %(default)s)",
    )
    add("--thresholds", type=_thresholds, help="terciles (default) or LOW,HIGH in bits")
    add(
        "--sentence-encoder",
        default="sbert",
        help="sbert (default), clip, or a folder for sentence-transformers",
    )
    add("--first-block", type=int, default=0, help="J, from 1 (default: the last third)")
    add(
        "--cluster-space",
        default=ClusterConfig.space,
        choices=("profile", "embedding"),
        help="default: %(default)s",
    )
    add("--min-cluster-size", type=int, default=ClusterConfig.min_cluster_size, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the choice of pictures (default: %(default)s)")
    add("--out", type=Path, required=True, help="roles.json to write")
    add("--threads", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _thresholds(text: str) -> tuple[float, float] | None:
    if text == "terciles":
        return None
    try:
        low, high = map(float, text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is neither terciles nor LOW,HIGH in bits") from error
    return low, high


def _check(args: argparse.Namespace, base: Base | None = None) -> None:
    """What can be said before the minutes of work."""
    if args.out.suffix != ".json":
        raise ConfigError(f"--out {args.out} must end in .json", field="out")
    if args.count < 2 or args.seed < 0 or args.threads < 1:
        raise ConfigError(
            f"--count {args.count}, --seed {args.seed}, --threads {args.threads}: 2, 0 and 1 at least",
            field="count",
        )
    layers = base.config.vision.layers if base else args.first_block
    if not 0 <= args.first_block <= layers:
        raise ConfigError(
            f"--first-block {args.first_block}: the image tower has blocks 1 to {layers}", field="first_block"
        )
    check_matplotlib()


def _renders(base: Base) -> bool:
    """Whether rendered pictures suit this base: dear-mini, or a file of its shape."""
    return base.name == "dear-mini" or (
        base.config.vision.image_size == 64 and base.config.preprocess.mean == (0.5, 0.5, 0.5)
    )


def _pictures(args: argparse.Namespace, base: Base) -> tuple[str, Iterator[Tensor]]:
    if args.images is not None:

        def skipped(path: Path, reason: str) -> None:
            print(f"warning: {path} left out: {reason}", file=sys.stderr)

        batches = folder_pictures(
            args.images, args.count, base.config.preprocess, seed=args.seed, skipped=skipped
        )
        return f"pictures in {args.images.name}", batches
    if not _renders(base):
        raise ConfigError(
            f"base {args.base!r} needs --images DIR, a folder of pictures like those it will be used on",
            field="images",
        )
    return "rendered pictures of the attribute world", world_pictures(args.count, seed=args.seed)


def _pool(args: argparse.Namespace, base: Base) -> tuple[str, list[str]]:
    if args.descriptions is not None:
        return f"descriptions in {args.descriptions.name}", load_descriptions(args.descriptions)
    if _renders(base):
        return "the attribute world's vocabulary and general phrases", unique(
            [*world_descriptions(), *general_descriptions()]
        )
    return "general phrases", unique(general_descriptions())


def _compute(args: argparse.Namespace) -> tuple[RoleReport, dict[str, Any]]:
    base = load_base(args.base)
    _check(args, base)
    config = RolesConfig(
        attributes=args.attributes,
        top_n=args.top_n,
        rank=args.rank,
        share=args.share,
        thresholds=args.thresholds,
        clusters=ClusterConfig(space=args.cluster_space, min_cluster_size=args.min_cluster_size),
    )
    lexicon = Lexicon.load(args.concepts)
    pool_name, texts = _pool(args, base)
    pictures_name, batches = _pictures(args, base)
    encoder_name, encode = sentence_encoder(args.sentence_encoder, base.clip)
    first = args.first_block or default_first_block(base.config.vision.layers)
    with tqdm(total=args.count, unit="picture", desc="head outputs", disable=None) as bar:
        outputs = head_outputs(
            base.clip, batches, first_block=first, progress=lambda seen: _advance(bar, seen)
        )
    report = classify(
        outputs,
        pool=(texts, text_features(base.clip, texts)),
        encode=encode,
        lexicon=lexicon,
        base=BaseIdentity(
            name=base.name,
            sha256=base.sha256,
            head_width=base.config.vision.width // base.config.vision.heads,
        ),
        config=config,
    )
    facts = {
        "pictures": {"what": pictures_name, "count": outputs.pictures, "seed": args.seed},
        "descriptions": {"what": pool_name, "count": len(texts)},
        "sentence_encoder": encoder_name,
        "largest_error_of_sum": float(f"{outputs.largest_error:.1e}"),
        "config": config.to_dict(),
    }
    return report, facts


def _advance(bar: tqdm[Any], seen: int) -> None:
    bar.update(seen - bar.n)


def table(roles: Roles) -> str:
    """The heads as text, one a line: block, head, role, concept, entropy, leading descriptions."""
    lines = [f"{'block':>5} {'head':>4}  {'role':<15}{'concept':<12}{'bits':>5}  leading descriptions"]
    for head in roles.heads:
        first = ", ".join(d.text for d in head.descriptions[:4]) or "(does not vary)"
        lines.append(
            f"{head.layer:>5} {head.head:>4}  {head.role:<15}{head.concept or '-':<12}{head.entropy:>5.2f}  {first}"
        )
    low, high = roles.thresholds
    lines.append(f"thresholds {low:.3f} and {high:.3f} bits")
    lines += [
        f"experts of {a}: " + (", ".join(f"{layer}.{head}" for layer, head in roles.experts(a)) or "none")
        for a in roles.attributes
    ]
    return "\n".join(lines)


def _write(out: Path, report: RoleReport, facts: dict[str, Any]) -> None:
    """Each file whole or not at all; roles.json last."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.stem}.partial.png")
    draw_role_map(report.roles, partial)
    partial.replace(out.with_suffix(".png"))
    partial = out.with_name(f".{out.name}.partial")
    data = {"base": report.roles.base, "base_sha256": report.roles.base_sha256, **facts, **report.to_dict()}
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(out.with_suffix(".report.json"))
    report.roles.save(partial)
    partial.replace(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 1 failed check, 2 bad usage or input, 3 a missing optional part."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args), debug=args.debug)


def _run(args: argparse.Namespace) -> None:
    threads = torch.get_num_threads()
    try:
        _check(args)
        torch.set_num_threads(args.threads)
        report, facts = _compute(args)
        _write(args.out, report, facts)
    finally:
        torch.set_num_threads(threads)
    print(table(report.roles))
    print(
        f"{facts['pictures']['count']} {facts['pictures']['what']}; {facts['descriptions']['count']} descriptions: "
        f"{facts['descriptions']['what']}; sentence encoder: {facts['sentence_encoder']}"
    )
    print(
        f"{len(report.clusters.names)} clusters, {report.noise:.0%} of the recorded descriptions in none (noise)"
    )
    for warning in report.warnings():
        print(f"warning: {warning}")
    print(
        f"wrote {args.out}, {args.out.with_suffix('.report.json').name}, {args.out.with_suffix('.png').name}"
    )


if __name__ == "__main__":
    sys.exit(main())
