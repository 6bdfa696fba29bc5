"""The attribute world's pictures and scenes: what is drawn is what the indices say."""

from __future__ import annotations

import sys
from itertools import combinations

import numpy as np
import pytest

from dear_serve.errors import ConfigError, MissingDependencyError
from training.world import (
    HELD_OUT_PAIRS,
    STYLES,
    TRAIN_STYLES,
    Scenes,
    World,
    is_held_out,
    sample_scenes,
    scenes_from,
)
from training.world_masks import dilate, glyph_bank, icon_font, shape_bank, texture_bank
from training.world_vocab import (
    ATTRIBUTES,
    COLORS,
    CORE_OBJECTS,
    ICONS,
    LOCATIONS,
    OBJECTS,
    SHAPES,
    TEXTURES,
    VOCABULARY,
)

CENTER = LOCATIONS.index("center")
PLAIN = TEXTURES.index("plain")
SQUARE = SHAPES.index("square")


@pytest.fixture(scope="module")
def world() -> World:
    return World(40)


def repeated(n: int, style: str = "print", **values: int) -> Scenes:
    """`n` equal scenes: a black plain square at the center with a cat, but for `values`."""
    row = {"color": COLORS.index("black"), "shape": SQUARE, "texture": PLAIN, "object": 0, "location": CENTER}
    row |= values
    return scenes_from(np.tile([row[name] for name in ATTRIBUTES], (n, 1)), np.full(n, STYLES.index(style)))


def test_render_is_reproducible_and_spans_chunks(world: World) -> None:
    scenes = sample_scenes(np.random.default_rng(0), 70, n_objects=40)
    first = world.render(scenes, np.random.default_rng(1))
    assert first.shape == (70, 64, 64, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, world.render(scenes, np.random.default_rng(1)))
    assert (first != world.render(scenes, np.random.default_rng(2))).mean() > 0.5
    assert world.render(scenes.select(slice(0, 0)), np.random.default_rng(1)).shape == (0, 64, 64, 3)


def test_a_smaller_world_draws_its_objects_alike(world: World) -> None:
    scenes = sample_scenes(np.random.default_rng(3), 20, n_objects=5)
    np.testing.assert_array_equal(
        World(5).render(scenes, np.random.default_rng(0)), world.render(scenes, np.random.default_rng(0))
    )


@pytest.mark.parametrize("color", range(len(COLORS)), ids=COLORS)
def test_plain_badges_have_their_color(world: World, color: int) -> None:
    def rim(index: int, seed: int) -> np.ndarray:
        """Median RGB of the square's upper part, above a fish."""
        scenes = repeated(40, color=index, object=OBJECTS.index("fish"))
        pixels = world.render(scenes, np.random.default_rng(seed))[:, 20:22, 28:36]
        return np.median(pixels, axis=(0, 1, 2))

    others = [rim(index, seed=9) for index in range(len(COLORS))]
    assert np.argmin([np.abs(rim(color, seed=0) - other).sum() for other in others]) == color


