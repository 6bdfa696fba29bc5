"""Whether TensorRT's ONNX parser can take a bundle's graphs, found without a GPU and without TensorRT.

Every operator, type, attribute, rank and dynamic axis is compared with the parser's published operator list, which is
kept as data in `trt_operators.json` with its version and source. What the list restricts in words that this check does
not know is reported too, never passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import AttributeProto, NodeProto, TensorProto, defs, helper, shape_inference

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, CheckFailedError
from dear_serve.io_spec import ALL_GRAPHS, GRAPHS, GraphSpec

__all__ = ["OperatorList", "Support", "Value", "check_bundle", "check_graph", "load_operators"]

_LIST = Path(__file__).with_name("trt_operators.json")
_TYPES = {
    TensorProto.FLOAT: "FP32",
    TensorProto.FLOAT16: "FP16",
    TensorProto.BFLOAT16: "BF16",
    TensorProto.FLOAT8E4M3FN: "FP8",
    TensorProto.INT4: "INT4",
    TensorProto.INT8: "INT8",
    TensorProto.INT32: "INT32",
    TensorProto.INT64: "INT64",
    TensorProto.UINT8: "UINT8",
    TensorProto.BOOL: "BOOL",
}
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class OperatorList:
    """The parser's published list (`trt_operators.json`)."""

    tensorrt: str
    source: str
    opsets: dict[str, tuple[int, int]]
    """Lowest and highest opset by the TensorRT version that brought it."""
    since: dict[str, str]
    """Operators that came after the oldest version in `opsets`."""
    max_rank: int
    data_dependent: frozenset[str]
    """Operators whose output shape depends on values."""
    operators: dict[str, tuple[str, ...]]
    """Types each supported operator takes, in TensorRT's names."""
    rules: dict[str, dict[str, Any]]
    """Restrictions as data: constants (inputs that must be), ranks, inputs and outputs (how many), attributes."""
    restricted: frozenset[str]
    """Operators with further restrictions, which this check does not know."""


@dataclass(frozen=True)
class Value:
    """A tensor of a graph: TensorRT's name of its type ("" if it has none), rank (None if unknown), constant or not."""

    kind: str
    rank: int | None
    constant: bool


@dataclass(frozen=True, kw_only=True)
class Support:
    """What the list says of one graph."""

    graph: str
    opset: int
    nodes: int
    operators: tuple[str, ...]
    needs: str
    """The oldest TensorRT version known to take it; "" if none."""
    problems: tuple[str, ...]


def load_operators(path: Path = _LIST) -> OperatorList:
    """The list that comes with this package."""
    data = json.loads(path.read_text(encoding="utf-8"))
    sets = {name: tuple(types) for name, types in data["type_sets"].items()}
    return OperatorList(
        tensorrt=data["tensorrt"],
        source=data["source"],
        opsets={version: (low, high) for version, (low, high) in data["opsets"].items()},
        since=data["since"],
        max_rank=data["max_rank"],
        data_dependent=frozenset(data["data_dependent"]),
        operators={name: sets[kind] for name, kind in data["operators"].items()},
        rules=data["rules"],
        restricted=frozenset(data["restricted"]),
    )


def check_bundle(bundle: Bundle) -> list[Support]:
    """Check every graph of a bundle.

    Raises:
        BundleError: the bundle has no graphs.
        CheckFailedError: a graph that the parser would refuse; every problem is named.
    """
    operators, found = load_operators(), []
    for name, spec in ALL_GRAPHS.items():
        relative = f"onnx/{spec.file}"
        if name in GRAPHS or relative in bundle.manifest.files:
            found.append(check_graph(bundle.file(relative), name, spec, operators))
    problems = [f"{support.graph}: {problem}" for support in found for problem in support.problems]
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckFailedError(
            f"TensorRT {operators.tensorrt}'s ONNX parser would refuse {len(problems)} things:\n  "
            + "\n  ".join(problems[:_SHOWN] + more)
            + "\nexport with --opset 20 and --precision fp32 or fp16 for TensorRT",
            code="trt_operators",
        )
    return found


def check_graph(path: Path, name: str, spec: GraphSpec, operators: OperatorList) -> Support:
    """Compare one graph with the list.

    Raises:
        BundleError: the file is not an ONNX graph whose shapes can be inferred.
    """
    try:
        model = onnx.load(path, load_external_data=False)
        inferred = shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:  # protobuf's and onnx's errors have no common ancestor below this
        raise BundleError(
            f"{path.name} is not a graph that can be checked ({error}); run dear-export again"
        ) from error
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    values = _values(inferred.graph)
    problems = [*_opset(opset, operators), *_inputs(inferred.graph, spec)]
    if model.functions:
        problems.append(f"has {len(model.functions)} local functions, which are not looked into")
    for value in values.items():
        problems += _value(*value, operators)
    for node in inferred.graph.node:
        problems += (f"{node.op_type} {node.name}: {text}" for text in _node(node, opset, values, operators))
    used = {node.op_type for node in inferred.graph.node}
    return Support(
        graph=name,
        opset=opset,
        nodes=len(inferred.graph.node),
        operators=tuple(sorted(used)),
        needs="" if problems else _needs(opset, used, operators),
        problems=tuple(problems),
    )


