"""int8 graphs for the CPU: the blocks' matrix products take uint8 activations and int8 weights.

Activations have one static range per tensor, measured on real pictures, so that a picture's features do not depend on
what else is in its batch; weights have one scale per output channel. Layers whose damage is too large stay fp32, found
by a greedy search over measured cosines. Written as QuantizeLinear and DequantizeLinear pairs of plain ONNX, which ONNX
Runtime turns into integer products; patch embedding, attention, norms, final projections and fusion stay fp32.

Weights use 7 of the 8 bits, -64 to 64: on x86 CPUs without VNNI a pair of products is summed in 16 bits, which overflow
with full weights. (ONNX Runtime's way around that, `session.x64quantprecision`, also turns off VNNI and AMX: 5 times
slower where they are, 1.32.) So a graph gives the same integers on every machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from dear_serve.config import StrictConfig
from dear_serve.errors import CheckFailedError
from export.ranges import Range, RangeObserver

__all__ = [
    "MAX_KEPT",
    "TARGET_COSINE",
    "WEIGHT_LEVELS",
    "Feed",
    "QuantizationInfo",
    "Quantizer",
    "layer_name",
    "quantize",
]

TARGET_COSINE = 0.995
"""Smallest cosine with fp32 over the calibration inputs at which the search is content."""
WEIGHT_LEVELS = 64
"""Largest weight as an integer: 2 * 255 * 64 fits 16 bits."""
MAX_KEPT = 0.5
"""Share of the layers that may stay fp32; when more would have to, int8 is refused."""
_TRIED = 8  # inputs that each layer's damage is measured on

Array = npt.NDArray[Any]
Feed = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True)
class QuantizationInfo(StrictConfig):
    """How one tower was quantised."""

    layers: int
    """Groups of matrix products with one input; each is int8 or fp32 as a whole."""
    kept: tuple[str, ...]
    """Weights that stay fp32."""
    inputs: int
    """How many inputs the ranges were measured on."""
    cosine: float
    """Smallest with fp32 over those inputs, any output."""
    damage: dict[str, float] = field(default_factory=dict)
    """1 - cosine when that layer alone is int8, the worst first; empty where nothing had to be searched."""


def layer_name(weight: str | None) -> str | None:
    """ "image.blocks.3.in_weight" -> "blocks.3.in_weight", the same in every graph; None for any other constant."""
    start = (weight or "").find("blocks.")
    return weight[start:] if weight and start >= 0 and weight.endswith("_weight") else None


def quantize(model: ir.Model, ranges: Mapping[str, Range], keep: Iterable[str] = ()) -> int:
    """Make the blocks' matrix products int8, in place.

    Args:
        model: in fp32.
        ranges: of their inputs, by tensor name.
        keep: `layer_name`s of weights that stay fp32.

    Returns:
        How many products were made int8.
    """
    graph, kept = model.graph, frozenset(keep)
    activations: dict[str, ir.Value] = {}
    weights: dict[str, ir.Value] = {}
    chosen = [product for product in _products(graph) if product.layer not in kept]
    for node, x, weight, _ in chosen:
        x_name, weight_name = str(x.name), str(weight.name)
        if x_name not in activations:
            activations[x_name] = _quantized_input(graph, node, x, ranges[x_name])
        if weight_name not in weights:
            weights[weight_name] = _quantized_weight(graph, node, weight)
        node.replace_input_with(0, activations[x_name])
        node.replace_input_with(1, weights[weight_name])
    for name in weights:
        if not graph.initializers[name].uses():
            del graph.initializers[name]
    return len(chosen)


class _Product(NamedTuple):
    """A matrix product with a block's weight."""

    node: ir.Node
    x: ir.Value
    weight: ir.Value
    layer: str


def _products(graph: ir.Graph) -> list[_Product]:
    found = []
    for node in graph:
        if node.op_type == "MatMul":
            x, weight = node.inputs
            layer = layer_name(weight.name) if weight is not None and weight.is_initializer() else None
            if x is not None and weight is not None and layer is not None:
                found.append(_Product(node, x, weight, layer))
    return found


def _constant(graph: ir.Graph, name: str, data: Array) -> ir.Value:
    value = ir.Value(
        name=name, type=ir.TensorType(ir.DataType.from_numpy(data.dtype)), shape=ir.Shape(data.shape)
    )
    value.const_value = ir.tensor(data, name=name)
    graph.register_initializer(value)
    return value


def _pair(graph: ir.Graph, before: ir.Node, x: ir.Value, scale: ir.Value, zero: ir.Value) -> ir.Value:
    """x quantised and dequantised again."""
    q = ir.node("QuantizeLinear", [x, scale, zero])
    dq = ir.node("DequantizeLinear", [q.outputs[0], scale, zero])
    for node, suffix in ((q, "q"), (dq, "dq")):
        node.name, node.outputs[0].name = f"{x.name}_{suffix}_node", f"{x.name}_{suffix}"
    graph.insert_before(before, [q, dq])
    return dq.outputs[0]


def _quantized_input(graph: ir.Graph, before: ir.Node, x: ir.Value, span: Range) -> ir.Value:
    scale = _constant(graph, f"{x.name}_scale", np.array(span.scale, dtype=np.float32))
    zero = _constant(graph, f"{x.name}_zero", np.array(span.zero_point, dtype=np.uint8))
    return _pair(graph, before, x, scale, zero)


