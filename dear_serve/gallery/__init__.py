"""Attribute-conditioned search over stored pictures, on LanceDB."""

from __future__ import annotations

try:
    import lancedb as _lancedb  # noqa: F401
    import pyarrow as _pyarrow  # noqa: F401
except ImportError as _error:
    from dear_serve.errors import MissingDependencyError

    raise MissingDependencyError(
        "the gallery needs LanceDB: pip install 'lancedb>=0.25' 'pyarrow>=17'"
    ) from _error

from dear_serve.gallery.indexer import IndexReport, content_hash, gallery_spec, index_folder
from dear_serve.gallery.query import (
    AttributeRequest,
    Invented,
    PhraseAttribute,
    Query,
    build_query,
    parse_attributes,
)
from dear_serve.gallery.schema import GallerySpec
from dear_serve.gallery.store import Gallery, GalleryStats, Hit, IndexStats, Record

__all__ = [
    "AttributeRequest",
    "Gallery",
    "GallerySpec",
    "GalleryStats",
    "Hit",
    "IndexReport",
    "IndexStats",
    "Invented",
    "PhraseAttribute",
    "Query",
    "Record",
    "build_query",
    "content_hash",
    "gallery_spec",
    "index_folder",
    "parse_attributes",
]
