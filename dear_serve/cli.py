"""The `dear-serve` command: demo, serve, index, search, doctor."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dear_serve import __version__
from dear_serve.command import run_command
from dear_serve.errors import DataError, DearError, ImageError, InputError, QueryError

__all__ = ["main"]

_EXAMPLES = """examples:
  dear-serve demo --no-serve
  dear-serve serve runs/flowers --gallery runs/gallery
  dear-serve serve flowers=runs/a/bundle pets=runs/b/bundle
  dear-serve labels runs/flowers garden garden.txt --template "a photo of a {} in a garden"
  dear-serve index runs/flowers pictures/ --gallery runs/gallery
  dear-serve search runs/flowers --gallery runs/gallery --image rose.jpg --attribute color
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
    _label_options(
        add(
            "labels",
            _labels,
            "keep a label set in a bundle, under a name",
            "dear-serve labels runs/flowers garden garden.txt",
        )
    )

    index = add(
        "index", _index, "put a folder of pictures into a gallery", "dear-serve index B pictures/ --gallery G"
    )
    index.add_argument("bundle", type=Path)
    index.add_argument("folder", type=Path, help="pictures; a labels.csv in it (path, ...) becomes metadata")
    index.add_argument("--gallery", type=Path, required=True)
    index.add_argument("--batch-size", type=int, default=64)
    index.add_argument(
        "--bad-list", type=Path, help="write the pictures that could not be added to this file"
    )
    _engine_options(index)

    search = add("search", _search, "search a gallery", 'dear-serve search B --gallery G --text "a red cup"')
    search.add_argument("bundle", type=Path)
    search.add_argument("--gallery", type=Path, required=True)
    what = search.add_mutually_exclusive_group(required=True)
    what.add_argument("--image", type=Path)
    what.add_argument("--text")
    what.add_argument("--id")
    search.add_argument(
        "--attribute", action="append", metavar="NAME[=WEIGHT]", help="color, class=0.5, ... (default: class)"
    )
    search.add_argument("--filter", help='SQL over the metadata, such as "price < 10"')
    search.add_argument("--top-k", type=int, default=10)
    search.add_argument("--json", action="store_true", help="print JSON")
    _engine_options(search)

    doctor = add("doctor", _doctor, "say what this machine can run, and what is missing", "dear-serve doctor")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    return parser


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
    _engine_options(serve)


def _label_options(labels: argparse.ArgumentParser) -> None:
    labels.add_argument("bundle", type=Path)
    labels.add_argument("name")
    labels.add_argument("file", type=Path, nargs="?", help="a label a line; without it the set is taken out")
    labels.add_argument("--template", action="append", help="a text with one {} (default: the bundle's)")


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=("onnx", "torch"), default="onnx")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine (default: all)")


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


def _labels(args: argparse.Namespace) -> int:
    from dear_serve.bundle import Bundle

    lines = None
    if args.file is not None:
        lines = [line.strip() for line in _read(args.file).decode("utf-8", "replace").splitlines()]
        lines = [line for line in lines if line]
    bundle = Bundle.open(args.bundle).store_label_set(args.name, lines, args.template or ())
    for name, kept in bundle.manifest.label_sets.items():
        print(f"{name}: {len(kept.labels)} labels")
    return 0


def _index(args: argparse.Namespace) -> int:
    from dear_serve.gallery.indexer import gallery_spec, index_folder
    from dear_serve.gallery.store import Gallery
    from dear_serve.runtime.predict import Predictor

    if args.batch_size < 1:
        raise InputError(f"--batch-size is {args.batch_size}; at least 1", field="batch_size")
    with Predictor.open(args.bundle, engine=args.engine, threads=args.threads) as predictor:
        gallery = Gallery.open(args.gallery, create_for=gallery_spec(predictor))
        with tqdm(unit=" pictures", disable=None) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            report = index_folder(
                predictor, gallery, args.folder, batch_size=args.batch_size, progress=progress
            )
    print(
        f"{report.added} added, {report.skipped} already there, {len(report.bad)} bad; {len(gallery)} in {args.gallery}"
    )
    for path, reason in report.bad[:10]:
        print(f"  {path}: {reason}", file=sys.stderr)
    if args.bad_list:
        lines = "".join(f"{path}\t{reason}\n" for path, reason in report.bad)
        args.bad_list.write_text(lines, encoding="utf-8")
    return 1 if report.bad else 0


def _weights(given: Sequence[str] | None) -> dict[str, float] | None:
    """`--attribute NAME[=WEIGHT]` options as weights."""
    if not given:
        return None
    weights: dict[str, float] = {}
    for item in given:
        name, equals, number = item.partition("=")
        try:
            weights[name] = float(number) if equals else 1.0
        except ValueError:
            raise QueryError(f"--attribute {item}: {number!r} is not a number", field="attributes") from None
    return weights


def _search(args: argparse.Namespace) -> int:
    from dear_serve.gallery import build_query, parse_attributes
    from dear_serve.gallery.indexer import gallery_spec
    from dear_serve.gallery.store import Gallery
    from dear_serve.runtime.predict import Predictor

    with Predictor.open(args.bundle, engine=args.engine, threads=args.threads) as predictor:
        gallery = Gallery.open(args.gallery)
        gallery.spec.check_same(gallery_spec(predictor))
        request = parse_attributes(_weights(args.attribute), tuple(gallery.spec.columns))
        if args.id is not None:
            found: Any = {name: rows[0] for name, rows in gallery.vectors([args.id]).items()}
        elif args.text is not None:
            found = {name: rows[0] for name, rows in predictor.readout_text([args.text]).items()}
        else:
            (found,) = predictor.readout_images([_read(args.image)])
            if isinstance(found, DearError):
                raise ImageError(f"{args.image}: {found.message}", code=found.code)
        exclude = (args.id,) if args.id is not None else ()
        query = build_query(request, found, {}, filter=args.filter, top_k=args.top_k, exclude=exclude)
        hits = gallery.search(query)
    rows = [{"id": h.id, "score": h.score, "scores": h.scores, "metadata": h.metadata} for h in hits]
    if args.json:
        print(json.dumps({"results": rows}, indent=2, default=_number))
    else:
        for row in rows:
            print(f"{row['score']:8.4f}  {row['id']}  {json.dumps(row['metadata'], ensure_ascii=False)}")
    return 0


def _number(value: Any) -> Any:
    """NumPy numbers for `json`."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", field="image") from error


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
