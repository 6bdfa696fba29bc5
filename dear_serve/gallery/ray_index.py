"""Indexing with Ray Data: many workers decode and embed, one process writes, so LanceDB sees a single writer.

Ray replaces a worker that dies and does its pictures again; pictures are replaced by id, so none is there twice.
A killed run resumes: what the gallery holds with the same content is not embedded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dear_serve.errors import InputError, MissingDependencyError
from dear_serve.gallery.indexer import Bad, IndexReport, gallery_spec, prepared, vectors_of
from dear_serve.gallery.schema import GallerySpec, new_kinds
from dear_serve.gallery.sources import FileSource, Item
from dear_serve.gallery.store import Gallery

__all__ = ["RayOptions", "index_with_ray"]

_WRITE = 512


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """How the work is spread.

    Attributes:
        workers: processes that embed, each with an engine of its own.
        threads: CPU threads of each engine; also the CPUs Ray reserves for it.
        batch_size: pictures an engine gets at once.
        address: of a running Ray cluster; None starts one on this machine.
    """

    workers: int = 2
    threads: int = 1
    batch_size: int = 64
    address: str | None = None
    engine: str = "onnx"

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; at least 1", field=name)


class _Worker:
    """One process's engine; called with batches of columns by Ray Data."""

    def __init__(self, bundle: str, options: RayOptions) -> None:
        from dear_serve.runtime.predict import Predictor

        self._predictor = Predictor.open(bundle, engine=options.engine, threads=options.threads)  # type: ignore[arg-type]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Columns id, path, metadata, known -> id, hash, metadata, thumbnail, reason and a vector of each name.

        `reason` is empty for a picture that was embedded, "=" for one the gallery has, else why it is bad.
        """
        config = self._predictor.bundle.manifest.preprocess
        rows: list[dict[str, Any]] = []
        for id_, path, metadata, known in zip(
            batch["id"], batch["path"], batch["metadata"], batch["known"], strict=True
        ):
            item = FileSource({str(id_): Path(path)}, {str(id_): json.loads(metadata)})
            found = prepared(next(iter(item)), config, str(known))
            row = {
                "id": str(id_),
                "metadata": metadata,
                "hash": "",
                "thumbnail": b"",
                "reason": "=",
                "pixels": None,
            }
            if isinstance(found, tuple):
                row["reason"] = found[1] or "bad"
            elif found is not None:
                row |= {
                    "hash": found.hash,
                    "thumbnail": found.thumbnail,
                    "reason": "",
                    "pixels": found.pixels,
                }
            rows.append(row)
        return self._embedded(rows)

    def _embedded(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        widths = self._predictor.columns
        vectors = {n: np.zeros((len(rows), r), dtype=np.float32) for n, r in widths.items()}
        kept = [i for i, row in enumerate(rows) if row["pixels"] is not None]
        if kept:
            found, usable = vectors_of(self._predictor, np.stack([rows[i]["pixels"] for i in kept]))
            for name, values in found.items():
                vectors[name][kept] = values
            for i, good in zip(kept, usable, strict=True):
                if not good:
                    rows[i]["reason"] = "the model gives it no usable vector"
        columns: dict[str, Any] = {
            n: np.array([row[n] for row in rows], dtype=object)
            for n in ("id", "hash", "metadata", "thumbnail", "reason")
        }
        return columns | {f"v_{n}": values for n, values in vectors.items()}


@dataclass
class _Writer:
    """Adds what the workers give, a few hundred at a time."""

    gallery: Gallery
    added: int = 0
    skipped: int = 0
    bad: list[Bad] = field(default_factory=list)
    _kept: list[dict[str, Any]] = field(default_factory=list)

    def take(self, batch: dict[str, Any]) -> None:
        """Queue one batch's rows."""
        for i, reason in enumerate(batch["reason"]):
            if reason == "=":
                self.skipped += 1
            elif reason:
                self.bad.append((str(batch["id"][i]), str(reason)))
            else:
                self._kept.append({name: values[i] for name, values in batch.items()})
        if len(self._kept) >= _WRITE:
            self.flush()

    def flush(self) -> None:
        """Write what is queued."""
        rows = self._kept
        if rows:
            self.added += self.gallery.add(
                [str(r["id"]) for r in rows],
                {n: np.stack([r[f"v_{n}"] for r in rows]) for n in self.gallery.spec.columns},
                [json.loads(r["metadata"]) for r in rows],
                [bytes(r["thumbnail"]) for r in rows],
                [str(r["hash"]) for r in rows],
            )
        self._kept = []


def index_with_ray(
    bundle: Path,
    gallery: Path,
    pictures: FileSource,
    *,
    options: RayOptions,
    worker: type[Any] = _Worker,
    progress: Callable[[int, int], None] | None = None,
) -> IndexReport:
    """As `dear_serve.gallery.index_pictures`, over the workers of a Ray cluster; the same rows.

    Args:
        bundle: folder of the bundle; every machine of the cluster needs it, and the pictures, under the same path.
        gallery: folder or object-store URI of the gallery, made when it is not there.
        pictures: files; a folder or a list.
        worker: what embeds (for tests).
        progress: called with pictures done and pictures in all.

    Raises MissingDependencyError without Ray, GalleryError (made with another bundle), InputError (bad_metadata).
    """
    ray = _import_ray()
    store = Gallery.open(gallery, create_for=_spec(bundle, options))
    new_kinds(pictures.labels.values(), store.stats().metadata)
    hashes = store.hashes()
    items = [_row(item, pictures, hashes) for item in pictures]
    writer = _Writer(store)
    writer.bad += pictures.missing
    if items:
        started = not ray.is_initialized()
        if started:
            local = options.workers * options.threads + 1
            where = {"address": options.address} if options.address else {"num_cpus": local}
            ray.init(include_dashboard=False, log_to_driver=False, **where)
        try:
            parts = max(options.workers * 4, len(items) // (options.batch_size * 8))
            data = ray.data.from_items(items, override_num_blocks=min(parts, len(items)))
            found = data.map_batches(
                worker,
                fn_constructor_args=(str(Path(bundle).absolute()), options),
                batch_size=options.batch_size,
                compute=ray.data.ActorPoolStrategy(size=options.workers),
                num_cpus=options.threads,
                max_restarts=-1,
                max_task_retries=-1,
            )
            done = 0
            for batch in found.iter_batches(batch_size=options.batch_size, batch_format="numpy"):
                writer.take(batch)
                done += len(batch["id"])
                if progress:
                    progress(done, len(items))
        finally:
            if started:
                ray.shutdown()
    writer.flush()
    if writer.added:
        store.compact()
    return IndexReport(added=writer.added, skipped=writer.skipped, bad=tuple(writer.bad))


def _row(item: Item, pictures: FileSource, hashes: dict[str, str]) -> dict[str, str]:
    path = str(pictures.files[item.id].absolute())
    return {
        "id": item.id,
        "path": path,
        "metadata": json.dumps(dict(item.metadata)),
        "known": hashes.get(item.id, ""),
    }


def _spec(bundle: Path, options: RayOptions) -> GallerySpec:
    from dear_serve.runtime.predict import Predictor

    with Predictor.open(bundle, engine=options.engine, threads=options.threads) as predictor:  # type: ignore[arg-type]
        return gallery_spec(predictor)


def _import_ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise MissingDependencyError(
            'indexing with Ray needs it: pip install "dear-serve[scale]"', field="engine"
        ) from error
    return ray
