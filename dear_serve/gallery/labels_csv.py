"""Metadata of a folder's pictures from a CSV file beside them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

from dear_serve.errors import DataError
from dear_serve.gallery.schema import Metadata, MetadataValue, check_metadata

__all__ = ["read_labels"]

_NUMBER = re.compile(r"[+-]?(?:0|[1-9]\d{0,14})(?:\.\d+)?(?:[eE][+-]?\d{1,2})?")


def _typed_column(texts: list[str]) -> list[MetadataValue]:
    """A CSV column as numbers or truth values if all its cells are, else as text; empty cells are null.

    Cells with leading zeros ("007") are text: they are codes, not quantities.
    """
    filled = [t for t in texts if t]
    if all(_NUMBER.fullmatch(t) for t in filled):
        return [(float(t) if re.search(r"[.eE]", t) else int(t)) if t else None for t in texts]
    if all(t.lower() in ("true", "false") for t in filled):
        return [t.lower() == "true" if t else None for t in texts]
    return [t or None for t in texts]


def read_labels(path: Path) -> dict[str, Metadata]:
    """Metadata by relative picture path from a CSV file with a `path` column and any others.

    Raises DataError for a file that is not such a table, InputError (bad_metadata) for its columns or values.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path.name} is not a CSV file in UTF-8 ({error})", field=path.name) from error
    rows = [row for row in rows if row]
    names = [name.strip() for name in rows[0]] if rows else []
    if names.count("path") != 1 or len(set(names)) != len(names):
        raise DataError(f"{path.name} needs distinct column names, one of them 'path'", field=path.name)
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(names):
            raise DataError(f"{path.name}, row {number}: {len(row)} cells; {len(names)} are expected")
    cells = {name: [row[i].strip() for row in rows[1:]] for i, name in enumerate(names)}
    pictures = [Path(p).as_posix() for p in cells.pop("path")]
    if len(set(pictures)) != len(pictures):
        twice = next(p for i, p in enumerate(pictures) if p in pictures[:i])
        raise DataError(f"{path.name} names {twice!r} twice", field=path.name)
    columns = {name: _typed_column(texts) for name, texts in cells.items()}
    return {
        picture: check_metadata({name: values[i] for name, values in columns.items()})
        for i, picture in enumerate(pictures)
    }
