"""Bundles on one base share the sessions of the frozen graphs, and nothing else."""

from __future__ import annotations

import dataclasses
import gc
import json

import pytest

from dear_serve.runtime.onnx_engine import OnnxEngine
from dear_serve.runtime.shared_sessions import frozen_key


@pytest.fixture(scope="module")
def exported(fake_bundle, graphs, tmp_path_factory):
    """`exported(precision, base)`: a bundle with graphs made by hand and an export.json that says so."""

    def export(precision="fp32", base="0" * 64):
        report = json.dumps(
            {"precision": precision, "opset": 20, "base_sha256": base, "versions": {"torch": "2"}}
        )
        return graphs.export(fake_bundle, tmp_path_factory.mktemp("shared") / "bundle", report=report)

    return export


def test_two_bundles_on_one_base_share_the_frozen_sessions(exported):
    one, two = (OnnxEngine(exported(), threads=1) for _ in range(2))
    for name in ("zero_shot_image", "zero_shot_text"):
        assert one._session(name) is two._session(name)
    for name in ("image", "text", "fusion"):
        assert one._session(name) is not two._session(name)
    other_threads = OnnxEngine(exported(), threads=2)
    assert other_threads._session("zero_shot_image") is not one._session("zero_shot_image")
    kept = one._session("zero_shot_image")
    one.close()
    assert two._session("zero_shot_image") is kept, "closing one leaves the other's"
    for engine in (two, other_threads):
        engine.close()
    del kept, one, two, other_threads
    gc.collect()


def test_what_is_not_the_bases_alone_is_not_shared(exported, fake_bundle):
    bundle = exported()
    assert frozen_key(bundle, "image") is None
    assert frozen_key(bundle, "zero_shot_image") == frozen_key(exported(), "zero_shot_image")
    assert frozen_key(exported("int8"), "zero_shot_image") is None
    assert frozen_key(exported(base="1" * 64), "zero_shot_image") is None
    assert frozen_key(exported("fp16"), "zero_shot_image") != frozen_key(bundle, "zero_shot_image")
    without = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, files={}))
    assert frozen_key(without, "zero_shot_image") is None
