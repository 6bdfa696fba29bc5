"""Folders into galleries: ids, metadata, thumbnails, skipped and bad pictures, resuming."""

from __future__ import annotations

import io
import os

import numpy as np
import pytest
from PIL import Image

from dear_serve.errors import DataError, GalleryError, InputError, OverloadError
from dear_serve.gallery import Gallery, GallerySpec, Query, gallery_spec, index_folder
from dear_serve.gallery import indexer as indexer_module
from dear_serve.gallery.labels_csv import read_labels
from dear_serve.runtime.base import ImageFeatures
from dear_serve.runtime.predict import Predictor


@pytest.fixture
def predictor(fake_bundle):
    with Predictor.open(fake_bundle.paths.root, engine="fake") as predictor:
        yield predictor


@pytest.fixture
def gallery(tmp_path, predictor):
    return Gallery.open(tmp_path / "gallery", create_for=gallery_spec(predictor))


@pytest.fixture
def folder(tmp_path):
    """Five good pictures in three folders, and what is no picture."""
    root = tmp_path / "pictures"
    for i, name in enumerate(("a.png", "b.JPG", "sub/c.webp", "sub/deep/é d.png", "sub/e.bmp")):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (300 + i, 40), (40 * i, 0, 0)).save(path)
    (root / "notes.txt").write_text("not a picture")
    (root / ".hidden.png").write_bytes(b"hidden")
    (root / ".cache").mkdir()
    (root / ".cache" / "x.png").write_bytes(b"hidden")
    return root


NAMES = ["a.png", "b.JPG", "sub/c.webp", "sub/deep/é d.png", "sub/e.bmp"]


def test_every_picture_is_added_with_its_vectors(predictor, gallery, folder):
    report = index_folder(predictor, gallery, folder, batch_size=2, threads=2)
    assert (report.added, report.skipped, report.bad) == (5, 0, ())
    assert sorted(gallery.hashes()) == sorted(NAMES)
    expected = predictor.readout_images([(folder / n).read_bytes() for n in NAMES])
    stored = gallery.vectors(NAMES)
    for i, vectors in enumerate(expected):
        for name, vector in vectors.items():
            np.testing.assert_allclose(stored[name][i], vector, atol=1e-6)
    for record in gallery.get(NAMES):
        image = Image.open(io.BytesIO(record.thumbnail))
        assert max(image.size) == 256
    vectors = {k: v[0] for k, v in gallery.vectors(["sub/e.bmp"]).items()}
    hit = gallery.search(Query(vectors=vectors, weights={"color": 1.0, "shape": 1.0}, top_k=1))[0]
    assert (hit.id, hit.score) == ("sub/e.bmp", pytest.approx(2.0, abs=1e-6))


def test_unchanged_pictures_are_skipped_and_changed_ones_replaced(predictor, gallery, folder):
    index_folder(predictor, gallery, folder)
    again = index_folder(predictor, gallery, folder)
    assert (again.added, again.skipped) == (0, 5)
    Image.new("RGB", (50, 50), "green").save(folder / "a.png")
    (folder / "labels.csv").write_text("path,price\nb.JPG,3\n")
    changed = index_folder(predictor, gallery, folder)
    assert (changed.added, changed.skipped) == (2, 3)
    assert len(gallery) == 5
    assert gallery.get(["b.JPG"])[0].metadata == {"price": 3}


