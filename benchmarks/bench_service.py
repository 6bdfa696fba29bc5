"""The service against the bare engine, and under a load it cannot bear.

    python benchmarks/bench_service.py --short                 about 6 minutes, after ViT-B-16 was exported once
    python benchmarks/bench_service.py --soak 600              10 minutes at twice the sustainable rate, dear-mini
    python benchmarks/bench_service.py --quick                 a minute on dear-mini: see that it works

Claims: at 64 clients at least 90 % of what the engine alone does on batches, ViT-B-16; at rest at most 5 ms more than
preprocessing and the engine; start to ready under 3 s for dear-mini; under too much load only 200, 429 and 503,
memory flat, full speed again within 5 s. The engine alone is measured in this process before and after each server,
with the same threads and the service's largest batch; the load comes from a process of its own and uses the same cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from load_client import pictures
from PIL import Image

from dear_serve.config import PreprocessConfig
from dear_serve.launch import serve_command, serve_environment, server_process
from dear_serve.preprocess import preprocess_bytes
from dear_serve.runtime import open_bundle

ROOT = Path(__file__).parents[1]
BATCH = 16  # the service's own on a CPU
SIZES = ("640x480", "4000x3000")
CLIENTS = (1, 8, 64)


def engine_rate(bundle: Path, threads: int, seconds: float) -> dict[str, float]:
    """Pictures a second on batches of 16, and ms of a single picture: encode_image and nothing else."""
    engine = open_bundle(bundle, "onnx", threads=threads, verify=False)
    try:
        size = json.loads((bundle / "dear.json").read_text())["preprocess"]["size"]
        pixels = np.random.default_rng(0).standard_normal((BATCH, 3, size, size)).astype(np.float32)
        engine.encode_image(pixels)
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            engine.encode_image(pixels)
            count += BATCH
        rate = count / (time.perf_counter() - start)
        single = []
        for _ in range(20):
            start = time.perf_counter()
            engine.encode_image(pixels[:1])
            single.append(time.perf_counter() - start)
    finally:
        engine.close()
    return {"rps": rate, "single_ms": 1000 * statistics.median(single)}


def preprocess_ms(bundle: Path, size: str) -> float:
    """Median of one picture in one thread."""
    config = PreprocessConfig.from_dict(json.loads((bundle / "dear.json").read_text())["preprocess"])
    data, times = pictures(size)[0], []
    for _ in range(15):
        start = time.perf_counter()
        preprocess_bytes(data, config)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


class Server:
    """A running server: its port, its memory, its batches."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port

    def memory(self) -> float:
        """Resident MB of the process that answers, the largest of the tree."""
        parent = psutil.Process(self.process.pid)
        sizes = [0]
        for child in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                sizes.append(child.memory_info().rss)
        return round(max(sizes) / 2**20, 1)

    def get(self, path: str) -> str:
        """Text of a GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def batches(self) -> tuple[float, float]:
        """Pictures run, and runs, so far."""
        text = self.get("/metrics")
        values = [re.search(rf'dear_batch_size_{n}{{kind="image"}} (\S+)', text) for n in ("sum", "count")]
        return tuple(float(v.group(1)) if v else 0.0 for v in values)  # type: ignore[return-value]

    def load(self, **options: Any) -> dict[str, Any]:
        """Run the load client; its summary and the mean batch meanwhile."""
        before = self.batches()
        arguments = [item for k, v in options.items() for item in (f"--{k}", str(v))]
        command = [
            sys.executable,
            str(Path(__file__).with_name("load_client.py")),
            str(self.port),
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = self.batches()
        found: dict[str, Any] = json.loads(done.stdout)
        runs = after[1] - before[1]
        return {**found, "batch": round((after[0] - before[0]) / runs, 2) if runs else 0.0}


@contextlib.contextmanager
def served(bundle: Path, threads: int) -> Iterator[tuple[Server, float]]:
    """A server on this bundle, ready, and the seconds that took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = serve_environment(bundle, threads=threads)
    log = Path(tempfile.gettempdir()) / f"bench-service-{port}.log"
    start = time.perf_counter()
    with server_process(serve_command(host="127.0.0.1", port=port), environment, log=log) as process:
        server = Server(process, port)
        while True:
            with contextlib.suppress(OSError):
                server.get("/readyz")
                break
            if process.poll() is not None:
                raise SystemExit(f"the server ended; see {log}")
            time.sleep(0.02)
        yield server, time.perf_counter() - start
    log.unlink()