@pytest.mark.parametrize("location", range(len(LOCATIONS)), ids=LOCATIONS)
def test_badges_are_where_the_location_says(world: World, location: int) -> None:
    scenes = repeated(24, location=location, color=COLORS.index("blue"))
    pictures = world.render(scenes, np.random.default_rng(0)).astype(float)
    blue = (pictures[..., 2] - pictures[..., 0]) > 80
    y, x = np.nonzero(blue.mean(axis=0) > 0.5)
    expected = np.array([[18, 32, 46][location // 3], [18, 32, 46][location % 3]])
    assert np.abs(np.array([y.mean(), x.mean()]) - expected).max() < 3


def test_only_the_icon_changes_with_the_object(world: World) -> None:
    one = world.render(repeated(8, object=0), np.random.default_rng(0)).astype(int)
    two = world.render(repeated(8, object=15), np.random.default_rng(0)).astype(int)
    changed = np.abs(one - two).max(axis=-1) > 0
    assert changed.any(axis=(1, 2)).all()
    assert not changed[:, :13].any()
    assert not changed[:, :, :13].any()


def test_dark_styles_are_dark_and_lined_ones_are_not_filled(world: World) -> None:
    means = {style: world.render(repeated(32, style), np.random.default_rng(0)).mean() for style in STYLES}
    assert max(means["night"], means["dusk"]) < 70 < 120 < min(means["print"], means["outline"])
    icon = slice(24, 40)
    filled = world.render(repeated(32, "print"), np.random.default_rng(0))[:, icon, icon].mean()
    lined = world.render(repeated(32, "outline"), np.random.default_rng(0))[:, icon, icon].mean()
    assert lined > filled + 30


def test_icons_stand_out_from_their_halo_on_every_texture(world: World) -> None:
    for texture in range(len(TEXTURES)):
        pictures = world.render(repeated(16, texture=texture), np.random.default_rng(0)).astype(float)
        middle = pictures[:, 20:44, 20:44].mean(axis=-1)
        assert (np.percentile(middle, 90, axis=(1, 2)) - np.percentile(middle, 10, axis=(1, 2)) > 150).all()


def test_shapes_and_textures_differ() -> None:
    fills, edges = shape_bank(1.5)
    upright = fills[:, 2, 2].astype(float) / 255
    assert (upright[:, 16:30, 16:30] > 0.9).mean() > 0.97  # the icon has ground to stand on
    for a, b in combinations(upright, 2):
        assert np.minimum(a, b).sum() / np.maximum(a, b).sum() < 0.9
    assert (edges.max(axis=(-1, -2)) > 180).all()
    fields = texture_bank().astype(float) / 255
    assert not fields[PLAIN].any()
    shares = np.delete(fields, PLAIN, axis=0).mean(axis=(2, 3))
    assert (shares > 0.2).all()
    assert (shares < 0.7).all()


def test_every_glyph_is_drawn_and_near_the_same_size() -> None:
    bank = glyph_bank(ICONS[::6])
    ink = bank[:, 1, 2] > 128
    longest = np.maximum(ink.any(axis=1).sum(axis=1), ink.any(axis=2).sum(axis=1))
    assert longest.min() >= 16  # icons of 18 pixels
    assert longest.max() <= 22
    assert not bank[..., 0, :].any()
    assert not bank[..., :, -1].any()


def test_dilate_grows_by_the_radius() -> None:
    mask = np.zeros((1, 9, 9), np.uint8)
    mask[0, 4, 4] = 200
    assert (dilate(mask, 1.0) > 0).sum() == 5
    assert (dilate(mask, 2.3) == 200).sum() == 21


def test_font_missing_is_said_with_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fonticon_mdi7.mdi7", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "dear-serve\[world\]"'):
        icon_font()


def test_splits_follow_the_rule() -> None:
    rng = np.random.default_rng(0)
    train = sample_scenes(rng, 20_000, split="train").attributes()
    assert not is_held_out(train).any()
    assert is_held_out(sample_scenes(rng, 2000, split="heldout").attributes()).all()
    share = is_held_out(sample_scenes(rng, 20_000, split="any").attributes()).mean()
    assert share == pytest.approx(1 - (6 / 7) ** 3, abs=0.03)
    for k, name in enumerate(ATTRIBUTES):
        assert len(np.unique(train[:, k])) == len(VOCABULARY[name])


@pytest.mark.parametrize("pair", HELD_OUT_PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_each_value_keeps_most_partners_in_training(pair: tuple[str, str, int, int]) -> None:
    first, second, p, q = pair
    a, b = np.meshgrid(np.arange(len(VOCABULARY[first])), np.arange(len(VOCABULARY[second])), indexing="ij")
    held = (p * a + q * b) % 7 == 0
    assert held.mean() == pytest.approx(1 / 7, abs=0.02)
    assert held.mean(axis=0).max() <= 2 / 9
    assert held.mean(axis=1).max() <= 2 / 9


def test_sampling_options() -> None:
    scenes = sample_scenes(np.random.default_rng(0), 500, n_objects=7, styles=["night", "print", "print"])
    assert scenes.object.max() == 6
    assert set(scenes.style.tolist()) == {STYLES.index("night"), STYLES.index("print")}
    assert (scenes.style == STYLES.index("print")).mean() == pytest.approx(2 / 3, abs=0.07)
    assert len(sample_scenes(np.random.default_rng(0), 0)) == 0
    assert not {"night", "dusk"} & set(TRAIN_STYLES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "test"}, "unknown split 'test'"),
        ({"styles": ["neon"]}, r"unknown styles \['neon'\]"),
        ({"styles": []}, "choose from print"),
        ({"n_objects": 0}, "n_objects is 0"),
        ({"n_objects": 10_000}, "n_objects is 10000"),
    ],
)
def test_bad_sampling_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sample_scenes(np.random.default_rng(0), 4, **options)
    with pytest.raises(ConfigError, match="-1 scenes"):
        sample_scenes(np.random.default_rng(0), -1)


@pytest.mark.parametrize("values", [{"object": 40}, {"color": 11}, {"location": -1}])
def test_scenes_out_of_range(world: World, values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(values))} runs from"):
        world.render(repeated(3, **values), np.random.default_rng(0))


def test_object_names_are_distinct_and_exist_in_the_font() -> None:
    _, characters = icon_font()
    assert len(OBJECTS) == len(set(OBJECTS)) == len(set(ICONS)) >= 300
    assert set(ICONS) <= set(characters)
    assert len(OBJECTS) > CORE_OBJECTS
    others = {name for key in ATTRIBUTES if key != "object" for name in VOCABULARY[key]}
    assert not others & set(OBJECTS)
