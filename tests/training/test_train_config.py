"""Options of a run: ranges, recipes, what goes over what."""

from __future__ import annotations

import pytest

from dear_serve.errors import ConfigError, LabelError
from training.config import Augmentation, TrainConfig, read_recipe


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"epochs": 0}, "epochs"),
        ({"shots": -1}, "shots"),
        ({"batch_size": 0}, "batch_size"),
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"reg": -1.0}, "reg"),
        ({"fusion_reg": float("inf")}, "fusion_reg"),
        ({"seeds": ()}, "seeds"),
        ({"seeds": (1, 1)}, "seeds"),
        ({"seeds": (-1,)}, "seeds"),
        ({"protocol": "cross"}, "protocol"),
        ({"augmentation": {"views": 0}}, "views"),
        ({"augmentation": {"crop": [0.9, 0.5]}}, "crop"),
        ({"dear": {"beta": 1.5}}, "beta"),
        ({"learning_rate": 1.0}, "learning_rate"),
        ({"epochs": "many"}, "epochs"),
    ],
)
def test_bad_options_are_named(options, word):
    with pytest.raises(ConfigError, match=word):
        TrainConfig().with_options(options)


def test_templates_need_their_place_for_the_name():
    with pytest.raises(LabelError):
        TrainConfig(templates=("a photo",))


def test_later_options_go_over_earlier_ones_and_tables_merge():
    config = TrainConfig().with_options({"lr": 0.1, "dear": {"beta": 0.5}, "seeds": [3, 4]})
    config = config.with_options({"dear": {"mask": "one-way"}, "epochs": 2})
    assert (config.lr, config.epochs, config.seeds) == (0.1, 2, (3, 4))
    assert (config.dear.beta, config.dear.mask) == (0.5, "one-way")
    assert config.augmentation == Augmentation()
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_protocol_all_takes_every_picture():
    assert TrainConfig(protocol="all", shots=4).shots_taken == 0
    assert TrainConfig(protocol="few-shot", shots=4).shots_taken == 4


def test_recipe(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('lr = 0.01\ntemplates = ["the {}"]\n[dear]\nbeta = 0.5\n')
    config = TrainConfig().with_options(read_recipe(file))
    assert (config.lr, config.templates, config.dear.beta) == (0.01, ("the {}",), 0.5)


@pytest.mark.parametrize("text", ["lr = = 1", "rate = 1", "\xff"])
def test_bad_recipes(tmp_path, text):
    file = tmp_path / "r.toml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        read_recipe(file)


def test_absent_recipe(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_recipe(tmp_path / "none.toml")
