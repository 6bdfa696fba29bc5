"""The real server: BentoML in processes of its own, and what importing the service loads."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from dear_serve.errors import BundleError
from dear_serve.gallery import Gallery, GallerySpec
from service.settings import Settings
from service.start import check

REPOSITORY = Path(__file__).parents[2]
NO_TORCH = """
import sys
import {module}
heavy = {{"torch", "torchvision", "open_clip"}} & {{name.partition(".")[0] for name in sys.modules}}
sys.exit(f"loaded: {{heavy}}" if heavy else 0)
"""


def environment(**extra: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("DEAR_", "BENTOML_", "PROMETHEUS_"))}
    return {**kept, "BENTOML_DO_NOT_TRACK": "True", "OMP_NUM_THREADS": "1", **extra}


@pytest.mark.parametrize("module", ["service.app", "service.start"])
def test_no_torch_and_no_bundle_at_import(module, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH.format(module=module)],
        cwd=REPOSITORY,
        env=environment(BENTOML_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def served(home: Path, **extra: str) -> Iterator[tuple[subprocess.Popen, str, Path]]:
    port = free_port()
    log = home / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "bentoml", "serve", "service.app:DearService"),
                *("--host", "127.0.0.1", "--port", str(port), "--working-dir", str(REPOSITORY)),
            ],
            env=environment(BENTOML_HOME=str(home / "bentoml"), **extra),
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_until_ready(process: subprocess.Popen, url: str, log: Path, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz", timeout=2).status_code == 200:
                return
        time.sleep(0.05)
    pytest.fail(f"not ready; the log says:\n{log.read_text()}")


def test_the_server(fake_bundle, picture, tmp_path):
    variables = {
        "DEAR_BUNDLE": str(fake_bundle.paths.root),
        "DEAR_GALLERY": str(tmp_path / "gallery"),
        "DEAR_ENGINE": "fake",
        "DEAR_API_KEY": "k",
    }
    with served(tmp_path, **variables) as (process, url, log):
        wait_until_ready(process, url, log)
        with httpx.Client(base_url=url, headers={"X-API-Key": "k"}, timeout=30) as client:
            assert client.get("/livez").status_code == 200
            assert httpx.get(f"{url}/model", timeout=30).status_code == 401
            assert client.get("/model").json()["engine"]["engine"] == "fake"
            files = [("images", ("x", picture())), ("images", ("y", b"broken"))]
            answer = client.post("/classify", files=files)
            assert answer.status_code == 200
            assert "error" in answer.json()["results"][1]
            assert client.post("/classify", files=files[1:]).status_code == 400
            added = client.post("/gallery/add", files=files[:1], data={"ids": '["one"]'})
            assert added.json() == {"results": [{"id": "one"}]}
            assert client.post("/search", json={"texts": ["a"]}).json()["results"][0]["id"] == "one"
            for method, path, status in (
                ("GET", "/nothing", 404),
                ("PUT", "/classify", 405),
                ("GET", "/x/y", 404),
            ):
                refused = client.request(method, path)
                assert (refused.status_code, set(refused.json())) == (status, {"error"})
            assert 'dear_engine_info{engine="fake"' in client.get("/metrics").text
            assert "/classify" in client.get("/docs.json").json()["paths"]
            assert client.get("/").headers["content-type"].startswith("text/html")
        finish = begun_request(url, picture())
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)  # the server has heard of it, most likely; the request must be answered either way
        assert finish().startswith(b"HTTP/1.1 200")
        assert process.wait(20) == 0
    assert "Traceback" not in log.read_text()


def begun_request(url: str, data: bytes) -> Callable[[], bytes]:
    """Half of a request, known to have arrived; the function returned sends the rest and gives the answer."""
    host, port = url.removeprefix("http://").split(":")
    request = httpx.Request(
        "POST", f"{url}/classify", files={"images": ("x", data)}, headers={"X-API-Key": "k"}
    )
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    body = request.read()
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.sendall(f"POST /classify HTTP/1.1\r\n{head}\r\n".encode() + body[:50])
    running = 'bentoml_service_request_in_progress{endpoint="/classify",service_name="dear"} 1.0'
    while running not in httpx.get(f"{url}/metrics", headers={"X-API-Key": "k"}, timeout=30).text:
        time.sleep(0.05)

    def finish() -> bytes:
        with connection:
            connection.sendall(body[50:])
            return connection.recv(1000)

    return finish


def test_no_bundle_stops_the_server_with_one_line(tmp_path):
    with served(tmp_path, DEAR_BUNDLE=str(tmp_path / "nothing")) as (process, _, log):
        assert process.wait(60) == 2
    assert "nothing holds no dear.json" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_another_bundles_gallery_stops_the_server(fake_bundle, tmp_path):
    Gallery.open(
        tmp_path / "gallery",
        create_for=GallerySpec(bundle_sha256="x", base_sha256="y", columns={"class": 3}),
    )
    variables = {
        "DEAR_BUNDLE": str(fake_bundle.paths.root),
        "DEAR_GALLERY": str(tmp_path / "gallery"),
        "DEAR_ENGINE": "fake",
    }
    with served(tmp_path, **variables) as (process, _, log):
        process.wait(60)
    assert "the gallery was made with bundle x" in log.read_text()


def test_the_engine_must_be_exported(fake_bundle):
    settings = Settings(bundles={"tiny": fake_bundle.paths.root}, engine="onnx")
    with pytest.raises(BundleError, match="dear-export"):
        check(settings)
