"""Which readout finds pictures alike in one attribute: precision at k on labelled pictures (method.md §8).

    python -m training.attribute_search runs/demo/bundle runs/demo/pictures

FOLDER holds pictures and a labels.csv with a column per attribute (`python -m training.world_data gallery FOLDER`).
Every picture is searched by once, the rest are ranked, and the share of the first k with the same value is averaged.
Rows are readouts, columns what "the same" means: a readout is good when its own column is high and the others are
near chance. `--choose FILE` writes the better kind per attribute, as training takes it for that base.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dear_serve.command import run_command
from dear_serve.gallery.evaluate import LabeledPictures, picture_features
from dear_serve.gallery.measures import chance, precision_at
from dear_serve.labels import l2_normalize
from dear_serve.readout import project
from dear_serve.runtime.predict import Predictor
from training.readouts import span_bases

__all__ = ["chance", "main", "precision_at", "search_table"]


def search_table(predictor: Predictor, folder: Path, *, k: int = 10) -> dict[str, Any]:
    """Precision at k of every readout.

    Args:
        predictor: of the bundle.
        folder: pictures and labels.csv.
        k: results looked at.

    Returns:
        "chance" and "rows", each {column attribute: precision from 0 to 1}; rows are "class", "frozen class", and per
        attribute "token NAME" (f_k), "span NAME" (class feature on the span of the attribute's phrases), "frozen span
        NAME" and "token span NAME" (f_k on the span).
    """
    names = predictor.bundle.manifest.dear.attributes
    pictures = LabeledPictures.read(folder, names)
    images, labels = pictures.data, pictures.labels
    features = picture_features(predictor, images)
    cls, attributes, frozen = features.cls, features.attributes, features.frozen
    vectors = {"class": cls, "frozen class": frozen}
    own = predictor.bundle.roles().phrases
    bases = span_bases(names, lambda texts: predictor.text_features(texts, "zero_shot"), own=own)
    for index, name in enumerate(names):
        token = np.ascontiguousarray(attributes[:, index])
        vectors[f"token {name}"] = token
        if name in bases:
            basis = bases[name]
            vectors[f"span {name}"] = project(cls, basis)
            vectors[f"frozen span {name}"] = project(frozen, basis)
            vectors[f"token span {name}"] = project(token, basis)
    rows = {
        name: {a: precision_at(l2_normalize(v), labels[a], k=k) for a in labels}
        for name, v in vectors.items()
    }
    return {
        "pictures": len(images),
        "k": k,
        "chance": {a: chance(labels[a]) for a in labels},
        "rows": rows,
    }


def better_kinds(table: dict[str, Any]) -> dict[str, str]:
    """Per attribute the stored kind ("token" or "span") with the higher precision on that attribute."""
    kinds = {}
    for attribute in table["chance"]:
        token, span = (table["rows"].get(f"{kind} {attribute}") for kind in ("token", "span"))
        kinds[attribute] = "span" if span and token and span[attribute] > token[attribute] else "token"
    return kinds


def _shown(table: dict[str, Any]) -> str:
    """The table as text, in percent."""
    columns = list(table["chance"])
    lines = [f"{'precision at ' + str(table['k']) + ', %':<24}" + "".join(f"{c:>10}" for c in columns)]
    for name, row in [("chance", table["chance"]), *table["rows"].items()]:
        own = name.rsplit(" ", 1)[-1]
        cells = [f"{100 * row[c]:.0f}{'*' if c == own else ' '}" for c in columns]
        lines.append(f"{name:<24}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training.attribute_search",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="example:\n  python -m training.attribute_search runs/demo/bundle runs/demo/pictures",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("folder", type=Path, help="pictures and a labels.csv with a column per attribute")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--engine", choices=("onnx", "torch"), default="onnx")
    parser.add_argument("--choose", type=Path, help="write the better kind per attribute to this JSON file")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)

    def run() -> int:
        with Predictor.open(args.bundle, engine=args.engine) as predictor:
            table = search_table(predictor, args.folder, k=args.k)
        if args.choose:
            args.choose.write_text(json.dumps(better_kinds(table), indent=1) + "\n", encoding="utf-8")
        print(_shown(table))
        print(json.dumps(table))
        return 0

    return run_command(run, debug=args.debug)


if __name__ == "__main__":
    sys.exit(main())
