"""Settings come from the environment when the service starts, and wrong ones are refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dear_serve.errors import ConfigError
from service.settings import Limits, Settings


def test_defaults_need_only_a_bundle():
    settings = Settings.from_env({"DEAR_BUNDLE": "runs/x", "DEAR_GALLERY": "", "HOME": "/"})
    assert settings.bundles == {"x": Path("runs/x")}
    assert (settings.batch, settings.decoders, settings.cors, settings.log) == (None, None, (), "text")
    assert (settings.gallery, settings.engine, settings.threads, settings.api_key) == (
        None,
        "onnx",
        None,
        None,
    )
    assert settings.limits == Limits()


def test_everything_can_be_set():
    settings = Settings.from_env(
        {
            "DEAR_BUNDLE": os.pathsep.join(("b", "runs/p", "pets=runs/q")),
            "DEAR_BATCH": "8",
            "DEAR_DECODERS": "2",
            "DEAR_CORS": "https://a.example, http://localhost:8000",
            "DEAR_LOG": "json",
            "DEAR_GALLERY": "g",
            "DEAR_ENGINE": "fake",
            "DEAR_THREADS": "3",
            "DEAR_PROVIDERS": "tensorrt, cuda,cpu",
            "DEAR_WORKERS": "5",
            "DEAR_API_KEY": "secret",
            "DEAR_MAX_IMAGES": "7",
            "DEAR_MAX_READ_SECONDS": "1.5",
        }
    )
    assert (settings.gallery, settings.engine, settings.threads, settings.workers) == (
        Path("g"),
        "fake",
        3,
        5,
    )
    assert settings.providers == ("tensorrt", "cuda", "cpu")
    assert (settings.limits.images, settings.limits.read_seconds) == (7, 1.5)
    assert settings.bundles == {"b": Path("b"), "p": Path("runs/p"), "pets": Path("runs/q")}
    assert (settings.batch, settings.decoders, settings.log) == (8, 2, "json")
    assert settings.cors == ("https://a.example", "http://localhost:8000")
    assert "secret" not in repr(settings)


def test_two_bundles_of_one_name_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"two bundles are called 'bundle'.*NAME="):
        Settings.from_env({"DEAR_BUNDLE": os.pathsep.join(("a/bundle", "b/bundle"))})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEAR_BUNDLE", ""),
        ("DEAR_ENGINE", "tensorflow"),
        ("DEAR_THREADS", "two"),
        ("DEAR_THREADS", "0"),
        ("DEAR_WORKERS", "nan"),
        ("DEAR_BATCH", "0"),
        ("DEAR_LOG", "xml"),
        ("DEAR_CORS", "example.org"),
        ("DEAR_MAX_IMAGES", "-1"),
        ("DEAR_MAX_IMAGES", "0"),
        ("DEAR_MAX_BODY_BYTES", "inf"),
    ],
)
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(ConfigError) as caught:
        Settings.from_env({"DEAR_BUNDLE": "b", name: value})
    assert caught.value.field is not None
    assert caught.value.field.upper() in name or caught.value.field == name


def test_the_environment_is_read_when_asked(monkeypatch):
    monkeypatch.delenv("DEAR_BUNDLE", raising=False)
    with pytest.raises(ConfigError, match="DEAR_BUNDLE"):
        Settings.from_env()
    monkeypatch.setenv("DEAR_BUNDLE", "later")
    assert Settings.from_env().bundles == {"later": Path("later")}
