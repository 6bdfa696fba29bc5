"""The bundle folder: round trip, every check on opening, and whole-folder writes that survive a kill."""

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

import numpy as np
import pytest

from dear_serve import atomic
from dear_serve.atomic import FolderWriter
from dear_serve.bundle import Bundle, BundlePaths, BundleWriter, load_arrays, save_arrays, sha256_file
from dear_serve.config import DearConfig
from dear_serve.dear.roles import Roles
from dear_serve.errors import BundleError, ConfigError
from dear_serve.manifest import BaseRef, FileEntry, Manifest, Readout


@pytest.fixture
def manifest(tiny_clip_config):
    return Manifest(
        base=BaseRef(name="tiny", sha256="0" * 64, clip=tiny_clip_config),
        dear=DearConfig(attributes=("color", "shape"), first_block=3, text_first_block=3, text_tokens=2),
        alpha=(0.5, 0.25, 0.25),
        logit_scale=14.0,
        class_names=("a red cup", "été"),
        templates=("{}",),
        preprocess=tiny_clip_config.preprocess,
        context_length=16,
        readouts=(
            Readout(
                attribute="color", kind="span", phrases=("something red", "something blue", "something green")
            ),
            Readout(attribute="shape", kind="token"),
        ),
        metrics={"base": 0.5, "novel": 1.0},
    )


SHAPES = {
    "attribute_tokens.tokens": (2, 32),
    "attribute_projection": (32, 24),
    "text_tokens.tokens": (2, 32),
    "fusion.weights": (3,),
}


def fill(paths: BundlePaths, seed: int) -> None:
    save_arrays(paths.adapter, {name: np.full(shape, seed, np.float32) for name, shape in SHAPES.items()})
    save_arrays(paths.readouts, {"color": np.eye(2, 24, dtype=np.float32)})
    roles().save(paths.roles)
    paths.tokenizer.write_text(json.dumps({"seed": seed}))


def roles(**changes) -> Roles:
    uniform = Roles.uniform(
        "mixed", **{"layers": 3, "heads_per_layer": 4, "first_block": 3, "attributes": ()} | changes
    )
    return dataclasses.replace(uniform, base="tiny", base_sha256="0" * 64)


def write(path: Path, manifest: Manifest, *, seed: int = 0) -> Bundle:
    with BundleWriter(path) as writer:
        fill(writer.paths, seed)
        return writer.commit(manifest)


@pytest.fixture
def bundle(tmp_path, manifest):
    return write(tmp_path / "flowers", manifest)


def seed_of(path: Path) -> int:
    return json.loads(Bundle.open(path).paths.tokenizer.read_text())["seed"]


def others(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


# Round trip


def test_round_trip(bundle, manifest):
    opened = Bundle.open(bundle.paths.root)
    assert dataclasses.replace(opened.manifest, files={}) == manifest
    assert set(opened.manifest.files) == {
        "adapter.safetensors",
        "readouts.safetensors",
        "roles.json",
        "tokenizer.json",
    }
    assert opened.name == "flowers"
    np.testing.assert_array_equal(opened.basis()["color"], np.eye(2, 24, dtype=np.float32))
    assert load_arrays(opened.paths.adapter)["attribute_projection"].shape == (32, 24)
    assert others(bundle.paths.root.parent) == []


def test_manifest_is_readable_json_with_every_hash(bundle):
    data = json.loads(bundle.paths.manifest.read_text(encoding="utf-8"))
    for name, entry in data["files"].items():
        file = bundle.paths.root / name
        assert entry == {"sha256": sha256_file(file), "size": file.stat().st_size}
    assert "été" in bundle.paths.manifest.read_text(encoding="utf-8")


def test_sha256_is_that_of_the_standard_tool(tmp_path):
    (tmp_path / "x").write_bytes(b"abc" * 700_000)
    told = subprocess.run(["sha256sum", tmp_path / "x"], capture_output=True, text=True, check=True).stdout
    assert sha256_file(tmp_path / "x") == told.split()[0]


def test_arrays_that_are_not_contiguous_are_written_as_they_read(tmp_path):
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    save_arrays(tmp_path / "a.safetensors", {"a": array})
    np.testing.assert_array_equal(load_arrays(tmp_path / "a.safetensors")["a"], array)


# Checks on opening


def test_no_bundle_there(tmp_path):
    with pytest.raises(BundleError, match=r"holds no dear\.json.*training\.run"):
        Bundle.open(tmp_path / "absent")
    with pytest.raises(BundleError, match=r"holds no dear\.json"):
        Bundle.open(tmp_path)


def test_other_format_version_names_both_and_the_remedy(bundle):
    text = bundle.paths.manifest.read_text()
    bundle.paths.manifest.write_text(text.replace('"format_version": 1', '"format_version": 7'))
    with pytest.raises(BundleError, match="format_version 7; this library reads 1: make the bundle again"):
        Bundle.open(bundle.paths.root)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"format_version": 1}'])
