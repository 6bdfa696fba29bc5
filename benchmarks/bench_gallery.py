"""Search in a gallery of many pictures, beside faiss and usearch on the same vectors: time, recall, build, size.

    pip install faiss-cpu usearch
    python benchmarks/bench_gallery.py                  # 1,000,000 pictures, under 8 minutes on 2 cores, 12 GB
    python benchmarks/bench_gallery.py --quick          # 20,000 pictures

Vectors are random and clustered: 1,000 centers, every vector a center plus as much noise. One wide column ("class") and
two narrow ones; queries are vectors of the same kind that are not stored. The gallery's time is a whole
`Gallery.search`: ranking, and ids, metadata and thumbnails read from the disk. The peers' is their search call alone,
of the wide column, which is all they hold; a peer that is not built within `--peer-seconds` is measured with the rows
it has by then, and the table says how many. Recall at 10 is against brute force over the same rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dear_serve.gallery import Gallery, GallerySpec, Query

COLUMNS = {"color": 10, "shape": 9}
WEIGHTS = {
    "narrow": {"color": 1.0},
    "wide": {"class": 1.0},
    "three": {"class": 0.5, "color": 1.0, "shape": 0.5},
}
NEAREST = 10


def clustered(rows: int, width: int, rng: np.random.Generator, centers: np.ndarray) -> np.ndarray:
    """(rows, width) float32 of length 1: a random center plus noise of the same length."""
    values = rng.standard_normal((rows, width), dtype=np.float32)
    for first in range(0, rows, 50_000):
        part = values[first : first + 50_000]
        part += centers[rng.integers(0, len(centers), len(part))]
        part /= np.linalg.norm(part, axis=1, keepdims=True)
    return values


def best(scores: np.ndarray, k: int = NEAREST) -> list[set[int]]:
    """Numbers of the k largest of each column of (n, q)."""
    return [set(column.tolist()) for column in np.argpartition(-scores, k - 1, axis=0)[:k].T]


def product(matrix: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """(n, q) scores, in pieces."""
    return np.concatenate([matrix[i : i + 50_000] @ queries.T for i in range(0, len(matrix), 50_000)])


def timed(
    call: Callable[[int], Sequence[int]], truth: list[set[int]], name: str, **more: Any
) -> dict[str, Any]:
    """One row of the table: `call` of each query's number, after a first one that is not counted."""
    call(0)
    seconds, found = [], 0
    for number, expected in enumerate(truth):
        start = time.perf_counter()
        answer = call(number)
        seconds.append(time.perf_counter() - start)
        found += len(expected & set(answer))
    p50, p95 = np.percentile(np.array(seconds) * 1000, [50, 95])
    wanted = sum(len(t) for t in truth)
    return {"name": name, "p50_ms": float(p50), "p95_ms": float(p95), "recall": found / wanted, **more}


def fill(folder: Path, vectors: dict[str, np.ndarray], prices: np.ndarray) -> tuple[Gallery, float]:
    """A gallery with the vectors, ids in the order of the rows, and the seconds it took."""
    spec = GallerySpec(
        bundle_sha256="b", base_sha256="a", columns={n: v.shape[1] for n, v in vectors.items()}
    )
    gallery = Gallery.open(folder, create_for=spec)
    start, rows = time.perf_counter(), len(prices)
    for first in range(0, rows, 20_000):
        part = slice(first, min(first + 20_000, rows))
        ids = [f"{i:08d}" for i in range(part.start, part.stop)]
        gallery.add(
            ids,
            {n: v[part] for n, v in vectors.items()},
            [{"price": float(p)} for p in prices[part]],
            [b"thumbnail"] * len(ids),
            ids,
        )
    return gallery, time.perf_counter() - start


def ours(
    gallery: Gallery, vectors: dict[str, np.ndarray], queries: dict[str, np.ndarray], prices: np.ndarray
) -> list[dict[str, Any]]:
    """Rows of the table: the three weightings, filters off and on."""
    products = {n: product(vectors[n], queries[n]) for n in vectors}
    count = len(queries["class"])
    bounds = np.random.default_rng(7).uniform(0.1, 0.5, count)  # a filter of its own for each query
    rows = []
    for weights in WEIGHTS.values():
        scores = sum(np.float32(w) * products[n] for n, w in weights.items())
        for filtered in (False, True):
            seen = np.where(prices[:, None] < bounds[None], scores, -np.inf) if filtered else scores

            def call(
                number: int, weights: dict[str, float] = weights, filtered: bool = filtered
            ) -> list[int]:
                query = Query(
                    vectors={n: q[number] for n, q in queries.items()},
                    weights=weights,
                    filter=f"price < {bounds[number]}" if filtered else None,
                    top_k=NEAREST,
                )
                return [int(hit.id) for hit in gallery.search(query)]

            label = f"gallery, {' + '.join(weights)}{', filtered' if filtered else ''}"
            rows.append(timed(call, best(seen), label, rows=len(prices)))
    return rows


