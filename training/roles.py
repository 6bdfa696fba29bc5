"""Head roles of a base by concept entropy: roles.json, a report, a page and a picture (method.md §1).

    python -m training.roles --base dear-mini --out roles.json
    python -m training.roles --base ViT-B-16/openai --images photos/ --out roles/vit-b-16.json
    python -m training.roles --base ViT-B-16/openai --images photos/ --labelled labels.csv --out roles/vit-b-16.json
    python -m training.roles --base dear-mini --phrases warmth.json --out warm/roles.json
    python -m training.roles --base dear-mini --sentence-encoder clip --thresholds 0.5,1.5 --out roles.json

Beside OUT.json it writes OUT.html (everything to look at), OUT.report.json (the same as data) and OUT.png (the map of
blocks and heads). Equal input gives equal bytes. A stopped run goes on where it was. See training/ROLES.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dear_serve.command import run_command
from dear_serve.dear.roles import Roles
from dear_serve.errors import ConfigError
from training.causal import CausalCheck
from training.role_compute import RoleOptions, RoleResult, compute_roles
from training.role_html import render
from training.role_map import check_matplotlib, draw_role_map

__all__ = ["main", "table"]

_DEFAULTS = RoleOptions()


def _parser() -> argparse.ArgumentParser:
    doc = __doc__ or ""
    parser = argparse.ArgumentParser(
        prog="python -m training.roles",
        description=doc.splitlines()[0],
        epilog="examples:\n" + "\n".join(x for x in doc.splitlines() if x.startswith("    python")),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_inputs(parser.add_argument_group("what is looked at"))
    _add_method(parser.add_argument_group("method"))
    _add_checks(parser.add_argument_group("checks"))
    add = parser.add_argument_group("place").add_argument
    add("--out", type=Path, required=True, help="roles.json to write")
    add(
        "--state",
        type=Path,
        help="folder to go on from after a stop (default: beside --out; removed at the end)",
    )
    add("--threads", type=int, default=os.cpu_count() or 1, help="default: %(default)s")
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_inputs(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--base",
        default="dear-mini",
        help="dear-mini, MODEL/TAG of open_clip, or a weights file (default: %(default)s)",
    )
    add("--images", type=Path, help="folder of pictures (default for dear-mini's world: rendered ones)")
    add("--count", type=int, default=1000, help="pictures at most (default: %(default)s)")
    add(
        "--seed",
        type=int,
        default=0,
        help="of the choice of pictures and of the checks (default: %(default)s)",
    )
    add("--descriptions", type=Path, help="file with one description a line (default: the pool that ships)")
    add(
        "--concepts",
        type=Path,
        default=_DEFAULTS.concepts,
        help="concept lexicon (default: the one that ships)",
    )
    add(
        "--attributes",
        type=_words,
        default=(),
        help="comma-separated concepts (default: the paper's five, and those of --phrases)",
    )
    add("--phrases", type=Path, help='attributes of your own: JSON {"NAME": ["phrase", ...]}')
    add("--layers", type=_layers, help="J-L, from 1 (default: the last third)")


def _add_method(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--top-n",
        type=int,
        default=_DEFAULTS.top_n,
        help="descriptions a head at most (default: %(default)s)",
    )
    add("--rank", type=int, default=0, help="directions of a head's output kept (default: a head's width)")
    shares = ("variance", "count")
    add("--share", default=_DEFAULTS.share, choices=shares, help="what P(c) counts (default: %(default)s)")
    add("--thresholds", type=_thresholds, help="terciles (default) or LOW,HIGH in bits")
    add(
        "--sentence-encoder",
        default="sbert",
        help="sbert (default), clip, or a folder for sentence-transformers",
    )
    spaces = ("profile", "embedding")
    add("--cluster-space", default=_DEFAULTS.cluster_space, choices=spaces, help="default: %(default)s")
    over = ("recorded", "pool")
    add(
        "--cluster-over",
        default=_DEFAULTS.cluster_over,
        choices=over,
        help="descriptions (default: %(default)s)",
    )
    add("--min-cluster-size", type=int, default=_DEFAULTS.min_cluster_size, help="default: %(default)s")


def _add_checks(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--labelled",
        type=Path,
        help="pictures labelled per attribute for the causal check: a CSV file with columns path and attributes, or "
        "DIR/<attribute>/<value>/ (default for dear-mini's world: rendered ones)",
    )
    add("--labelled-count", type=int, default=0, help="of them at most (default: 200; 1000 rendered ones)")
    add(
        "--bootstrap",
        type=int,
        default=20,
        help="rounds over pictures and over descriptions (default: %(default)s)",
    )


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


def _layers(text: str) -> tuple[int, int]:
    try:
        first, last = map(int, text.split("-"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not J-L, such as 9-12") from error
    return first, last


def _check(args: argparse.Namespace) -> None:
    """What can be said before the minutes of work."""
    if args.out.suffix != ".json":
        raise ConfigError(f"--out {args.out} must end in .json", field="out")
    if args.threads < 1:
        raise ConfigError(f"--threads {args.threads}: 1 at least", field="threads")
    check_matplotlib()


def _options(args: argparse.Namespace) -> RoleOptions:
    return RoleOptions(**{f.name: getattr(args, f.name) for f in dataclasses.fields(RoleOptions)})


def _told(path: Path, reason: str) -> None:
    print(f"warning: {path} left out: {reason}", file=sys.stderr)


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


def _causal_table(causal: CausalCheck, roles: Roles) -> str:
    """Points of accuracy lost and, small changes apart, the rise of cross-entropy."""
    names = list(causal.accuracy)
    lines = [f"{'silenced: points lost / nats':<32}" + "".join(f"{n:>16}" for n in names)]
    lines.append(
        f"{'(whole model, accuracy in %)':<32}" + "".join(f"{100 * causal.accuracy[n]:>16.1f}" for n in names)
    )
    named = [
        (f"{h.layer}.{h.head} {roles.core_attribute(h.layer, h.head) or h.role}", c)
        for h, c in zip(roles.heads, causal.heads, strict=True)
    ]
    named += [(f"{name} ({len(heads)})", cost) for name, (heads, cost) in causal.groups.items()]
    for name, cost in named:
        cells = [
            f"{100 * cost.lost[n]:.1f}{'*' if cost.dearest() == n else ''} /{cost.nats[n]:6.2f}"
            for n in names
        ]
        lines.append(f"{name:<32}" + "".join(f"{c:>16}" for c in cells))
    return "\n".join(lines)


def _write(out: Path, result: RoleResult) -> None:
    """Each file whole or not at all; roles.json last."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _put(out.with_suffix(".png"), lambda path: draw_role_map(result.report.roles, path))
    page = render(result.page, result.warnings)
    _put(out.with_suffix(".html"), lambda path: path.write_text(page, encoding="utf-8"))
    data = json.dumps(result.to_dict(), indent=1) + "\n"
    _put(out.with_suffix(".report.json"), lambda path: path.write_text(data, encoding="utf-8"))
    _put(out, result.report.roles.save)


