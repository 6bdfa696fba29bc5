"""A gallery as one Parquet file and back, and a gallery's pictures re-embedded for another bundle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dear_serve.errors import DataError, GalleryError
from dear_serve.gallery.indexer import IndexReport, VectorSource, gallery_spec, index_pictures
from dear_serve.gallery.schema import Metadata, spec_of, vector_column
from dear_serve.gallery.sources import FileSource, Item
from dear_serve.gallery.store import Gallery, Record
from dear_serve.preprocess import ImageLimits

__all__ = ["export_parquet", "import_parquet", "migrate"]

_ROWS = 256


def export_parquet(gallery: Gallery, file: Path) -> int:
    """Write every picture (ids, vectors, metadata, thumbnails, hashes) and the specification; how many there were.

    The file appears whole or not at all. Raises DataError when it cannot be written.
    """
    schema, batches = gallery.batches()
    partial = file.with_name(file.name + ".partial")
    count = 0
    try:
        with pq.ParquetWriter(partial, schema, compression="zstd") as writer:
            for batch in batches:
                writer.write_table(pa.Table.from_batches([batch]).select(schema.names).cast(schema))
                count += len(batch)
        partial.replace(file)
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror or error}") from error
    return count


def import_parquet(folder: Path, file: Path, *, progress: Callable[[int, int], None] | None = None) -> int:
    """Add the pictures of an exported file to the gallery in `folder`, made when it is not there; how many there were.

    Run again after a kill, it ends with the same gallery: pictures are replaced by id.

    Raises DataError (no such export), GalleryError (a gallery made with another bundle).
    """
    try:
        source = pq.ParquetFile(file)
        spec = spec_of(source.schema_arrow)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{file} cannot be read as Parquet ({error})") from error
    except GalleryError as error:
        raise DataError(f"{file} is no exported gallery; make one with dear-serve gallery export") from error
    gallery = Gallery.open(folder, create_for=spec)
    done, total = 0, int(source.metadata.num_rows)
    for batch in source.iter_batches(_ROWS * 4):
        vectors = {
            name: np.asarray(batch.column(vector_column(name)).flatten(), dtype=np.float32).reshape(-1, width)
            for name, width in spec.columns.items()
        }
        ids, hashes, metadata, thumbnails = (
            batch.column(n).to_pylist() for n in ("id", "hash", "metadata", "thumbnail")
        )
        gallery.add(ids, vectors, [json.loads(m) for m in metadata], thumbnails, hashes)
        done += len(batch)
        if progress:
            progress(done, total)
    return done


class _Stored:
    """A gallery's pictures: their files where `files` has them, else their thumbnails."""

    labels: Mapping[str, Metadata] = {}
    missing: list[tuple[str, str]] = []  # noqa: RUF012 - never changed

    def __init__(self, gallery: Gallery, files: FileSource | None) -> None:
        self._gallery = gallery
        self._files = {} if files is None else {item.id: item for item in files}
        self._ids = sorted(gallery.hashes())

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Item]:
        ids = iter(self._ids)
        while part := list(islice(ids, _ROWS)):
            for record in self._gallery.get(part):
                original = self._files.get(record.id)
                read = original.read if original else _thumbnail_of(record)
                yield Item(id=record.id, read=read, metadata=record.metadata)


def migrate(
    source: VectorSource,
    folder: Path,
    files: FileSource | None = None,
    *,
    batch_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> IndexReport:
    """Re-embed a gallery's pictures for another bundle; ids, metadata and thumbnails stay.

    The new gallery grows beside the old one (NAME.migrating) and takes its place at the end, so a killed run
    resumes and the old one can be searched meanwhile; open it again afterwards. Nothing may be added meanwhile.

    Args:
        source: the predictor of the new bundle.
        folder: of the gallery.
        files: the pictures themselves; those it lacks are made of their thumbnails (up to 256 x 256).

    Raises GalleryError: there is no gallery, or an earlier migration was for yet another bundle. A picture that can no
    longer be read stops nothing and is in the report; then the old gallery stays in place.
    """
    folder = Path(folder)
    fresh, old = (folder.with_name(folder.name + end) for end in (".migrating", ".old"))
    if not folder.exists() and fresh.exists() and old.exists():
        fresh.rename(folder)  # killed between the two renames below
    gallery = Gallery.open(folder)
    if gallery.spec == gallery_spec(source):
        shutil.rmtree(old, ignore_errors=True)
        return IndexReport(added=0, skipped=len(gallery), bad=())
    target = Gallery.open(fresh, create_for=gallery_spec(source))
    report = index_pictures(source, target, _Stored(gallery, files), batch_size=batch_size, progress=progress)
    if not report.bad:
        folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    return report


def _thumbnail_of(record: Record) -> Callable[[ImageLimits], bytes]:
    return lambda _: record.thumbnail
