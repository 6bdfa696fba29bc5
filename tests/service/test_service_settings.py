"""Settings come from the environment when the service starts, and wrong ones are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from dear_serve.errors import ConfigError
from service.settings import Limits, Settings


def test_defaults_need_only_a_bundle():
    settings = Settings.from_env({"DEAR_BUNDLE": "runs/x", "DEAR_GALLERY": "", "HOME": "/"})
    assert settings.bundle == Path("runs/x")
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
            "DEAR_BUNDLE": "b",
            "DEAR_GALLERY": "g",
            "DEAR_ENGINE": "fake",
            "DEAR_THREADS": "3",
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
    assert (settings.limits.images, settings.limits.read_seconds) == (7, 1.5)
    assert "secret" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEAR_BUNDLE", ""),
        ("DEAR_ENGINE", "tensorflow"),
        ("DEAR_THREADS", "two"),
        ("DEAR_THREADS", "0"),
        ("DEAR_WORKERS", "nan"),
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
    assert Settings.from_env().bundle == Path("later")
