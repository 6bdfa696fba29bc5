"""Read the inputs and outputs of an ONNX file without loading its weights or needing the `onnx` package.

An ONNX file is one protobuf message; only the fields on the way to the graph's inputs and outputs are decoded
(numbers from onnx.proto3), everything else is skipped by its length. So all graphs of a bundle can be checked
when it is opened, while sessions are made only for those that are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from dear_serve.errors import BundleError

__all__ = ["TensorHeader", "read_header"]

# TensorProto.DataType
_DTYPES = {1: "float32", 6: "int32", 7: "int64", 9: "bool", 10: "float16", 11: "float64"}

_Span = tuple[int, int]


@dataclass(frozen=True)
class TensorHeader:
    """One graph input or output as declared; `axes` are sizes, or names of dynamic axes ("" if unnamed)."""

    name: str
    dtype: str
    axes: tuple[int | str, ...]


def read_header(path: Path) -> tuple[list[TensorHeader], list[TensorHeader]]:
    """Inputs and outputs of the ONNX file `path`. Raises BundleError if it is not one."""
    with path.open("rb") as stream:
        try:
            graph = _message(stream, (0, path.stat().st_size), 7)
            inputs = [_tensor(stream, span) for span in _messages(stream, graph, 11)]
            outputs = [_tensor(stream, span) for span in _messages(stream, graph, 12)]
        except ValueError as error:
            raise BundleError(f"{path.name} is not an ONNX graph ({error}); run dear-export again") from error
    return inputs, outputs


def _tensor(stream: BinaryIO, span: _Span) -> TensorHeader:
    """ValueInfoProto: name = 1, type = 2; TypeProto: tensor_type = 1 with elem_type = 1, shape = 2."""
    name = _text(stream, span, 1)
    tensor = _message(stream, _message(stream, span, 2), 1)
    dtype = _integer(stream, tensor, 1) or 0
    axes: list[int | str] = []
    for dim in _messages(stream, _message(stream, tensor, 2), 1):
        size = _integer(stream, dim, 1)
        axes.append(_text(stream, dim, 2) if size is None else size)
    return TensorHeader(name, _DTYPES.get(dtype, f"type {dtype}"), tuple(axes))


def _fields(stream: BinaryIO, span: _Span) -> Iterator[tuple[int, int | _Span]]:
    """Field numbers of the message at `span` with their integer, or where their bytes are."""
    position, end = span
    while position < end:
        stream.seek(position)
        key = _varint(stream)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value: int | _Span = _varint(stream)
            position = stream.tell()
        elif wire in (1, 5):
            start = stream.tell()
            position = start + (8 if wire == 1 else 4)
            value = (start, position)
        elif wire == 2:
            length = _varint(stream)
            start = stream.tell()
            position = start + length
            value = (start, position)
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if number == 0 or position > end:
            raise ValueError(f"the message is damaged before byte {position}")
        yield number, value


def _varint(stream: BinaryIO) -> int:
    value = 0
    for shift in range(0, 70, 7):
        byte = stream.read(1)
        if not byte:
            raise ValueError("the file ends too early")
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise ValueError("a number is too long")


def _messages(stream: BinaryIO, span: _Span, number: int) -> list[_Span]:
    return [value for n, value in _fields(stream, span) if n == number and isinstance(value, tuple)]


def _message(stream: BinaryIO, span: _Span, number: int) -> _Span:
    found = _messages(stream, span, number)
    if not found:
        raise ValueError(f"field {number} is missing")
    return found[-1]


def _integer(stream: BinaryIO, span: _Span, number: int) -> int | None:
    found = [value for n, value in _fields(stream, span) if n == number and isinstance(value, int)]
    return found[-1] if found else None


def _text(stream: BinaryIO, span: _Span, number: int) -> str:
    found = _messages(stream, span, number)
    if not found:
        return ""
    start, end = found[-1]
    stream.seek(start)
    return stream.read(end - start).decode("utf-8")
