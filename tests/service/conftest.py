"""The whole application in this process on the fake engine, asked over ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn
from PIL import Image

from dear_serve.bundle import Bundle
from dear_serve.gallery import Gallery, gallery_spec
from dear_serve.runtime.predict import Predictor
from service.asgi import create_asgi_app
from service.models import Models
from service.settings import Limits, Settings


def picture_bytes(color: str = "red", kind: str = "PNG", size: tuple[int, int] = (40, 30)) -> bytes:
    """An encoded picture of one color."""
    stream = io.BytesIO()
    Image.new("RGB", size, color).save(stream, kind)
    return stream.getvalue()


class Client:
    """Asks an application synchronously; every answer is checked against the error contract."""

    def __init__(self, app) -> None:
        self.app = app

    async def _send(self, method: str, path: str, options: dict) -> httpx.Response:
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as client:
            return await client.request(method, path, **options)

    def ask(self, method: str, path: str, **options) -> httpx.Response:
        response = asyncio.run(self._send(method, path, options))
        if response.status_code >= 400:
            check_refusal(response)
        return response

    def get(self, path: str, **options) -> httpx.Response:
        return self.ask("GET", path, **options)

    def post(self, path: str, **options) -> httpx.Response:
        return self.ask("POST", path, **options)


def check_refusal(response: httpx.Response) -> None:
    """The error contract: shape, a request id, and nothing of the server's insides."""
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"code", "message", "field"}
    assert error["code"] and error["message"]
    assert response.headers["x-request-id"]
    for secret in ("Traceback", "/work", "/tmp", "site-packages", ".py"):
        assert secret not in response.text


Make = Callable[..., Client]


@pytest.fixture(scope="session")
def picture() -> Callable[..., bytes]:
    """`picture(color, kind, size)`: encoded bytes."""
    return picture_bytes


@pytest.fixture(scope="session")
def predictor(fake_bundle: Bundle) -> Iterator[Predictor]:
    with Predictor.open(fake_bundle.paths.root, engine="fake") as opened:
        yield opened


@contextlib.contextmanager
def listening(app) -> Iterator[str]:
    """An application at an address of this machine, for what cannot ask over ASGI."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", ws="none", loop="asyncio")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < until, "the server does not start"
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="session")
def listen() -> Callable[..., contextlib.AbstractContextManager[str]]:
    """`with listen(app) as address`."""
    return listening


@pytest.fixture
def gallery(predictor: Predictor, tmp_path) -> Gallery:
    return Gallery.open(tmp_path / "gallery", create_for=gallery_spec(predictor))


@pytest.fixture
def make_client(predictor: Predictor) -> Iterator[Make]:
    """Applications with settings of one's own: `make_client(gallery=…, api_key=…, images=…)`."""
    apps = []

    def make(*, gallery=None, api_key=None, workers=2, cors=(), models=None, **limits) -> Client:
        settings = Settings(
            bundles={"tiny": predictor.bundle.paths.root},
            api_key=api_key,
            workers=workers,
            cors=cors,
            limits=Limits(**limits),
        )
        app = create_asgi_app(models or Models({"tiny": predictor}, gallery=gallery), settings)
        apps.append(app)
        return Client(app)

    yield make
    for app in apps:
        app.state.close()


@pytest.fixture
def client(make_client: Make) -> Client:
    return make_client()


@pytest.fixture
def search_client(make_client: Make, gallery: Gallery) -> Client:
    return make_client(gallery=gallery)
