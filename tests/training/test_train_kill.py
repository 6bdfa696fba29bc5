"""Killed (SIGKILL) at random points of its life and gone on with: the same files."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

DRIVER = '''
import json, os, random, signal, sys
from pathlib import Path

import training.run

arguments, whole, killed = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]


def attempt(out, limit, *more):
    """A run in a process of its own, killed at its event number `limit`: wait status, events."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        events = 0

        def count(frame, event, argument):
            nonlocal events
            events += 1
            if events == limit:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        status = training.run.main([*arguments, "--out", out, "--cache", out + ".cache", *more])
        sys.setprofile(None)
        os.write(writer, str(events).encode())
        os._exit(status)
    os.close(writer)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), int(os.read(reader, 100) or 0)


status, total = attempt(whole, 0)
assert status == 0, status
rng, points = random.Random(4), []
for _ in range(20):
    point = int(total * rng.uniform(0.05, 0.95))
    status, _ = attempt(killed, point, "--resume")
    if status == -signal.SIGKILL:
        points.append(point / total)
    else:  # gone on from so late that it came to its end
        assert status == 0, status
    if len(points) == 5:
        break
status, _ = attempt(killed, 0, "--resume")
print(json.dumps({"status": status, "points": points}))
'''


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_five_times_and_resumed_gives_the_same_files(train_set, tmp_path):
    """The process is imported once and forked for each try; a point is a number of calls, from start to bundle."""
    arguments = [
        str(train_set.pictures), "--base", train_set.base, "--epochs", "4", "--batch-size", "6", "--shots", "3",
        "--views", "2", "--quiet", "--device", "cpu",
    ]  # fmt: skip
    folders = {name: tmp_path / name / "noise" for name in ("whole", "killed")}
    for folder in folders.values():
        folder.parent.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(arguments), *map(str, folders.values())],
        capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["status"] == 0, result.stderr[-3000:]
    assert len(found["points"]) == 5, found
    listed = [
        {p.relative_to(f.parent): p.read_bytes() for p in sorted(f.parent.rglob("*")) if p.is_file()}
        for f in folders.values()
    ]
    assert [p for p in listed[1] if p not in listed[0] and p.suffix != ".npy" and ".npy" not in p.name] == []
    assert {p: c for p, c in listed[1].items() if p in listed[0]} == listed[0]
