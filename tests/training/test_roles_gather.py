"""Head outputs over a probe set: exact, streamed, resumable; the pictures of a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dear_serve.backbone.clip import Clip
from dear_serve.config import ClipConfig, PreprocessConfig
from dear_serve.dear.roles import Description
from dear_serve.errors import CheckFailedError, DataError
from training import head_values as head_values_module
from training.head_values import gather, head_values
from training.probe import Batch, FolderPictures, WorldPictures, as_image
from training.role_pictures import strongest, thumbnails
from training.role_report import Chosen


@pytest.fixture
def clip(tiny_clip_config: ClipConfig) -> Clip:
    torch.manual_seed(0)
    return Clip(tiny_clip_config).eval()


class Noise:
    """Random pictures as a probe set, in batches of the size asked for."""

    what = "noise"

    def __init__(self, count: int = 24) -> None:
        self.data = torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.data)

    @property
    def identity(self) -> str:
        return f"noise {len(self.data)}"

    def batches(self, start: int, size: int) -> Iterator[Batch]:
        for first in range(start, len(self.data), size):
            self.asked.append(first)
            end = min(first + size, len(self.data))
            yield Batch(pixels=self.data[first:end], positions=tuple(range(first, end)), end=end)

    def pixels(self, position: int) -> torch.Tensor:
        return self.data[position]


def test_contributions_add_up_and_are_streamed(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_values_module, "batch_size", lambda patches: 4)
    seen: list[int] = []
    outputs = gather(clip, Noise(), first_block=2, progress=seen.append)
    assert outputs.values.shape == (24, 2, 4, 8)
    assert outputs.largest_error < 1e-4
    assert outputs.checked == 4  # one batch of ten
    assert seen == [0, 4, 8, 12, 16, 20, 24]
    with torch.no_grad():
        heads = clip.visual.contributions(Noise().data, first_block=2).heads.numpy()
    for i, h in outputs.heads:
        np.testing.assert_allclose(outputs.contributions(i, h), heads[:, i, h], atol=1e-5)
    q, r = outputs.directions(1, 2)
    covariance = outputs.value_covariances()[1, 2]
    expected = np.cov(heads[:, 1, 2].T.astype(np.float64), bias=True)
    np.testing.assert_allclose(q.T @ r.T @ covariance @ r @ q, expected, atol=1e-8)
    np.testing.assert_allclose(q @ q.T, np.eye(8), atol=1e-12)


def test_layer_scale_belongs_to_the_heads(tiny_clip_config: ClipConfig) -> None:
    vision = dataclasses.replace(tiny_clip_config.vision, layer_scale=True)
    scaled = Clip(dataclasses.replace(tiny_clip_config, vision=vision)).eval()
    with torch.no_grad():
        for block in scaled.visual.blocks:
            block.ls_1.gamma.uniform_(0.2, 2.0)
    assert gather(scaled, Noise(8), first_block=1).largest_error < 1e-4


def test_a_stopped_run_goes_on(clip: Clip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_values_module, "batch_size", lambda patches: 4)

    def stop(seen: int) -> None:
        if seen == 12:
            raise KeyboardInterrupt

    whole = gather(clip, Noise(), first_block=2)
    state = tmp_path / "state"
    with pytest.raises(KeyboardInterrupt):
        gather(clip, Noise(), first_block=2, state=state, key="a", progress=stop)
    rest = Noise()
    outputs = gather(clip, rest, first_block=2, state=state, key="a")
    assert rest.asked == [12, 16, 20]
    assert isinstance(outputs.values, np.memmap)
    np.testing.assert_array_equal(outputs.values, whole.values)
    assert (outputs.positions, outputs.checked) == (whole.positions, whole.checked)
    for other in ({"key": "b"}, {"first_block": 3}):  # of another base, or other blocks: from the start
        again = Noise()
        gather(clip, again, **{"first_block": 2, "state": state, "key": "a", **other})
        assert again.asked[0] == 0


def test_resampling_every_picture_once_changes_nothing(clip: Clip) -> None:
    outputs = gather(clip, Noise(), first_block=2)
    once = outputs.resampled_covariances(np.ones(24, np.int64))
    np.testing.assert_allclose(once, outputs.value_covariances(), atol=1e-9)
    twice = np.repeat([2, 0], 12)
    rows = np.concatenate([outputs.values[:12]] * 2)[:, 1, 3].astype(np.float64)
    np.testing.assert_allclose(
        outputs.resampled_covariances(twice)[1, 3], np.cov(rows.T, bias=True), atol=1e-9
    )


def test_contributions_that_do_not_add_up_are_refused(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = clip.visual.pool
    monkeypatch.setattr(clip.visual, "pool", lambda x: pool(x) + 0.01)
    with pytest.raises(CheckFailedError, match=r"miss the image feature by 0\.01"):
        gather(clip, Noise(), first_block=2)


def test_one_pass_gives_the_feature(clip: Clip) -> None:
    values, feature = head_values(clip, Noise().data, 2)
    with torch.no_grad():
        torch.testing.assert_close(feature, clip.visual(Noise().data))
    assert values.shape == (24, 2, 4, 8)


def test_one_picture_is_too_few(clip: Clip) -> None:
    with pytest.raises(DataError, match="1 pictures"):
        gather(clip, Noise(1), first_block=3)


def write_pictures(folder: Path, n: int = 12) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(n):
        Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(folder / f"{i:02d}.png")


def test_folder_of_pictures(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in")
    (tmp_path / "in" / "03b.png").write_bytes(b"no picture")
    skipped: list[str] = []
    config = PreprocessConfig(size=32)
    pictures = FolderPictures(tmp_path / "in", 99, config, skipped=lambda path, _: skipped.append(path.name))
    found = list(pictures.batches(0, 5))
    assert [b.positions for b in found] == [(0, 1, 2, 3), (5, 6, 7, 8, 9), (10, 11, 12)]
    assert [b.end for b in found] == [5, 10, 13]
    assert skipped == ["03b.png"]
    torch.testing.assert_close(found[1].pixels[0], pictures.pixels(5))
    torch.testing.assert_close(next(pictures.batches(10, 5)).pixels, found[2].pixels)
    few = FolderPictures(tmp_path / "in", 5, config, seed=3)
    assert len(few) == 5
    assert few.identity != pictures.identity
    with pytest.raises(DataError, match="not a folder"):
        FolderPictures(tmp_path / "absent", 5, config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no picture"):
        FolderPictures(tmp_path / "empty", 5, config)


def test_rendered_pictures_are_the_same_from_any_place_on() -> None:
    pytest.importorskip("fonticon_mdi7")
    pictures = WorldPictures(7, seed=3, n_objects=5)
    whole = torch.cat([b.pixels for b in pictures.batches(0, 3)])
    assert whole.shape == (7, 3, 64, 64)
    torch.testing.assert_close(next(pictures.batches(3, 3)).pixels, whole[3:6])
    torch.testing.assert_close(pictures.pixels(5), whole[5])
    assert (WorldPictures(7, seed=4, n_objects=5).pixels(5) != whole[5]).any()


def test_pixels_back_to_a_picture() -> None:
    config = PreprocessConfig(size=2, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))
    image = np.array([[[0, 1, 2], [50, 100, 150]], [[200, 220, 255], [7, 8, 9]]], np.uint8)
    scaled = torch.from_numpy(image).permute(2, 0, 1) / 255
    pixels = (scaled - torch.tensor(config.mean)[:, None, None]) / torch.tensor(config.std)[:, None, None]
    np.testing.assert_array_equal(as_image(pixels, config), image)


def test_pictures_a_head_responds_to(clip: Clip) -> None:
    noise = Noise()
    outputs = gather(clip, noise, first_block=2)
    text = np.eye(24, dtype=np.float32)
    chosen = [
        Chosen(descriptions=(Description(text="b", variance=1.0),), explained=1.0, variance=1.0)
        for _ in outputs.heads
    ]
    found = strongest(outputs, chosen, (["a", "b"], text[:2]), count=4)
    for (i, h), s in zip(outputs.heads, found, strict=True):
        c = outputs.contributions(i, h)
        c = c - c.mean(0)
        assert list(s.overall) == np.argsort(-(c**2).sum(1))[:4].tolist()
        assert list(s.along["b"]) == np.argsort(-c[:, 1])[:4].tolist()
    shown = thumbnails(noise, found[:1], PreprocessConfig(size=32))
    assert set(shown) == {*found[0].overall, *found[0].along["b"]}
    assert all(data.startswith(b"\xff\xd8") for data in shown.values())