def _values(graph: onnx.GraphProto) -> dict[str, Value]:
    """Every named tensor of a graph."""
    values = {
        t.name: Value(_TYPES.get(t.data_type, f"type {t.data_type}"), len(t.dims), True)
        for t in graph.initializer
    }
    for node in graph.node:
        if node.op_type == "Constant":
            values[node.output[0]] = Value("", None, True)
    for info in (*graph.input, *graph.value_info, *graph.output):
        kind = info.type.tensor_type
        rank = len(kind.shape.dim) if kind.HasField("shape") else None
        constant = info.name in values
        values[info.name] = Value(_TYPES.get(kind.elem_type, f"type {kind.elem_type}"), rank, constant)
    return values


def _opset(opset: int, operators: OperatorList) -> Iterator[str]:
    low, high = (
        pick(pair)
        for pick, pair in zip((min, max), zip(*operators.opsets.values(), strict=True), strict=True)
    )
    if not low <= opset <= high:
        yield f"opset {opset}; the parser takes {low} to {high}"


def _inputs(graph: onnx.GraphProto, spec: GraphSpec) -> Iterator[str]:
    """Dynamic axes are those that get an optimisation profile, and no others."""
    names = {t.name: t for t in graph.initializer}
    declared = {tensor.name: tensor.dynamic_axes() for tensor in spec.inputs}
    for value in graph.input:
        if value.name in names:
            continue
        dims = value.type.tensor_type.shape.dim
        dynamic = {i for i, dim in enumerate(dims) if not dim.HasField("dim_value")}
        for axis in sorted(dynamic - set(declared.get(value.name, ()))):
            yield f"input {value.name} axis {axis} is dynamic, and no optimisation profile gives its range"


def _value(name: str, value: Value, operators: OperatorList) -> Iterator[str]:
    if value.kind.startswith("type "):
        yield f"{name} has ONNX {value.kind}, which TensorRT does not have"
    if value.rank is None and value.kind:
        yield f"{name} has a rank that is not known before it runs"
    elif value.rank is not None and value.rank > operators.max_rank:
        yield f"{name} has {value.rank} axes; TensorRT takes {operators.max_rank}"


def _node(node: NodeProto, opset: int, values: Mapping[str, Value], operators: OperatorList) -> Iterator[str]:
    if node.domain not in ("", "ai.onnx"):
        yield f"operator of {node.domain}, which the parser does not know"
        return
    types = operators.operators.get(node.op_type)
    if types is None:
        yield "operator that the list does not support"
        return
    if node.op_type in operators.restricted:
        yield "operator with restrictions that this check does not know"
    if node.op_type in operators.data_dependent:
        yield "the shape of its output depends on values"
    for name in _typed(node, opset):
        kind = values[name].kind if name in values else ""
        if kind and not kind.startswith("type ") and kind not in types:
            yield f"{name} is {kind}; the list has {', '.join(types)}"
    yield from _rules(node, values, operators.rules.get(node.op_type, {}))


def _typed(node: NodeProto, opset: int) -> Iterator[str]:
    """Inputs and outputs whose type the operator leaves open; the others (an index, a shape) are fixed by ONNX."""
    schema = defs.get_schema(node.op_type, opset, "")
    for formal, names in ((schema.inputs, node.input), (schema.outputs, node.output)):
        for i, name in enumerate(names):
            parameter = formal[min(i, len(formal) - 1)]
            open_type = not parameter.type_str.startswith("tensor(")
            result_only = formal is schema.outputs and not any(
                parameter.type_str == p.type_str for p in schema.inputs
            )
            if (
                name
                and open_type
                and (not result_only or node.op_type in ("Cast", "Constant", "ConstantOfShape"))
            ):
                yield name


def _rules(node: NodeProto, values: Mapping[str, Value], rules: Mapping[str, Any]) -> Iterator[str]:
    for kind, names in (("inputs", node.input), ("outputs", node.output)):
        extra = [name for name in names[rules.get(kind, len(names)) :] if name]
        if extra:
            yield f"{kind} after the first {rules[kind]} are not supported, it has {', '.join(extra)}"
    for i in rules.get("constants", ()):
        if len(node.input) > i and node.input[i] and not _constant(values, node.input[i]):
            yield f"input {i} must be a constant"
    for i, rank in rules.get("ranks", {}).items():
        if len(node.input) > int(i) and node.input[int(i)]:
            found = values[node.input[int(i)]].rank
            if found != rank:
                yield f"input {i} has {found} axes; {rank} are needed"
    for attribute in node.attribute:
        allowed = rules.get("attributes", {}).get(attribute.name)
        if allowed is not None and _given(attribute) and helper.get_attribute_value(attribute) not in allowed:
            yield f"attribute {attribute.name} is {helper.get_attribute_value(attribute)!r}, which is not supported"


def _constant(values: Mapping[str, Value], name: str) -> bool:
    return name in values and values[name].constant


def _given(attribute: AttributeProto) -> bool:
    """Whether an attribute says anything: 0 is what ONNX takes where the ones in question are absent."""
    return bool(helper.get_attribute_value(attribute))


def _needs(opset: int, used: set[str], operators: OperatorList) -> str:
    """The oldest version in the list's data that takes this opset and these operators."""
    versions = [version for version, (low, high) in operators.opsets.items() if low <= opset <= high]
    oldest = min(versions, key=_order)
    return max([oldest, *(operators.since[name] for name in used & set(operators.since))], key=_order)


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
