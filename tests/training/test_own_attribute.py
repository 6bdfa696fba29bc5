"""An attribute of one's own, from phrases to a search over HTTP: roles, token, readout, gallery, service."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dear_serve.bundle import Bundle
from dear_serve.dear.roles import Roles
from dear_serve.errors import ConfigError
from dear_serve.gallery import Gallery, gallery_spec
from dear_serve.runtime.predict import Predictor
from service.asgi import create_asgi_app
from service.models import Models
from service.settings import Settings
from training import roles
from training import run as run_module
from training.phrases import PHRASES, load_phrases
from training.readouts import build_readouts, span_bases

WARMTH = ["something red", "something orange", "something blue", "something green"]


def ask(app: Any, path: str, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client:
            return await client.post(path, **options)

    return asyncio.run(send())


def nearest(vectors: dict[str, np.ndarray], names: list[str]) -> list[str]:
    """Names of the other pictures by the cosine of their warmth to the first one's."""
    rows = vectors["warmth"]
    order = np.argsort(-(rows @ rows[0]))
    return [names[i] for i in order if i]


def test_from_phrases_to_a_search(train_set, tmp_path: Path) -> None:
    (tmp_path / "warmth.json").write_text(json.dumps({"warmth": WARMTH}))
    (tmp_path / "texts").write_text("\n".join(f"a thing {i}" for i in range(40)))
    out, bundle = tmp_path / "roles.json", tmp_path / "bundle"
    options = {
        "base": train_set.base,
        "images": train_set.pictures,
        "phrases": tmp_path / "warmth.json",
        "descriptions": tmp_path / "texts",
        "sentence-encoder": "clip",
        "bootstrap": 0,
        "out": out,
    }
    assert roles.main([part for k, v in options.items() for part in (f"--{k}", str(v))]) == 0
    found = Roles.load(out)
    assert found.attributes == ("color", "shape", "texture", "object", "location", "warmth")
    assert found.phrases == {"warmth": tuple(WARMTH)}

    options = {"base": train_set.base, "roles": out, "out": bundle, "epochs": 1, "shots": 2, "views": 1}
    arguments = [part for k, v in options.items() for part in (f"--{k}", str(v))]
    assert run_module.main([str(train_set.pictures), *arguments, "--no-cache", "--quiet"]) == 0
    manifest = Bundle.open(bundle).manifest
    assert manifest.dear.attributes[-1] == "warmth"
    assert len(manifest.alpha) == 7  # the class feature and six tokens
    readout = manifest.readouts[-1]
    assert (readout.attribute, readout.kind, readout.phrases) == ("warmth", "span", tuple(WARMTH))

    with Predictor.open(bundle, engine="torch") as predictor:
        gallery = Gallery.open(tmp_path / "gallery", create_for=gallery_spec(predictor))
        assert "warmth" in gallery.spec.columns
        app = create_asgi_app(Models({"own": predictor}, gallery=gallery), Settings(bundles={"own": bundle}))
        try:
            pictures = sorted((train_set.pictures / "test").rglob("0.png"))
            names = [p.parent.name for p in pictures]
            files = [("images", (n, p.read_bytes())) for n, p in zip(names, pictures, strict=True)]
            added = ask(app, "/gallery/add", files=files, data={"ids": json.dumps(names)})
            assert added.json() == {"results": [{"id": n} for n in names]}
            answer = ask(app, "/search", json={"ids": [names[0]], "attributes": {"warmth": 1.0}, "top_k": 2})
            assert answer.status_code == 200, answer.text
            vectors = gallery.vectors(names)
            refused = ask(app, "/search", json={"ids": [names[0]], "attributes": {"coldness": 1.0}})
            assert refused.status_code == 400, refused.text
        finally:
            app.state.close()
    assert [r["id"] for r in answer.json()["results"]] == nearest(vectors, names)[:2]


def test_phrases_of_ones_own_have_a_span() -> None:
    rng = np.random.default_rng(0)
    known: dict[str, np.ndarray] = {}

    def encode(texts):
        rows = [known.setdefault(t, rng.standard_normal(64)) for t in texts]
        return np.array([r / np.linalg.norm(r) for r in rows], np.float32)

    own = {"warmth": WARMTH}
    bases = span_bases(("color", "object", "warmth"), encode, own=own)
    assert bases["warmth"].shape == (3, 64)
    # it is not taken away from the object's, which would be emptied by an attribute that is about objects
    without = span_bases(("color", "object"), encode)
    np.testing.assert_allclose(bases["object"], without["object"], atol=1e-5)
    readouts, spans = build_readouts(
        ("color", "object", "warmth"), {"warmth": "span", "object": "span"}, encode, own=own
    )
    assert readouts[1].without == ("color",)
    assert readouts[2].phrases == tuple(WARMTH)
    assert set(spans) == {"warmth", "object"}
    assert "warmth" not in PHRASES


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"a": "red"}',
        '{"a": ["x"]}',
        '{"a": ["x", "x"]}',
        '{"a": ["x", 1]}',
        '{"class": ["x", "y"]}',
    ],
)
def test_phrases_that_say_nothing_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ConfigError, match="phrases"):
        load_phrases(tmp_path / "p.json")
