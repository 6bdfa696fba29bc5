"""Adapt a base to labelled pictures and write a bundle: python -m training.run DATA."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from dear_serve.command import run_command
from dear_serve.errors import ConfigError
from training.config import Protocol, TrainConfig, read_recipe
from training.console import StopRequest, Terminal
from training.distributed import joined
from training.execution import Execution, default_keep, resolve_precision
from training.experiment import Options, run
from training.items import DataSet
from training.prepare import read_templates, resolve_device
from training.recipe import known_recipes, open_data
from training.tables import check_places, table, write_tables

__all__ = ["main"]

Group = argparse._ArgumentGroup

_EXAMPLES = """examples:
  python -m training.run data/flowers
  python -m training.run data/flowers --base ViT-B-16/openai --shots 16 --protocol base-to-novel --seeds 1,2,3
  python -m training.run data/flowers --recipe flowers.toml --out runs/flowers --resume
  torchrun --nproc-per-node 4 -m training.run data/flowers   (one process a GPU)
  python -m training.run oxford_pets --root DATA --roles vit-b-16.roles.json --baselines
  python -m training.run imagenet --root DATA --protocol domain --test-on imagenet_a --test-on imagenet_r

DATA is an image folder (train/[val/]test/<class>/…, or <class>/… which is split 70 to 30), a CSV file with columns
path,label,split, or a JSON file with lists train, val, test of [path, label, class name]. With --root it may also be
a recipe: the name of a known data set (--list-recipes), or a TOML file with a table [data]. Nothing is downloaded.

exit status: 0 done; 1 stopped (go on with --resume) or a failed check; 2 bad options or pictures; 3 something is
not installed."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.run",
        description="Adapt a frozen CLIP to labelled pictures with DeAR and write a bundle.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = TrainConfig()
    parser.add_argument("data", nargs="?", default="", help="the labelled pictures (below)")
    parser.add_argument("--root", type=Path, help="the folder that holds the recipes' folders")
    parser.add_argument("--list-recipes", action="store_true", help="print the known data sets' names")
    _task_options(parser.add_argument_group("task"), defaults)
    _method_options(parser.add_argument_group("method"), defaults)
    _place_options(parser.add_argument_group("place"))
    return parser


def _task_options(task: Group, defaults: TrainConfig) -> None:
    task.add_argument(
        "--base", help=f"dear-mini, ARCHITECTURE/TAG of open_clip, or a file (default: {defaults.base})"
    )
    task.add_argument(
        "--protocol",
        choices=get_args(Protocol),
        help=f"all: every class, every picture (default: {defaults.protocol})",
    )
    task.add_argument(
        "--test-on",
        action="append",
        default=[],
        metavar="DATA",
        help="another data set to test on (protocols cross-dataset and domain); repeatable",
    )
    task.add_argument(
        "--shots", type=int, help=f"training pictures a class, 0 for all (default: {defaults.shots})"
    )
    task.add_argument("--template", action="append", help="a text with one {} for the class name; repeatable")
    task.add_argument("--templates", type=Path, help="a file of templates, one a line")
    task.add_argument("--skip-unreadable", action="store_true", help="leave out pictures that cannot be read")
    task.add_argument(
        "--strict",
        action="store_true",
        help="refuse a data set with problems: copies in two splits, too few pictures, …",
    )
    task.add_argument(
        "--baselines", action="store_true", help="rows for other prompts and for a linear probe too"
    )
    seeds = task.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=int, help=f"default: {defaults.seeds[0]}")
    seeds.add_argument(
        "--seeds", type=_seeds, help="several, as 1,2,3: mean and spread; the first one's is the bundle"
    )


def _method_options(method: Group, defaults: TrainConfig) -> None:
    method.add_argument("--recipe", type=Path, help="a TOML file of options; the command line goes over it")
    method.add_argument("--epochs", type=int, help=f"default: {defaults.epochs}")
    method.add_argument("--lr", type=float, help=f"peak learning rate (default: {defaults.lr})")
    method.add_argument("--batch-size", type=int, help=f"default: {defaults.batch_size}")
    method.add_argument(
        "--reg", type=float, help=f"weight of staying near the base (default: {defaults.reg})"
    )
    method.add_argument(
        "--fusion-reg",
        type=float,
        help=f"weight of leaning on the class feature (default: {defaults.fusion_reg})",
    )
    method.add_argument(
        "--beta", type=float, help=f"share of its start in each token (default: {defaults.dear.beta})"
    )
    method.add_argument("--mask", choices=("paper", "one-way"), help=f"default: {defaults.dear.mask}")
    method.add_argument(
        "--roles", help="a roles.json, or mixed, generalization, random:SEED (default: the base's own)"
    )
    method.add_argument(
        "--views",
        type=int,
        help=f"views of a training picture, 1: no crops (default: {defaults.augmentation.views})",
    )
    method.add_argument(
        "--crop",
        type=float,
        help=f"smallest crop, a share of the area (default: {defaults.augmentation.crop[0]})",
    )
    method.add_argument("--flip", action="store_const", const=True, help="crops may be mirrored")


