"""Label sets by name: those of the bundles, and a bounded number that were sent to this server."""

from __future__ import annotations

import threading

from dear_serve.labels import validate_labels, validate_templates
from dear_serve.manifest import LabelSet

from .errors import ApiError

__all__ = ["LabelSets"]


class LabelSets:
    """What was sent is kept in memory until the server stops. Thread-safe.

    Args:
        limit: sets kept; one more is refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sets: dict[str, LabelSet] = {}
        self._lock = threading.Lock()

    def get(self, name: str) -> LabelSet | None:
        """The set sent under this name."""
        return self._sets.get(name)

    def all(self) -> dict[str, LabelSet]:
        """Everything that was sent."""
        with self._lock:
            return dict(self._sets)

    def put(self, name: str, labels: list[str], templates: list[str]) -> None:
        """Keep a set; one of the same name is replaced.

        Raises:
            LabelError: labels or templates that cannot be used. ApiError: too_many_label_sets.
        """
        kept = LabelSet(
            labels=validate_labels(labels), templates=validate_templates(templates) if templates else ()
        )
        with self._lock:
            if name not in self._sets and len(self._sets) >= self._limit:
                raise ApiError(
                    f"{self._limit} label sets are kept and no more fit; delete one",
                    code="too_many_label_sets",
                    field="name",
                )
            self._sets[name] = kept

    def delete(self, name: str) -> None:
        """Forget a set. Raises ApiError: unknown_label_set."""
        with self._lock:
            if self._sets.pop(name, None) is None:
                raise unknown(name)


def unknown(name: str) -> ApiError:
    """What is raised for a name that isn't there."""
    return ApiError(
        f"label set {name[:100]!a} is not known; GET /label_sets lists them",
        code="unknown_label_set",
        field="label_set",
    )
