"""The bundle folder: round trip and every check on opening."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from dear_serve.bundle import Bundle, BundlePaths, BundleWriter, load_arrays, save_arrays, sha256_file
from dear_serve.errors import BundleError

# Round trip


def test_round_trip(bundles, bundle, manifest):
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
    assert bundles.others(bundle.paths.root.parent) == []


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
def test_readout_shapes_are_checked(bundles, tmp_path, manifest, arrays, message):
    with pytest.raises(BundleError, match=message), BundleWriter(tmp_path / "b") as writer:
        bundles.fill(writer.paths, 0)
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
def test_adapter_shapes_are_checked(bundles, tmp_path, manifest, name, array, message):
    arrays = {key: np.zeros(shape, np.float32) for key, shape in bundles.shapes.items()} | {name: array}
    with pytest.raises(BundleError, match=message), BundleWriter(tmp_path / "b") as writer:
        bundles.fill(writer.paths, 0)
        save_arrays(writer.paths.adapter, {key: a for key, a in arrays.items() if a is not None})
        writer.commit(manifest)


def test_an_adapter_that_is_no_safetensors_file(bundles, tmp_path, manifest):
    message = r"adapter\.safetensors is not a safetensors file"
    with pytest.raises(BundleError, match=message), BundleWriter(tmp_path / "b") as writer:
        bundles.fill(writer.paths, 0)
        writer.paths.adapter.write_bytes(b"pickle")
        writer.commit(manifest)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"first_block": 2}, r"first block 2; dear\.json says 3"),
        ({"layers": 4}, r"blocks 4; dear\.json says 3"),
        ({"heads_per_layer": 2}, r"heads a block 2; dear\.json says 4"),
        ({"base_sha256": "1" * 64}, r"base weights 1{64}; dear\.json says 0{64}"),
    ],
)
def test_roles_of_something_else_are_refused(bundles, tmp_path, manifest, other, message):
    with pytest.raises(BundleError, match=message), BundleWriter(tmp_path / "b") as writer:
        bundles.fill(writer.paths, 0)
        bundles.roles(**other).save(writer.paths.roles)
        writer.commit(manifest)


def test_roles_that_name_no_base_fit(bundles, tmp_path, manifest):
    with BundleWriter(tmp_path / "b") as writer:
        bundles.fill(writer.paths, 0)
        bundles.roles(base_sha256="").save(writer.paths.roles)
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


def test_files_are_as_readable_as_any_other(tmp_path):
    """A server often runs as another user than the one who trained."""
    (tmp_path / "plain").write_bytes(b"")
    save_arrays(tmp_path / "arrays", {"a": np.zeros(3, dtype=np.float32)})
    assert (tmp_path / "arrays").stat().st_mode == (tmp_path / "plain").stat().st_mode
