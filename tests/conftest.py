"""Tiny random models and bundles for every test; no network, no downloaded weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dear_serve.config import ClipConfig, DearConfig, PreprocessConfig, TextConfig, VisionConfig

os.environ.setdefault("OMP_NUM_THREADS", "2")


def tiny_config() -> ClipConfig:
    """A CLIP of 3 blocks a tower that runs in milliseconds; the vocabulary is CLIP's own, so real tokens fit."""
    return ClipConfig(
        embed_dim=24,
        vision=VisionConfig(image_size=32, patch_size=8, width=32, layers=3, heads=4, mlp_width=64),
        text=TextConfig(context_length=16, vocab_size=49408, width=32, layers=3, heads=4, mlp_width=64),
        preprocess=PreprocessConfig(size=32),
    )


@pytest.fixture(scope="session")
def tiny_clip_config() -> ClipConfig:
    return tiny_config()
