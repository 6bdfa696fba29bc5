"""The cache of frozen blocks: views, what is computed again, room, a disk that is full."""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dear_serve.errors import DataError
from training.cache import UNWRITABLE, CachedTrunks, view_pixels
from training.config import Augmentation
from training.prepare import build_model


def cached(prepared, task, folder, **augmentation):
    model = build_model(prepared, 1)
    paths = [item.path for item in task.train]
    return CachedTrunks(
        model, paths, Augmentation(**augmentation), base_sha256=prepared.base.sha256, folder=folder
    )


def test_cut_off_cache_files_are_computed_again(prepared, task, tmp_path):
    trunks = cached(prepared, task, tmp_path, views=2)
    trunks.fill(limit=10**9)
    whole = trunks.batch([0, 1, 2], [0, 1, 0])
    files = sorted(tmp_path.rglob("*.npy"))
    assert len(files) == len(task.train)
    assert sum(f.stat().st_size for f in files) == trunks.size
    contents = [f.read_bytes() for f in files]
    files[0].write_bytes(contents[0][:200])
    files[1].write_bytes(b"")
    files[2].unlink()
    spoiled = bytearray(contents[3])
    spoiled[-400] ^= 1
    files[3].write_bytes(spoiled)
    again = cached(prepared, task, tmp_path, views=2)
    again.fill(limit=10**9)
    assert [f.read_bytes() for f in files] == contents
    assert all(torch.equal(a, b) for a, b in zip(whole, again.batch([0, 1, 2], [0, 1, 0]), strict=True))


def test_other_runs_make_room(prepared, task, tmp_path):
    old = cached(prepared, task, tmp_path, views=2)
    old.fill(limit=10**9)
    new = cached(prepared, task, tmp_path, views=3)
    new.fill(limit=new.size + old.size // 2)
    left = list(old.folder.rglob("*.npy"))
    assert 0 < len(left) <= len(task.train) // 2
    assert len(list(new.folder.rglob("*.npy"))) == len(task.train)


def test_a_cache_that_cannot_be_written(prepared, task, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--no-cache"):
        cached(prepared, task, tmp_path / "file", views=1).fill(limit=10**9)


def test_views(task, prepared):
    data = task.train[0].path.read_bytes()
    config = prepared.base.config.preprocess
    augmentation = Augmentation(views=4, crop=(0.5, 1.0))
    views = [view_pixels(data, v, augmentation, config) for v in range(4)]
    assert all(v.shape == (3, 32, 32) and v.dtype == np.float32 for v in views)
    assert all(not np.array_equal(views[0], v) for v in views[1:])
    assert np.array_equal(views[2], view_pixels(data, 2, augmentation, config))
    flipped = [view_pixels(data, v, replace(augmentation, flip=True), config) for v in range(1, 9)]
    plain = [view_pixels(data, v, augmentation, config) for v in range(1, 9)]
    mirrored = [np.abs(f - p[:, :, ::-1]).max() < 1e-6 for f, p in zip(flipped, plain, strict=True)]
    assert any(mirrored)
    assert not all(mirrored)


def test_an_entry_that_is_spoiled_during_a_run_is_computed_again(prepared, task, tmp_path):
    trunks = cached(prepared, task, tmp_path, views=2)
    trunks.fill(limit=10**9)
    whole = trunks.batch([0, 1, 2], [1, 1, 1])
    shutil.rmtree(trunks.folder)
    assert all(torch.equal(a, b) for a, b in zip(whole, trunks.batch([0, 1, 2], [1, 1, 1]), strict=True))
    file = trunks._file(1)
    content = file.read_bytes()
    file.write_bytes(content[:-4] + bytes(4))
    assert all(torch.equal(a, b) for a, b in zip(whole, trunks.batch([0, 1, 2], [1, 1, 1]), strict=True))
    assert file.read_bytes() == content


def test_a_full_disk_is_said_before_anything_is_computed(prepared, task, tmp_path, monkeypatch):
    trunks = cached(prepared, task, tmp_path / "new", views=2)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=trunks.size - 1))
    with pytest.raises(DataError, match=r"are to be written and the disk has .*--no-cache") as raised:
        trunks.fill(limit=10**9)
    assert raised.value.code == UNWRITABLE
    assert not (tmp_path / "new").exists()


def test_a_disk_that_fills_up_leaves_no_part_and_a_run_goes_on(prepared, task, tmp_path, monkeypatch):
    trunks = cached(prepared, task, tmp_path, views=2)
    trunks.fill(limit=10**9)
    whole = trunks.batch([0, 1], [1, 0])
    shutil.rmtree(trunks.folder)

    def full(self, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DataError, match="No space left"):
        trunks.fill(limit=10**9)
    assert all(torch.equal(a, b) for a, b in zip(whole, trunks.batch([0, 1], [1, 0]), strict=True))
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_leftovers_of_killed_runs_go_and_fresh_ones_stay(prepared, task, tmp_path):
    trunks = cached(prepared, task, tmp_path, views=1)
    old, fresh = tmp_path / ".a.npy.1", tmp_path / ".b.npy.2"
    for file in (old, fresh):
        file.write_bytes(b"part")
    os.utime(old, (time.time() - 7200,) * 2)
    trunks.fill(limit=10**9)
    assert not old.exists()
    assert fresh.exists()
