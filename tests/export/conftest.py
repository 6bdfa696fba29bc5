"""One real export of the tiny bundle, shared: it takes seconds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dear_serve.bundle import Bundle
from dear_serve.dear.model import DearModel
from dear_serve.runtime.torch_engine import load_model
from export.pipeline import ExportReport, ExportSettings, export_bundle


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Bundle) -> tuple[Bundle, ExportReport]:
    """The tiny bundle with graphs, and the report. Read only."""
    path = tmp_path_factory.mktemp("exported") / "tiny"
    shutil.copytree(tiny_bundle.paths.root, path)
    return export_bundle(path, ExportSettings())


@pytest.fixture(scope="session")
def tiny_model(tiny_bundle: Bundle) -> DearModel:
    return load_model(tiny_bundle)


@pytest.fixture
def copy(tmp_path: Path, exported: tuple[Bundle, ExportReport]) -> Path:
    """A copy of the exported bundle that a test may break."""
    path = tmp_path / "runs" / "tiny"
    shutil.copytree(exported[0].paths.root, path)
    return path