def test_broken_manifest(bundle, content):
    bundle.paths.manifest.write_bytes(content)
    with pytest.raises(BundleError, match=r"dear\.json"):
        Bundle.open(bundle.paths.root)


def test_unknown_manifest_key_is_refused(bundle):
    data = json.loads(bundle.paths.manifest.read_text())
    bundle.paths.manifest.write_text(json.dumps(data | {"surprise": 1}))
    with pytest.raises(BundleError, match="no option 'surprise'"):
        Bundle.open(bundle.paths.root)


def test_missing_file(bundle):
    bundle.paths.roles.unlink()
    with pytest.raises(BundleError, match=r"roles\.json is missing"):
        Bundle.open(bundle.paths.root)


def test_changed_size_is_told_with_both_values_before_hashing(bundle, monkeypatch):
    size = bundle.paths.adapter.stat().st_size
    with bundle.paths.adapter.open("ab") as stream:
        stream.write(b"x")
    monkeypatch.setattr(
        "dear_serve.bundle.sha256_file", lambda path: pytest.fail("hashed a file of wrong size")
    )
    with pytest.raises(
        BundleError, match=rf"adapter\.safetensors has {size + 1} bytes; dear\.json says {size}"
    ):
        Bundle.open(bundle.paths.root)


def test_changed_content_is_told_with_both_hashes(bundle):
    expected = bundle.manifest.files["tokenizer.json"].sha256
    bundle.paths.tokenizer.write_text(json.dumps({"seed": 1}))
    found = sha256_file(bundle.paths.tokenizer)
    with pytest.raises(BundleError, match=rf"tokenizer\.json has sha256 {found}; dear\.json says {expected}"):
        Bundle.open(bundle.paths.root)
    assert Bundle.open(bundle.paths.root, verify=False).manifest.class_names


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/etc/passwd",
        "a/../../evil",
        "a\\..\\evil",
        "C:evil",
        "",
        ".",
        "./a",
        "a//b",
        "dear.json",
        "a\0b",
    ],
)
def test_paths_that_lead_out_of_the_folder_are_refused(bundle, name):
    data = json.loads(bundle.paths.manifest.read_text())
    data["files"][name] = {"sha256": "0" * 64, "size": 1}
    bundle.paths.manifest.write_text(json.dumps(data))
    with pytest.raises(BundleError, match="only paths inside the bundle's folder are allowed"):
        Bundle.open(bundle.paths.root)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"shape": np.zeros((2, 24), np.float32)}, "lacks 'color'; it holds shape"),
        ({"color": np.zeros((2, 23), np.float32)}, r"float32 \(2, 23\); float32 \(r, 24\)"),
        ({"color": np.zeros((2, 24), np.float64)}, r"float64 \(2, 24\); float32 \(r, 24\)"),
        ({"color": np.zeros((25, 24), np.float32)}, r"float32 \(25, 24\); float32 \(r, 24\)"),
        ({"color": np.zeros(24, np.float32)}, r"float32 \(24,\); float32 \(r, 24\)"),
    ],
)
def test_readout_shapes_are_checked(tmp_path, manifest, arrays, message):
    with pytest.raises(BundleError, match=message), BundleWriter(tmp_path / "b") as writer:
        fill(writer.paths, 0)
        save_arrays(writer.paths.readouts, arrays)
        writer.commit(manifest)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        (
            "attribute_projection",
            np.zeros((32, 23), np.float32),
            r"of shape \(32, 23\); dear\.json implies \(32, 24\)",
        ),
        (
            "fusion.weights",
            np.zeros(2, np.float32),
            r"fusion\.weights of shape \(2,\); dear\.json implies \(3,\)",
        ),
        ("text_tokens.tokens", None, r"text_tokens\.tokens of shape None; dear\.json implies \(2, 32\)"),
    ],
)
def test_adapter_shapes_are_checked(tmp_path, manifest, name, array, message):
    arrays = {key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()} | {name: array}
    with pytest.raises(BundleError, match=message), BundleWriter(tmp_path / "b") as writer:
        fill(writer.paths, 0)
        save_arrays(writer.paths.adapter, {key: a for key, a in arrays.items() if a is not None})
        writer.commit(manifest)