def test_bad_pictures_are_listed_and_stop_nobody(predictor, gallery, folder):
    good = (folder / "a.png").read_bytes()
    bad = {"empty.png": b"", "text.jpg": b"hello", "cut.png": good[:60], "x" * 200 + ".png": good}
    for name, data in bad.items():
        (folder / name).write_bytes(data)
    deep = folder / ("y" * 200) / ("z" * 200)
    deep.mkdir(parents=True)
    (deep / ("w" * 150 + ".png")).write_bytes(good)
    (folder / "folder.png").mkdir()
    (folder / "link.png").symlink_to(folder / "gone")
    report = index_folder(predictor, gallery, folder, batch_size=2)
    reasons = dict(report.bad)
    assert report.added == 6
    assert set(reasons) == {
        "empty.png", "text.jpg", "cut.png", "link.png", (deep / ("w" * 150 + ".png")).relative_to(folder).as_posix()
    }  # fmt: skip
    assert "0 bytes" in reasons["empty.png"]
    assert "not a file" in reasons["link.png"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_or_a_huge_file_is_bad_and_not_read(predictor, gallery, folder):
    os.mkfifo(folder / "pipe.png")
    with (folder / "huge.png").open("wb") as file:
        file.truncate(10**12)
    reasons = dict(index_folder(predictor, gallery, folder).bad)
    assert "not a file" in reasons["pipe.png"]
    assert "1000000000000 bytes" in reasons["huge.png"]


def test_a_picture_without_a_direction_is_bad(predictor, gallery, folder, monkeypatch):
    real = predictor.readout

    def readout(features: ImageFeatures):
        vectors = {k: v.copy() for k, v in real(features).items()}
        vectors["color"][0] = 0
        vectors["shape"][1] = np.nan
        return vectors

    monkeypatch.setattr(predictor, "readout", readout)
    report = index_folder(predictor, gallery, folder)
    assert report.added == 3
    assert dict(report.bad) == dict.fromkeys(NAMES[:2], "the model gives it no usable vector")


def test_compaction_without_a_turn_loses_nothing(predictor, gallery, folder, monkeypatch):
    def no_turn():
        raise OverloadError("busy")

    monkeypatch.setattr(gallery, "compact", no_turn)
    assert index_folder(predictor, gallery, folder).added == 5
    assert len(gallery) == 5


def test_progress_counts_every_picture(predictor, gallery, folder):
    (folder / "bad.png").write_bytes(b"")
    seen = []
    index_folder(predictor, gallery, folder, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i, 6) for i in range(1, 7)]


def test_a_run_cut_short_keeps_what_was_written_and_resumes(predictor, gallery, folder, monkeypatch):
    monkeypatch.setattr(indexer_module, "_WRITE", 2)

    def stop(done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_folder(predictor, gallery, folder, batch_size=1, progress=stop)
    assert 2 <= len(gallery) < 5
    report = index_folder(predictor, gallery, folder)
    assert report.added + report.skipped == 5
    assert report.skipped >= 2
    assert sorted(gallery.hashes()) == sorted(NAMES)


def test_metadata_comes_from_labels(predictor, gallery, folder):
    (folder / "labels.csv").write_text(
        "path,price,code,new,note\na.png,1,007,true,x\n./sub/c.webp,2.5,010,FALSE,\nnone.png,,1,,\n",
        encoding="utf-8-sig",
    )
    report = index_folder(predictor, gallery, folder)
    assert report.bad == (("none.png", "labels.csv names it and it is not there"),)
    records = {r.id: r.metadata for r in gallery.get(["a.png", "sub/c.webp", "b.JPG"])}
    assert records["a.png"] == {"price": 1, "code": "007", "new": True, "note": "x"}
    assert records["sub/c.webp"] == {"price": 2.5, "code": "010", "new": False, "note": None}
    assert records["b.JPG"] == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name\na.png\n",
        "path,path\na,b\n",
        "path,x,x\na,1,2\n",
        "path,x\na.png\n",
        "path\na.png\na.png\n",
        'path\n"a',
    ],
)
def test_bad_labels_are_refused(tmp_path, text):
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(DataError, match=r"labels\.csv"):
        read_labels(tmp_path / "labels.csv")


def test_labels_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "labels.csv").write_bytes(b"path\n\xff\xfe\n")
    with pytest.raises(DataError, match="UTF-8"):
        read_labels(tmp_path / "labels.csv")
    (tmp_path / "labels.csv").write_text("path,a.b\nx.png,1\n")
    with pytest.raises(InputError, match="cannot be a column"):
        read_labels(tmp_path / "labels.csv")


def test_labels_against_the_gallery_are_refused_before_the_work(predictor, gallery, folder):
    (folder / "labels.csv").write_text("path,price\na.png,1\n")
    index_folder(predictor, gallery, folder)
    (folder / "labels.csv").write_text("path,price\na.png,cheap\n")
    with pytest.raises(InputError) as caught:
        index_folder(predictor, gallery, folder)
    assert caught.value.code == "bad_metadata"


def test_another_bundles_gallery_and_a_missing_folder_are_refused(predictor, gallery, folder, tmp_path):
    other = GallerySpec(bundle_sha256="0", base_sha256="0", columns=predictor.columns)
    with pytest.raises(GalleryError, match=predictor.bundle.sha256):
        index_folder(predictor, Gallery.open(tmp_path / "other", create_for=other), folder)
    with pytest.raises(DataError, match="is not a folder"):
        index_folder(predictor, gallery, tmp_path / "nowhere")


def test_an_empty_folder_is_no_error(predictor, gallery, tmp_path):
    (tmp_path / "empty").mkdir()
    report = index_folder(predictor, gallery, tmp_path / "empty")
    assert (report.added, report.skipped, report.bad) == (0, 0, ())
