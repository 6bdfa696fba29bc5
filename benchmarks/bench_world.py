"""Rendering rate of the attribute world on one core. Claim: 2,000 pictures a second or more.

python benchmarks/bench_world.py
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

from training.world import World, sample_scenes

BATCH, ROUNDS = 256, 8


def main() -> None:
    """Print a table, then one JSON line."""
    world, rng = World(), np.random.default_rng(0)
    world.render(sample_scenes(rng, BATCH), rng)
    rates = []
    for _ in range(ROUNDS):
        start = time.process_time()
        world.render(sample_scenes(rng, BATCH), rng)
        rates.append(BATCH / (time.process_time() - start))
    median = statistics.median(rates)
    print(f"{'pictures per CPU second':<28}{'median':>10}{'lowest':>10}{'highest':>10}")
    print(f"{'render, 64 x 64':<28}{median:>10.0f}{min(rates):>10.0f}{max(rates):>10.0f}")
    print(json.dumps({"bench": "world", "pictures_per_second": round(median), "batch": BATCH}))


if __name__ == "__main__":
    main()