def _put(path: Path, write: Callable[[Path], Any]) -> None:
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    write(partial)
    partial.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code: 0, 1 failed check, 2 bad usage or input, 3 a missing optional part."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args), debug=args.debug)


def _run(args: argparse.Namespace) -> None:
    threads = torch.get_num_threads()
    state = args.state or args.out.with_name(f".{args.out.stem}.state")
    try:
        _check(args)
        torch.set_num_threads(args.threads)
        result = compute_roles(_options(args), state=state, skipped=_told)
        _write(args.out, result)
    finally:
        torch.set_num_threads(threads)
    shutil.rmtree(state, ignore_errors=True)
    _print(args.out, result)


def _print(out: Path, result: RoleResult) -> None:
    page, roles = result.page, result.page.roles
    facts, stability = page.facts, page.stability
    print(table(roles))
    if page.causal:
        print(_causal_table(page.causal, roles))
        print(page.causal.finding(roles))
    for s in stability:
        print(f"{s.share:.0%} of heads keep their role when the {s.over} are drawn anew ({s.rounds} rounds)")
    print(
        f"{page.chance.apart} of {len(roles.heads)} heads have concepts of their own (p of 5 % at most; all together "
        f"p = {page.chance.overall:.3f}); "
        f"{facts['pictures']['count']} {facts['pictures']['what']}; {facts['descriptions']['count']} descriptions: "
        f"{facts['descriptions']['what']}; sentence encoder: {facts['sentence_encoder']}; "
        f"{len(page.report.clusters.names)} clusters, {page.report.noise:.0%} of the recorded descriptions are noise"
    )
    for warning in result.warnings:
        print(f"warning: {warning}")
    others = ", ".join(out.with_suffix(s).name for s in (".html", ".report.json", ".png"))
    print(f"wrote {out}, {others}")


if __name__ == "__main__":
    sys.exit(main())
