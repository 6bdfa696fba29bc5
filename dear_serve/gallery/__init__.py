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

from dear_serve.gallery.indexer import IndexReport, content_hash, gallery_spec, index_folder, index_pictures
from dear_serve.gallery.query import (
    AttributeRequest,
    Invented,
    PhraseAttribute,
    Query,
    build_query,
    parse_attributes,
)
from dear_serve.gallery.schema import GallerySpec
from dear_serve.gallery.sources import FileSource, ParquetSource, open_source
from dear_serve.gallery.store import Gallery, GalleryStats, Hit, IndexStats, Record
from dear_serve.gallery.transfer import export_parquet, import_parquet, migrate

__all__ = [
    "AttributeRequest",
    "FileSource",
    "Gallery",
    "GallerySpec",
    "GalleryStats",
    "Hit",
    "IndexReport",
    "IndexStats",
    "Invented",
    "ParquetSource",
    "PhraseAttribute",
    "Query",
    "Record",
    "build_query",
    "content_hash",
    "export_parquet",
    "gallery_spec",
    "import_parquet",
    "index_folder",
    "index_pictures",
    "migrate",
    "open_source",
    "parse_attributes",
]
