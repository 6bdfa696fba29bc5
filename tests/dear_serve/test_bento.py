"""The folder that `bentoml build` makes an image of; the build itself is BentoML's and is run once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dear_serve import cli
from dear_serve.bundle import Bundle
from dear_serve.errors import InputError
from dear_serve.launch import named_bundles


def test_bentoml_builds_what_is_written(hand_exported, tmp_path, capsys):
    out = tmp_path / "image"
    command = ["bento", str(hand_exported.paths.root), f"pets={hand_exported.paths.root}", "--out", str(out)]
    assert cli.main(command) == 0
    assert "bentoml build" in capsys.readouterr().out
    assert Bundle.open(out / "bundles" / "pets").sha256 == hand_exported.sha256
    text = (out / "bentofile.yaml").read_text()
    assert "torch" not in text
    assert "onnxruntime" in text
    assert "bundle=/home/bentoml/bento/src/bundles/bundle:pets=/home/bentoml/bento/src/bundles/pets" in text
    environment = {**os.environ, "BENTOML_HOME": str(tmp_path / "home"), "BENTOML_DO_NOT_TRACK": "True"}
    build = [sys.executable, "-m", "bentoml", "build", "--output", "tag"]
    done = subprocess.run(
        build, cwd=out, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (built,) = (tmp_path / "home" / "bentos" / "dear").glob("*/src")
    assert (built / "service" / "web" / "index.html").is_file()
    assert Bundle.open(built / "bundles" / "bundle").sha256 == hand_exported.sha256
    assert cli.main(command) == 2, "the folder is not empty any more"


def test_an_image_needs_graphs(fake_bundle, tmp_path, capsys):
    assert cli.main(["bento", str(fake_bundle.paths.root), "--out", str(tmp_path / "x")]) == 2
    assert "dear-export" in capsys.readouterr().err


def test_two_bundles_of_one_name_are_refused(tmp_path):
    with pytest.raises(InputError, match="two bundles are called 'b'"):
        named_bundles([tmp_path / "b", f"b={tmp_path / 'c'}"])
