"""dear-serve: adapt a pretrained CLIP per attention head (DeAR), export it, serve it, search by attribute."""

from __future__ import annotations

__version__ = "0.1.0"
