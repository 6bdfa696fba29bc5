"""The bundles that are served, by name: found for a request, and replaced while others are answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dear_serve.errors import DearError
from dear_serve.runtime.batching import deadline
from dear_serve.runtime.predict import Predictor

from .errors import ApiError

if TYPE_CHECKING:
    from dear_serve.gallery.store import Gallery

__all__ = ["Models", "Served"]

Open = Callable[[str], Predictor]


class Served:
    """An opened bundle under its name. It is closed when it has been replaced and nobody uses it any more."""

    def __init__(self, name: str, predictor: Predictor) -> None:
        self.name = name
        self.predictor = predictor
        self._users = 0
        self._retired = False
        self._lock = threading.Lock()

    def enter(self) -> bool:
        """Begin to use it; False if it has been replaced."""
        with self._lock:
            if self._retired:
                return False
            self._users += 1
            return True

    def leave(self) -> None:
        """Use it no longer."""
        with self._lock:
            self._users -= 1
            last = self._retired and self._users == 0
        if last:
            self.predictor.close()

    def retire(self) -> None:
        """It has been replaced."""
        with self._lock:
            self._retired = True
            unused = self._users == 0
        if unused:
            self.predictor.close()


class Models:
    """The served bundles, the first one the default, and the gallery of one of them. Thread-safe.

    Args:
        predictors: by name.
        gallery: belongs to the bundle that made its vectors.
        reopen: opens a bundle's folder anew, warmed up; without it `reload` is refused.
    """

    def __init__(
        self,
        predictors: Mapping[str, Predictor],
        *,
        gallery: Gallery | None = None,
        reopen: Open | None = None,
    ) -> None:
        self._served = {name: Served(name, predictor) for name, predictor in predictors.items()}
        self._default = next(iter(self._served))
        self._reopen = reopen
        self._reloading = threading.Lock()
        self.gallery = gallery
        self.gallery_model: str | None = None
        if gallery is not None:
            self.gallery_model = next(
                (n for n, p in predictors.items() if p.bundle.sha256 == gallery.spec.bundle_sha256),
                self._default,
            )

    @property
    def names(self) -> list[str]:
        """The default first."""
        return list(self._served)

    @property
    def predictors(self) -> list[Predictor]:
        """Those that answer now."""
        return [served.predictor for served in self._served.values()]

    @contextmanager
    def use(self, name: object = None) -> Iterator[Served]:
        """The bundle of this name, the default where there is none; it stays open during the block.

        Raises ApiError: unknown_model.
        """
        wanted = name if isinstance(name, str) else self._default
        served = self._served.get(wanted)
        while served is not None and not served.enter():  # replaced between the two
            served = self._served.get(wanted)
        if served is None:
            raise ApiError(
                f"model {wanted[:100]!a} is not served here; {', '.join(map(ascii, self._served))} "
                f"{'is' if len(self._served) == 1 else 'are'}",
                code="unknown_model",
                field="model",
            )
        try:
            yield served
        finally:
            served.leave()

    def reload(self, name: str) -> tuple[str, str]:
        """Open a bundle's folder anew and answer from it; requests under way end with the old one.

        Returns:
            `Bundle.sha256` before and after.

        Raises:
            ApiError: unknown_model, reload_failed. What is served stays as it is.
        """
        with self._reloading, self.use(name) as old:
            before = old.predictor.bundle.sha256
            if self._reopen is None:
                raise ApiError("this server cannot reload", code="reload_failed")
            hurry = deadline.set(None)  # opening takes as long as it takes, whether or not the caller waits
            try:
                predictor = self._reopen(old.name)
            except DearError as error:
                raise self._failed(error.message) from error
            finally:
                deadline.reset(hurry)
            if self.gallery is not None and self.gallery_model == old.name:
                after = predictor.bundle.sha256
                if after != self.gallery.spec.bundle_sha256:
                    predictor.close()
                    raise self._failed(f"the gallery was made with bundle {before} and this is {after}")
            predictor.observer = old.predictor.observer
            self._served[old.name] = Served(old.name, predictor)
            old.retire()
            return before, predictor.bundle.sha256

    def close(self) -> None:
        """Close every bundle, once it is no longer used."""
        for served in self._served.values():
            served.retire()

    def _failed(self, reason: str) -> ApiError:
        from .guard import log

        log.error("reload failed: %s", reason)
        return ApiError(
            "the bundle was not reloaded and the old one goes on; the log has the reason",
            code="reload_failed",
        )
