"""Lists and Parquet files into galleries, galleries as Parquet, galleries re-embedded for another bundle."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dear_serve import cli
from dear_serve.errors import DataError, GalleryError
from dear_serve.gallery import (
    FileSource,
    Gallery,
    GallerySpec,
    export_parquet,
    gallery_spec,
    import_parquet,
    index_folder,
    index_pictures,
    migrate,
    open_source,
)
from dear_serve.runtime.predict import Predictor


@pytest.fixture
def predictor(fake_bundle):
    with Predictor.open(fake_bundle.paths.root, engine="fake") as predictor:
        yield predictor


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "pictures"
    root.mkdir()
    rng = np.random.default_rng(0)
    for i in range(5):
        Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(root / f"{i}.png")
    (root / "labels.csv").write_text("path,price\n" + "".join(f"{i}.png,{i}\n" for i in range(5)))
    return root


@pytest.fixture
def filled(tmp_path, predictor, folder):
    gallery = Gallery.open(tmp_path / "gallery", create_for=gallery_spec(predictor))
    index_folder(predictor, gallery, folder)
    return gallery


def content(gallery):
    ids = sorted(gallery.hashes())
    vectors = {n: v.tolist() for n, v in gallery.vectors(ids).items()}
    return gallery.get(ids), vectors


def test_a_list_of_paths(tmp_path, predictor, folder):
    names = tmp_path / "list.txt"
    names.write_text(f"pictures/0.png\n\n{folder / '1.png'}\npictures/none.png\n")
    gallery = Gallery.open(tmp_path / "g", create_for=gallery_spec(predictor))
    report = index_pictures(predictor, gallery, open_source(names))
    assert report.added == 2
    assert report.bad == (("pictures/none.png", "not a file"),)
    assert set(gallery.hashes()) == {"pictures/0.png", str(folder / "1.png")}
    assert index_pictures(predictor, gallery, open_source(names)).skipped == 2


@pytest.mark.parametrize("as_struct", [False, True])
def test_a_parquet_file(tmp_path, predictor, folder, as_struct):
    data = [(folder / f"{i}.png").read_bytes() for i in range(3)]
    images = [{"bytes": d, "path": None} for d in data] if as_struct else data
    table = pa.table({
        "id": ["a", "b", "c", "d"], "image": [*images, None], "price": [1, 2, None, 4], "odd": [[1], [2], [3], [4]],
    })  # fmt: skip
    pq.write_table(table, tmp_path / "in.parquet")
    gallery = Gallery.open(tmp_path / "g", create_for=gallery_spec(predictor))
    source = open_source(tmp_path / "in.parquet")
    report = index_pictures(predictor, gallery, source, batch_size=2)
    assert (report.added, report.bad) == (3, (("d", "the row has no picture"),))
    assert [r.metadata for r in gallery.get(["a", "c"])] == [{"price": 1}, {"price": None}]
    assert index_pictures(predictor, gallery, source).skipped == 3


def test_what_is_no_source_is_refused(tmp_path):
    with pytest.raises(DataError, match="is not there"):
        open_source(tmp_path / "none")
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="as Parquet"):
        open_source(tmp_path / "bad.parquet")
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "lacks.parquet")
    with pytest.raises(DataError, match="'image' is needed"):
        open_source(tmp_path / "lacks.parquet")
    (tmp_path / "twice.txt").write_text("a.png\na.png\n")
    with pytest.raises(DataError, match="twice"):
        open_source(tmp_path / "twice.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match="UTF-8"):
        open_source(tmp_path / "binary.txt")


def test_a_gallery_goes_through_parquet_unchanged(tmp_path, filled):
    file = tmp_path / "out.parquet"
    assert export_parquet(filled, file) == 5
    assert not list(tmp_path.glob("*.partial"))
    seen = []
    assert (
        import_parquet(tmp_path / "copy", file, progress=lambda done, total: seen.append((done, total))) == 5
    )
    copy = Gallery.open(tmp_path / "copy", create_for=filled.spec)
    assert content(copy) == content(filled)
    assert seen[-1] == (5, 5)
    assert import_parquet(tmp_path / "copy", file) == 5
    assert len(copy) == 5


def test_imports_are_checked(tmp_path, filled):
    file = tmp_path / "out.parquet"
    export_parquet(filled, file)
    other = GallerySpec(bundle_sha256="0", base_sha256="0", columns=filled.spec.columns)
    Gallery.open(tmp_path / "other", create_for=other)
    with pytest.raises(GalleryError, match="--migrate"):
        import_parquet(tmp_path / "other", file)
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "foreign.parquet")
    with pytest.raises(DataError, match="no exported gallery"):
        import_parquet(tmp_path / "new", tmp_path / "foreign.parquet")
    with pytest.raises(DataError, match="as Parquet"):
        import_parquet(tmp_path / "new", tmp_path / "none.parquet")
    with pytest.raises(DataError, match="cannot be written"):
        export_parquet(filled, tmp_path / "nowhere" / "out.parquet")


def made_by_another(tmp_path, filled):
    """The gallery's content in one that another bundle made."""
    other = GallerySpec(bundle_sha256="0" * 64, base_sha256="1" * 64, columns={"class": 4})
    gallery = Gallery.open(tmp_path / "old", create_for=other)
    ids = sorted(filled.hashes())
    rows = filled.get(ids)
    gallery.add(
        ids,
        {"class": np.ones((5, 4), np.float32)},
        [r.metadata for r in rows],
        [r.thumbnail for r in rows],
        ids,
    )
    return tmp_path / "old"