def compare(name: str, bundle: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Engine, service under each load, engine again."""
    bare = [engine_rate(bundle, args.threads, args.seconds)]
    alone = {size: preprocess_ms(bundle, size) for size in args.sizes}
    rows = []
    with served(bundle, args.threads) as (server, ready):
        print(f"\n{name}: ready after {ready:.2f} s, {server.memory():.0f} MB")
        print(
            f"{'picture':>10}{'clients':>8}{'rps':>9}{'p50 ms':>9}{'p95':>9}{'p99':>9}{'batch':>7}{'MB':>7}  statuses"
        )
        server.load(clients=8, seconds=2, size=SIZES[0])  # warm
        start_memory = server.memory()
        for size in args.sizes:
            for clients in args.clients:
                found = server.load(clients=clients, seconds=args.seconds, size=size)
                row = {"size": size, "clients": clients, **found, "mb": server.memory()}
                rows.append(row)
                print(
                    f"{size:>10}{clients:>8}{row['rps']:>9.1f}{row['p50_ms']:>9.1f}{row['p95_ms']:>9.1f}{row['p99_ms']:>9.1f}"
                    f"{row['batch']:>7.1f}{row['mb']:>7.0f}  {row['statuses']}"
                )
        end_memory = server.memory()
    bare.append(engine_rate(bundle, args.threads, args.seconds))
    rate = statistics.mean(b["rps"] for b in bare)
    single = statistics.median(b["single_ms"] for b in bare)
    share = {r["size"]: round(r["rps"] / rate, 3) for r in rows if r["clients"] == max(args.clients)}
    added = {r["size"]: round(r["p50_ms"] - alone[r["size"]] - single, 2) for r in rows if r["clients"] == 1}
    print(
        f"engine alone: {bare[0]['rps']:.1f} and {bare[1]['rps']:.1f} pictures/s on batches of {BATCH}; "
        f"{single:.1f} ms for one"
    )
    print(f"preprocessing, one thread: {', '.join(f'{s} {ms:.1f} ms' for s, ms in alone.items())}")
    print(f"service at {max(args.clients)} clients / engine alone: {share}; added at rest, ms: {added}")
    return {
        "ready_s": round(ready, 2),
        "engine_rps": [round(b["rps"], 2) for b in bare],
        "engine_single_ms": round(single, 2),
        "preprocess_ms": {s: round(ms, 2) for s, ms in alone.items()},
        "share": share,
        "added_ms": added,
        "memory_mb": [start_memory, end_memory],
        "rows": rows,
    }


def soak(bundle: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Twice the sustainable rate for a long time, then the sustainable rate again."""
    with served(bundle, args.threads) as (server, _):
        server.load(clients=64, seconds=5, size=SIZES[0])
        before = server.load(clients=64, seconds=10, size=SIZES[0])
        samples: list[float] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(1):
                samples.append(server.memory())

        watcher = threading.Thread(target=watch)
        watcher.start()
        under = server.load(rate=2 * before["rps"], seconds=args.soak, size=SIZES[0])
        done.set()
        watcher.join()
        after = server.load(clients=64, seconds=5, size=SIZES[0])
    # The client may take a minute to start and to end beside a busy server: those seconds are no part of the soak.
    warm = samples[min(60, len(samples) // 4) : int(args.soak)] or samples
    spread = (max(warm) - min(warm)) / statistics.median(warm)
    odd = {k: v for k, v in under["statuses"].items() if k not in ("200", "429", "503", "-1")}
    print(f"sustainable: {before['rps']:.0f} a second; {args.soak:.0f} s at twice that: {under['statuses']}")
    print(f"memory after warm-up: {min(warm):.0f} to {max(warm):.0f} MB ({100 * spread:.1f} %)")
    print(f"right after: {after['rps']:.0f} a second, {after['statuses']}")
    return {
        "before": before,
        "under": under,
        "after": after,
        "memory_mb": [min(warm), max(warm)],
        "memory_spread": round(spread, 4),
        "unexpected": odd,
        "recovered": round(after["rps"] / before["rps"], 3),
    }


def draft(bundle: Path) -> dict[str, Any]:
    """libjpeg's draft mode: how much faster, and how far from open_clip's transform."""
    import io

    from dear_serve.preprocess import preprocess

    config = PreprocessConfig.from_dict(json.loads((bundle / "dear.json").read_text())["preprocess"])
    found = {}
    for size in SIZES:
        data = pictures(size)[0]
        times: dict[str, list[float]] = {"full": [], "draft": []}
        pixels = {}
        for _ in range(7):
            for name in times:
                start = time.perf_counter()
                image = Image.open(io.BytesIO(data))
                if name == "draft":
                    image.draft("RGB", (2 * config.size, 2 * config.size))
                pixels[name] = preprocess(image, config)
                times[name].append(time.perf_counter() - start)
        difference = np.abs(pixels["full"] - pixels["draft"])
        found[size] = {
            "full_ms": round(1000 * statistics.median(times["full"]), 1),
            "draft_ms": round(1000 * statistics.median(times["draft"]), 1),
            "max_difference": round(float(difference.max()), 4),
            "mean_difference": round(float(difference.mean()), 4),
        }
        print(f"{size}: {found[size]} (normalised pixels; preprocessing allows no difference at all)")
    return found


def main() -> None:
    """Print tables, then one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--seconds", type=float, default=15, help="of each measurement (default: %(default)s)"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench", help="where bundles are kept")
    parser.add_argument("--short", action="store_true", help="8 s each")
    parser.add_argument("--quick", action="store_true", help="2 s each, dear-mini alone, small pictures")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="only this, on dear-mini")
    parser.add_argument("--draft", action="store_true", help="only JPEG draft mode against full decoding")
    args = parser.parse_args()
    args.clients, args.sizes = CLIENTS, SIZES
    if args.short:
        args.seconds = 8
    if args.quick:
        args.seconds, args.sizes = 2, SIZES[:1]
    names = ["dear-mini"] if args.quick or args.soak or args.draft else ["dear-mini", "ViT-B-16/random"]
    bundles = {name: made(name, args.work) for name in names}
    result: dict[str, Any] = {"bench": "service", "threads": args.threads}
    if args.soak:
        result["soak"] = soak(bundles["dear-mini"], args)
    elif args.draft:
        result["draft"] = draft(bundles["dear-mini"])
    else:
        result |= {name: compare(name, bundle, args) for name, bundle in bundles.items()}
    print(json.dumps(result))


def made(name: str, work: Path) -> Path:
    """The bundle on a base, made in a process of its own where it isn't there: this one stays without torch."""
    folder = work / name.replace("/", "-").lower()
    if not (folder / "onnx").is_dir():
        script = Path(__file__).with_name("random_bundle.py")
        subprocess.run([sys.executable, str(script), name, str(folder)], check=True, cwd=ROOT)
    return folder


if __name__ == "__main__":
    main()
