"""Zero-shot and adapted accuracy of a bundle: python -m training.evaluate BUNDLE DATA…"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from dear_serve.bundle import Bundle
from dear_serve.command import run_command
from dear_serve.errors import DataError
from dear_serve.labels import validate_templates
from dear_serve.runtime import open_engine
from dear_serve.tokenizer import Tokenizer, clean_text
from training.baselines import add_baselines
from training.checks import PictureCheck
from training.config import Protocol
from training.data import TARGET_PROTOCOLS, distinct_names, make_task, test_splits
from training.items import DataSet, Task, some
from training.recipe import open_data
from training.scoring import EngineTowers, evaluate, summary
from training.tables import check_places, table, write_tables

__all__ = ["main"]

_EXAMPLES = """examples:
  python -m training.evaluate runs/flowers data/flowers
  python -m training.evaluate runs/flowers data/flowers --protocol base-to-novel --engine onnx --baselines
  python -m training.evaluate runs/imagenet imagenet_a imagenet_r --protocol domain --root DATA --json table.json

DATA is what training takes: image folders, CSV or split JSON files, with --root also the names of recipes.
cross-dataset and domain make one table of all DATA, whose unsplit folders are tested on as a whole; the others make a
table each. Nothing is chosen on test pictures.

exit status: 0 done; 1 something failed; 2 bad options, bundle or pictures; 3 something is not installed."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate",
        description="Zero-shot and adapted accuracy of a bundle on test pictures.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path, help="a bundle's folder")
    parser.add_argument("data", nargs="+", help="image folders, CSV or split JSON files, names of recipes")
    parser.add_argument("--root", type=Path, help="the folder that holds the recipes' folders")
    parser.add_argument("--engine", choices=("torch", "onnx"), default="torch", help="default: %(default)s")
    parser.add_argument(
        "--protocol", choices=get_args(Protocol), default="few-shot", help="default: %(default)s"
    )
    parser.add_argument(
        "--template",
        action="append",
        help="a text with one {}; repeatable (default: the recipe's, else the bundle's)",
    )
    parser.add_argument(
        "--baselines", action="store_true", help="rows for other prompts and for a linear probe too"
    )
    parser.add_argument("--shots", type=int, default=16, help="of the linear probe (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of its draw (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the tables to this file too")
    parser.add_argument("--html", type=Path, help="write the tables to this page too")
    parser.add_argument(
        "--skip-unreadable", action="store_true", help="leave out pictures that cannot be read"
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _tasks(args: argparse.Namespace, bundle: Bundle) -> list[tuple[str, Task]]:
    """What is tested, by title; with training pictures only where a linear probe needs them."""
    check = PictureCheck(skip=args.skip_unreadable)
    apart = args.protocol in TARGET_PROTOCOLS
    sets = [open_data(name, args.root, target=apart)[0] for name in args.data]
    if apart:
        return [(", ".join(args.data), _joined(sets, args.protocol, check, bundle))]
    tasks = []
    for name, data in zip(args.data, sets, strict=True):
        if args.baselines:
            task = make_task(data, protocol=args.protocol, shots=args.shots, seed=args.seed, check=check)
        else:
            tests, _ = test_splits(data, args.protocol, check)
            task = Task(class_names=data.class_names, train=(), tests=tests)
        own = dict.fromkeys(task.tests, data.templates) if data.templates else {}
        tasks.append((name, replace(task, templates=own)))
    return tasks


def _joined(sets: Sequence[DataSet], protocol: str, check: PictureCheck, bundle: Bundle) -> Task:
    """A task with a split for each data set; for "domain", once all their classes are the bundle's."""
    trained = {clean_text(name) for name in bundle.manifest.class_names}
    tests = {}
    names = distinct_names([data.name for data in sets])
    for name, data in zip(names, sets, strict=True):
        other = [c for c in data.class_names if clean_text(c) not in trained]
        if protocol == "domain" and other:
            raise DataError(
                f"{data.root} has {len(other)} classes that {bundle.name} was not trained on: {some(other)}; "
                "the domain protocol tests the same classes on other pictures (cross-dataset: other classes)"
            )
        tests[name] = test_splits(data, "all", check)[0]["all"]
    own = {name: data.templates for name, data in zip(names, sets, strict=True) if data.templates}
    return Task(
        class_names=bundle.manifest.class_names, train=(), tests=tests, templates=own, targets=tuple(names)
    )


def _run(args: argparse.Namespace) -> None:
    check_places(args.json, args.html)
    bundle = Bundle.open(args.bundle)
    given = validate_templates(args.template) if args.template else ()
    default = given or bundle.manifest.templates
    towers = EngineTowers(open_engine(bundle, args.engine), bundle)
    tokenizer = Tokenizer.from_file(bundle.paths.tokenizer)
    preprocess = bundle.manifest.preprocess
    tables = []
    for title, made in _tasks(args, bundle):
        task = replace(made, templates={}) if given else made
        scores = [
            found
            for split, pictures in task.tests.items()
            for found in evaluate(
                towers,
                {split: pictures},
                tokenizer=tokenizer,
                templates=task.split_templates(split, default),
                preprocess=preprocess,
            )
        ]
        if args.baselines:
            scores = add_baselines(
                scores, task, towers, tokenizer=tokenizer, templates=default, preprocess=preprocess
            )
        runs = [summary(scores, targets=task.targets)]
        tables.append((f"{bundle.name} on {title}", runs))
        print(f"{bundle.name} on {title}, accuracy in % ({args.engine})")
        print(table(runs))
    write_tables(tables, seeds=[args.seed], json_file=args.json, html_file=args.html)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status."""
    args = _parser().parse_args(argv)
    return run_command(lambda: _run(args), debug=args.debug)


if __name__ == "__main__":
    raise SystemExit(main())
