"""The commands of `dear-serve` about galleries: index, search, eval-search, gallery."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tqdm import tqdm

from dear_serve.errors import DataError, DearError, ImageError, InputError, QueryError

if TYPE_CHECKING:
    from dear_serve.gallery.evaluate import Evaluation
    from dear_serve.gallery.indexer import IndexReport
    from dear_serve.runtime.predict import Predictor

__all__ = ["add_gallery_commands", "engine_options", "read_bytes"]


class Add(Protocol):
    """Adds a subcommand (`dear_serve.cli`)."""

    def __call__(
        self, name: str, run: Callable[[argparse.Namespace], int], text: str, example: str
    ) -> argparse.ArgumentParser: ...


def add_gallery_commands(add: Add) -> None:
    """Add the subcommands."""
    _index_options(
        add("index", _index, "put many pictures into a gallery", "dear-serve index B pictures/ --gallery G")
    )
    _search_options(
        add("search", _search, "search a gallery", 'dear-serve search B --gallery G --text "a red cup"')
    )
    _evaluation_options(
        add(
            "eval-search",
            _evaluate,
            "measure search by attribute on labelled pictures",
            "dear-serve eval-search runs/flowers pictures/ --sheet sheet.html",
        )
    )
    _gallery_options(
        add(
            "gallery",
            _gallery,
            "export a gallery as Parquet, import one, or say what is in it",
            "dear-serve gallery export G pictures.parquet",
        )
    )


def engine_options(parser: argparse.ArgumentParser, *more: str) -> None:
    """Options that choose an engine."""
    parser.add_argument("--engine", choices=("onnx", "torch", *more), default="onnx")
    parser.add_argument("--threads", type=int, help="CPU threads of the engine (default: all)")


def _index_options(index: argparse.ArgumentParser) -> None:
    index.add_argument("bundle", type=Path)
    index.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="DIR|PARQUET|LIST",
        help="a folder (a labels.csv in it becomes metadata), a .parquet file with id and image, or a text file with "
        "a path a line",
    )
    index.add_argument("--gallery", type=Path, required=True)
    index.add_argument("--batch-size", type=int, default=64)
    index.add_argument(
        "--migrate",
        action="store_true",
        help="re-embed a gallery of another bundle: from DIR or LIST, thumbnails of pictures that are not there",
    )
    index.add_argument(
        "--bad-list", type=Path, help="write the pictures that could not be added to this file"
    )
    engine_options(index, "ray")
    index.add_argument(
        "--workers", type=int, default=2, help="of --engine ray, an onnx engine each (%(default)s)"
    )
    index.add_argument("--ray-address", help="of a Ray cluster (default: one on this machine)")


def _search_options(search: argparse.ArgumentParser) -> None:
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
    engine_options(search)


def _evaluation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path, help="pictures and a labels.csv with a column per attribute")
    parser.add_argument("--k", type=int, default=10, help="results looked at for precision (%(default)s)")
    parser.add_argument(
        "--derived", type=Path, help="JSON of attributes given by phrases alone; see the README"
    )
    parser.add_argument("--sheet", type=Path, help="write a contact sheet (HTML) to this file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    engine_options(parser)


def _gallery_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("export", "import", "stats"))
    parser.add_argument("gallery", type=Path)
    parser.add_argument("file", type=Path, nargs="?", help="the Parquet file, for export and import")


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Shows pictures done, their rate and the time that is left; nothing where no one looks."""
    with tqdm(unit=" pictures", disable=None) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def _index(args: argparse.Namespace) -> int:
    from dear_serve.runtime.predict import Predictor

    if args.batch_size < 1:
        raise InputError(f"--batch-size is {args.batch_size}; at least 1", field="batch_size")
    if args.folder is None and not args.migrate:
        raise InputError("name the pictures: a folder, a .parquet file or a list of paths", field="folder")
    if args.engine == "ray":
        report, total = _indexed_by_ray(args)
    else:
        with (
            Predictor.open(args.bundle, engine=args.engine, threads=args.threads) as predictor,
            _progress() as progress,
        ):
            report, total = (_migrated if args.migrate else _indexed)(args, predictor, progress)
    print(
        f"{report.added} added, {report.skipped} already there, {len(report.bad)} bad; {total} in {args.gallery}"
    )
    for path, reason in report.bad[:10]:
        print(f"  {path}: {reason}", file=sys.stderr)
    if args.bad_list:
        lines = "".join(f"{path}\t{reason}\n" for path, reason in report.bad)
        args.bad_list.write_text(lines, encoding="utf-8")
    return 1 if report.bad else 0