def faiss_peer(kind: str, vectors: np.ndarray, queries: np.ndarray, seconds: float) -> dict[str, Any]:
    """faiss: "flat", or "hnsw" with its usual 32 links, 40 looked at when adding and 128 when searching."""
    import faiss

    width = vectors.shape[1]
    if kind == "flat":
        index = faiss.IndexFlatIP(width)
    else:
        index = faiss.IndexHNSWFlat(width, 32, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = 40
        index.hnsw.efSearch = 128
    size, spent = grow(index.add, vectors, seconds)
    truth = best(product(vectors[:size], queries))
    return timed(
        lambda i: index.search(queries[i : i + 1], NEAREST)[1][0].tolist(), truth, f"faiss {kind}, class",
        rows=size, build_s=spent, bytes=size * width * 4 if kind == "flat" else len(faiss.serialize_index(index)),
    )  # fmt: skip


def usearch_peer(vectors: np.ndarray, queries: np.ndarray, seconds: float) -> dict[str, Any]:
    """usearch: HNSW of float32 with its own defaults, 128 looked at when searching."""
    from usearch.index import Index

    index = Index(ndim=vectors.shape[1], metric="ip", dtype="f32", expansion_search=128)
    added = 0

    def add(rows: np.ndarray) -> None:
        nonlocal added
        index.add(np.arange(added, added + len(rows)), rows)
        added += len(rows)

    size, spent = grow(add, vectors, seconds)
    truth = best(product(vectors[:size], queries))
    return timed(
        lambda i: index.search(queries[i], NEAREST).keys.tolist(), truth, "usearch hnsw, class",
        rows=size, build_s=spent, bytes=int(index.memory_usage),
    )  # fmt: skip


def grow(add: Callable[[np.ndarray], Any], vectors: np.ndarray, seconds: float) -> tuple[int, float]:
    """Add vectors until they are all there or the time is over: how many, and the seconds it took."""
    start = time.perf_counter()
    for first in range(0, len(vectors), 10_000):
        add(vectors[first : first + 10_000])
        spent = time.perf_counter() - start
        if spent > seconds:
            return min(first + 10_000, len(vectors)), spent
    return len(vectors), time.perf_counter() - start


def peers(vectors: np.ndarray, queries: np.ndarray, seconds: float) -> list[dict[str, Any]]:
    """Rows of the peers that are installed."""
    rows = []
    for call in (
        lambda: faiss_peer("flat", vectors, queries, seconds),
        lambda: faiss_peer("hnsw", vectors, queries, seconds),
        lambda: usearch_peer(vectors, queries, seconds),
    ):
        try:
            rows.append(call())
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
        gc.collect()
    return rows


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """The table as text."""
    lines = [f"{'':<40}{'rows':>10}{'p50 ms':>9}{'p95 ms':>9}{'recall@10':>11}{'build s':>9}{'MB':>8}"]
    for row in rows:
        build = f"{row['build_s']:.0f}" if "build_s" in row else ""
        size = f"{row['bytes'] / 1e6:.0f}" if "bytes" in row else ""
        lines.append(
            f"{row['name']:<40}{row['rows']:>10,}{row['p50_ms']:>9.1f}{row['p95_ms']:>9.1f}"
            f"{row['recall']:>11.3f}{build:>9}{size:>8}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=512, help="of the class column (%(default)s)")
    parser.add_argument("--queries", type=int, default=50)
    parser.add_argument("--peer-seconds", type=float, default=75, help="for building each peer (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="20,000 rows, 20 queries")
    args = parser.parse_args(argv)
    rows, count = (20_000, 20) if args.quick else (args.rows, args.queries)
    rng = np.random.default_rng(0)
    vectors, queries = {}, {}
    for name, width in {"class": args.width, **COLUMNS}.items():
        centers = rng.standard_normal((1000, width), dtype=np.float32)
        vectors[name] = clustered(rows, width, rng, centers)
        queries[name] = clustered(count, width, rng, centers)
    prices = rng.random(rows)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        gallery, added = fill(Path(folder) / "gallery", vectors, prices)
        start = time.perf_counter()
        gallery.prepare()
        prepared = time.perf_counter() - start
        table = ours(gallery, vectors, queries, prices)
        stats = gallery.stats()
        disk = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    memory = stats.bytes_in_memory
    del gallery
    gc.collect()
    table += peers(vectors["class"], queries["class"], args.peer_seconds)
    print(shown(table))
    print(
        f"gallery: {rows:,} pictures added in {added:.0f} s, read and indexed in {prepared:.0f} s; "
        f"{disk / 1e6:.0f} MB on disk, {memory / 1e6:.0f} MB in memory; indexes {stats.indexes}"
    )
    summary = {
        "rows": rows, "width": args.width, "added_s": added, "prepared_s": prepared, "disk_bytes": disk,
        "memory_bytes": memory, "table": table,
    }  # fmt: skip
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
