"""The exported adapted image tower against the plain one in ONNX Runtime. Claim: at most 2 % slower on ViT-B-16.

    python benchmarks/bench_image_tower.py [--base ViT-B-16/random] [--threads 1]

Both graphs come from `dear-export`'s own exporter, in one run; the two are timed in turn, so that a machine whose speed
drifts is fair to both. Times are CPU seconds of this process.
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

from dear_serve import DearConfig, DearModel, Roles, load_base
from dear_serve.config import default_first_block
from export.to_onnx import DEFAULT_OPSET, export_graphs

ROUNDS = 9


def model_of(base: str) -> DearModel:
    """An adapted model with a third of the heads in each role."""
    clip = load_base(base).clip
    layers, heads = clip.config.vision.layers, clip.config.vision.heads
    config = DearConfig()
    roles = Roles.uniform(
        "mixed",
        layers=layers,
        heads_per_layer=heads,
        first_block=default_first_block(layers),
        attributes=config.attributes,
    )
    kinds = ("mixed", "generalization", "attribute")
    dealt = [
        {**head.to_dict(), "role": kinds[i % 3], "concept": config.attributes[i % 5]}
        for i, head in enumerate(roles.heads)
    ]
    return DearModel(clip, Roles.from_dict({**roles.to_dict(), "heads": dealt}), config).eval()


def main() -> None:
    """Print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--base", default="ViT-B-16/random")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = model_of(args.base)
    size, width = model.clip.config.vision.image_size, model.clip.config.embed_dim
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = args.threads
    print(f"{args.base}, {args.threads} thread(s), CPU ms, medians of {ROUNDS}")
    print(f"{'batch':>6}{'plain':>10}{'adapted':>10}{'ratio':>8}")
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        features = torch.eye(4, width)
        export_graphs(model, features, Path(folder), opset=DEFAULT_OPSET, metadata={})
        sessions = {
            name: onnxruntime.InferenceSession(str(Path(folder) / f"{name}.onnx"), options)
            for name in ("zero_shot_image", "image")
        }
        for batch in (1, 8):
            pixels = np.random.default_rng(0).standard_normal((batch, 3, size, size)).astype(np.float32)
            times: dict[str, list[float]] = {name: [] for name in sessions}
            for _ in range(ROUNDS + 2):
                for name, session in sessions.items():
                    start = time.process_time()
                    session.run(None, {"pixels": pixels})
                    times[name].append(1000 * (time.process_time() - start))
            plain, adapted = (statistics.median(t[2:]) for t in times.values())
            ratios[batch] = round(adapted / plain, 4)
            print(f"{batch:>6}{plain:>10.1f}{adapted:>10.1f}{ratios[batch]:>8.3f}")
    print(json.dumps({"bench": "image_tower", "base": args.base, "threads": args.threads, "ratio": ratios}))


if __name__ == "__main__":
    main()
