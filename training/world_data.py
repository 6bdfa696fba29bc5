"""Folders of rendered pictures: the demo's classification task, and galleries with known attributes.

python -m training.world_data demo OUT      image folder OUT/{train,test}/<class name>/NNNN.png
python -m training.world_data gallery OUT   pictures and labels.csv

Equal options and seed give byte-identical folders. Both kinds carry `labels.csv`, which says what every
picture shows.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from dear_serve.atomic import FolderWriter
from dear_serve.command import run_command
from dear_serve.errors import ConfigError, DataError
from training.world import SPLITS, STYLES, Scenes, World, sample_scenes
from training.world_vocab import ATTRIBUTES, CORE_OBJECTS, OBJECTS, VOCABULARY

LABELS = "labels.csv"
COLUMNS = ("path", *ATTRIBUTES)
_EXAMPLES = """examples:
  python -m training.world_data demo data/demo
  python -m training.world_data demo data/demo --classes 10 --style dusk --seed 1
  python -m training.world_data gallery data/gallery --count 1000
"""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The demo task: `classes` of the core objects, `train` and `test` pictures of each, in one style."""

    classes: int = 24
    train: int = 20
    test: int = 30
    style: str = "night"
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.classes <= CORE_OBJECTS:
            raise ConfigError(f"classes is {self.classes}; choose 2 to {CORE_OBJECTS}", field="classes")
        for name in ("train", "test"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 1 or more", field=name)
        _check_common(self.style, self.seed)


@dataclass(frozen=True, kw_only=True)
class GalleryOptions:
    """A gallery of `count` pictures in one style, of a split of the attribute combinations."""

    count: int = 1000
    style: str = "print"
    split: str = "any"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"count is {self.count}; give 1 or more", field="count")
        if self.split not in SPLITS:
            raise ConfigError(
                f"unknown split {self.split!r}; choose one of {', '.join(SPLITS)}", field="split"
            )
        _check_common(self.style, self.seed)


def _check_common(style: str, seed: int) -> None:
    if style not in STYLES:
        raise ConfigError(f"unknown style {style!r}; choose one of {', '.join(STYLES)}", field="style")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; give 0 or more", field="seed")


def _refuse_foreign(out: Path) -> None:
    """Only replace what this program wrote: a folder with our labels.csv, or an empty one."""
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file; give a folder to write")
    labels = out / LABELS
    if labels.is_file():
        with labels.open(encoding="utf-8", newline="") as file:
            if next(csv.reader(file), None) == list(COLUMNS):
                return
    if any(out.iterdir()):
        raise DataError(f"{out} holds files that this program did not write; give a new or empty folder")


def _save(folder: Path, paths: Sequence[str], scenes: Scenes, pictures: np.ndarray) -> list[list[str]]:
    """Write pictures (B, 64, 64, 3) as PNG; the rows of labels.csv."""
    rows = []
    for path, values, picture in zip(paths, scenes.attributes().tolist(), pictures, strict=True):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(target, format="PNG")
        names = [VOCABULARY[name][value] for name, value in zip(ATTRIBUTES, values, strict=True)]
        rows.append([path, *names])
    return rows


def _write(out: Path, fill: Callable[[Path], list[list[str]]]) -> int:
    """Replace `out` by what `fill` writes into an empty folder, and its labels; the number of pictures."""
    _refuse_foreign(out)
    with FolderWriter(out) as writer:
        rows = fill(writer.temporary)
        with (writer.temporary / LABELS).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
        writer.commit()
    return len(rows)


def demo_classes(options: DemoOptions) -> list[int]:
    """The objects that are the demo's classes: indices into OBJECTS, in that order."""
    order = np.random.default_rng((options.seed, 0)).permutation(CORE_OBJECTS)
    return sorted(order[: options.classes].tolist())


def write_demo(out: Path, options: DemoOptions) -> int:
    """Write the demo's image folder; the number of pictures.

    Classes are objects; color, shape, texture and location vary freely: only the icon tells them apart.
    A picture depends on the seed, its class, its split and the split's size alone.

    Raises:
        DataError: `out` is a file, or holds something this program did not write.
        MissingDependencyError: the icon font isn't installed.
    """

    def fill(folder: Path) -> list[list[str]]:
        world = World(CORE_OBJECTS)
        rows = []
        for number, (split, count) in enumerate((("train", options.train), ("test", options.test)), start=1):
            for index in demo_classes(options):
                rng = np.random.default_rng((options.seed, number, index))
                scenes = sample_scenes(rng, count, split="any", styles=[options.style])
                scenes = replace(scenes, object=np.full(count, index, np.int64))
                paths = [f"{split}/{OBJECTS[index]}/{i:04d}.png" for i in range(count)]
                rows += _save(folder, paths, scenes, world.render(scenes, rng))
        return rows

    return _write(out, fill)


def write_gallery(out: Path, options: GalleryOptions) -> int:
    """Write `options.count` pictures OUT/NNNNNN.png; the number of pictures.

    Raises:
        DataError: `out` is a file, or holds something this program did not write.
        MissingDependencyError: the icon font isn't installed.
    """

    def fill(folder: Path) -> list[list[str]]:
        world = World()
        rng = np.random.default_rng((options.seed, 3))
        scenes = sample_scenes(rng, options.count, split=options.split, styles=[options.style])
        paths = [f"{i:06d}.png" for i in range(options.count)]
        rows = []
        for start in range(0, options.count, 1024):
            part = slice(start, start + 1024)
            rows += _save(folder, paths[part], scenes.select(part), world.render(scenes.select(part), rng))
        return rows

    return _write(out, fill)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.world_data",
        description="Write folders of pictures of the attribute world.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="an image folder of icons as classes, train and test")
    demo.add_argument("--classes", type=int, default=24, help="number of classes (default: %(default)s)")
    demo.add_argument(
        "--train", type=int, default=20, help="training pictures a class (default: %(default)s)"
    )
    demo.add_argument("--test", type=int, default=30, help="test pictures a class (default: %(default)s)")
    gallery = commands.add_parser("gallery", help="pictures with labels.csv")
    gallery.add_argument("--count", type=int, default=1000, help="number of pictures (default: %(default)s)")
    gallery.add_argument("--split", choices=SPLITS, default="any", help="combinations (default: %(default)s)")
    for command, style in ((demo, "night"), (gallery, "print")):
        command.add_argument("out", type=Path, help="the folder to write or to replace")
        command.add_argument("--style", choices=STYLES, default=style, help="default: %(default)s")
        command.add_argument("--seed", type=int, default=0, help="default: %(default)s")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "demo":
        demo = DemoOptions(
            classes=arguments.classes,
            train=arguments.train,
            test=arguments.test,
            style=arguments.style,
            seed=arguments.seed,
        )
        return write_demo(arguments.out, demo)
    gallery = GalleryOptions(
        count=arguments.count, style=arguments.style, split=arguments.split, seed=arguments.seed
    )
    return write_gallery(arguments.out, gallery)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status (0 done, 2 bad usage or input, 3 the icon font is missing)."""
    arguments = _parser().parse_args(argv)

    def run() -> None:
        print(f"{_run(arguments)} pictures in {arguments.out}")

    return run_command(run, debug=arguments.debug)


if __name__ == "__main__":
    raise SystemExit(main())
