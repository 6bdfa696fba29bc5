"""The demo: the whole path on rendered pictures, each step by the command a user would type.

Pictures are rendered, dear-mini is adapted to a style it never saw, the graphs are exported and checked, a gallery is
indexed, a server is started, and real questions are asked over HTTP.
"""

from __future__ import annotations

import base64
import csv
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dear_serve.bundle import Bundle
from dear_serve.errors import CheckFailedError, DearError
from dear_serve.launch import serve_command, serve_environment, server_process

__all__ = ["Client", "run_demo", "running_server"]

_READY_SECONDS = 60


def run_demo(out: Path, *, port: int = 3000, serve: bool = True, quick: bool = False) -> int:
    """Run every step; prints as it goes.

    Args:
        out: folder for pictures, bundle and gallery; steps that can be skipped on a second run are.
        port: of the server, on 127.0.0.1.
        serve: keep serving after the answers, until interrupted.
        quick: one seed, fewer epochs and a smaller gallery: to see that everything works, not how well.

    Returns:
        0.

    Raises:
        CheckFailedError: a step ended with an error; its own message stands above.
    """
    out.mkdir(parents=True, exist_ok=True)
    data, pictures, bundle = out / "data", out / "pictures", out / "bundle"
    start = time.monotonic()
    pictures_count, training = (
        (200, ("--seeds", "1", "--epochs", "5")) if quick else (1000, ("--seeds", "1,2,3"))
    )
    task = ("--base", "dear-mini", "--protocol", "base-to-novel", *training, "--out", bundle)
    style = ("--style", "dusk")  # dark with printed icons; dear-mini was trained on light ones
    _step(
        "render the task: icons in a style that dear-mini never saw",
        "training.world_data",
        "demo",
        data,
        *style,
    )
    _step("render a gallery", "training.world_data", "gallery", pictures, "--count", pictures_count)
    _step("adapt: 16 shots a class, half of the classes kept novel", "training.run", data, *task)
    _step("export to ONNX and compare with torch", "export.cli", bundle, "--images", data / "test")
    gallery = out / f"gallery-{Bundle.open(bundle).sha256[:8]}"  # another bundle's gallery would be refused
    _step("index the gallery", "dear_serve.cli", "index", bundle, pictures, "--gallery", gallery)
    environment = serve_environment(bundle, gallery=gallery)
    _say(f"serve on http://127.0.0.1:{port} and ask")
    with running_server(environment, port=port, log=out / "server.log") as client:
        _ask(client, data, pictures)
        print(f"\nthe whole path took {time.monotonic() - start:.0f} s")
        if serve:
            print(f"the page: http://127.0.0.1:{port}/   (Ctrl-C ends it)", flush=True)
            _wait()
    return 0


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _step(title: str, module: str, *arguments: object) -> None:
    """Run `python -m module arguments`, its output passed through."""
    _say(title)
    command = [sys.executable, "-m", module, *map(str, arguments)]
    print(f"$ python -m {module} {' '.join(map(str, arguments))}", flush=True)
    code = subprocess.run(command, check=False).returncode
    if code:
        raise CheckFailedError(f"the step '{title}' ended with exit code {code}")


def _wait() -> None:
    """Until Ctrl-C."""
    try:
        signal.pause()
    except KeyboardInterrupt:
        print("stopped")


class Client:
    """JSON over HTTP to one server on this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Status and decoded answer of one request; OSError when nothing listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
            response = connection.getresponse()
            content = response.read()
            return response.status, json.loads(content) if content.startswith((b"{", b"[")) else content
        finally:
            connection.close()

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer of a POST.

        Raises:
            CheckFailedError: any status but 200.
        """
        status, answer = self.call("POST", path, body)
        if status != 200:
            raise CheckFailedError(f"POST {path} answered {status}: {answer}")
        return answer


