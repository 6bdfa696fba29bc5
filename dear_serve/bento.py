"""A folder that `bentoml build` makes a Bento of, and `bentoml containerize` an image: bundles and code, no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, InputError

__all__ = ["write_bento_folder"]

_PACKAGES = ("dear_serve", "service")
_SKIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", "dear-mini")
_IN_IMAGE = "/home/bentoml/bento/src"  # where BentoML's images have what was built


def write_bento_folder(bundles: Mapping[str, Path], out: Path) -> Path:
    """Write `out`: bentofile.yaml, the bundles, and the packages that serve them, as they are installed here.

    Args:
        bundles: exported bundles by the name they are served under; the first is the default.
        out: a folder that is not there yet, or empty.

    Returns:
        Path of bentofile.yaml.

    Raises:
        BundleError: a bundle that is absent, broken or not exported.
        InputError: `out` holds something.
    """
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty; choose another folder or remove it", field="out")
    for path in bundles.values():
        if not Bundle.open(path).paths.onnx.is_dir():
            raise BundleError(f"{path} has no graphs; run: dear-export {path}", field="bundle")
    for name, path in bundles.items():
        shutil.copytree(path, out / "bundles" / name)
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise InputError(f"package {package} is not installed here; pip install dear-serve")
        shutil.copytree(Path(spec.origin).parent, out / package, ignore=_SKIPPED)
    file = out / "bentofile.yaml"
    file.write_text(_bentofile(list(bundles)), encoding="utf-8")
    return file


def _bentofile(names: list[str]) -> str:
    """The build file. Strings are written as JSON, which YAML takes as it is.

    The image's key is given when it is run (`docker run -e DEAR_API_KEY=...`), so that it is in no layer.
    """
    paths = ":".join(f"{name}={_IN_IMAGE}/bundles/{name}" for name in names)
    packages = "".join(f"    - {json.dumps(line)}\n" for line in _requirements())
    return f"""# Made by dear-serve bento. Build: bentoml build && bentoml containerize dear:latest
service: "service.app:DearService"
name: dear
include:
  - "**"
python:
  lock_packages: false
  packages:
{packages}envs:
  - name: DEAR_BUNDLE
    value: {json.dumps(paths)}
"""


def _requirements() -> list[str]:
    """What serving on a CPU needs: the base dependencies of this package, and those of its extra `cpu`."""
    found = []
    for line in importlib.metadata.requires("dear-serve") or ():
        requirement, _, condition = line.partition(";")
        if not condition or 'extra == "cpu"' in condition.replace("'", '"'):
            found.append(requirement.strip())
    return found
