"""Starts the service: opens what the settings name, checks that it fits, and warms up before it is ready."""

from __future__ import annotations

import importlib.util
import io
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image
from starlette.applications import Starlette

from dear_serve.bundle import Bundle
from dear_serve.errors import MissingDependencyError
from dear_serve.io_spec import GRAPHS
from dear_serve.runtime.predict import Predictor

from .asgi import create_asgi_app
from .settings import Settings

if TYPE_CHECKING:
    from dear_serve.gallery.store import Gallery

__all__ = ["Running", "check", "start"]

log = logging.getLogger("service")


@dataclass(frozen=True)
class Running:
    """A started service."""

    app: Starlette
    predictor: Predictor

    def close(self) -> None:
        """Finish what was accepted, then free the engine."""
        self.app.state.close()
        self.predictor.close()


def check(settings: Settings) -> None:
    """Look at what usually keeps `start` from working, without loading weights or LanceDB.

    BentoML starts a failing worker again and again; asked before, a wrong setting stops the server once.

    Raises the errors of `start`.
    """
    bundle = Bundle.open(settings.bundle, verify=False)
    if settings.engine == "onnx":
        for graph in GRAPHS.values():
            bundle.file(f"onnx/{graph.file}")
        if importlib.util.find_spec("onnxruntime") is None:
            raise MissingDependencyError("ONNX Runtime is missing: pip install 'dear-serve[cpu]' (or [gpu])")


def start(settings: Settings) -> Running:
    """Open the bundle and the gallery, run every path of the engine once, and build the application.

    Raises:
        BundleError: the bundle is absent, broken or not exported.
        GalleryError: the gallery was made with another bundle, or is broken.
        MissingDependencyError: the engine's package is not installed.
    """
    predictor = Predictor.open(settings.bundle, engine=settings.engine, threads=settings.threads)
    info = predictor.engine.info
    log.info("bundle %s on %s, %s, %s, %d threads", predictor.bundle.name, *vars(info).values())
    gallery = _open_gallery(settings, predictor)
    _warm_up(predictor)
    return Running(app=create_asgi_app(predictor, gallery, settings), predictor=predictor)


def _open_gallery(settings: Settings, predictor: Predictor) -> Gallery | None:
    if settings.gallery is None:
        return None
    from dear_serve.gallery import Gallery, gallery_spec  # LanceDB takes a second to import

    return Gallery.open(settings.gallery, create_for=gallery_spec(predictor))


def _warm_up(predictor: Predictor) -> None:
    """A picture through both modes over the trained classes: loads graphs, fills caches, starts threads."""
    size = predictor.bundle.manifest.preprocess.size
    stream = io.BytesIO()
    Image.new("RGB", (size, size), "white").save(stream, "PNG")
    picture = [stream.getvalue()]
    predictor.classify(picture, mode="zero_shot")
    predictor.classify(picture, mode="adapted")