def test_migration_from_files_is_as_indexing(tmp_path, filled, predictor, folder):
    path = made_by_another(tmp_path, filled)
    report = migrate(predictor, path, FileSource.folder(folder), batch_size=2)
    assert (report.added, report.bad) == (5, ())
    gallery = Gallery.open(path, create_for=gallery_spec(predictor))
    ids = sorted(filled.hashes())
    assert gallery.get(ids) == filled.get(ids)
    expected = filled.vectors(ids)
    for name, vectors in gallery.vectors(ids).items():
        np.testing.assert_allclose(vectors, expected[name], atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["gallery", "old", "pictures"]
    assert migrate(predictor, path).skipped == 5


def test_migration_from_thumbnails_and_after_a_kill(tmp_path, filled, predictor, folder):
    path = made_by_another(tmp_path, filled)
    Gallery.open(tmp_path / "old.migrating", create_for=gallery_spec(predictor))  # begun and killed
    assert migrate(predictor, path).added == 5
    gallery = Gallery.open(path, create_for=gallery_spec(predictor))
    assert [r.metadata for r in gallery.get(["3.png"])] == [{"price": 3}]
    assert gallery.search  # it opens and its thumbnails were the pictures
    again = index_folder(predictor, gallery, folder)  # the originals replace what thumbnails gave
    assert (again.added, again.skipped) == (5, 0)


def test_a_swap_cut_short_is_ended(tmp_path, filled, predictor):
    path = made_by_another(tmp_path, filled)
    migrate(predictor, path)
    path.rename(tmp_path / "old.migrating")
    made_by_another(tmp_path, filled).rename(tmp_path / "old.old")
    assert migrate(predictor, path).skipped == 5
    assert not (tmp_path / "old.old").exists()


def test_a_picture_that_cannot_be_read_keeps_the_old_gallery(tmp_path, filled, predictor, folder):
    path = made_by_another(tmp_path, filled)
    (folder / "2.png").write_bytes(b"broken")
    report = migrate(predictor, path, FileSource.folder(folder))
    assert [name for name, _ in report.bad] == ["2.png"]
    assert Gallery.open(path).spec.bundle_sha256 == "0" * 64


def test_commands(tmp_path, tiny_bundle, folder, capsys):
    bundle, gallery, engine = str(tiny_bundle.paths.root), str(tmp_path / "g"), ["--engine", "torch"]
    names = tmp_path / "list.txt"
    names.write_text("".join(f"pictures/{i}.png\n" for i in range(5)))
    assert cli.main(["index", bundle, str(names), "--gallery", gallery, *engine]) == 0
    file = str(tmp_path / "out.parquet")
    assert cli.main(["gallery", "export", gallery, file]) == 0
    assert cli.main(["gallery", "import", str(tmp_path / "copy"), file]) == 0
    capsys.readouterr()
    assert cli.main(["gallery", "stats", str(tmp_path / "copy")]) == 0
    assert json.loads(capsys.readouterr().out)["pictures"] == 5
    assert cli.main(["index", bundle, "--gallery", gallery, "--migrate", *engine]) == 0
    assert "0 added, 5 already there" in capsys.readouterr().out
    assert cli.main(["gallery", "export", gallery]) == 2
    assert cli.main(["index", bundle, file, "--gallery", gallery, "--engine", "ray"]) == 2
    assert cli.main(["index", bundle, "--gallery", gallery, *engine]) == 2
    assert cli.main(["index", bundle, file, "--gallery", gallery, "--migrate", *engine]) == 2
