"""Indexing a folder against the bare engine with the same threads: pictures per second, and resuming after a kill.

    python benchmarks/bench_index.py runs/demo/bundle          # 2,000 pictures of 256 x 256, about 2 minutes
    python benchmarks/bench_index.py runs/flowers --pictures 300 --threads 1
    python benchmarks/bench_index.py runs/demo/bundle --quick

The bare engine gets pixels that are there already, in the same batches. Goal: 0.9 of it or more, which needs a core for
decoding beside the engine's threads. Then a run is killed half way and run again: the gallery has to be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from dear_serve.gallery import Gallery, gallery_spec, index_folder
from dear_serve.preprocess import preprocess_bytes
from dear_serve.runtime.predict import Predictor

BATCH = 64


def render(folder: Path, count: int) -> None:
    """JPEGs of 256 x 256 with some structure."""
    rng = np.random.default_rng(0)
    for i in range(count):
        small = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(small).resize((256, 256), Image.Resampling.BICUBIC).save(
            folder / f"{i:06d}.jpg", quality=85
        )


def bare(predictor: Predictor, folder: Path, count: int) -> float:
    """Pictures a second of the engine alone."""
    names = sorted(folder.glob("*.jpg"))[:BATCH]
    pixels = np.stack([preprocess_bytes(n.read_bytes(), predictor.bundle.manifest.preprocess) for n in names])
    predictor.engine.encode_image(pixels)
    start = time.perf_counter()
    for first in range(0, count, BATCH):
        predictor.engine.encode_image(pixels[: min(BATCH, count - first)])
    return count / (time.perf_counter() - start)


def content(gallery: Gallery) -> tuple[dict[str, str], int]:
    return gallery.hashes(), len(gallery)


def killed_and_resumed(args: argparse.Namespace, pictures: Path, folder: Path, seconds: float) -> Gallery:
    """A gallery whose first run was killed after about half of the time."""
    command = [
        sys.executable, "-m", "dear_serve.cli", "index", str(args.bundle), str(pictures), "--gallery", str(folder),
        "--engine", args.engine, "--threads", str(args.threads),
    ]  # fmt: skip
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(4 + seconds / 2)  # the start takes some seconds
    run.kill()
    run.wait()
    left = len(Gallery.open(folder)) if (folder / "pictures.lance").exists() else 0
    print(f"killed with {left} pictures written")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Gallery.open(folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--pictures", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1, help="of the engine (%(default)s)")
    parser.add_argument("--engine", choices=("onnx", "torch"), default="onnx")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="200 pictures, one round")
    args = parser.parse_args(argv)
    count, rounds = (200, 1) if args.quick else (args.pictures, args.rounds)
    engine, indexed = [], []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        root = Path(name)
        (root / "pictures").mkdir()
        render(root / "pictures", count)
        with Predictor.open(args.bundle, engine=args.engine, threads=args.threads) as predictor:
            for number in range(rounds):
                engine.append(bare(predictor, root / "pictures", count))
                gallery = Gallery.open(root / f"g{number}", create_for=gallery_spec(predictor))
                start = time.perf_counter()
                index_folder(predictor, gallery, root / "pictures", batch_size=BATCH)
                indexed.append(count / (time.perf_counter() - start))
            again = killed_and_resumed(args, root / "pictures", root / "killed", count / indexed[-1])
            same = content(again) == content(gallery)
    ratios = [i / e for i, e in zip(indexed, engine, strict=True)]
    print(
        f"bare engine {statistics.median(engine):.0f}, indexing {statistics.median(indexed):.0f} pictures/s"
    )
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"the same gallery after a kill: {same}")
    summary = {
        "pictures": count, "threads": args.threads, "bare": engine, "indexed": indexed, "ratios": ratios,
        "same_after_kill": same,
    }  # fmt: skip
    print(json.dumps(summary))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
