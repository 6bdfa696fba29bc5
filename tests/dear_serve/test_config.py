"""Strict configurations and the error tree."""

from __future__ import annotations

import re

import pytest

from dear_serve import errors, io_spec
from dear_serve.config import ClipConfig, DearConfig, PreprocessConfig, TextConfig, VisionConfig
from dear_serve.errors import ConfigError

VISION = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 3, "heads": 4, "mlp_width": 64}
TEXT = {"context_length": 16, "vocab_size": 100, "width": 32, "layers": 3, "heads": 4, "mlp_width": 64}


def test_round_trip_of_nested_configurations():
    config = ClipConfig.from_dict({"embed_dim": 24, "vision": VISION, "text": TEXT})
    assert config.vision == VisionConfig(**VISION)
    assert config.text == TextConfig(**TEXT)
    assert config.vision.patches == 16
    assert ClipConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["preprocess"]["mean"] == list(PreprocessConfig().mean)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"bta": 0.5}, "has no option 'bta'; known are attributes"),
        ({"beta": "high"}, "beta is 'high'; float is expected"),
        ({"beta": True}, "beta is True"),
        ({"beta": 1.5}, "beta is 1.5; it is a share"),
        ({"text_tokens": -1}, "text_tokens is -1"),
        ({"text_tokens": True}, "text_tokens is True"),
        ({"mask": "two-way"}, "mask is 'two-way'; use one of 'paper', 'one-way'"),
        ({"attributes": "color"}, "attributes is 'color'; a list is expected"),
        ({"attributes": ["a", "a"]}, "must be distinct"),
        ({"attributes": ["class"]}, "not 'class'"),
        ({"attributes": [1]}, r"attributes\[0\] is 1; str is expected"),
        ({"alpha_cls": 0}, "alpha_cls is 0.0"),
        ({"alpha_cls": 1.0}, "alpha_cls is 1.0"),
        ([], "a table is expected"),
    ],
)
def test_what_cannot_be_configured(data, message):
    with pytest.raises(ConfigError, match=message):
        DearConfig.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 5}, "not a multiple of patch_size 5"),
        ({"heads": 5}, "cannot be shared by 5 heads"),
        ({"layers": 0}, "at least 1 block"),
    ],
)
def test_towers_that_cannot_be(change, message):
    with pytest.raises(ConfigError, match=message):
        VisionConfig.from_dict({**VISION, **change})


def test_missing_keys_and_tuple_lengths_are_named():
    with pytest.raises(ConfigError, match="lacks image_size"):
        VisionConfig.from_dict({k: v for k, v in VISION.items() if k != "image_size"})
    with pytest.raises(ConfigError, match="mean has 2 items; 3 are expected"):
        PreprocessConfig.from_dict({"mean": [0.5, 0.5]})
    with pytest.raises(ConfigError, match="size is 0"):
        PreprocessConfig(size=0)
    with pytest.raises(ConfigError, match="std is"):
        PreprocessConfig(std=(1.0, 0.0, 1.0))


def test_error_tree_is_the_one_drawn():
    """Every class stands in the module docstring, under its parent's branch, with its exit status."""
    drawing = errors.__doc__ or ""
    for name in errors.__all__:
        assert re.search(
            rf"(^|── ){name} +exit {getattr(errors, name).exit_code}|── {name}  ", drawing, re.MULTILINE
        )
        assert issubclass(getattr(errors, name), errors.DearError)
    assert {getattr(errors, n).exit_code for n in errors.__all__} == {1, 2, 3}
    assert all(
        getattr(errors, n).exit_code == 2
        for n in errors.__all__
        if issubclass(getattr(errors, n), errors.InputError)
    )


def test_errors_carry_code_and_field():
    error = errors.ImageError("it is not a picture", code="not_an_image", field="images")
    assert (str(error), error.code, error.field, error.http_status) == (
        "it is not a picture",
        "not_an_image",
        "images",
        400,
    )
    assert errors.QueryError("x").code == "bad_query"


def test_io_spec_shapes():
    spec = io_spec.GRAPHS["image"]
    assert spec.inputs[0].dynamic_axes() == {0: "B"}
    assert spec.inputs[0].shape({"S": 64}) == ("B", 3, 64, 64)
    assert spec.outputs[1].shape({"K": 5, "D": 128, "B": 2}) == (2, 5, 128)
    assert {g.file for g in io_spec.GRAPHS.values()} == {f"{name}.onnx" for name in io_spec.GRAPHS}
