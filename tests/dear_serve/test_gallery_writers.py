"""Several writers and readers of one gallery: processes, threads, kills, conflicts, syncing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import lancedb
import numpy as np
import pytest

from dear_serve.errors import GalleryError, OverloadError
from dear_serve.gallery import Gallery, GallerySpec, Query
from dear_serve.gallery import store as store_module

SPEC = GallerySpec(bundle_sha256="b" * 64, base_sha256="a" * 64, columns={"class": 8, "color": 3})


def fill(gallery, ids, metadata=None):
    vectors = {k: np.ones((len(ids), r), np.float32) for k, r in SPEC.columns.items()}
    gallery.add(ids, vectors, metadata or [{} for _ in ids], [b"jpeg"] * len(ids), ["h"] * len(ids))


@pytest.fixture
def gallery(tmp_path):
    return Gallery.open(tmp_path / "gallery", create_for=SPEC)


WRITER = """
    import sys
    import numpy as np
    from dear_serve.gallery import Gallery, GallerySpec
    path, who, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    spec = GallerySpec(bundle_sha256="b" * 64, base_sha256="a" * 64, columns={"class": 8, "color": 3})
    gallery = Gallery.open(path, create_for=spec)
    print("ready", flush=True)
    for i in range(rounds):
        sys.stdin.readline()
        ids = [f"shared-{i}", f"{who}-{i}"]
        vectors = {k: np.full((2, r), i + 1, np.float32) for k, r in spec.columns.items()}
        metadata = [{f"key_{who}": i, f"at_{i % 3}": who}] * 2
        gallery.add(ids, vectors, metadata, [b"t"] * 2, ["h"] * 2)
        print(*ids, flush=True)
"""


def start_writer(path: Path, who: str, rounds: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path), who, str(rounds)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


def acknowledged(out: str) -> set[str]:
    """Ids of whole lines only: a kill can cut the last one."""
    return {i for line in out.splitlines(keepends=True) if line.endswith("\n") for i in line.split()} - {
        "ready"
    }


def stored_ids(path: Path) -> list[str]:
    return lancedb.connect(path).open_table("pictures").search().select(["id"]).to_arrow()["id"].to_pylist()


def test_two_processes_add_the_same_ids_at_once(tmp_path):
    path, rounds = tmp_path / "gallery", 30
    writers = [start_writer(path, who, rounds) for who in ("x", "y")]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for _ in range(rounds):  # in step, so that both add the same new id at the same time
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        for writer in writers:
            assert writer.stdout.readline()
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    expected = sorted(f"{who}-{i}" for who in ("shared", "x", "y") for i in range(rounds))
    assert sorted(stored_ids(path)) == expected
    assert set(Gallery.open(path).stats().metadata) == {"key_x", "key_y", "at_0", "at_1", "at_2"}


def test_what_was_answered_survives_kills(tmp_path):
    path, answered = tmp_path / "gallery", set()
    for number, adds in enumerate((0, 2, 5)):
        writer = start_writer(path, f"w{number}", 1000)
        assert writer.stdout.readline() == "ready\n"
        writer.stdin.write("go\n" * 1000)
        writer.stdin.flush()
        for _ in range(adds):
            answered |= set(writer.stdout.readline().split())
        writer.kill()
        answered |= acknowledged(writer.communicate()[0])
        ids = stored_ids(path)
        assert len(ids) == len(set(ids))
        assert answered <= set(ids)
        assert len(Gallery.open(path, create_for=SPEC)) == len(ids)
    assert len(answered) >= 10


def test_readers_see_what_another_handle_committed(tmp_path, gallery):
    other = Gallery.open(tmp_path / "gallery")
    query = Query(vectors={"class": np.ones(8, np.float32)}, top_k=100)
    assert other.search(query) == []
    fill(gallery, ["a", "b"])
    assert len(other.search(query)) == 2
    gallery.delete("a")
    assert [h.id for h in other.search(query)] == ["b"]


def test_threads_add_and_search_at_once(gallery):
    failures = []

    def work(who):
        try:
            for i in range(5):
                fill(gallery, [f"{who}-{i}"], metadata=[{f"k{who}": i}])
                found = gallery.search(
                    Query(vectors={"class": np.ones(8, np.float32)}, filter=f"k{who} = {i}")
                )
                assert [h.id for h in found] == [f"{who}-{i}"]
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(w,)) for w in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(gallery) == 20


class StubTable:
    """A table whose every change fails."""

    def __init__(self, table, message):
        self.schema = table.schema
        self.message = message
        self.tries = 0

    def checkout_latest(self):
        pass

    def delete(self, condition):
        self.tries += 1
        raise RuntimeError(self.message)


@pytest.mark.parametrize(
    ("message", "error", "tries"),
    [
        ("Commit conflict for version 3, /secret/path", OverloadError, 30),
        ("No space left on device, /secret/path", GalleryError, 1),
    ],
)
def test_failed_writes_say_so_without_paths(gallery, monkeypatch, message, error, tries):
    stub = StubTable(gallery._table, message)
    monkeypatch.setattr(gallery, "_table", stub)
    monkeypatch.setattr(store_module.time, "sleep", lambda seconds: None)
    with pytest.raises(error) as caught:
        gallery.delete("a")
    assert stub.tries == tries
    assert "/" not in caught.value.message


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be synced there")
def test_every_new_file_is_synced_before_the_answer(gallery, tmp_path, monkeypatch):
    synced = set()
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(os.fstat(fd).st_ino), real(fd)))
    before = set(tmp_path.rglob("*"))
    fill(gallery, ["a"])
    gallery.delete("a")
    fresh = [p for p in tmp_path.rglob("*") if p not in before and p.is_file()]
    assert len(fresh) >= 5
    assert {p.stat().st_ino for p in fresh} <= synced
