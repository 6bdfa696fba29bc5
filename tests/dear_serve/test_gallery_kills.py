"""Writers killed while they add, compact and build the index of ids: `benchmarks/crash_gallery.py` with a few kills."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "crash_gallery.py"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL there")
def test_kills_lose_nothing_and_double_nothing(tmp_path):
    spec = importlib.util.spec_from_file_location("crash_gallery", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.crash(tmp_path / "gallery", 4, seed=1)
    assert found["kills"] == 4
    assert (found["lost"], found["duplicated"], found["writers_that_failed"]) == (0, 0, 0)
    assert found["present"] >= found["acknowledged"]