def _quantized_weight(graph: ir.Graph, before: ir.Node, weight: ir.Value) -> ir.Value:
    """(in, out) fp32 as int8 with a scale per output channel, symmetric."""
    assert weight.const_value is not None
    data = weight.const_value.numpy()
    scales = np.maximum(np.abs(data).max(0) / WEIGHT_LEVELS, np.finfo(np.float32).tiny).astype(np.float32)
    integers = np.clip(np.rint(data / scales), -WEIGHT_LEVELS, WEIGHT_LEVELS).astype(np.int8)
    inputs = [
        _constant(graph, f"{weight.name}_int8", integers),
        _constant(graph, f"{weight.name}_scale", scales),
        _constant(graph, f"{weight.name}_zero", np.zeros(len(scales), dtype=np.int8)),
    ]
    node = ir.node("DequantizeLinear", inputs, {"axis": 1})
    node.name, node.outputs[0].name = f"{weight.name}_dq_node", f"{weight.name}_dq"
    graph.insert_before(before, node)
    return node.outputs[0]


class Quantizer:
    """Ranges and the search for one tower, in a folder of fp32 graphs where trial graphs can be written.

    Args:
        folder: of the fp32 graphs.
        feeds: calibration inputs, batch by batch; every graph of the tower takes them.
        threads: CPU threads.
    """

    def __init__(self, folder: Path, feeds: Sequence[Feed], *, threads: int = 0) -> None:
        self._folder, self._feeds, self._threads = folder, feeds, threads

    def ranges(self, file: str) -> dict[str, Range]:
        """Ranges of the inputs of a graph's products, by tensor name."""
        model = onnx.load(self._folder / file, load_external_data=False)
        names = sorted({str(p.x.name) for p in _products(ir.serde.deserialize_model(model).graph)})
        model.graph.output.extend(
            onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in names
        )
        observers = {name: RangeObserver() for name in names}
        run = self._session(model.SerializeToString(), "calibration.onnx").run
        for feed in self._feeds:
            for name, values in zip(observers, run(list(observers), dict(feed)), strict=True):
                observers[name].add(values)
        return {name: observer.range() for name, observer in observers.items()}

    def search(self, file: str, ranges: Mapping[str, Range]) -> QuantizationInfo:
        """Which layers of a graph stay fp32, so that the smallest cosine is `TARGET_COSINE` or more.

        Layers are measured one by one, and kept in fp32 from the most damaging on until the target is met.

        Raises:
            CheckFailedError: more than `MAX_KEPT` of the layers would have to stay.
        """
        groups = self._groups(file)
        inputs = sum(len(next(iter(feed.values()))) for feed in self._feeds)
        expected = self._outputs(ir.load(self._folder / file), self._feeds)
        damage: dict[str, float] = {}
        kept: list[str] = []
        order: list[str] = []
        while (cosine := self._cosine(file, ranges, kept, expected)) < TARGET_COSINE:
            if not damage:
                damage = self._damages(file, ranges, groups)
                order = sorted(damage, key=lambda name: -damage[name])
            if not order or len(damage) - len(order) + 1 > MAX_KEPT * len(groups):
                raise CheckFailedError(
                    f"int8 loses too much in {file}: cosine {cosine:.4f} with {len(damage) - len(order)} of "
                    f"{len(groups)} layers in fp32, and {TARGET_COSINE} is needed; "
                    "calibrate with --images of your own, or use fp32",
                    code="parity",
                )
            kept += groups[order.pop(0)]
        return QuantizationInfo(
            layers=len(groups),
            kept=tuple(sorted(kept)),
            inputs=inputs,
            cosine=cosine,
            damage={name: damage[name] for name in sorted(damage, key=lambda name: -damage[name])},
        )

    def _groups(self, file: str) -> dict[str, list[str]]:
        """Weights (`layer_name`s) whose products share an input, named after them."""
        shared: dict[str, list[str]] = defaultdict(list)
        for product in _products(ir.load(self._folder / file).graph):
            shared[str(product.x.name)].append(product.layer)
        return {"+".join(names): names for names in shared.values()}

    def _damages(
        self, file: str, ranges: Mapping[str, Range], groups: Mapping[str, list[str]]
    ) -> dict[str, float]:
        feeds = [{name: rows[:_TRIED] for name, rows in self._feeds[0].items()}]
        expected = self._outputs(ir.load(self._folder / file), feeds)
        every = {name for names in groups.values() for name in names}
        return {
            group: 1 - self._cosine(file, ranges, every.difference(names), expected, feeds)
            for group, names in groups.items()
        }

    def _cosine(
        self,
        file: str,
        ranges: Mapping[str, Range],
        keep: Iterable[str],
        expected: list[Array],
        feeds: Sequence[Feed] | None = None,
    ) -> float:
        model = ir.load(self._folder / file)
        quantize(model, ranges, keep)
        found = self._outputs(model, feeds or self._feeds)
        return min(_smallest_cosine(a, b) for a, b in zip(found, expected, strict=True))

    def _outputs(self, model: ir.Model, feeds: Sequence[Feed]) -> list[Array]:
        """Every output over all feeds."""
        session = self._session(ir.serde.serialize_model(model).SerializeToString(), "trial.onnx")
        parts = [session.run(None, dict(feed)) for feed in feeds]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def _session(self, content: bytes, file: str) -> Any:
        """A session over a graph written beside the weights it refers to."""
        import onnxruntime

        path = self._folder / file
        path.write_bytes(content)
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, self._threads
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        path.unlink()
        return session


def _smallest_cosine(found: Array, expected: Array) -> float:
    norms = np.linalg.norm(found, axis=-1) * np.linalg.norm(expected, axis=-1)
    cosines = (found * expected).sum(-1) / np.maximum(norms, np.finfo(np.float32).tiny)
    return float(np.nan_to_num(cosines, nan=-1.0).min())
