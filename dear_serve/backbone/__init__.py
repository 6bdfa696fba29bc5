"""CLIP as two readable towers. Importing this package alone needs no torch."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ASSETS"]

ASSETS = Path(__file__).parent.parent / "assets"
"""The files that ship with the package: dear-mini."""
