"""The joint graph against the two separate image graphs in ONNX Runtime. Claim: at most 0.72 of their time on ViT-B-16.

    python benchmarks/bench_joint.py [--base ViT-B-16/random] [--threads 1] [--quick]

Frozen and adapted features of the same pictures share blocks 1..J-1; with J at the last third the rest, two thirds of
the work, is done twice: (J-1 + 2 (L-J+1)) / 2L = 0.67 of two passes, a little less because the last blocks compute only
what is read. All graphs come from `dear-export`'s own exporter, in one run; the three are timed in turn, so that a
machine whose speed drifts is fair to all. Times are CPU seconds of this process; one ratio a round, medians with the
middle half.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from bench_image_tower import model_of

from dear_serve.io_spec import ALL_GRAPHS
from export import to_onnx

ROUNDS = 9
GRAPHS = ("zero_shot_image", "image", "joint")
GOAL = 0.72


def sessions_of(base: str, threads: int, folder: Path) -> tuple[dict[str, onnxruntime.InferenceSession], int]:
    """The three graphs, opened, and the picture size."""
    model = model_of(base)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    features = torch.eye(4, model.clip.config.embed_dim)
    wanted = {name: ALL_GRAPHS[name] for name in GRAPHS}
    traced = to_onnx.trace_graphs(model, features, opset=to_onnx.DEFAULT_OPSET)
    graphs = [next(traced) for _ in range(5)]  # those that take pixels come first
    to_onnx.write_graphs([(name, graph) for name, graph in graphs if name in wanted], folder, {})
    opened = {n: onnxruntime.InferenceSession(str(folder / s.file), options) for n, s in wanted.items()}
    return opened, model.clip.config.vision.image_size


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def main() -> None:
    """Print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", default="ViT-B-16/random")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="3 rounds of batch 1")
    args = parser.parse_args()
    rounds, batches = (3, (1,)) if args.quick else (ROUNDS, (1, 8))
    torch.set_num_threads(args.threads)
    print(f"{args.base}, {args.threads} thread(s), CPU ms, medians of {rounds} rounds (middle half)")
    print(f"{'batch':>6}{'zero-shot':>11}{'adapted':>10}{'joint':>10}{'joint / both':>20}")
    ratios: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        sessions, size = sessions_of(args.base, args.threads, Path(folder))
        for batch in batches:
            pixels = np.random.default_rng(0).standard_normal((batch, 3, size, size)).astype(np.float32)
            times: dict[str, list[float]] = {name: [] for name in GRAPHS}
            for _ in range(rounds + 1):
                for name, session in sessions.items():
                    start = time.process_time()
                    session.run(None, {"pixels": pixels})
                    times[name].append(1000 * (time.process_time() - start))
            plain, adapted, joint = (times[name][1:] for name in GRAPHS)
            low, ratio, high = quartiles([j / (p + a) for p, a, j in zip(plain, adapted, joint, strict=True)])
            ratios[batch] = round(ratio, 4)
            medians = "".join(
                f"{statistics.median(t):>{w}.1f}" for t, w in ((plain, 11), (adapted, 10), (joint, 10))
            )
            print(f"{batch:>6}{medians}{ratio:>8.3f} ({low:.3f}-{high:.3f})")
    report = {"bench": "joint", "base": args.base, "threads": args.threads, "ratio": ratios, "goal": GOAL}
    print(json.dumps({**report, "held": max(ratios.values()) <= GOAL}))


if __name__ == "__main__":
    main()
