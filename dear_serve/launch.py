"""How a server process is started: the BentoML command line, the environment the service reads, and the wait."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, InputError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

__all__ = ["named_bundles", "run_server", "serve_command", "serve_environment", "server_process"]


def serve_command(*, host: str, port: int) -> list[str]:
    """The command that answers over HTTP on `host`:`port` in the foreground.

    Raises:
        InputError: an address or a port that cannot be.
    """
    if not 1 <= port <= 65535:
        raise InputError(f"--port is {port}; 1 to 65535", field="port")
    address = "127.0.0.1" if host == "localhost" else host
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise InputError(
            f"--host is {host!r}; an IP address such as 127.0.0.1 or 0.0.0.0", field="host"
        ) from None
    command = [sys.executable, "-m", "bentoml", "serve", "service.app:DearService"]
    return [*command, "--host", address, "--port", str(port)]


def serve_environment(
    bundles: Path | Sequence[Path | str],
    *,
    gallery: Path | None = None,
    engine: str = "onnx",
    threads: int | None = None,
    options: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """This process's environment with the service's settings in it.

    The bundles are looked at here first, so that a broken one is one clear line and not a server that does not start;
    their hashes are compared by the server.

    Args:
        bundles: a folder, or several, each as a path or as NAME=PATH; the first is the default.
        options: more of `service.settings`, by the variable's name.

    Raises:
        BundleError: absent, broken, or not exported.
        InputError: a number of threads that cannot be, a path with the system's path separator in it.
    """
    places = [_placed(item) for item in ([bundles] if isinstance(bundles, Path) else bundles)]
    for _, bundle in places:
        opened = Bundle.open(bundle, verify=False)
        if engine == "onnx" and not opened.paths.onnx.is_dir():
            raise BundleError(f"{bundle} has no graphs; run: dear-export {bundle}", field="bundle")
    if threads is not None and threads < 1:
        raise InputError(f"--threads is {threads}; at least 1", field="threads")
    settings = {
        "DEAR_BUNDLE": os.pathsep.join(f"{name}{bundle.resolve()}" for name, bundle in places),
        "DEAR_GALLERY": str(gallery.resolve()) if gallery else "",
        "DEAR_ENGINE": engine,
        "DEAR_THREADS": str(threads) if threads else "",
        "BENTOML_DO_NOT_TRACK": "True",
    }
    return {**os.environ, **settings, **(options or {})}


def named_bundles(items: Sequence[Path | str]) -> dict[str, Path]:
    """Each PATH or NAME=PATH under the name it is served by. Raises InputError for two of one name."""
    found: dict[str, Path] = {}
    for item in items:
        prefix, path = _placed(item)
        name = prefix.rstrip("=") or path.resolve().name
        if name in found:
            raise InputError(
                f"two bundles are called {name!r}; give one another name: NAME={path}", field="bundle"
            )
        found[name] = path
    return found


def _placed(item: Path | str) -> tuple[str, Path]:
    """PATH or NAME=PATH as ("" or "NAME=", path)."""
    name, equals, folder = str(item).partition("=")
    if equals and _NAME.fullmatch(name) and folder and not Path(str(item)).exists():
        name, path = f"{name}=", Path(folder)
    else:
        name, path = "", Path(item)
    if os.pathsep in str(path.resolve()):
        raise InputError(
            f"{path} has {os.pathsep!r} in it, which parts bundles; rename the folder", field="bundle"
        )
    return name, path


@contextlib.contextmanager
def server_process(
    command: Sequence[str], environment: Mapping[str, str], *, log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server process in a group of its own, stopped on leaving.

    BentoML keeps its working files in a folder that only this server uses: a second one with the same folder would
    delete the first one's metrics.

    Args:
        command: from `serve_command`.
        environment: from `serve_environment`.
        log: file that gets what the server prints; default: where this process prints.
    """
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="dear-serve-", ignore_cleanup_errors=True)
        )
        output = stack.enter_context(log.open("wb")) if log else None
        process = subprocess.Popen(
            command,
            env={**environment, "BENTOML_HOME": home},
            start_new_session=True,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
        )
        try:
            yield process
        finally:
            _stop(process)


def run_server(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Serve until the server ends or this process is told to (SIGINT, SIGTERM); returns the exit code."""
    with server_process(command, environment) as process:

        def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (the interface of a handler)
            process.terminate()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)
        return process.wait()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server and its workers to end, then insist."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                continue
    process.wait()
