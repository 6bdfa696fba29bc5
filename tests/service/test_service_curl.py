"""The README's curl lines, run against the real application on the fake engine."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dear_serve.gallery import Gallery, gallery_spec
from service.models import Models

README = Path(__file__).parents[2] / "README.md"
CURL = shutil.which("curl")


def samples() -> list[list[str]]:
    """The words of every curl command in the README's shell blocks."""
    text = README.read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for command in re.findall(r"^curl .*?(?=^curl |\Z)", block, flags=re.MULTILINE | re.DOTALL):
            found.append(shlex.split(command, comments=True))
    return found


@pytest.mark.skipif(CURL is None, reason="no curl here: apt-get install curl")
def test_curl_samples(make_client, listen, predictor, picture, tmp_path):
    """Each is answered, without an error; they run in the README's order, where a later one may need an earlier."""
    gallery = Gallery.open(tmp_path / "gallery", create_for=gallery_spec(predictor))
    pictures = [picture("red"), picture("blue")]
    features, _ = predictor.image_features(pictures)
    ids = ["a.jpg", "b.jpg"]
    gallery.add(ids, predictor.readout(features), [{"price": 1.5}, {"price": 20.0}], pictures, ids)
    (tmp_path / "rose.jpg").write_bytes(picture("red", "JPEG"))
    models = Models({"flowers": predictor, "pets": predictor}, gallery=gallery)
    commands = samples()
    assert len(commands) >= 5
    with listen(make_client(models=models, gallery=gallery).app) as address:
        for words in commands:
            assert any("localhost:3000/" in word for word in words)
            asked = [word.replace("localhost:3000/", address) for word in words]
            done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
            assert "error" not in json.loads(done.stdout), (words, done.stdout)
