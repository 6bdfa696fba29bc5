"""The whole path on dear-mini: what the demo wrote, printed and answered, and what a bundle of it must hold."""

from __future__ import annotations

import csv
import json
import re

import numpy as np
import pytest
from PIL import Image

from dear_serve.bundle import Bundle
from dear_serve.gallery import Gallery, build_query, parse_attributes
from dear_serve.runtime.predict import Predictor


@pytest.fixture(scope="module")
def predictor(demo):
    with Predictor.open(demo.root / "bundle") as opened:
        yield opened


def truth(demo) -> dict[str, dict[str, str]]:
    with (demo.root / "pictures" / "labels.csv").open(encoding="utf-8", newline="") as file:
        return {row["path"]: row for row in csv.DictReader(file)}


def opened_gallery(demo) -> Gallery:
    (folder,) = demo.root.glob("gallery-*")
    return Gallery.open(folder)


def test_the_demo_answers_every_question(demo):
    for line in (
        "classify three pictures",
        "labels the adapter never saw",
        "search for the same color",
        "search for the same shape",
        "search by text",
        "answered by",
        "the whole path took",
    ):
        assert line in demo.output
    assert re.search(r"zero_shot\s+\S+.* \d+ %", demo.output)
    assert "CPUExecutionProvider" in demo.output


