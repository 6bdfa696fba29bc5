"""Where pictures to index come from: a folder, a list of files, a Parquet file; each picture is read when needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from dear_serve.errors import DataError, ImageError
from dear_serve.gallery.labels_csv import read_labels
from dear_serve.gallery.schema import Metadata
from dear_serve.preprocess import ImageLimits

__all__ = ["FileSource", "Item", "ParquetSource", "PictureSource", "open_source"]

LABELS = "labels.csv"
SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif")
)
_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Item:
    """A picture to come. `read` gives its bytes; it raises ImageError, or OSError when the disk does."""

    id: str
    read: Callable[[ImageLimits], bytes]
    metadata: Metadata = field(default_factory=dict)


class PictureSource(Protocol):
    """Pictures in an order of their own, the same each time."""

    @property
    def labels(self) -> Mapping[str, Metadata]:
        """Metadata by id, where all of it is known beforehand."""

    @property
    def missing(self) -> list[tuple[str, str]]:
        """Ids that are named and not there, and why."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Item]: ...


class FileSource:
    """Pictures in files.

    Args:
        files: path of each picture by its id.
        labels: metadata by id.
    """

    def __init__(self, files: Mapping[str, Path], labels: Mapping[str, Metadata] | None = None) -> None:
        self.files = files
        self.labels: Mapping[str, Metadata] = labels or {}
        self.missing = [
            (n, f"{LABELS} names it and it is not there") for n in sorted(set(self.labels) - set(files))
        ]

    @classmethod
    def folder(cls, folder: Path) -> FileSource:
        """The pictures below a folder; ids are relative paths with "/", metadata comes from its labels.csv.

        Raises DataError: no such folder, a bad labels.csv.
        """
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder", field="folder")
        labels = read_labels(folder / LABELS) if (folder / LABELS).is_file() else {}
        return cls({name: folder / name for name in _walk(folder)}, labels)

    @classmethod
    def listed(cls, file: Path) -> FileSource:
        """The pictures that a text file names, one path a line, relative to the file's folder or absolute.

        Ids are the lines. Raises DataError: it cannot be read, is not UTF-8, or names a picture twice.
        """
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} is neither a folder, a .parquet file nor a list of paths in UTF-8"
            ) from error
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}", field="folder") from error
        names = [line for line in lines if line]
        files = {name: file.parent / name for name in names}
        if len(files) != len(names):
            raise DataError(f"{file} names a picture twice", field="folder")
        return cls(files)

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[Item]:
        for name, path in self.files.items():
            yield Item(id=name, read=_reader(path), metadata=self.labels.get(name, {}))


class ParquetSource:
    """Rows of a Parquet file: `id` (text), `image` (the picture's bytes, or an object with `bytes`), and metadata.

    Every other column of text, numbers or truth values becomes metadata; the others are left out.

    Raises DataError: it cannot be read, or lacks a column.
    """

    labels: Mapping[str, Metadata] = {}
    missing: list[tuple[str, str]] = []  # noqa: RUF012 - never changed

    def __init__(self, file: Path) -> None:
        try:
            self._file = pq.ParquetFile(file)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{file} cannot be read as Parquet ({error})", field="folder") from error
        schema = self._file.schema_arrow
        for name in ("id", "image"):
            if name not in schema.names:
                raise DataError(f"{file} has the columns {', '.join(schema.names)}; {name!r} is needed")
        self._metadata = [f.name for f in schema if f.name not in ("id", "image") and _is_plain(f.type)]

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __iter__(self) -> Iterator[Item]:
        for batch in self._file.iter_batches(_ROWS, columns=["id", "image", *self._metadata]):
            for row in batch.to_pylist():
                yield Item(
                    id=row["id"], read=_holder(row["image"]), metadata={n: row[n] for n in self._metadata}
                )


def open_source(path: Path) -> PictureSource:
    """A folder, a .parquet file, or a text file with a path a line. Raises DataError."""
    if path.is_dir():
        return FileSource.folder(path)
    if not path.exists():
        raise DataError(f"{path} is not there; a folder, a .parquet file or a list of paths is expected")
    return ParquetSource(path) if path.suffix == ".parquet" else FileSource.listed(path)


def _walk(folder: Path) -> list[str]:
    """Relative POSIX paths of the pictures below `folder`, sorted; hidden files and folders left out."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        here = Path(root)
        found += [
            (here / f).relative_to(folder).as_posix()
            for f in files
            if Path(f).suffix.lower() in SUFFIXES and not f.startswith(".")
        ]
    return sorted(found)


def _reader(path: Path) -> Callable[[ImageLimits], bytes]:
    """Reads a file; a pipe or device with a picture's name would never end."""

    def read(limits: ImageLimits) -> bytes:
        if not path.is_file():
            raise ImageError("not a file")
        size = path.stat().st_size
        if size > limits.max_bytes:
            raise ImageError(f"{size} bytes; at most {limits.max_bytes}", code="too_many_bytes")
        return path.read_bytes()

    return read


def _holder(value: object) -> Callable[[ImageLimits], bytes]:
    data = value.get("bytes") if isinstance(value, dict) else value

    def read(_: ImageLimits) -> bytes:
        if not isinstance(data, bytes):
            raise ImageError("the row has no picture")
        return data

    return read


def _is_plain(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
    )
