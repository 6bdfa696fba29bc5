"""Recipes: TOML files of a run's options and of how a known data set lies on disk (table [data]).

Those of `training/recipes/` are called by name: python -m training.run oxford_pets --root DATA. Layouts of [data]:

    split-json   a JSON file of [path, label, class name] lists, paths from `images`
    lists        `class_names` with a name a line; `train`, `val`, `test` with a picture's name and its class a line
    folders      a folder a class in `images`/`train` and `images`/`test` (without them: in `images`, only to be
                 tested on); `class_names` with a folder and its class a line
    numbered     folders 0, 1, … in `images`, only to be tested on; names by the lines of such a `class_names`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dear_serve.config import StrictConfig
from dear_serve.errors import ConfigError, DataError
from training.config import read_recipe, read_toml
from training.items import DataSet, some
from training.layouts import check_names, load_data, pictures, read_split, split_data

__all__ = ["DataRecipe", "known_recipes", "load_recipe", "open_data"]

FOLDER = Path(__file__).parent / "recipes"

Lists = dict[str, list[tuple[str, int]]]


@dataclass(frozen=True, kw_only=True)
class DataRecipe(StrictConfig):
    """How one data set lies on disk; every path is below `folder`, that below the root that the user names."""

    layout: Literal["split-json", "lists", "folders", "numbered"]
    folder: str
    images: str = "."
    split: str = ""
    class_names: str = ""
    train: str = ""
    val: str = ""
    test: str = ""
    suffix: str = ".jpg"
    """Of the pictures that `lists` names."""
    spellings: dict[str, str] = field(default_factory=dict)
    """Class name (or its folder) as it stands on disk, to how the model is to read it."""

    @property
    def test_only(self) -> bool:
        """Whether there is nothing to train on."""
        return self.layout == "numbered" or (self.layout == "folders" and not self.train)

    def places(self) -> list[str]:
        """The files and folders that must be there, relative to the root."""
        if self.layout == "lists":
            inside = [f"{self.images}/", self.class_names, self.train, self.val, self.test]
        elif self.layout == "folders" and self.train:
            inside = [f"{self.images}/{self.train}/", f"{self.images}/{self.test}/", self.class_names]
        else:
            inside = ["" if self.images == "." else f"{self.images}/", self.split, self.class_names]
        return [f"{self.folder}/{place}" for place in inside if place]


def known_recipes() -> list[str]:
    """Names of the data sets in `training/recipes/`."""
    return sorted(file.stem for file in FOLDER.glob("*.toml") if "data" in read_toml(file))


def open_data(
    argument: str, root: Path | None = None, *, target: bool = False
) -> tuple[DataSet, dict[str, Any]]:
    """The data set that a command line names, and the options that its recipe gives.

    Args:
        argument: a path as for `load_data`; with `root` also a recipe's name, or a TOML file with a table [data].
        root: the folder that holds the recipes' folders.
        target: only to be tested on (see `load_data`).

    Raises:
        DataError: nothing usable there, with the expected tree.
        ConfigError: a recipe without `root`, or an unknown name.
    """
    file = Path(argument) if argument.endswith(".toml") else FOLDER / f"{argument}.toml"
    by_name = file.is_file()
    if by_name and root is not None:
        return load_recipe(file, root, target=target)
    if root is None and by_name and not Path(argument).is_dir():
        raise ConfigError(
            f"{argument} is a recipe: give --root, the folder that holds {_data_recipe(file).folder}/",
            field="root",
        )
    if root is not None and not Path(argument).exists():
        raise ConfigError(
            f"{argument} is neither a recipe nor a path; recipes are {', '.join(known_recipes())}",
            field="data",
        )
    return load_data(Path(argument), target=target), {}


def _data_recipe(file: Path) -> DataRecipe:
    table = read_toml(file).get("data")
    if table is None:
        raise ConfigError(f"{file} has no table [data]: it says nothing of where pictures are", field="data")
    return DataRecipe.from_dict(table, where="data")


def load_recipe(file: Path, root: Path, *, target: bool = False) -> tuple[DataSet, dict[str, Any]]:
    """The data set of a recipe below `root`, and the recipe's options. No picture is opened.

    Raises:
        DataError: a place that the recipe names is missing (the message has the expected tree), or a list that
            cannot be used.
        ConfigError: the recipe cannot be used, or has no training pictures and `target` is false.
    """
    recipe, options = _data_recipe(file), read_recipe(file)
    if recipe.test_only and not target:
        raise ConfigError(
            f"{file.stem} has no training pictures: train on another data set and give it as --test-on",
            field="data",
        )
    absent = [place for place in recipe.places() if not (root / place).exists()]
    if absent:
        raise DataError(
            f"{some([str(root / place) for place in absent])} not found; {_tree(recipe, root, file)}"
        )
    try:
        data = _READERS[recipe.layout](recipe, root / recipe.folder)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{root / recipe.folder} cannot be read: {error}") from error
    named = replace(data, name=file.stem, templates=tuple(options.get("templates", ())))
    return check_names(root / recipe.folder, named, target=target, tree=_tree(recipe, root, file)), options


def _tree(recipe: DataRecipe, root: Path, file: Path) -> str:
    lines = [f"  {place}{'' if (root / place).exists() else '   (missing)'}" for place in recipe.places()]
    return "\n".join([f"{file.stem} is expected in {root} as", *lines, f"see {file}"])


# --- layouts --------------------------------------------------------------------------------------


def _split_json(recipe: DataRecipe, folder: Path) -> DataSet:
    names, lists = read_split(folder / recipe.split)
    return split_data(folder / recipe.images, names, lists, recipe.spellings)


def _lists(recipe: DataRecipe, folder: Path) -> DataSet:
    names = _lines(folder / recipe.class_names)
    numbers = {name: i for i, name in enumerate(names)}
    lists: Lists = {}
    for split in ("train", "val", "test"):
        file = folder / getattr(recipe, split)
        rows = [line.partition(" ") for line in _lines(file)]
        unknown = sorted({name.strip() for _, _, name in rows} - set(numbers))
        if unknown:
            raise DataError(f"{file} has classes that {recipe.class_names} has not: {some(unknown)}")
        lists[split] = [(picture + recipe.suffix, numbers[name.strip()]) for picture, _, name in rows]
    return split_data(folder / recipe.images, names, lists, recipe.spellings)


def _folders(recipe: DataRecipe, folder: Path) -> DataSet:
    images = folder / recipe.images
    titles = _titles(folder / recipe.class_names)
    parts = {"train": images / recipe.train} if recipe.train else {}
    parts["test"] = images / recipe.test
    found = sorted({p.name for part in parts.values() for p in part.iterdir() if p.is_dir()})
    unknown = [name for name in found if name not in titles]
    if unknown:
        raise DataError(f"{folder / recipe.class_names} has no names for the folders {some(unknown)}")
    lists = {split: _listed(part, found, images) for split, part in parts.items()}
    return _of_folders(recipe, images, {name: titles[name] for name in found}, lists)


def _numbered(recipe: DataRecipe, folder: Path) -> DataSet:
    images = folder / recipe.images
    titles = _titles(folder / recipe.class_names)
    absent = [str(i) for i in range(len(titles)) if not (images / str(i)).is_dir()]
    if absent:
        raise DataError(
            f"{images} has no folders {some(absent)}; one for each line of {recipe.class_names} is expected"
        )
    lists = {"test": _listed(images, [str(i) for i in range(len(titles))], images)}
    return _of_folders(recipe, images, titles, lists)


def _of_folders(recipe: DataRecipe, images: Path, titles: Mapping[str, str], lists: Lists) -> DataSet:
    """Folder names are spelled as the recipe says, then as the class names do."""
    names = [recipe.spellings.get(name, title) for name, title in titles.items()]
    empty: Lists = {"train": [], "val": [], "test": []}
    return split_data(images, names, {**empty, **lists}, recipe.spellings)


def _listed(part: Path, names: list[str], images: Path) -> list[tuple[str, int]]:
    return [
        (path.relative_to(images).as_posix(), label)
        for label, name in enumerate(names)
        for path in pictures(part / name)
    ]


def _titles(file: Path) -> dict[str, str]:
    """Folder to class name, of lines "folder name"; DataError for a line without a name."""
    titles: dict[str, str] = {}
    for number, line in enumerate(_lines(file), 1):
        folder, _, name = line.partition(" ")
        if not name.strip():
            raise DataError(f"{file}, line {number}: {line!r}; a folder and its class name are expected")
        titles[folder] = name.strip()
    return titles


def _lines(file: Path) -> list[str]:
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


_READERS = {"split-json": _split_json, "lists": _lists, "folders": _folders, "numbered": _numbered}