def _indexed(
    args: argparse.Namespace, predictor: Predictor, progress: Callable[[int, int], None]
) -> tuple[IndexReport, int]:
    from dear_serve.gallery import Gallery, gallery_spec, index_pictures, open_source

    pictures = open_source(args.folder)
    gallery = Gallery.open(args.gallery, create_for=gallery_spec(predictor))
    report = index_pictures(predictor, gallery, pictures, batch_size=args.batch_size, progress=progress)
    return report, len(gallery)


def _indexed_by_ray(args: argparse.Namespace) -> tuple[IndexReport, int]:
    from dear_serve.gallery import FileSource, Gallery, open_source
    from dear_serve.gallery.ray_index import RayOptions, index_with_ray

    files = None if args.migrate else open_source(args.folder)
    if not isinstance(files, FileSource):
        raise InputError("--engine ray indexes a folder or a list of paths", field="folder")
    options = RayOptions(
        workers=args.workers,
        threads=args.threads or 1,
        batch_size=args.batch_size,
        address=args.ray_address,
    )
    with _progress() as progress:
        report = index_with_ray(args.bundle, args.gallery, files, options=options, progress=progress)
    return report, len(Gallery.open(args.gallery))


def _migrated(
    args: argparse.Namespace, predictor: Predictor, progress: Callable[[int, int], None]
) -> tuple[IndexReport, int]:
    from dear_serve.gallery import FileSource, Gallery, migrate, open_source

    files = None if args.folder is None else open_source(args.folder)
    if files is not None and not isinstance(files, FileSource):
        raise InputError("--migrate takes a folder or a list of paths, or neither", field="folder")
    report = migrate(predictor, args.gallery, files, batch_size=args.batch_size, progress=progress)
    return report, len(Gallery.open(args.gallery))


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
    from dear_serve.gallery import Gallery, build_query, gallery_spec, parse_attributes
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
            (found,) = predictor.readout_images([read_bytes(args.image)])
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


def read_bytes(path: Path) -> bytes:
    """A file's content; DataError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", field="image") from error


def _evaluate(args: argparse.Namespace) -> int:
    from dear_serve.gallery.contact_sheet import contact_sheet, text_table
    from dear_serve.gallery.evaluate import evaluate, read_derived
    from dear_serve.runtime.predict import Predictor

    derived = read_derived(args.derived) if args.derived else ()
    with Predictor.open(args.bundle, engine=args.engine, threads=args.threads) as predictor:
        found = evaluate(predictor, args.folder, k=args.k, derived=derived)
    if args.sheet:
        args.sheet.write_text(contact_sheet(found), encoding="utf-8")
    if args.json:
        print(json.dumps(_as_json(found, args.k)))
        return 0
    print(f"{len(found.pictures.data)} pictures; precision at {args.k} / mean AP / recall at 100, in %\n")
    print(text_table(found))
    for note in found.notes:
        print(note, file=sys.stderr)
    return 0


def _as_json(found: Evaluation, k: int) -> dict[str, Any]:
    rows = {name: {a: asdict(q) for a, q in row.items()} for name, row in found.rows.items()}
    return {
        "pictures": len(found.pictures.data),
        "k": k,
        "chance": found.chance,
        "highest": found.highest,
        "rows": rows,
        "notes": found.notes,
    }


def _gallery(args: argparse.Namespace) -> int:
    from dear_serve.gallery import Gallery, export_parquet, import_parquet

    if args.what == "stats":
        print(json.dumps(asdict(Gallery.open(args.gallery).stats()), indent=2))
        return 0
    if args.file is None:
        raise InputError(
            f"gallery {args.what} needs a file: dear-serve gallery {args.what} G pictures.parquet"
        )
    if args.what == "export":
        print(f"{export_parquet(Gallery.open(args.gallery), args.file)} pictures in {args.file}")
        return 0
    with _progress() as progress:
        count = import_parquet(args.gallery, args.file, progress=progress)
    print(f"{count} pictures in {args.gallery}")
    return 0
