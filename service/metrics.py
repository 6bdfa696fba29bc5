"""What the service counts, in Prometheus's format.

BentoML's own request metrics carry the raw path as a label, one time series for every path anyone asks for. Ours
have BentoML's names and the route's template instead (`/gallery/{id}`), so their number is bounded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import prometheus_client as prometheus
from prometheus_client import multiprocess

from dear_serve.runtime.base import EngineInfo

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The service's counters and histograms, in a registry of their own.

    Build it only when the service starts: just before, BentoML says where several processes' metrics meet.
    """

    content_type: str = prometheus.CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        registry = self._registry = prometheus.CollectorRegistry()
        labels = ("endpoint", "service_name", "http_response_code")
        self._requests = prometheus.Counter(
            "bentoml_service_request_total", "Requests answered", labels, registry=registry
        )
        self._duration = prometheus.Histogram(
            "bentoml_service_request_duration_seconds",
            "Seconds to answer",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self._running = prometheus.Gauge(
            "bentoml_service_request_in_progress",
            "Requests in flight",
            labels[:2],
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._stages = prometheus.Histogram(
            "dear_stage_seconds",
            "Seconds per call and stage (preprocess, queue, core, postprocess, search)",
            ("stage",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._batch = prometheus.Histogram(
            "dear_batch_size",
            "Pictures or texts per engine call",
            ("kind",),
            buckets=_SIZES,
            registry=registry,
        )
        self._cache = prometheus.Counter(
            "dear_class_features_cache_total", "Class features asked for", ("result",), registry=registry
        )
        self._engine = prometheus.Gauge(
            "dear_engine_info",
            "What really runs",
            ("engine", "provider", "precision", "threads", "model"),
            registry=registry,
            multiprocess_mode="max",
        )

    @contextmanager
    def request(self, endpoint: str) -> Iterator[list[int]]:
        """Count one request of a route; the block puts its status into the list."""
        status: list[int] = []
        running = self._running.labels(endpoint, "dear")
        start = perf_counter()
        running.inc()
        try:
            yield status
        finally:
            running.dec()
            labels = (endpoint, "dear", str(status[0] if status else 500))
            self._requests.labels(*labels).inc()
            self._duration.labels(*labels).observe(perf_counter() - start)

    def stage(self, name: str, seconds: float) -> None:
        """Seconds that one stage of one call took."""
        self._stages.labels(name).observe(seconds)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block as stage `name`."""
        start = perf_counter()
        try:
            yield
        finally:
            self.stage(name, perf_counter() - start)

    def batch(self, kind: str, size: int) -> None:
        """How many pictures or texts one engine call had."""
        self._batch.labels(kind).observe(size)

    def cache(self, *, hit: bool) -> None:
        """Class features found in the cache, or not."""
        self._cache.labels("hit" if hit else "miss").inc()

    def engine(self, model: str, info: EngineInfo) -> None:
        """What really runs a bundle."""
        self._engine.labels(info.engine, info.provider, info.precision, str(info.threads), model).set(1)

    def text(self) -> bytes:
        """All metrics of this server, its other processes' included."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return prometheus.generate_latest(self._registry)
        registry = prometheus.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return prometheus.generate_latest(registry)
