"""How a server process is started: the BentoML command line and the environment the service reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, InputError

__all__ = ["serve_command", "serve_environment"]


def serve_command(*, host: str, port: int) -> list[str]:
    """The command that answers over HTTP on `host`:`port` in the foreground.

    Raises:
        InputError: a port that cannot be.
    """
    if not 1 <= port <= 65535:
        raise InputError(f"--port is {port}; 1 to 65535", field="port")
    return [
        sys.executable, "-m", "bentoml", "serve", "service.app:DearService", "--host", host, "--port", str(port),
    ]  # fmt: skip


def serve_environment(
    bundle: Path, *, gallery: Path | None = None, engine: str = "onnx", threads: int | None = None
) -> dict[str, str]:
    """This process's environment with the service's settings in it.

    The bundle is opened here first, so that a broken one is one clear line and not a server that does not start.

    Raises:
        BundleError: absent, broken, or not exported.
        InputError: a number of threads that cannot be.
    """
    opened = Bundle.open(bundle)
    if engine == "onnx" and not opened.paths.onnx.is_dir():
        raise BundleError(f"{bundle} has no graphs; run: dear-export {bundle}", field="bundle")
    if threads is not None and threads < 1:
        raise InputError(f"--threads is {threads}; at least 1", field="threads")
    settings = {
        "DEAR_BUNDLE": str(bundle.resolve()),
        "DEAR_GALLERY": str(gallery.resolve()) if gallery else "",
        "DEAR_ENGINE": engine,
        "DEAR_THREADS": str(threads) if threads else "",
        "BENTOML_DO_NOT_TRACK": "True",
    }
    return {**os.environ, **settings}
