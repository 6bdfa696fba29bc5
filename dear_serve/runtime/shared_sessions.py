"""Frozen CLIP's graphs are the same in every bundle on one base: bundles of a process share one session each (ours).

Only the graphs of zero-shot mode hold nothing but the base. The adapted graphs hold the same frozen weights, but each
session of ONNX Runtime packs its own copy of them for its matrix products.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakValueDictionary

from dear_serve.bundle import Bundle

__all__ = ["frozen_key", "shared_session"]

_FROZEN = ("zero_shot_image", "zero_shot_text")
_EXACT = ("fp32", "fp16")  # int8 depends on the pictures that it was calibrated with

_sessions: WeakValueDictionary[Hashable, Any] = WeakValueDictionary()
_lock = threading.Lock()


def frozen_key(bundle: Bundle, graph: str) -> tuple[str, ...] | None:
    """What a frozen graph's session depends on but for how it is run; None for a graph that is the bundle's own.

    The base's weights, the precision, the operator set and the exporter's versions, as export.json tells them.
    """
    name = "onnx/export.json"
    if graph not in _FROZEN or name not in bundle.manifest.files:
        return None
    data = json.loads(bundle.file(name).read_text(encoding="utf-8"))
    if data.get("base_sha256") != bundle.manifest.base.sha256 or data.get("precision") not in _EXACT:
        return None
    told = (data["precision"], str(data.get("opset")), json.dumps(data.get("versions"), sort_keys=True))
    return (graph, bundle.manifest.base.sha256, *told)


def shared_session(key: Hashable | None, make: Callable[[], Any]) -> Any:
    """The session of this key that some engine still uses, or else a new one; always a new one for None."""
    if key is None:
        return make()
    with _lock:
        session = _sessions.get(key)
        if session is None:
            _sessions[key] = session = make()
        return session
