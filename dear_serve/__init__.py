"""dear-serve: adapt a pretrained CLIP per attention head (DeAR), export it, serve it, search by attribute.

Names that need torch, ONNX Runtime or LanceDB are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dear_serve.backbone.zoo import load_base
    from dear_serve.bundle import Bundle
    from dear_serve.config import ClipConfig, DearConfig
    from dear_serve.dear.model import DearModel
    from dear_serve.dear.roles import Roles
    from dear_serve.errors import DearError
    from dear_serve.gallery.store import Gallery
    from dear_serve.runtime import open_bundle
    from dear_serve.runtime.predict import Predictor
    from dear_serve.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "Bundle",
    "ClipConfig",
    "DearConfig",
    "DearError",
    "DearModel",
    "Gallery",
    "Predictor",
    "Roles",
    "Tokenizer",
    "__version__",
    "load_base",
    "open_bundle",
]

_HOMES = {
    "Bundle": "dear_serve.bundle",
    "ClipConfig": "dear_serve.config",
    "DearConfig": "dear_serve.config",
    "DearError": "dear_serve.errors",
    "DearModel": "dear_serve.dear.model",
    "Gallery": "dear_serve.gallery.store",
    "Predictor": "dear_serve.runtime.predict",
    "Roles": "dear_serve.dear.roles",
    "Tokenizer": "dear_serve.tokenizer",
    "load_base": "dear_serve.backbone.zoo",
    "open_bundle": "dear_serve.runtime",
}


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dear_serve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
