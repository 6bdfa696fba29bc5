"""A tiny random base on disk with head roles beside it, and a small image folder, for the tests of training."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dear_serve.config import DearConfig
from training.config import Augmentation, TrainConfig

CLASSES = ("blue_cup", "green_tree", "grey_stone", "red_fox")


@dataclass(frozen=True)
class TrainSet:
    """A tiny base's weights file, an image folder, and a configuration that trains in a second."""

    base: str
    pictures: Path
    config: TrainConfig


def write_pictures(root: Path, *, train: int = 5, test: int = 3) -> Path:
    """Noise around a class's own color, root/{train,test}/<class>/N.png."""
    rng = np.random.default_rng(0)
    for index, name in enumerate(CLASSES):
        for split, count in (("train", train), ("test", test)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                noise = rng.integers(0, 120, (36, 40, 3))
                noise[..., index % 3] += 100
                Image.fromarray(noise.astype(np.uint8)).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="session")
def train_set(tmp_path_factory: pytest.TempPathFactory, tiny_clip_config) -> TrainSet:
    from safetensors.torch import save_file

    from dear_serve.backbone.clip import Clip
    from dear_serve.backbone.weights import to_open_clip
    from dear_serve.backbone.zoo import load_base
    from dear_serve.dear.roles import HeadRole, Roles

    folder = tmp_path_factory.mktemp("train-base")
    weights = folder / "base.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_file(to_open_clip(Clip(tiny_clip_config).state_dict()), weights)
    vision, text = tiny_clip_config.vision, tiny_clip_config.text
    towers = {
        "embed_dim": tiny_clip_config.embed_dim,
        "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 3, "head_width": 8},
        "text_cfg": {
            "context_length": 16,
            "vocab_size": text.vocab_size,
            "width": 32,
            "layers": 3,
            "heads": 4,
        },
    }
    (folder / "base.json").write_text(json.dumps(towers))
    base = load_base(str(weights))
    roles = Roles.uniform(
        "mixed", layers=vision.layers, heads_per_layer=4, first_block=3, attributes=DearConfig().attributes
    )
    kinds = [("attribute", "color"), ("attribute", "shape"), ("mixed", ""), ("generalization", "")]
    heads = tuple(
        HeadRole(layer=3, head=i, role=role, concept=concept, entropy=float(i))  # type: ignore[arg-type]
        for i, (role, concept) in enumerate(kinds)
    )
    replace(roles, base=base.name, base_sha256=base.sha256, heads=heads).save(folder / "roles.json")
    (folder / "templates.txt").write_text("a picture of a {}\n\nthe {}\n")
    pictures = write_pictures(tmp_path_factory.mktemp("train-pictures") / "noise")
    config = TrainConfig(
        base=base.name,
        epochs=3,
        batch_size=6,
        shots=4,
        lr=1e-3,
        augmentation=Augmentation(views=3, crop=(0.5, 1.0)),
        dear=DearConfig(),
    )
    return TrainSet(base=base.name, pictures=pictures, config=config)


@pytest.fixture(scope="session")
def prepared(train_set: TrainSet):
    """The tiny base, ready to train."""
    from training.prepare import prepare

    return prepare(train_set.config)


@pytest.fixture(scope="session")
def task(train_set: TrainSet):
    """Four classes of four pictures."""
    from training.data import PictureCheck, load_data, make_task

    return make_task(
        load_data(train_set.pictures), protocol="few-shot", shots=4, seed=1, check=PictureCheck()
    )


@pytest.fixture(scope="session")
def make_fit(prepared, task):
    """make_fit(config, cache=, seed=, execution=, prepared=): a run on `task`, before its first step."""
    from training.cache import CachedTrunks, PlainTrunks
    from training.loop import Fit, TextSide
    from training.prepare import build_model

    own = prepared

    def make(config, *, cache=None, seed=1, execution=None, prepared=own):
        model = build_model(prepared, seed)
        paths = [item.path for item in task.train]
        if cache is None:
            trunks = PlainTrunks(model, paths, config.augmentation)
        else:
            trunks = CachedTrunks(
                model, paths, config.augmentation, base_sha256=prepared.base.sha256, folder=cache
            )
            trunks.fill(limit=10**9)
        text = TextSide(model, prepared.tokenizer, task.class_names, prepared.templates, execution=execution)
        labels = [item.label for item in task.train]
        return Fit(model, trunks=trunks, labels=labels, text=text, config=config, seed=seed)

    return make