def _place_options(place: Group) -> None:
    place.add_argument("--out", type=Path, help="the bundle to write (default: runs/<name of DATA>)")
    place.add_argument("--json", type=Path, help="write the table to this file too")
    place.add_argument("--html", type=Path, help="write the table to this page too")
    place.add_argument("--resume", action="store_true", help="go on with a stopped run of the same options")
    place.add_argument(
        "--cache", type=Path, help="folder of the frozen blocks' output (default: beside --out)"
    )
    place.add_argument("--cache-limit", type=float, default=8.0, help="its size in GB (default: %(default)s)")
    place.add_argument("--no-cache", action="store_true", help="compute the frozen blocks in every step")
    place.add_argument("--device", default="auto", help="cpu, cuda, or auto (default)")
    place.add_argument(
        "--precision",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="of the trained blocks' matrix products (default: bf16 on a GPU that has it, else fp32)",
    )
    place.add_argument(
        "--checkpoint-above",
        type=float,
        metavar="GB",
        help="activations that a tower may keep; beyond, they are computed twice (gradient checkpointing; "
        "default: 2, on a GPU a quarter of its memory)",
    )
    place.add_argument("--quiet", action="store_true", help="no progress bars")
    place.add_argument("--debug", action="store_true", help="show the traceback of an error")


def _seeds(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _sources(args: argparse.Namespace) -> tuple[DataSet, list[DataSet], dict[str, Any]]:
    """The data set, those to test on, and the options of the data set's recipe."""
    data, options = open_data(args.data or str(args.recipe), args.root)
    return data, [open_data(name, args.root, target=True)[0] for name in args.test_on], options


def _config(args: argparse.Namespace, known: dict[str, Any]) -> TrainConfig:
    """Defaults, then the data set's recipe, then --recipe, then the command line."""
    names = ("base", "protocol", "shots", "seeds", "epochs", "lr", "batch_size", "reg", "fusion_reg", "roles")
    given: dict[str, Any] = {n: getattr(args, n) for n in names}
    given["seeds"] = given["seeds"] or (None if args.seed is None else (args.seed,))
    if args.template and args.templates:
        raise ConfigError("give --template or --templates, not both", field="templates")
    given["templates"] = read_templates(args.templates) if args.templates else args.template
    given["dear"] = _without_none({"beta": args.beta, "mask": args.mask})
    crop = None if args.crop is None else (args.crop, 1.0)
    given["augmentation"] = _without_none({"views": args.views, "flip": args.flip, "crop": crop})
    recipe = read_recipe(args.recipe) if args.recipe else {}
    return TrainConfig().with_options(known).with_options(recipe).with_options(_without_none(given))


def _without_none(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _main(args: argparse.Namespace) -> None:
    if args.list_recipes:
        print("\n".join(known_recipes()))
        return
    with joined(resolve_device(args.device)) as (world, device):
        execution = Execution(
            world=world,
            precision=resolve_precision(args.precision, device),
            keep=default_keep(device) if args.checkpoint_above is None else int(args.checkpoint_above * 1e9),
        )
        _train(args, execution, device)


def _train(args: argparse.Namespace, execution: Execution, device: str) -> None:
    console, start = Terminal(quiet=args.quiet or not execution.world.first), time.monotonic()
    data, targets, known = _sources(args)
    out = args.out or Path("runs") / data.name
    config = _config(args, known)
    check_places(args.json, args.html)
    try:
        with StopRequest() as should_stop:
            result = run(
                data,
                config,
                Options(
                    out=out,
                    resume=args.resume,
                    cache=None if args.no_cache else args.cache or out.parent / ".cache",
                    cache_limit=int(args.cache_limit * 1e9),
                    skip_unreadable=args.skip_unreadable,
                    strict=args.strict,
                    baselines=args.baselines,
                    device=device,
                    execution=execution,
                ),
                targets=targets,
                console=console,
                should_stop=should_stop,
            )
    finally:
        console.end()
    if not execution.world.first:
        return
    print(f"{args.data or data.name}: accuracy in %")
    print(table(result.runs))
    print(f"bundle {out}, report {out / 'report.html'} ({time.monotonic() - start:.0f} s)")
    title = f"{data.name}: {config.protocol} on {config.base}"
    write_tables([(title, result.runs)], seeds=config.seeds, json_file=args.json, html_file=args.html)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not (args.data or args.recipe or args.list_recipes):
        parser.error("no data: give an image folder, a CSV or split JSON file, or a recipe and --root")
    return run_command(lambda: _main(args), debug=args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
