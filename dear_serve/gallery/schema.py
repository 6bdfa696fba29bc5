"""What a gallery's table looks like: the specification, the Arrow schema, metadata checked and typed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from dear_serve.errors import GalleryError, InputError
from dear_serve.runtime.base import Float32

__all__ = [
    "FORMAT_VERSION",
    "GallerySpec",
    "Kind",
    "Metadata",
    "MetadataValue",
    "arrow_schema",
    "check_id",
    "check_ids",
    "check_metadata",
    "kind_fields",
    "metadata_column",
    "metadata_kinds",
    "new_kinds",
    "spec_of",
    "typed_values",
    "vector_column",
    "vector_columns",
]

FORMAT_VERSION = 1
MAX_ID_LENGTH = 512
Kind = Literal["text", "number", "truth"]
MetadataValue: TypeAlias = str | int | float | bool | None
Metadata: TypeAlias = dict[str, MetadataValue]

_SPEC_KEY = b"dear_gallery"
# Lance refuses to commit two concurrent inserts of one key when the key is declared so; without it both rows
# stay.
_PRIMARY_KEY = {b"lance-schema:unenforced-primary-key:position": b"1"}
_ARROW_TYPES: dict[str, pa.DataType] = {"text": pa.string(), "number": pa.float64(), "truth": pa.bool_()}
_NAME = re.compile(r"[^\W\d_][\w \-]{0,63}")
_MAX_KEYS = 64
_MAX_TEXT = 4096
_EXACT = 2**53


@dataclass(frozen=True, kw_only=True)
class GallerySpec:
    """What the vectors of a gallery were made with.

    Attributes:
        bundle_sha256: hash of whatever decides the vectors: the bundle that made them.
        base_sha256: hash of the base model's weights.
        columns: width of each vector: "class" (D) and one entry per attribute (r_k).
        format_version: of the table's layout.

    Raises GalleryError when a column's name or width cannot be stored.
    """

    bundle_sha256: str
    base_sha256: str
    columns: Mapping[str, int]
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if "class" not in self.columns:
            raise GalleryError(f"vectors are {', '.join(self.columns)}; 'class' is needed", field="columns")
        for name, width in self.columns.items():
            if not _NAME.fullmatch(name) or width < 1:
                raise GalleryError(
                    f"vector {name!r} of {width} numbers cannot be stored; a name starts with a letter and "
                    "holds letters, digits, '_', '-' and spaces, and a vector holds 1 number or more",
                    field="columns",
                )

    def check_same(self, wanted: GallerySpec) -> None:
        """Raise GalleryError naming both values and the remedy unless `wanted` made this gallery."""
        remedy = (
            "re-embed it (dear-serve index BUNDLE --gallery GALLERY --migrate), index the pictures again into a new "
            "folder, or use the bundle that made it"
        )
        for what, mine, other in (
            ("bundle", self.bundle_sha256, wanted.bundle_sha256),
            ("base model", self.base_sha256, wanted.base_sha256),
            ("set of vectors", dict(self.columns), dict(wanted.columns)),
        ):
            if mine != other:
                raise GalleryError(
                    f"the gallery was made with {what} {mine}, not with {other}; {remedy}",
                    code="other_bundle",
                )

    def to_json(self) -> str:
        """The specification as JSON text."""
        return json.dumps(
            {
                "format_version": self.format_version,
                "bundle_sha256": self.bundle_sha256,
                "base_sha256": self.base_sha256,
                "columns": dict(self.columns),
            }
        )


def vector_column(name: str) -> str:
    """The table's column for a vector."""
    return f"v_{name}"


def metadata_column(key: str) -> str:
    """The table's column for a metadata key; prefixed, so no key can clash with our columns."""
    return f"m_{key}"


def arrow_schema(spec: GallerySpec) -> pa.Schema:
    """The schema of a new, empty table: id, hash, vectors, metadata as JSON, thumbnail."""
    fields = [
        pa.field("id", pa.string(), nullable=False, metadata=_PRIMARY_KEY),
        pa.field("hash", pa.string()),
    ]
    fields += [pa.field(vector_column(n), pa.list_(pa.float32(), r)) for n, r in spec.columns.items()]
    fields += [pa.field("metadata", pa.string()), pa.field("thumbnail", pa.binary())]
    return pa.schema(fields, metadata={_SPEC_KEY: spec.to_json().encode()})


def spec_of(schema: pa.Schema) -> GallerySpec:
    """The specification in a table's schema; GalleryError for tables not ours or of another format."""
    text = (schema.metadata or {}).get(_SPEC_KEY)
    if text is None:
        raise GalleryError("the folder holds a LanceDB table that is not a gallery; choose another folder")
    data = json.loads(text)
    if data["format_version"] != FORMAT_VERSION:
        raise GalleryError(
            f"the gallery has format {data['format_version']}; {FORMAT_VERSION} is expected: index again"
        )
    return GallerySpec(**data)


def metadata_kinds(schema: pa.Schema) -> dict[str, Kind]:
    """Kind of every metadata key a table has columns for."""
    kinds: dict[Any, Kind] = {pa.string(): "text", pa.float64(): "number", pa.bool_(): "truth"}
    return {f.name[2:]: kinds[f.type] for f in schema if f.name.startswith("m_")}


