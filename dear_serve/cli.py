"""The `dear-serve` command: demo, serve, labels, doctor, and the commands about galleries."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from dear_serve import __version__
from dear_serve.cli_gallery import add_gallery_commands, engine_options
from dear_serve.command import run_command
from dear_serve.errors import DataError

__all__ = ["main"]

_EXAMPLES = """examples:
  dear-serve demo --no-serve
  dear-serve serve runs/flowers --gallery runs/gallery
  dear-serve serve flowers=runs/a/bundle pets=runs/b/bundle
  dear-serve labels runs/flowers garden garden.txt --template "a photo of a {} in a garden"
  dear-serve index runs/flowers pictures/ --gallery runs/gallery
  dear-serve search runs/flowers --gallery runs/gallery --image rose.jpg --attribute color
  dear-serve eval-search runs/flowers pictures/ --sheet sheet.html
  dear-serve doctor

exit codes: 0 fine, 1 a check failed, 2 bad usage or input, 3 an optional part is missing
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    args = _parser().parse_args(argv)
    return run_command(lambda: int(args.run(args)), debug=args.debug)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dear-serve",
        description="Serve an adapted CLIP and search pictures by attribute.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str, example: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.set_defaults(run=run)
        return sub

    demo = add(
        "demo", _demo, "adapt, export, index, serve and ask: the whole path", "dear-serve demo --no-serve"
    )
    demo.add_argument(
        "--out", type=Path, default=Path("runs/demo"), help="folder for everything (%(default)s)"
    )
    demo.add_argument("--port", type=int, default=3000)
    demo.add_argument("--no-serve", action="store_true", help="stop after the answers")
    demo.add_argument(
        "--quick", action="store_true", help="one seed, few epochs: see that it works, not how well"
    )

    _serve_options(add("serve", _serve, "answer over HTTP", "dear-serve serve runs/flowers --port 3000"))
    _bento_options(
        add(
            "bento",
            _bento,
            "write a folder that bentoml build makes an image of",
            "dear-serve bento runs/flowers --out runs/image",
        )
    )
    _label_options(
        add(
            "labels",
            _labels,
            "keep a label set in a bundle, under a name",
            "dear-serve labels runs/flowers garden garden.txt",
        )
    )

    add_gallery_commands(add)

    doctor = add("doctor", _doctor, "say what this machine can run, and what is missing", "dear-serve doctor")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _bento_options(bento: argparse.ArgumentParser) -> None:
    bento.add_argument("bundle", nargs="+", help="a folder, or NAME=FOLDER; the first is the default")
    bento.add_argument("--out", type=Path, required=True, help="folder to write, not there yet")


def _serve_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "bundle",
        nargs="+",
        help="a folder, or NAME=FOLDER; the first is the default, `model` chooses another",
    )
    serve.add_argument("--gallery", type=Path, help="folder of a gallery, made when it is not there")
    serve.add_argument("--host", default="127.0.0.1", help="address to bind (%(default)s: this machine only)")
    serve.add_argument("--port", type=int, default=3000)
    serve.add_argument(
        "--batch", type=int, help="pictures that the engine runs at once at most (default: 16, GPU 64)"
    )
    serve.add_argument(
        "--cors", action="append", metavar="ORIGIN", help="let pages of this origin call; repeatable"
    )
    serve.add_argument("--log", choices=("text", "json"), help="form of the log (default: text)")
    engine_options(serve)


def _label_options(labels: argparse.ArgumentParser) -> None:
    labels.add_argument("bundle", type=Path)
    labels.add_argument("name")
    labels.add_argument("file", type=Path, nargs="?", help="a label a line; without it the set is taken out")
    labels.add_argument("--template", action="append", help="a text with one {} (default: the bundle's)")


def _demo(args: argparse.Namespace) -> int:
    from dear_serve.demo import run_demo

    return run_demo(args.out, port=args.port, serve=not args.no_serve, quick=args.quick)


def _serve(args: argparse.Namespace) -> int:
    from dear_serve.launch import run_server, serve_command, serve_environment

    options = {
        "DEAR_BATCH": str(args.batch) if args.batch else "",
        "DEAR_CORS": ",".join(args.cors or ()),
        "DEAR_LOG": args.log or "",
    }
    environment = serve_environment(
        args.bundle,
        gallery=args.gallery,
        engine=args.engine,
        threads=args.threads,
        options={name: value for name, value in options.items() if value},
    )
    command = serve_command(host=args.host, port=args.port)
    return run_server(command, environment)


def _bento(args: argparse.Namespace) -> int:
    from dear_serve.bento import write_bento_folder
    from dear_serve.launch import named_bundles

    file = write_bento_folder(named_bundles(args.bundle), args.out)
    print(
        f"{file} is written; next:\n  cd {file.parent} && bentoml build && bentoml containerize dear:latest"
    )
    return 0


def _labels(args: argparse.Namespace) -> int:
    from dear_serve.bundle import Bundle

    lines = None
    if args.file is not None:
        try:
            text = args.file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{args.file} cannot be read as text: {error}", field="file") from error
        lines = [line.strip() for line in text.splitlines() if line.strip()]
    bundle = Bundle.open(args.bundle).store_label_set(args.name, lines, args.template or ())
    for name, kept in bundle.manifest.label_sets.items():
        print(f"{name}: {len(kept.labels)} labels")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from dear_serve.doctor import examine

    findings = examine()
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        for finding in findings:
            mark = "ok     " if finding.ok else "missing"
            print(f"{mark}  {finding.part:<22} {finding.detail}")
            if not finding.ok and finding.remedy:
                print(f"         {'':<22} {finding.remedy}")
    return 0 if all(f.ok for f in findings if f.needed) else 3


if __name__ == "__main__":
    sys.exit(main())