def test_the_bundle_is_whole(demo):
    bundle = Bundle.open(demo.root / "bundle")
    manifest = bundle.manifest
    assert manifest.base.name == "dear-mini"
    assert len(manifest.class_names) == 12
    assert manifest.alpha[0] > 0.3
    assert sum(manifest.alpha) == pytest.approx(1.0)
    names = {
        "adapter.safetensors",
        "roles.json",
        "tokenizer.json",
        "metrics.jsonl",
        "report.html",
        "onnx/image.onnx",
    }
    assert names <= set(manifest.files)
    report = (demo.root / "bundle" / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(src|href)=.https?:", report)


def test_adapting_helps_even_in_a_quick_run(demo, predictor):
    """On the trained classes' test pictures: adapted beats zero-shot, and zero-shot is neither blind nor done."""
    shares = {}
    for mode in ("zero_shot", "adapted"):
        right = total = 0
        for name in predictor.bundle.manifest.class_names:
            files = sorted((demo.root / "data" / "test" / name).iterdir())[:15]
            results = predictor.classify([f.read_bytes() for f in files], mode=mode, top_k=1)
            right += sum(r.predictions[0].label == name for r in results)
            total += len(files)
        shares[mode] = right / total
    assert 0.25 < shares["zero_shot"] < 0.85
    assert shares["adapted"] > shares["zero_shot"] + 0.05


def test_contributions_sum_to_logits(demo, predictor):
    picture = next(iter(sorted((demo.root / "data" / "test").rglob("*.png"))))
    (result,) = predictor.classify([picture.read_bytes()], top_k=12)
    for p in result.predictions:
        assert sum(p.contributions.values()) == pytest.approx(p.logit, abs=1e-4)
    assert sum(p.probability for p in result.predictions) == pytest.approx(1.0, abs=1e-5)


def test_search_by_color_finds_that_color(demo, predictor):
    rows = truth(demo)
    gallery = opened_gallery(demo)
    hits = {"color": [], "class": []}
    for name in list(rows)[:25]:
        vectors = {k: v[0] for k, v in gallery.vectors([name]).items()}
        for attribute, found in hits.items():
            request = parse_attributes({attribute: 1.0}, tuple(gallery.spec.columns))
            result = gallery.search(build_query(request, vectors, {}, top_k=5, exclude=(name,)))
            found += [rows[h.id]["color"] == rows[name]["color"] for h in result]
    assert np.mean(hits["color"]) > 0.8
    assert np.mean(hits["color"]) > np.mean(hits["class"]) + 0.1


def test_an_attribute_of_ones_own_needs_no_training(demo, predictor):
    """Warm against cold colors, from phrases alone, on stored class vectors."""
    rows = truth(demo)
    gallery = opened_gallery(demo)
    phrases = ["something red", "something orange", "something blue", "something green"]
    wanted = [{"name": "warmth", "phrases": phrases, "weight": 1.0}]
    request = parse_attributes(wanted, tuple(gallery.spec.columns))
    name = next(n for n, row in rows.items() if row["color"] == "red")
    vectors = {k: v[0] for k, v in gallery.vectors([name]).items()}
    query = build_query(
        request, vectors, {"warmth": predictor.readout_phrases(phrases)}, top_k=5, exclude=(name,)
    )
    found = [rows[h.id]["color"] for h in gallery.search(query)]
    assert sum(color in ("red", "orange", "pink", "brown") for color in found) >= 4


def test_onnx_equals_torch_on_real_pictures(demo, predictor):
    """64 pictures of the task: features, logits and the best class."""
    files = sorted((demo.root / "data" / "test").rglob("*.png"))[::6][:64]
    images = [f.read_bytes() for f in files]
    assert len(images) >= 50
    with Predictor.open(demo.root / "bundle", engine="torch") as reference:
        for mode in ("adapted", "zero_shot"):
            ours = predictor.classify(images, mode=mode, top_k=12)
            theirs = reference.classify(images, mode=mode, top_k=12)
            for a, b in zip(ours, theirs, strict=True):
                assert a.predictions[0].label == b.predictions[0].label
                logits = {p.label: p.logit for p in b.predictions}
                assert max(abs(p.logit - logits[p.label]) for p in a.predictions) <= 1e-3
        a, _ = predictor.image_features(images)
        b, _ = reference.image_features(images)
    assert np.abs(a.cls - b.cls).max() <= 1e-4
    assert np.abs(a.attributes - b.attributes).max() <= 1e-4


def test_every_batch_from_1_to_64(predictor):
    """No batch size gives NaN or other numbers: pictures alone, in every company, on all image graphs."""
    pixels = np.random.default_rng(0).standard_normal((64, 3, 64, 64)).astype(np.float32)
    engine = predictor.engine
    whole, frozen, logits = (
        engine.encode_image(pixels),
        engine.encode_image_zero_shot(pixels),
        engine.classify(pixels),
    )
    for n in range(1, 65):
        part = engine.encode_image(pixels[:n])
        assert np.abs(part.cls - whole.cls[:n]).max() <= 1e-5
        assert np.abs(part.attributes - whole.attributes[:n]).max() <= 1e-5
        assert np.abs(engine.encode_image_zero_shot(pixels[:n]) - frozen[:n]).max() <= 1e-5
        assert np.abs(engine.classify(pixels[:n]) - logits[:n]).max() <= 1e-4


def test_roles_of_dear_mini_name_experts(demo):
    roles = Bundle.open(demo.root / "bundle").roles()
    experts = {a for a in roles.attributes if roles.experts(a)}
    assert experts == {"color", "shape", "texture", "object", "location"}
    assert "generalization" in {h.role for h in roles.heads}


def test_attribute_search_table(demo, capsys):
    from training import attribute_search

    arguments = [
        str(demo.root / "bundle"),
        str(demo.root / "pictures"),
        "--choose",
        str(demo.folder / "kinds.json"),
    ]
    assert attribute_search.main(arguments) == 0
    table = json.loads(capsys.readouterr().out.splitlines()[-1])
    for attribute in ("color", "shape", "texture", "location"):
        assert table["rows"][f"span {attribute}"][attribute] > table["chance"][attribute] + 0.3
    kinds = json.loads((demo.folder / "kinds.json").read_text())
    assert set(kinds) == {"color", "shape", "texture", "object", "location"}
    assert attribute_search.main([str(demo.root / "bundle"), str(demo.root / "data" / "train")]) == 2
    assert "labels.csv" in capsys.readouterr().err


def test_pictures_as_people_have_them(demo, predictor, tmp_path):
    """The same picture as PNG, rotated by EXIF, with alpha and in grey is answered every time."""
    picture = Image.open(next(iter(sorted((demo.root / "data" / "test").rglob("*.png")))))
    variants = []
    for convert, options in (("RGB", {}), ("RGBA", {}), ("L", {}), ("P", {})):
        file = tmp_path / f"{convert}.png"
        picture.convert(convert).save(file, **options)
        variants.append(file.read_bytes())
    results = predictor.classify([*variants, b"not a picture"], top_k=1)
    assert [r.error is None for r in results] == [True, True, True, True, False]
    assert len({results[i].predictions[0].label for i in (0, 1)}) == 1