@contextmanager
def running_server(environment: Mapping[str, str], *, port: int, log: Path) -> Iterator[Client]:
    """A server process that is ready, stopped on leaving.

    Args:
        environment: from `launch.serve_environment`.
        port: on 127.0.0.1.
        log: file that gets what the server prints.

    Raises:
        CheckFailedError: the port is taken, or the server is not ready in time or ends before.
    """
    client = Client(port)
    if _ready(client) is not None:
        raise CheckFailedError(f"something answers on port {port} already; choose another with --port")
    command = serve_command(host="127.0.0.1", port=port)
    with server_process(command, environment, log=log) as process:
        deadline = time.monotonic() + _READY_SECONDS
        while _ready(client) != 200:
            if process.poll() is not None:
                raise CheckFailedError(f"the server ended with exit code {process.returncode}; see {log}")
            if time.monotonic() > deadline:
                raise CheckFailedError(f"the server was not ready after {_READY_SECONDS} s; see {log}")
            time.sleep(0.1)
        yield client


def _ready(client: Client) -> int | None:
    """Status of /readyz, or None when nothing answers."""
    try:
        return client.call("GET", "/readyz")[0]
    except (OSError, http.client.HTTPException):
        return None


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _ask(client: Client, data: Path, pictures: Path) -> None:
    """Five questions, their answers printed."""
    classes = sorted(p.name for p in (data / "test").iterdir() if p.is_dir())
    half = len(classes) // 2
    for title, names, labels in (
        ("classify three pictures", classes[:3], None),
        ("classify with labels the adapter never saw", classes[-1:], classes[half:]),
    ):
        paths = [sorted((data / "test" / name).iterdir())[0] for name in names]
        _question(title)
        body: dict[str, Any] = {"images": [_encoded(p) for p in paths], "top_k": 3}
        body |= {} if labels is None else {"labels": labels}
        answers = {
            mode: client.post("/classify", {**body, "mode": mode}) for mode in ("zero_shot", "adapted")
        }
        for index, path in enumerate(paths):
            print(f"   {path.parent.name}/{path.name}")
            for mode, answer in answers.items():
                _print_predictions(mode, answer["results"][index]["predictions"])
    rows = _labels(pictures)
    sample = next(iter(rows))
    print(f"\nthe gallery's picture {sample}: {_words(rows[sample])}")
    for attribute in ("color", "shape"):
        _question(f"search for the same {attribute}")
        _print_hits(
            client.post("/search", {"ids": [sample], "attributes": {attribute: 1.0}, "top_k": 5}), rows
        )
    text = f"a {rows[sample]['color']} {rows[sample]['shape']}"
    _question(f"search by text: {text}")
    _print_hits(client.post("/search", {"texts": [text], "top_k": 5}), rows)
    status, model = client.call("GET", "/model")
    if status != 200:
        raise DearError(f"GET /model answered {status}")
    print(f"\nanswered by {json.dumps(model['engine'])}")


def _labels(pictures: Path) -> dict[str, dict[str, str]]:
    """Truth of the rendered gallery: path -> attributes."""
    with (pictures / "labels.csv").open(encoding="utf-8", newline="") as file:
        return {row["path"]: row for row in csv.DictReader(file)}


def _words(row: Mapping[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("path", "style", "split"))


def _question(text: str) -> None:
    print(f"\n-- {text}")


def _print_predictions(mode: str, predictions: list[dict[str, Any]]) -> None:
    shown = ", ".join(f"{p['label']} {100 * p['probability']:.0f} %" for p in predictions)
    print(f"      {mode:<10} {shown}")
    if mode == "adapted":
        parts = ", ".join(f"{k} {v:+.1f}" for k, v in predictions[0]["contributions"].items())
        print(f"      {'':<10} why {predictions[0]['label']}: {parts}")


def _print_hits(answer: dict[str, Any], rows: Mapping[str, Mapping[str, str]]) -> None:
    for hit in answer["results"]:
        print(f"   {hit['score']:.3f}  {hit['id']}: {_words(rows[hit['id']])}")