def _bad(message: str) -> InputError:
    return InputError(message, code="bad_metadata", field="metadata")


def _kind(key: str, value: MetadataValue) -> Kind | None:
    """Kind of a value, None for null. Raises InputError (bad_metadata) for values that cannot be stored."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or (isinstance(value, int) and abs(value) > _EXACT):
            raise _bad(f"metadata {key!r} is a number that filters cannot compare exactly; store it as text")
        return "number"
    if isinstance(value, str):
        if len(value) > _MAX_TEXT or "\0" in value or not _is_unicode(value):
            raise _bad(f"metadata {key!r} is not text of at most {_MAX_TEXT} characters")
        return "text"
    raise _bad(
        f"metadata {key!r} is a {type(value).__name__}; text, a number, true, false or null is expected"
    )


def _is_unicode(value: str) -> bool:
    """False for lone surrogates, which JSON can carry and UTF-8 cannot."""
    return not any("\ud800" <= c <= "\udfff" for c in value)


def check_metadata(row: Any) -> Metadata:
    """`row` if it is a flat mapping with usable names and values; else InputError (bad_metadata)."""
    if not isinstance(row, Mapping):
        raise _bad(f'metadata is a {type(row).__name__}; an object such as {{"price": 9.5}} is expected')
    if len(row) > _MAX_KEYS:
        raise _bad(f"metadata has {len(row)} keys; at most {_MAX_KEYS}")
    for key, value in row.items():
        if not isinstance(key, str) or not _NAME.fullmatch(key) or not _is_unicode(key):
            raise _bad(
                f"metadata key {str(key)[:80]!a} cannot be a column; it starts with a letter, holds letters, "
                "digits, '_', '-' and spaces, and has at most 64 characters"
            )
        _kind(key, value)
    return dict(row)


def new_kinds(rows: Iterable[Metadata], known: Mapping[str, Kind]) -> dict[str, Kind]:
    """Kinds of the keys in checked `rows` that `known` lacks.

    Raises InputError (bad_metadata) when a key's values are of two kinds, or the gallery would get over 64
    keys.
    """
    kinds = dict(known)
    for row in rows:
        for key, value in row.items():
            kind = _kind(key, value)
            if kind is not None and kinds.setdefault(key, kind) != kind:
                raise _bad(
                    f"metadata {key!r} is {kind} here and {kinds[key]} in the gallery; a key has one kind"
                )
    if len(kinds) > _MAX_KEYS:
        raise _bad(f"the gallery would get {len(kinds)} metadata keys; at most {_MAX_KEYS}")
    return {k: v for k, v in kinds.items() if k not in known}


def typed_values(rows: Sequence[Metadata], key: str, kind: Kind) -> pa.Array:
    """The values of one key as its column, null where a row lacks it."""
    values = [row.get(key) for row in rows]
    if kind == "number":
        values = [None if v is None else float(v) for v in values]
    return pa.array(values, type=_ARROW_TYPES[kind])


def kind_fields(kinds: Mapping[str, Kind]) -> pa.Schema:
    """Columns to add to a table for new metadata keys."""
    return pa.schema([pa.field(metadata_column(k), _ARROW_TYPES[v]) for k, v in kinds.items()])


def check_id(value: str) -> None:
    """Raise InputError (bad_ids) unless the id can be stored."""
    usable = isinstance(value, str) and 0 < len(value) <= MAX_ID_LENGTH and "\0" not in value
    if not usable or not _is_unicode(value):
        raise InputError(
            f"id {str(value)[:80]!a} is not text of 1 to {MAX_ID_LENGTH} characters",
            code="bad_ids",
            field="ids",
        )


def check_ids(ids: Sequence[str]) -> None:
    """Raise InputError (bad_ids) unless the ids can be stored and are distinct."""
    for i in ids:
        check_id(i)
    if len(set(ids)) != len(ids):
        twice = next(i for n, i in enumerate(ids) if i in ids[:n])
        raise InputError(f"id {twice[:80]!a} is given twice", code="bad_ids", field="ids")


def vector_columns(
    spec: GallerySpec, ids: Sequence[str], vectors: Mapping[str, Float32]
) -> dict[str, pa.FixedSizeListArray]:
    """The vectors at length 1 as columns. Raises InputError (bad_vector)."""
    if set(vectors) != set(spec.columns):
        raise InputError(
            f"vectors are {', '.join(sorted(vectors))}; the gallery has {', '.join(sorted(spec.columns))}",
            code="bad_vector",
        )
    columns = {}
    for name, width in spec.columns.items():
        values = np.asarray(vectors[name], dtype=np.float32)
        if values.shape != (len(ids), width):
            raise InputError(
                f"vector {name!r} has shape {values.shape}; ({len(ids)}, {width}) is expected",
                code="bad_vector",
            )
        norms = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
        wrong = np.flatnonzero(~(np.isfinite(norms) & (norms > 0)).ravel())
        if len(wrong):
            raise InputError(
                f"vector {name!r} of {ids[wrong[0]][:80]!a} is zero or not finite and points nowhere",
                code="bad_vector",
            )
        unit = (values / norms).astype(np.float32)
        columns[vector_column(name)] = pa.FixedSizeListArray.from_arrays(pa.array(unit.ravel()), width)
    return columns