def test_an_adapter_that_is_no_safetensors_file(tmp_path, manifest):
    message = r"adapter\.safetensors is not a safetensors file"
    with pytest.raises(BundleError, match=message), BundleWriter(tmp_path / "b") as writer:
        fill(writer.paths, 0)
        writer.paths.adapter.write_bytes(b"pickle")
        writer.commit(manifest)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (roles(first_block=2), r"first block 2; dear\.json says 3"),
        (roles(layers=4), r"blocks 4; dear\.json says 3"),
        (roles(heads_per_layer=2), r"heads a block 2; dear\.json says 4"),
        (dataclasses.replace(roles(), base_sha256="1" * 64), r"base weights 1{64}; dear\.json says 0{64}"),
    ],
)
def test_roles_of_something_else_are_refused(tmp_path, manifest, other, message):
    with pytest.raises(BundleError, match=message), BundleWriter(tmp_path / "b") as writer:
        fill(writer.paths, 0)
        other.save(writer.paths.roles)
        writer.commit(manifest)


def test_roles_that_name_no_base_fit(tmp_path, manifest):
    with BundleWriter(tmp_path / "b") as writer:
        fill(writer.paths, 0)
        dataclasses.replace(roles(), base_sha256="").save(writer.paths.roles)
        assert writer.commit(manifest).roles().method == "uniform-mixed"


def test_not_safetensors(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(BundleError, match=r"x\.safetensors is not a safetensors file"):
        load_arrays(tmp_path / "x.safetensors")
    with pytest.raises(BundleError, match=r"y\.safetensors is missing"):
        load_arrays(tmp_path / "y.safetensors")


def test_a_file_that_is_not_listed_is_not_given_out(bundle):
    (bundle.paths.root / "stray.onnx").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"lists no stray\.onnx; run: dear-export"):
        bundle.file("stray.onnx")
    assert bundle.file("roles.json") == bundle.paths.roles


# The manifest's own rules


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"alpha": (0.5, 0.5)}, "alpha"),
        ({"alpha": (0.5, 0.5, 0.5)}, "alpha"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"logit_scale": float("nan")}, "logit_scale"),
        ({"class_names": ()}, "class_names"),
        ({"class_names": ("a", "a")}, "class_names"),
        ({"readouts": (Readout(attribute="smell", kind="token"),)}, "readouts"),
        (
            {"dear": DearConfig(attributes=("color", "shape"), first_block=0, text_first_block=3)},
            "dear.first_block",
        ),
        (
            {"dear": DearConfig(attributes=("color", "shape"), first_block=4, text_first_block=3)},
            "dear.first_block",
        ),
        ({"dear": DearConfig(attributes=("color", "shape"), first_block=3)}, "dear.text_first_block"),
    ],
)
def test_manifest_refuses_what_cannot_be(manifest, change, field):
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(manifest, **change)
    assert caught.value.field == field


def test_preprocessing_must_fit_the_base(manifest):
    with pytest.raises(ConfigError, match="size is 64; the base takes 32"):
        dataclasses.replace(manifest, preprocess=dataclasses.replace(manifest.preprocess, size=64))


def test_a_span_needs_phrases():
    with pytest.raises(ConfigError, match="1 phrases; a span needs 2 or more"):
        Readout(attribute="color", kind="span", phrases=("red",))


