"""Bundles are written whole or not at all: replacing, adding graphs, kills, readers at the same time."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dear_serve import atomic
from dear_serve.atomic import FolderWriter
from dear_serve.bundle import Bundle, BundleWriter, sha256_file
from dear_serve.errors import BundleError, DearError
from dear_serve.manifest import Manifest

# Replacing a folder of it


def test_replace_folder_adds_graphs_and_keeps_the_rest(bundle):
    adapter = bundle.paths.adapter.stat().st_ino

    def fill(folder: Path) -> None:
        (folder / "image.onnx").write_bytes(b"graph")
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_bytes(b"w")

    def update(manifest: Manifest) -> Manifest:
        return dataclasses.replace(manifest, metrics={"parity": 1e-6})

    new = bundle.replace_folder("onnx", fill, update=update)
    assert new.sha256 == bundle.sha256
    assert {n for n in Bundle.open(new.paths.root).manifest.files if n.startswith("onnx/")} == {
        "onnx/image.onnx",
        "onnx/sub/weights",
    }
    assert new.manifest.metrics == {"parity": 1e-6}
    assert new.paths.adapter.stat().st_ino == adapter, "unchanged files are linked, not copied"
    again = new.replace_folder("onnx", lambda folder: None)
    assert not any(n.startswith("onnx/") for n in again.manifest.files)


def test_replace_folder_that_fails_leaves_the_old_graphs(bundles, bundle):
    bundle = bundle.replace_folder("onnx", lambda folder: (folder / "image.onnx").write_bytes(b"old"))
    before = bundle.paths.manifest.read_bytes()

    def fail(folder: Path) -> None:
        (folder / "image.onnx").write_bytes(b"new")
        raise RuntimeError("parity")

    with pytest.raises(RuntimeError, match="parity"):
        bundle.replace_folder("onnx", fail)
    assert bundle.paths.manifest.read_bytes() == before
    assert (Bundle.open(bundle.paths.root).paths.onnx / "image.onnx").read_bytes() == b"old"
    assert bundles.others(bundle.paths.root.parent) == []


def test_replace_folder_does_not_bring_back_a_bundle_that_was_replaced_meanwhile(bundles, bundle, manifest):
    def fill_slowly(folder: Path) -> None:
        bundles.write(bundle.paths.root, manifest, seed=5)

    with pytest.raises(BundleError, match="flowers was replaced by another bundle meanwhile"):
        bundle.replace_folder("onnx", fill_slowly)
    assert bundles.seed_of(bundle.paths.root) == 5


def test_replace_folder_does_not_bless_a_changed_file(bundle):
    bundle.paths.tokenizer.write_text(json.dumps({"seed": 1}))
    with pytest.raises(BundleError, match=r"tokenizer\.json has sha256"):
        bundle.replace_folder("onnx", lambda folder: None)


def test_files_are_copied_where_links_cannot_be_made(bundle, monkeypatch):
    def refuse(*args):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    bundle.replace_folder("trt", lambda folder: (folder / "image.plan").write_bytes(b"p"))
    assert "trt/image.plan" in Bundle.open(bundle.paths.root).manifest.files


# Whole or not at all


def test_replacing_gives_the_new_one_and_leaves_nothing_else(bundles, bundle, manifest):
    bundles.write(bundle.paths.root, manifest, seed=1)
    assert bundles.seed_of(bundle.paths.root) == 1
    assert bundles.others(bundle.paths.root.parent) == []


def test_an_exception_leaves_the_old_one(bundles, bundle):
    with pytest.raises(RuntimeError, match="stop"), BundleWriter(bundle.paths.root) as writer:
        writer.paths.roles.write_text("half")
        raise RuntimeError("stop")
    assert bundles.seed_of(bundle.paths.root) == 0
    assert bundles.others(bundle.paths.root.parent) == []


def test_a_bundle_that_could_not_be_opened_replaces_nothing(bundles, bundle, manifest):
    with pytest.raises(BundleError, match="first block 2"), BundleWriter(bundle.paths.root) as writer:
        bundles.fill(writer.paths, 1)
        bundles.roles(first_block=2).save(writer.paths.roles)
        writer.commit(manifest)
    assert bundles.seed_of(bundle.paths.root) == 0
    assert bundles.others(bundle.paths.root.parent) == []


def test_leaving_without_commit_writes_nothing(tmp_path):
    with BundleWriter(tmp_path / "b") as writer:
        writer.paths.roles.write_text("{}")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_bundle_is_not_replaced(bundles, tmp_path, manifest):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"precious")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        bundles.write(tmp_path / "photos", manifest)
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"precious"
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        bundles.write(tmp_path / "file", manifest)
    (tmp_path / "empty").mkdir()
    assert bundles.write(tmp_path / "empty", manifest).name == "empty"


def test_a_parent_that_is_a_file(bundles, tmp_path, manifest):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(BundleError, match="cannot write beside"):
        bundles.write(tmp_path / "file" / "b", manifest)


def test_a_link_to_a_bundle_stays_a_link(bundles, bundle, manifest, tmp_path):
    (tmp_path / "current").symlink_to(bundle.paths.root)
    bundles.write(tmp_path / "current", manifest, seed=3)
    assert (tmp_path / "current").is_symlink()
    assert bundles.seed_of(bundle.paths.root) == 3


def test_others_may_read_a_new_bundle(bundle):
    mask = os.umask(0)
    os.umask(mask)
    assert bundle.paths.root.stat().st_mode & 0o777 == 0o777 & ~mask


# What a kill leaves, step by step (dear_serve/atomic.py)


def test_killed_while_writing_the_temporary_folder(bundles, bundle, manifest):
    parent = bundle.paths.root.parent
    (parent / ".flowers.tmp-1-dead").mkdir()
    (parent / ".flowers.tmp-1-dead" / "roles.json").write_text("ha")
    assert bundles.seed_of(bundle.paths.root) == 0
    bundles.write(bundle.paths.root, manifest, seed=1)
    assert bundles.others(parent) == [".flowers.tmp-1-dead"], "a folder this young may be a living writer's"
    os.utime(parent / ".flowers.tmp-1-dead", (0, 0))
    bundles.write(bundle.paths.root, manifest, seed=2)
    assert bundles.others(parent) == []


def test_a_living_writers_folder_is_left_alone(bundles, bundle, manifest):
    with BundleWriter(bundle.paths.root) as slow:
        os.utime(slow.paths.root, (0, 0))
        bundles.write(bundle.paths.root, manifest, seed=1)
        bundles.fill(slow.paths, 2)
        slow.commit(manifest)
    assert bundles.seed_of(bundle.paths.root) == 2
    assert bundles.others(bundle.paths.root.parent) == []


def test_killed_between_the_two_renames(bundles, bundle, manifest):
    parent = bundle.paths.root.parent
    with BundleWriter(bundle.paths.root) as writer:
        staged = writer.paths.root
        bundle.paths.root.rename(parent / ".flowers.old-1-dead")
        assert not bundle.paths.root.exists()
        assert bundles.seed_of(bundle.paths.root) == 0, "a reader puts the old one back"
    assert not staged.exists()
    bundle.paths.root.rename(parent / ".flowers.old-1-dead")
    bundles.write(bundle.paths.root, manifest, seed=4)
    assert bundles.seed_of(bundle.paths.root) == 4, "and so does a writer"
    assert bundles.others(parent) == []


def test_killed_before_the_old_folder_was_deleted(bundles, bundle, manifest, tmp_path):
    bundles.write(tmp_path / "copy", manifest, seed=9).paths.root.rename(
        bundle.paths.root.parent / ".flowers.old-1-dead"
    )
    assert bundles.seed_of(bundle.paths.root) == 0
    bundles.write(bundle.paths.root, manifest, seed=1)
    assert bundles.others(bundle.paths.root.parent) == []


def test_the_newest_old_folder_is_the_one_put_back(tmp_path):
    for age, name in ((100, "a"), (50, "b"), (200, "c")):
        folder = tmp_path / f".x.old-1-{name}"
        folder.mkdir()
        (folder / "name").write_text(name)
        os.utime(folder, (time.time() - age,) * 2)
    assert atomic.recover_folder(tmp_path / "x")
    assert (tmp_path / "x" / "name").read_text() == "b"
    assert not atomic.recover_folder(tmp_path / "x")


def test_mending_that_is_not_allowed_says_what_to_do(bundle, monkeypatch):
    bundle.paths.root.rename(bundle.paths.root.parent / ".flowers.old-1-dead")

    def refuse(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(BundleError, match=r"half replaced.*rename the newest \.flowers\.old-"):
        Bundle.open(bundle.paths.root)


@pytest.mark.parametrize("step", ["sync", "aside", "in", "delete"])
def test_sigkill_at_each_step_leaves_the_old_one_or_the_new_one(tmp_path, step):
    """A real process, killed by a signal inside `commit`."""
    script = textwrap.dedent(
        """
        import os, shutil, signal, sys
        from pathlib import Path
        from dear_serve import atomic

        def die(*args, **options):
            os.kill(os.getpid(), signal.SIGKILL)

        folder, step = Path(sys.argv[1]), sys.argv[2]
        rename = Path.rename
        with atomic.FolderWriter(folder) as writer:
            (writer.temporary / "value").write_text("new")
            if step == "sync":
                atomic._sync_tree = die
            if step == "aside":
                Path.rename = lambda self, to: (rename(self, to), die())
            if step == "in":
                Path.rename = lambda self, to: die() if to == writer.folder else rename(self, to)
            if step == "delete":
                atomic._remove_leftovers = die
            writer.commit()
        """
    )
    target = tmp_path / "runs" / "x"
    with FolderWriter(target) as writer:
        (writer.temporary / "value").write_text("old")
        writer.commit()
    done = subprocess.run([sys.executable, "-c", script, target, step], check=False)
    assert done.returncode == -signal.SIGKILL
    atomic.recover_folder(target)
    assert (target / "value").read_text() == ("new" if step == "delete" else "old")
    with FolderWriter(target) as writer:
        (writer.temporary / "value").write_text("next")
        writer.commit()
    assert (target / "value").read_text() == "next"


@pytest.mark.parametrize("verify", [True, False])
def test_replaced_while_it_is_read(bundles, bundle, manifest, monkeypatch, verify):
    """The manifest of one and the files of the other: it is read again, and the new one comes out whole."""
    from dear_serve import bundle as module

    root, original, times = bundle.paths.root, module._read_manifest, []

    def read_then_replace(paths):
        found = original(paths)
        if paths.root == root and len(times) < 2:
            times.append(1)
            monkeypatch.setattr(module, "_read_manifest", original)
            bundles.write(root, manifest, seed=len(times))
            monkeypatch.setattr(module, "_read_manifest", read_then_replace)
        return found

    monkeypatch.setattr(module, "_read_manifest", read_then_replace)
    opened = Bundle.open(root, verify=verify)
    assert len(times) == 2
    assert opened.is_current()
    assert opened.manifest.files["tokenizer.json"].sha256 == sha256_file(opened.paths.tokenizer)
    assert json.loads(opened.paths.tokenizer.read_text())["seed"] == 2


def test_a_bundle_knows_that_it_has_been_replaced(bundles, bundle, manifest):
    assert bundle.is_current()
    new = bundles.write(bundle.paths.root, manifest)
    assert not bundle.is_current()
    assert new.is_current()
    newer = new.replace_folder("onnx", lambda folder: None)
    assert (new.is_current(), newer.is_current()) == (False, True)


def test_label_sets_are_stored_replaced_and_taken_out(bundle):
    before = bundle.sha256
    bundle.store_label_set("pets", ["cat", "dog"], ["a {}"])
    changed = Bundle.open(bundle.paths.root).store_label_set("pets", ["cat", "dog", "hamster"])
    assert changed.manifest.label_sets["pets"].labels == ("cat", "dog", "hamster")
    opened = Bundle.open(bundle.paths.root)
    assert opened.manifest == changed.manifest
    assert opened.sha256 == before
    assert opened.store_label_set("pets", None).manifest.label_sets == {}


@pytest.mark.parametrize(
    ("name", "labels", "message"),
    [
        ("a b", ["x"], "is no name"),
        ("pets", None, "has no label set 'pets'; known: it has none"),
        ("pets", [], "no labels"),
        ("pets", ["x", "X"], "label 0 again"),
    ],
)
def test_label_sets_that_cannot_be_stored(bundle, name, labels, message):
    with pytest.raises(DearError, match=message):
        bundle.store_label_set(name, labels)
    assert Bundle.open(bundle.paths.root).manifest.label_sets == {}
