"""Kills writers of a gallery with SIGKILL while they add, compact and build the index of ids; counts what is left.

    python benchmarks/crash_gallery.py                # 100 kills, about 5 minutes on 2 cores
    python benchmarks/crash_gallery.py --kills 6

Two processes write to one gallery at a time: each adds a picture of its own and replaces one they share, over and over,
and after each add compacts, builds the index of ids anew, or neither. It prints an id once `Gallery.add` has returned.
Both are killed at a random moment, and so on. At the end every printed id must be there, once, and the gallery opens.
Exit code 1 if a picture is lost or there twice.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dear_serve.errors import GalleryError, OverloadError
from dear_serve.gallery import Gallery, GallerySpec
from dear_serve.gallery import store as store_module

SPEC = GallerySpec(bundle_sha256="b" * 64, base_sha256="a" * 64, columns={"class": 32, "color": 4})
PHASES = ("add", "compact", "index")
SHARED = 5


def write(folder: Path, who: str, phase: str) -> None:
    """Add until killed; a line "PHASE" when the work after an add begins, a line "= ID" when an add has returned."""
    gallery = Gallery.open(folder, create_for=SPEC)
    print("ready", flush=True)
    rng = np.random.default_rng(abs(hash(who)) % 2**32)
    number = 0
    while True:
        ids = [f"{who}-{number:05d}", f"shared-{number % SHARED}"]
        vectors = {n: rng.standard_normal((2, r)).astype(np.float32) for n, r in SPEC.columns.items()}
        gallery.add(ids, vectors, [{"by": who}] * 2, [b"thumbnail" * 100] * 2, ids)
        print(f"= {ids[0]}", flush=True)
        number += 1
        print(phase, flush=True)
        try:
            after(gallery, phase)
        except OverloadError:
            continue  # the other writer left no turn


def after(gallery: Gallery, phase: str) -> None:
    """What is interrupted besides adds."""
    if phase == "index":
        for index in gallery._table.list_indices():
            try:
                gallery._commit(lambda table, name=index.name: table.drop_index(name))
            except (
                GalleryError
            ) as error:  # another writer may have dropped it first; nothing else is let pass
                if "index not found" not in str(error.__cause__):
                    raise
        store_module._INDEX_IDS = 1
    if phase != "add":
        gallery.compact()


def start(folder: Path, who: str, phase: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--worker", str(folder), who, phase]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(out: str) -> list[str]:
    """Whole lines only: a kill can cut the last one."""
    return [line.strip() for line in out.splitlines(keepends=True) if line.endswith("\n")]


def crash(folder: Path, kills: int, seed: int) -> dict[str, int | dict[str, int]]:
    """Kill `kills` writers, two at a time; what was acknowledged, is present, is there twice, is lost."""
    random_ = random.Random(seed)
    acknowledged: set[str] = set()
    killed = dict.fromkeys(PHASES, 0)
    interrupted, failed = 0, 0
    for number in range(0, kills, 2):
        phases = [PHASES[(number + i) // 2 % 3 if i == 0 else random_.randrange(3)] for i in range(2)]
        writers = [start(folder, f"w{number + i:03d}", phase) for i, phase in enumerate(phases)]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        time.sleep(random_.uniform(0.02, 1.5))
        for writer, phase in zip(writers, phases, strict=True):
            writer.kill()
            out, errors = writer.communicate()
            said = lines(out)
            acknowledged |= {line[2:] for line in said if line.startswith("= ")}
            killed[phase] += 1
            interrupted += bool(said) and said[-1] in ("compact", "index")
            failed += "Traceback" in errors
            if "Traceback" in errors:
                print(errors, file=sys.stderr)
    gallery = Gallery.open(folder, create_for=SPEC)
    gallery.compact()
    _, batches = gallery.batches()
    ids = [i for batch in batches for i in batch.column("id").to_pylist()]
    return {
        "kills": sum(killed.values()),
        "while": killed,
        "in_the_middle_of_compaction_or_index": interrupted,
        "writers_that_failed": failed,
        "acknowledged": len(acknowledged),
        "present": len(set(ids)),
        "duplicated": len(ids) - len(set(ids)),
        "lost": len(acknowledged - set(ids)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", nargs=3, metavar=("FOLDER", "NAME", "PHASE"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        write(Path(args.worker[0]), args.worker[1], args.worker[2])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = crash(Path(folder) / "gallery", args.kills, args.seed)
    for name, value in found.items():
        print(f"{name.replace('_', ' '):<40}{value}")
    print(json.dumps(found))
    return 1 if found["lost"] or found["duplicated"] or found["writers_that_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
