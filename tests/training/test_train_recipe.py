"""Recipes of known data sets: each is laid out in small as its community lays it out, then read."""

from __future__ import annotations

import json
import shutil

import pytest

from dear_serve.errors import ConfigError, DataError
from training.config import TrainConfig, read_toml
from training.recipe import FOLDER, DataRecipe, known_recipes, load_recipe, open_data

BASE_TO_NOVEL = (
    "caltech101", "dtd", "eurosat", "fgvc_aircraft", "flowers102", "food101", "imagenet", "oxford_pets",
    "stanford_cars", "sun397", "ucf101",
)  # fmt: skip
VARIANTS = ("imagenet_a", "imagenet_r", "imagenet_sketch", "imagenet_v2")
SYNSETS = {"n01440764": "tench", "n03773504": "missile", "n04008634": "missile", "n04355933": "sunglasses"}
NAMES = ["Beta_class", "alpha/x", "Sea_Lion"]


def recipe_of(name) -> DataRecipe:
    return DataRecipe.from_dict(read_toml(FOLDER / f"{name}.toml")["data"])


def touch(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


def lay_out(name, root):
    """An empty picture or two for each class, lists and names as the recipe's layout has them."""
    recipe = recipe_of(name)
    folder = root / recipe.folder
    folder.mkdir(parents=True)
    images = folder / recipe.images
    images.mkdir(parents=True, exist_ok=True)
    if recipe.layout == "split-json":
        rows = {s: [[f"{s}/{i}.jpg", i, n] for i, n in enumerate(NAMES)] for s in ("train", "val", "test")}
        (folder / recipe.split).write_text(json.dumps(rows))
    elif recipe.layout == "lists":
        (folder / recipe.class_names).write_text("737-200\nA330 neo\n")
        for part in (recipe.train, recipe.val, recipe.test):
            (folder / part).write_text("0034309 A330 neo\n0034310 737-200\n")
    else:
        lines = [f"{synset} {title}" for synset, title in SYNSETS.items()]
        (folder / recipe.class_names).write_text("\n".join(lines) + "\n")
        found = range(len(SYNSETS)) if recipe.layout == "numbered" else SYNSETS
        for part in {recipe.train, recipe.test}:
            for i in found:
                touch(images / part / str(i) / f"{part}_b.JPEG")
                touch(images / part / str(i) / f"{part}_a.JPEG")
        touch(images / "README.txt")
    return root


def test_all_fifteen_are_there():
    assert known_recipes() == sorted((*BASE_TO_NOVEL, *VARIANTS))


@pytest.mark.parametrize("name", BASE_TO_NOVEL)
def test_recipe_reads_its_layout(name, tmp_path):
    data, options = open_data(name, lay_out(name, tmp_path))
    config = TrainConfig().with_options(options)
    assert (data.name, data.sampling) == (name, "coop")
    assert (config.base, config.protocol, config.seeds, config.shots) == (
        "ViT-B-16/openai", "base-to-novel", (1, 2, 3), 16,
    )  # fmt: skip
    assert data.templates == config.templates
    assert config.templates[0].count("{}") == 1
    if recipe_of(name).layout == "split-json":
        assert data.class_names == ("Beta class", "alpha/x", "Sea Lion")  # by label, underscores as spaces
        assert (
            data.train[1].path == tmp_path / recipe_of(name).folder / recipe_of(name).images / "train/1.jpg"
        )


def test_class_names_are_spelled_as_the_recipe_says(tmp_path):
    for name, raw, spelled in (
        ("eurosat", "SeaLake", "Sea or Lake"),
        ("caltech101", "Motorbikes", "motorbike"),
    ):
        root = lay_out(name, tmp_path / name)
        file = root / recipe_of(name).folder / recipe_of(name).split
        file.write_text(file.read_text().replace(NAMES[0], raw))
        assert open_data(name, root)[0].class_names[0] == spelled


def test_aircraft_labels_follow_the_file_of_variants(tmp_path):
    data, _ = open_data("fgvc_aircraft", lay_out("fgvc_aircraft", tmp_path))
    assert data.class_names == ("737-200", "A330 neo")
    assert [(item.path.name, item.label) for item in data.val] == [("0034309.jpg", 1), ("0034310.jpg", 0)]
    (tmp_path / "fgvc_aircraft/images_variant_val.txt").write_text("1 Concorde\n")
    with pytest.raises(DataError, match="Concorde"):
        open_data("fgvc_aircraft", tmp_path)


def test_imagenet_and_its_variants_have_the_same_names(tmp_path):
    expected = ("tench", "missile", "projectile", "sunglass")
    data, _ = open_data("imagenet", lay_out("imagenet", tmp_path))
    assert data.class_names == expected
    assert (len(data.train), len(data.val), len(data.test)) == (8, 0, 8)
    assert [item.path.name for item in data.train[:2]] == ["train_a.JPEG", "train_b.JPEG"]
    for name in VARIANTS:
        target, _ = open_data(name, lay_out(name, tmp_path), target=True)
        assert target.class_names == expected, name
        assert (len(target.train), len(target.test)) == (0, 8)
        assert target.templates == ("a photo of a {}.",)
        with pytest.raises(ConfigError, match="--test-on"):
            open_data(name, tmp_path)


def test_variants_of_some_classes_are_labelled_among_them(tmp_path):
    root = lay_out("imagenet_a", tmp_path)
    shutil.rmtree(root / "imagenet-adversarial/imagenet-a/n03773504")
    target, _ = open_data("imagenet_a", root, target=True)
    assert target.class_names == ("tench", "projectile", "sunglass")
    assert [item.label for item in target.test] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("name", [*BASE_TO_NOVEL, *VARIANTS])
def test_a_missing_place_shows_the_expected_tree(name, tmp_path):
    root = lay_out(name, tmp_path)
    place = recipe_of(name).places()[-1]
    (root / place).rename(root / "elsewhere")
    with pytest.raises(DataError) as raised:
        open_data(name, root, target=True)
    lines = raised.value.message.splitlines()
    assert lines[0] == f"{root / place} not found; {name} is expected in {root} as"
    assert lines[1:-1] == [f"  {p}{'   (missing)' if p == place else ''}" for p in recipe_of(name).places()]
    assert lines[-1] == f"see {FOLDER / name}.toml"


def test_folders_without_a_name_and_names_without_a_folder(tmp_path):
    lay_out("imagenet_r", tmp_path)
    touch(tmp_path / "imagenet-rendition/imagenet-r/n99999999/a.jpg")
    with pytest.raises(DataError, match="n99999999"):
        open_data("imagenet_r", tmp_path, target=True)
    names = lay_out("imagenet_v2", tmp_path) / "imagenetv2/classnames.txt"
    names.write_text(names.read_text() + "n99999999 unicorn\n")
    with pytest.raises(DataError, match="no folders 4"):
        open_data("imagenet_v2", tmp_path, target=True)
    names.write_text("n99999999\n")
    with pytest.raises(DataError, match="line 1"):
        open_data("imagenet_v2", tmp_path, target=True)


def test_names_and_roots_belong_together(tmp_path, train_set):
    with pytest.raises(ConfigError, match="give --root, the folder that holds oxford_pets/"):
        open_data("oxford_pets")
    with pytest.raises(ConfigError, match="recipes are caltech101, dtd"):
        open_data("oxford_cats", tmp_path)
    with pytest.raises(DataError, match="expected is one of"):
        open_data("oxford_cats")
    assert open_data(str(train_set.pictures), tmp_path)[0].name == "noise"  # a path is a path, root or not


def test_a_recipe_of_ones_own(tmp_path):
    lay_out("dtd", tmp_path)
    file = tmp_path / "mine.toml"
    file.write_text('lr = 0.01\n[data]\nlayout = "split-json"\nfolder = "dtd"\nimages = "images"\n')
    with pytest.raises(DataError, match="cannot be read"):
        load_recipe(file, tmp_path)
    file.write_text(file.read_text() + 'split = "split_zhou_DescribableTextures.json"\n')
    data, options = open_data(str(file), tmp_path)
    assert (data.name, data.templates, options) == ("mine", (), {"lr": 0.01})
    file.write_text("lr = 0.01\n")
    with pytest.raises(ConfigError, match=r"no table \[data\]"):
        open_data(str(file), tmp_path)
    file.write_text('[data]\nlayout = "zip"\nfolder = "dtd"\n')
    with pytest.raises(ConfigError, match="split-json"):
        open_data(str(file), tmp_path)
