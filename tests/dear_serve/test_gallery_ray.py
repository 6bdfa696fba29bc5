"""Indexing with two local Ray workers, one of which dies: the rows of a single process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dear_serve.errors import InputError
from dear_serve.gallery import FileSource, Gallery, gallery_spec, index_folder
from dear_serve.gallery.ray_index import RayOptions, _Worker, index_with_ray
from dear_serve.runtime.predict import Predictor


class DyingWorker(_Worker):
    """Dies once in all, in its first batch."""

    def __call__(self, batch):
        mark = Path(str(batch["path"][0])).parent / "died"
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return super().__call__(batch)
        os._exit(1)


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "pictures"
    root.mkdir()
    rng = np.random.default_rng(0)
    for i in range(30):
        Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(root / f"{i:02}.png")
    (root / "bad.png").write_bytes(b"no picture")
    (root / "labels.csv").write_text("path,price\n" + "".join(f"{i:02}.png,{i}\n" for i in range(30)))
    return root


def test_options_are_checked():
    with pytest.raises(InputError, match="workers is 0"):
        RayOptions(workers=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning")
def test_two_workers_one_killed_give_the_rows_of_one_process(tmp_path, folder, fake_bundle):
    pytest.importorskip("ray", reason="needs Ray: pip install 'dear-serve[scale]'")
    bundle = fake_bundle.paths.root
    with Predictor.open(bundle, engine="fake") as predictor:
        single = Gallery.open(tmp_path / "single", create_for=gallery_spec(predictor))
        index_folder(predictor, single, folder)
    options = RayOptions(workers=2, batch_size=4, engine="fake")
    pictures = FileSource.folder(folder)
    report = index_with_ray(bundle, tmp_path / "many", pictures, options=options, worker=DyingWorker)
    assert (folder / "died").exists()
    assert report.added == 30
    assert [name for name, _ in report.bad] == ["bad.png"]
    many = Gallery.open(tmp_path / "many", create_for=single.spec)
    ids = sorted(single.hashes())
    assert many.hashes() == single.hashes()
    assert len(many) == 30
    assert many.get(ids) == single.get(ids)
    expected = single.vectors(ids)
    for name, vectors in many.vectors(ids).items():
        np.testing.assert_allclose(vectors, expected[name], atol=1e-6)
    again = index_with_ray(bundle, tmp_path / "many", pictures, options=options)
    assert (again.added, again.skipped) == (0, 30)
