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
from dear_serve.errors import GalleryError, MissingDependencyError
from dear_serve.io_spec import GRAPHS
from dear_serve.preprocess import ImageLimits
from dear_serve.runtime import open_engine
from dear_serve.runtime.batching import Batcher
from dear_serve.runtime.predict import Predictor

from .asgi import create_asgi_app
from .metrics import Metrics
from .models import Models
from .settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dear_serve.gallery.store import Gallery

__all__ = ["Running", "check", "start"]

log = logging.getLogger("service")

_CPU_BATCH, _GPU_BATCH = 16, 64


@dataclass(frozen=True)
class Running:
    """A started service."""

    app: Starlette
    models: Models
    batcher: Batcher

    def close(self) -> None:
        """Finish what was accepted, then free the engines."""
        self.app.state.close()
        self.batcher.close()
        self.models.close()


def check(settings: Settings) -> None:
    """Look at what usually keeps `start` from working, without loading weights or LanceDB.

    BentoML starts a failing worker again and again; asked before, a wrong setting stops the server once.

    Raises the errors of `start`.
    """
    for path in settings.bundles.values():
        bundle = Bundle.open(path, verify=False)
        if settings.engine == "onnx":
            for graph in GRAPHS.values():
                bundle.file(f"onnx/{graph.file}")
            if importlib.util.find_spec("onnxruntime") is None:
                raise MissingDependencyError(
                    "ONNX Runtime is missing: pip install 'dear-serve[cpu]' (or [gpu])"
                )


def start(settings: Settings) -> Running:
    """Open the bundles and the gallery, run every path of the engines once, and build the application.

    Raises:
        BundleError: a bundle is absent, broken or not exported.
        GalleryError: the gallery was made with another bundle, or is broken.
        MissingDependencyError: the engine's package is not installed.
    """
    batcher = Batcher(max_rows=settings.batch or _CPU_BATCH, max_pictures=settings.limits.pictures)

    def open_one(name: str) -> Predictor:
        predictor = _open(settings, name, batcher)
        info = predictor.engine.info
        log.info("bundle %s on %s, %s, %s, %d threads", name, *vars(info).values())
        _warm_up(predictor)
        return predictor

    predictors = {name: open_one(name) for name in settings.bundles}
    if settings.batch is None and not _on_cpu(next(iter(predictors.values()))):
        batcher.max_rows = _GPU_BATCH
    gallery = _open_gallery(settings, predictors)
    models = Models(predictors, gallery=gallery, reopen=open_one)
    batcher.observer = metrics = Metrics()
    app = create_asgi_app(models, settings, metrics=metrics)
    return Running(app=app, models=models, batcher=batcher)


def _open(settings: Settings, name: str, batcher: Batcher) -> Predictor:
    bundle = Bundle.open(settings.bundles[name])
    limits = ImageLimits(max_bytes=settings.limits.picture_bytes, max_pixels=settings.limits.pixels)
    return Predictor(
        bundle,
        open_engine(bundle, settings.engine, threads=settings.threads, providers=settings.providers or None),
        limits=limits,
        decode_threads=settings.decoders,
        batcher=batcher,
    )


def _on_cpu(predictor: Predictor) -> bool:
    return predictor.engine.info.provider in ("CPUExecutionProvider", "cpu", "none")


def _open_gallery(settings: Settings, predictors: Mapping[str, Predictor]) -> Gallery | None:
    if settings.gallery is None:
        return None
    from dear_serve.gallery import Gallery, gallery_spec  # LanceDB takes a second to import

    specs = [gallery_spec(predictor) for predictor in predictors.values()]
    try:
        gallery = Gallery.open(settings.gallery)
    except GalleryError as error:
        if error.code != "no_gallery":
            raise
        return Gallery.open(settings.gallery, create_for=specs[0])
    made = [spec for spec in specs if spec.bundle_sha256 == gallery.spec.bundle_sha256]
    gallery.spec.check_same([*made, *specs][0])
    return gallery


def _warm_up(predictor: Predictor) -> None:
    """A picture through both modes over the trained classes: loads graphs, fills caches, starts threads."""
    size = predictor.bundle.manifest.preprocess.size
    stream = io.BytesIO()
    Image.new("RGB", (size, size), "white").save(stream, "PNG")
    picture = [stream.getvalue()]
    predictor.classify(picture, mode="zero_shot")
    predictor.classify(picture, mode="adapted")
