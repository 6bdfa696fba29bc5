"""Puts many pictures into a gallery: decoding in threads, the engine and the writing overlapped."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dear_serve.bundle import Bundle
from dear_serve.config import PreprocessConfig
from dear_serve.errors import DearError, OverloadError
from dear_serve.gallery.schema import GallerySpec, Metadata, check_id, check_metadata, new_kinds
from dear_serve.gallery.sources import FileSource, Item, PictureSource
from dear_serve.gallery.store import Gallery
from dear_serve.preprocess import DEFAULT_LIMITS, ImageLimits, decode_image, preprocess, thumbnail
from dear_serve.runtime.base import Engine, Float32, ImageFeatures

__all__ = [
    "Bad",
    "IndexReport",
    "Prepared",
    "VectorSource",
    "content_hash",
    "gallery_spec",
    "index_folder",
    "index_pictures",
    "prepared",
    "vectors_of",
]

# A write is one commit with a few synced files; fewer, larger ones cost less and lose more work to a kill.
_WRITE = 512
_MAX_DECODERS = 8

Bad = tuple[str, str]


class VectorSource(Protocol):
    """What an indexer needs of a predictor (`dear_serve.runtime.predict.Predictor`)."""

    bundle: Bundle
    engine: Engine

    @property
    def columns(self) -> dict[str, int]:
        """Width of each search vector."""

    def readout(self, features: ImageFeatures) -> dict[str, Float32]:
        """Search vectors (B, r) by name."""


@dataclass(frozen=True, kw_only=True)
class IndexReport:
    """What became of a folder's pictures."""

    added: int
    """New or changed ones, now in the gallery."""
    skipped: int
    """Already there, with the same content and metadata."""
    bad: tuple[Bad, ...]
    """Relative path and reason of each that could not be added."""


def gallery_spec(source: VectorSource) -> GallerySpec:
    """The specification of galleries that hold this predictor's vectors."""
    bundle = source.bundle
    return GallerySpec(
        bundle_sha256=bundle.sha256, base_sha256=bundle.manifest.base.sha256, columns=source.columns
    )