def test_identity_is_that_of_the_vectors(bundle, manifest, tmp_path):
    """Graphs, reports and metrics do not change it; the adapter, the base and the readouts do."""
    complete = bundle.manifest
    entry = FileEntry(sha256="1" * 64, size=1)
    for same in (
        {"files": complete.files | {"onnx/image.onnx": entry, "trt/x.plan": entry, "report.html": entry}},
        {"metrics": {}, "library_version": "9.9", "alpha": (0.8, 0.1, 0.1), "class_names": ("z",)},
    ):
        assert dataclasses.replace(complete, **same).identity() == bundle.sha256
    for other in (
        {"files": complete.files | {"adapter.safetensors": entry}},
        {"files": complete.files | {"readouts.safetensors": entry}},
        {"base": dataclasses.replace(complete.base, sha256="1" * 64)},
        {"context_length": 15},
    ):
        assert dataclasses.replace(complete, **other).identity() != bundle.sha256
    assert write(tmp_path / "elsewhere", manifest).sha256 == bundle.sha256


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


def test_replace_folder_that_fails_leaves_the_old_graphs(bundle):
    bundle = bundle.replace_folder("onnx", lambda folder: (folder / "image.onnx").write_bytes(b"old"))
    before = bundle.paths.manifest.read_bytes()

    def fail(folder: Path) -> None:
        (folder / "image.onnx").write_bytes(b"new")
        raise RuntimeError("parity")

    with pytest.raises(RuntimeError, match="parity"):
        bundle.replace_folder("onnx", fail)
    assert bundle.paths.manifest.read_bytes() == before
    assert (Bundle.open(bundle.paths.root).paths.onnx / "image.onnx").read_bytes() == b"old"
    assert others(bundle.paths.root.parent) == []


def test_replace_folder_does_not_bring_back_a_bundle_that_was_replaced_meanwhile(bundle, manifest):
    def fill_slowly(folder: Path) -> None:
        write(bundle.paths.root, manifest, seed=5)

    with pytest.raises(BundleError, match="flowers was replaced by another bundle meanwhile"):
        bundle.replace_folder("onnx", fill_slowly)
    assert seed_of(bundle.paths.root) == 5


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


def test_replacing_gives_the_new_one_and_leaves_nothing_else(bundle, manifest):
    write(bundle.paths.root, manifest, seed=1)
    assert seed_of(bundle.paths.root) == 1
    assert others(bundle.paths.root.parent) == []


def test_an_exception_leaves_the_old_one(bundle):
    with pytest.raises(RuntimeError, match="stop"), BundleWriter(bundle.paths.root) as writer:
        writer.paths.roles.write_text("half")
        raise RuntimeError("stop")
    assert seed_of(bundle.paths.root) == 0
    assert others(bundle.paths.root.parent) == []


def test_a_bundle_that_could_not_be_opened_replaces_nothing(bundle, manifest):
    with pytest.raises(BundleError, match="first block 2"), BundleWriter(bundle.paths.root) as writer:
        fill(writer.paths, 1)
        roles(first_block=2).save(writer.paths.roles)
        writer.commit(manifest)
    assert seed_of(bundle.paths.root) == 0
    assert others(bundle.paths.root.parent) == []


def test_leaving_without_commit_writes_nothing(tmp_path):
    with BundleWriter(tmp_path / "b") as writer:
        writer.paths.roles.write_text("{}")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_bundle_is_not_replaced(tmp_path, manifest):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"precious")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        write(tmp_path / "photos", manifest)
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"precious"
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(BundleError, match="exists and is not a bundle"):
        write(tmp_path / "file", manifest)
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "empty", manifest).name == "empty"


def test_a_parent_that_is_a_file(tmp_path, manifest):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(BundleError, match="cannot write beside"):
        write(tmp_path / "file" / "b", manifest)


def test_a_link_to_a_bundle_stays_a_link(bundle, manifest, tmp_path):
    (tmp_path / "current").symlink_to(bundle.paths.root)
    write(tmp_path / "current", manifest, seed=3)
    assert (tmp_path / "current").is_symlink()
    assert seed_of(bundle.paths.root) == 3


def test_others_may_read_a_new_bundle(bundle):
    mask = os.umask(0)
    os.umask(mask)
    assert bundle.paths.root.stat().st_mode & 0o777 == 0o777 & ~mask


