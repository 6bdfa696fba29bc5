"""The BentoML service: what `bentoml serve` starts. The routes are in `asgi`, what they answer in `answers`.

    bentoml serve service.app:DearService          with DEAR_BUNDLE set, see `settings`

BentoML gives the process, the workers, /livez, /readyz and tracing; every other path is the mounted
application's. It is mounted rather than written as BentoML methods because those decode pictures themselves, answer
500 to what isn't one, and fail a whole list for one bad item (1.4.40).
"""

from __future__ import annotations

import logging
import os
import signal
import sys

import bentoml
from starlette.types import ASGIApp, Receive, Scope, Send

from dear_serve.errors import DearError

from .settings import Settings

__all__ = ["DearService"]


class _Mounted:
    """What BentoML mounts at import; passes on to the application that the service makes when it starts."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)


_mounted = _Mounted()


class _LineBreaks:
    """Passes on what no route of BentoML's takes: its patterns stop at a line break, and an id may hold one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = "\n" in scope.get("path", "") and _mounted.app is not None
        await (_mounted if ours else self._app)(scope, receive, send)


@bentoml.asgi_app(_mounted, path="/")
@bentoml.service(
    name="dear",
    workers=1,
    # Above the service's own limits, which answer in the error contract.
    traffic={"timeout": 150},
    # Both label or log the raw path; the application counts and logs its routes itself.
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class DearService:
    """Opens the bundle (and gallery) that the environment names, warms up, and answers until stopped."""

    @bentoml.on_deployment  # type: ignore[untyped-decorator]
    @staticmethod
    def check() -> None:
        """Before any worker starts: one line and the error's exit status if the settings cannot work."""
        from .start import check

        try:
            check(Settings.from_env())
        except DearError as error:
            logging.getLogger("bentoml.dear").error("%s", error.message)
            raise SystemExit(error.exit_code) from None

    def __init__(self) -> None:
        # Here, not at import: BentoML's supervisor imports this module too, and needs none of it.
        from .logs import configure
        from .start import start

        try:
            settings = Settings.from_env()
            configure(settings.log)
            self._running = start(settings)
        except DearError as error:
            logging.getLogger("service").error("%s", error.message)
            _stop_server()
            raise
        _mounted.app = self._running.app

    @bentoml.on_shutdown  # type: ignore[untyped-decorator]
    def close(self) -> None:
        """Finish what was accepted, then free the engine."""
        _mounted.app = None
        self._running.close()


DearService.add_asgi_middleware(_LineBreaks)  # type: ignore[attr-defined]  # of BentoML's decorator


def _stop_server() -> None:
    """Ask BentoML's supervisor, where there is one, to stop: it would start the failing worker for ever."""
    main = sys.modules["__main__"].__spec__
    if main is not None and main.name == "_bentoml_impl.worker.service":
        os.kill(os.getppid(), signal.SIGTERM)
