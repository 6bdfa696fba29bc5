"""Three ways to join requests into batches in one process. Claim: ours adds least at rest and is as fast under load.

    python benchmarks/bench_batching.py [--clients 64] [--seconds 5]

The engine is ONNX Runtime on dear-mini's image tower; clients are coroutines that ask for one picture each, again and
again. Ours (`dear_serve.runtime.batching`) is asked from threads, as the service does; BentoML's dispatcher and, where
it is installed, `batched` (pip install batched) from the event loop, as they are made to be. `none` is a thread a call
and a lock. The ways take turns, and figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import statistics
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from bench_service import BATCH, ROOT, made

from dear_serve.runtime import open_bundle
from dear_serve.runtime.batching import BatchedEngine, Batcher

Ask = Callable[[Any], Awaitable[Any]]
ROUNDS = 3


def ours(engine: Any, pool: ThreadPoolExecutor, close: contextlib.ExitStack) -> Ask:
    """A thread a call, waiting for the batcher's."""
    batcher = close.enter_context(contextlib.closing(Batcher(max_rows=BATCH)))
    batched = BatchedEngine(engine, batcher)

    async def ask(row: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, batched.encode_image, row)

    return ask


def none(engine: Any, pool: ThreadPoolExecutor, _: contextlib.ExitStack) -> Ask:
    """One call after the other."""
    lock = threading.Lock()

    def run(row: Any) -> Any:
        with lock:
            return engine.encode_image(row)

    async def ask(row: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, run, row)

    return ask


def bentoml(engine: Any, pool: ThreadPoolExecutor, close: contextlib.ExitStack) -> Ask:
    """BentoML's own, not public: what its `batchable` methods use."""
    from bentoml._internal.marshal.dispatcher import CorkDispatcher

    dispatcher: Any = CorkDispatcher(
        max_latency_in_ms=60_000,
        max_batch_size=BATCH,
        fallback=lambda: None,
        get_batch_size=lambda job: len(job),
    )

    async def run(rows: Any) -> list[Any]:
        joined = np.concatenate(list(rows))
        found = await asyncio.get_running_loop().run_in_executor(pool, engine.encode_image, joined)
        return list(found.cls)

    close.callback(dispatcher.shutdown)
    return dispatcher(run)  # type: ignore[no-any-return]


def batched(engine: Any, pool: ThreadPoolExecutor, _: contextlib.ExitStack) -> Ask:
    """The library of that name."""
    from batched import aio

    @aio.dynamically(batch_size=BATCH, timeout_ms=1.0, small_batch_threshold=1)
    async def run(rows: list[Any]) -> list[Any]:
        joined = np.concatenate(rows)
        found = await asyncio.get_running_loop().run_in_executor(pool, engine.encode_image, joined)
        return list(found.cls)

    async def ask(row: Any) -> Any:
        return (await run([row]))[0]

    return ask


async def measure(ask: Ask, rows: Any, clients: int, seconds: float) -> tuple[float, float]:
    """Calls a second, and the median call in ms."""
    end, times = time.perf_counter() + seconds, []

    async def client(row: Any) -> None:
        while (start := time.perf_counter()) < end:
            await ask(row)
            times.append(time.perf_counter() - start)

    begin = time.perf_counter()
    await asyncio.gather(*(client(rows[i : i + 1]) for i in range(clients)))
    return len(times) / (time.perf_counter() - begin), 1000 * statistics.median(times)


async def compare(engine: Any, size: int, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Every way, in turn, at rest and under load."""
    ways = {"none": none, "ours": ours, "bentoml": bentoml}
    if importlib.util.find_spec("batched"):
        ways["batched"] = batched
    rows = np.random.default_rng(0).standard_normal((args.clients, 3, size, size)).astype(np.float32)
    with contextlib.ExitStack() as close:
        pool = close.enter_context(ThreadPoolExecutor(args.clients))
        asks = {name: way(engine, pool, close) for name, way in ways.items()}
        seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
        for ask in asks.values():  # BentoML's dispatcher learns from its first calls
            await measure(ask, rows, 8, args.seconds / 2)
        for _ in range(ROUNDS):
            for name, ask in asks.items():
                rest = await measure(ask, rows, 1, args.seconds / 2)
                load = await measure(ask, rows, args.clients, args.seconds)
                seen[name].append((rest[1], *load))
    keys = ("rest_ms", "rps", "load_ms")
    return {
        name: {key: round(statistics.median(r[i] for r in found), 2) for i, key in enumerate(keys)}
        for name, found in seen.items()
    }


def main() -> None:
    """Print a table, then one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench")
    args = parser.parse_args()
    bundle = made("dear-mini", args.work)
    size = json.loads((bundle / "dear.json").read_text())["preprocess"]["size"]
    engine = open_bundle(bundle, "onnx", threads=args.threads)
    found = asyncio.run(compare(engine, size, args))
    engine.close()
    print(f"{'way':>10}{'1 client, ms':>14}{f'{args.clients} clients, a second':>24}{'ms':>10}")
    for name, row in found.items():
        print(f"{name:>10}{row['rest_ms']:>14.2f}{row['rps']:>24.1f}{row['load_ms']:>10.1f}")
    print(json.dumps({"bench": "batching", "clients": args.clients, "threads": args.threads, "ways": found}))


if __name__ == "__main__":
    main()