# What a kill leaves, step by step (dear_serve/atomic.py)


def test_killed_while_writing_the_temporary_folder(bundle, manifest):
    parent = bundle.paths.root.parent
    (parent / ".flowers.tmp-1-dead").mkdir()
    (parent / ".flowers.tmp-1-dead" / "roles.json").write_text("ha")
    assert seed_of(bundle.paths.root) == 0
    write(bundle.paths.root, manifest, seed=1)
    assert others(parent) == [".flowers.tmp-1-dead"], "a folder this young may be a living writer's"
    os.utime(parent / ".flowers.tmp-1-dead", (0, 0))
    write(bundle.paths.root, manifest, seed=2)
    assert others(parent) == []


def test_a_living_writers_folder_is_left_alone(bundle, manifest):
    with BundleWriter(bundle.paths.root) as slow:
        os.utime(slow.paths.root, (0, 0))
        write(bundle.paths.root, manifest, seed=1)
        fill(slow.paths, 2)
        slow.commit(manifest)
    assert seed_of(bundle.paths.root) == 2
    assert others(bundle.paths.root.parent) == []


def test_killed_between_the_two_renames(bundle, manifest):
    parent = bundle.paths.root.parent
    with BundleWriter(bundle.paths.root) as writer:
        staged = writer.paths.root
        bundle.paths.root.rename(parent / ".flowers.old-1-dead")
        assert not bundle.paths.root.exists()
        assert seed_of(bundle.paths.root) == 0, "a reader puts the old one back"
    assert not staged.exists()
    bundle.paths.root.rename(parent / ".flowers.old-1-dead")
    write(bundle.paths.root, manifest, seed=4)
    assert seed_of(bundle.paths.root) == 4, "and so does a writer"
    assert others(parent) == []


def test_killed_before_the_old_folder_was_deleted(bundle, manifest, tmp_path):
    write(tmp_path / "copy", manifest, seed=9).paths.root.rename(
        bundle.paths.root.parent / ".flowers.old-1-dead"
    )
    assert seed_of(bundle.paths.root) == 0
    write(bundle.paths.root, manifest, seed=1)
    assert others(bundle.paths.root.parent) == []


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
def test_replaced_while_it_is_read(bundle, manifest, monkeypatch, verify):
    """The manifest of one and the files of the other: it is read again, and the new one comes out whole."""
    from dear_serve import bundle as module

    root, original, times = bundle.paths.root, module._read_manifest, []

    def read_then_replace(paths):
        found = original(paths)
        if paths.root == root and len(times) < 2:
            times.append(1)
            monkeypatch.setattr(module, "_read_manifest", original)
            write(root, manifest, seed=len(times))
            monkeypatch.setattr(module, "_read_manifest", read_then_replace)
        return found

    monkeypatch.setattr(module, "_read_manifest", read_then_replace)
    opened = Bundle.open(root, verify=verify)
    assert len(times) == 2
    assert opened.is_current()
    assert opened.manifest.files["tokenizer.json"].sha256 == sha256_file(opened.paths.tokenizer)
    assert json.loads(opened.paths.tokenizer.read_text())["seed"] == 2


def test_a_bundle_knows_that_it_has_been_replaced(bundle, manifest):
    assert bundle.is_current()
    new = write(bundle.paths.root, manifest)
    assert not bundle.is_current()
    assert new.is_current()
    newer = new.replace_folder("onnx", lambda folder: None)
    assert (new.is_current(), newer.is_current()) == (False, True)


def test_paths_are_those_of_the_design():
    paths = BundlePaths(Path("b"))
    assert [
        p.as_posix()
        for p in (paths.manifest, paths.adapter, paths.readouts, paths.roles, paths.tokenizer, paths.metrics)
    ] == [
        "b/dear.json",
        "b/adapter.safetensors",
        "b/readouts.safetensors",
        "b/roles.json",
        "b/tokenizer.json",
        "b/metrics.jsonl",
    ]
    assert [p.as_posix() for p in (paths.report, paths.onnx, paths.export_report, paths.trt)] == [
        "b/report.html",
        "b/onnx",
        "b/onnx/export.json",
        "b/trt",
    ]