def content_hash(data: bytes, metadata: Metadata) -> str:
    """sha256 in hexadecimal of a picture's bytes and its metadata: unchanged, it need not be added again."""
    digest = hashlib.sha256(data)
    digest.update(json.dumps(metadata, sort_keys=True).encode())
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A decoded picture. pixels: (3, S, S) float32."""

    id: str
    hash: str
    metadata: Metadata
    pixels: Float32
    thumbnail: bytes


@dataclass(kw_only=True)
class _Pending:
    """Embedded pictures that wait to be written."""

    pictures: list[Prepared] = field(default_factory=list)
    vectors: list[dict[str, Float32]] = field(default_factory=list)

    def write(self, gallery: Gallery) -> int:
        """Add them all; how many there were."""
        if not self.pictures:
            return 0
        return gallery.add(
            [p.id for p in self.pictures],
            {n: np.concatenate([v[n] for v in self.vectors]) for n in self.vectors[0]},
            [p.metadata for p in self.pictures],
            [p.thumbnail for p in self.pictures],
            [p.hash for p in self.pictures],
        )


def prepared(
    item: Item, config: PreprocessConfig, known: str | None, *, limits: ImageLimits = DEFAULT_LIMITS
) -> Prepared | Bad | None:
    """The picture decoded, why it is bad, or None when `known` is its content hash: the gallery has it as it is."""
    try:
        check_id(item.id)
        metadata = check_metadata(item.metadata)
        data = item.read(limits)
        digest = content_hash(data, metadata)
        if known == digest:
            return None
        image = decode_image(data, limits=limits)
        return Prepared(
            id=item.id,
            hash=digest,
            metadata=metadata,
            pixels=preprocess(image, config),
            thumbnail=thumbnail(image),
        )
    except DearError as error:
        return str(item.id), error.message
    except OSError as error:
        return item.id, f"cannot be read: {error.strerror}"


def vectors_of(source: VectorSource, pixels: Float32) -> tuple[dict[str, Float32], npt.NDArray[np.bool_]]:
    """Search vectors of pixels (B, 3, S, S) by name, and (B,) which of them can be stored."""
    vectors = source.readout(source.engine.encode_image(pixels))
    usable: npt.NDArray[np.bool_] = np.all([_has_direction(rows) for rows in vectors.values()], axis=0)
    return vectors, usable


def _ahead(
    pool: ThreadPoolExecutor,
    prepare: Callable[[Item], Prepared | Bad | None],
    items: Iterable[Item],
    depth: int,
) -> Iterator[Prepared | Bad | None]:
    """`prepare` of every item, in order, at most `depth` of them decoded or being decoded at once."""
    rest = iter(items)
    waiting: deque[Future[Prepared | Bad | None]] = deque(
        pool.submit(prepare, item) for item in islice(rest, depth)
    )
    while waiting:
        result = waiting.popleft().result()
        for item in islice(rest, 1):
            waiting.append(pool.submit(prepare, item))
        yield result


class _Embedder:
    """Runs the engine batch by batch and writes in a thread of its own while the next batch runs."""

    def __init__(self, source: VectorSource, gallery: Gallery, writer: ThreadPoolExecutor) -> None:
        self._source = source
        self._gallery = gallery
        self._writer = writer
        self._pending = _Pending()
        self._writing: Future[int] | None = None
        self.added = 0
        self.bad: list[Bad] = []

    def embed(self, batch: list[Prepared]) -> None:
        """Embed B pictures and queue them for writing."""
        if not batch:
            return
        vectors, usable = vectors_of(self._source, np.stack([p.pixels for p in batch]))
        self.bad += [
            (p.id, "the model gives it no usable vector") for p, u in zip(batch, usable, strict=True) if not u
        ]
        self._pending.vectors.append({n: rows[usable] for n, rows in vectors.items()})
        self._pending.pictures += [p for p, u in zip(batch, usable, strict=True) if u]
        if len(self._pending.pictures) >= _WRITE:
            self.flush()

    def flush(self) -> None:
        """Begin to write what is queued, once the write before it has ended."""
        self.wait()
        self._writing = self._writer.submit(self._pending.write, self._gallery)
        self._pending = _Pending()

    def wait(self) -> None:
        """Return when the last write has ended; raises its error."""
        if self._writing is not None:
            self.added += self._writing.result()
            self._writing = None


def _has_direction(rows: Float32) -> npt.NDArray[np.bool_]:
    """(B,) which rows are finite and not zero."""
    norms = np.linalg.norm(rows, axis=1)
    usable: npt.NDArray[np.bool_] = np.isfinite(norms) & (norms > 0)
    return usable


def index_folder(
    source: VectorSource,
    gallery: Gallery,
    folder: Path,
    *,
    batch_size: int = 64,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> IndexReport:
    """Add the pictures below a folder to a gallery; as `index_pictures` with `FileSource.folder`.

    Ids are paths relative to the folder, with "/". Metadata comes from the folder's `labels.csv` (see
    `read_labels`), where there is one. Raises DataError too: no such folder, bad labels.csv.
    """
    return index_pictures(
        source,
        gallery,
        FileSource.folder(Path(folder)),
        batch_size=batch_size,
        threads=threads,
        progress=progress,
    )


def index_pictures(
    source: VectorSource,
    gallery: Gallery,
    pictures: PictureSource,
    *,
    batch_size: int = 64,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> IndexReport:
    """Add pictures to a gallery; what is there unchanged is skipped, so a killed run resumes.

    A bad picture is reported and never stops the others.

    Args:
        source: the predictor that made, or makes, the gallery's vectors.
        pictures: see `dear_serve.gallery.sources`.
        batch_size: pictures the engine gets at once.
        threads: decoding threads; default: the CPUs, at most 8.
        progress: called with pictures done and pictures in all, after each picture.

    Raises GalleryError (made with another bundle), InputError (bad_metadata: two kinds of values under one key).
    """
    gallery.spec.check_same(gallery_spec(source))
    new_kinds(pictures.labels.values(), gallery.stats().metadata)
    bad: list[Bad] = list(pictures.missing)
    skipped = 0
    batch: list[Prepared] = []
    known, config = gallery.hashes(), source.bundle.manifest.preprocess

    def prepare(item: Item) -> Prepared | Bad | None:
        return prepared(item, config, known.get(item.id))

    workers = threads or min(_MAX_DECODERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, "decode") as decoders, ThreadPoolExecutor(1, "write") as writer:
        embedder = _Embedder(source, gallery, writer)
        try:
            for done, item in enumerate(_ahead(decoders, prepare, pictures, 3 * batch_size), start=1):
                if item is None:
                    skipped += 1
                elif isinstance(item, Prepared):
                    batch.append(item)
                else:
                    bad.append(item)
                if len(batch) >= batch_size:
                    embedder.embed(batch)
                    batch = []
                if progress:
                    progress(done, len(pictures))
            embedder.embed(batch)
            embedder.flush()
            embedder.wait()
        finally:
            decoders.shutdown(cancel_futures=True)
    if embedder.added:
        # Housekeeping: other writers may leave no turn for it, and nothing is lost without it.
        with suppress(OverloadError):
            gallery.compact()
    return IndexReport(added=embedder.added, skipped=skipped, bad=tuple(bad + embedder.bad))
