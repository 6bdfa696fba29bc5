"""Adapted model to the ONNX graphs of `io_spec`, with their weights in one shared file.

Equal tensors are stored once, whichever graphs use them; the same model gives the same bytes again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim

from dear_serve.bundle import sha256_file
from dear_serve.config import StrictConfig
from dear_serve.dear.model import DearModel
from dear_serve.errors import CheckFailedError, ConfigError
from dear_serve.io_spec import ALL_GRAPHS, GraphSpec
from export.half import to_half
from export.sides import count_traced, cut, sides

__all__ = [
    "DEFAULT_OPSET",
    "OPSETS",
    "PORTABLE_OPSET",
    "TRACED",
    "WEIGHTS_FILE",
    "GraphInfo",
    "WeightsInfo",
    "check_opset",
    "export_graphs",
    "trace_graphs",
    "write_graphs",
]

DEFAULT_OPSET = 23
PORTABLE_OPSET = 20
"""Attention as matrix products and a softmax: for ONNX Runtime before 1.23, and for TensorRT, whose parser takes
Attention with four axes only (`export.check_trt`)."""
OPSETS = range(18, 24)
"""18 is the first that torch's exporter writes; from `FUSED_OPSET` on attention is one Attention operator."""
FUSED_OPSET = 23
WEIGHTS_FILE = "weights.bin"
_INLINE_BYTES = 1024  # smaller constants stay in the graph
_PAGE = 4096  # so that large tensors can be mapped into memory
_LINE = 64
TRACED = "dear.traced"


@dataclass(frozen=True, kw_only=True)
class GraphInfo(StrictConfig):
    """What was written for one graph."""

    file: str
    sha256: str
    size: int
    nodes: int
    operators: dict[str, int]
    traced: int = 0
    """Operations of the model before the exporter and this package made them fewer; 0 where it is not known."""


@dataclass(frozen=True, kw_only=True)
class WeightsInfo(StrictConfig):
    """The shared weights file; `referenced` is what the graphs would hold if each had its own, in bytes."""

    file: str
    sha256: str
    size: int
    referenced: int


def check_opset(opset: int) -> int:
    """`opset` if graphs can be written in it. Raises ConfigError."""
    if opset not in OPSETS:
        raise ConfigError(f"opset is {opset}; use one of {OPSETS[0]} to {OPSETS[-1]}", field="opset")
    return opset


@dataclass
class _WeightStore:
    """Writes tensors to the shared file, each content once."""

    stream: BinaryIO
    offsets: dict[str, int] = field(default_factory=dict)
    referenced: int = 0

    def add(self, tensor: ir.TensorProtocol, name: str) -> ir.ExternalTensor:
        """The tensor as a reference into the file."""
        data = np.ascontiguousarray(tensor.numpy())
        raw = data.tobytes()
        self.referenced += len(raw)
        key = hashlib.sha256(raw).hexdigest()
        if key not in self.offsets:
            align = _PAGE if len(raw) >= _PAGE * 4 else _LINE
            self.stream.write(b"\0" * (-self.stream.tell() % align))
            self.offsets[key] = self.stream.tell()
            self.stream.write(raw)
        return ir.ExternalTensor(
            WEIGHTS_FILE, self.offsets[key], len(raw), tensor.dtype, shape=ir.Shape(data.shape), name=name
        )


def export_graphs(
    model: DearModel, class_features: Tensor, folder: Path, *, opset: int, metadata: Mapping[str, str]
) -> tuple[dict[str, GraphInfo], WeightsInfo]:
    """Write every graph of `io_spec.ALL_GRAPHS` in fp32, and the weights file, into `folder`.

    Args:
        model: the adapted model, on the CPU.
        class_features: adapted text features of the trained classes, (C, D), L2-normalised.
        folder: exists; nothing is read from it.
        opset: of `OPSETS`.
        metadata: stored in each graph, which adds its own name.

    Raises:
        ConfigError: an opset outside `OPSETS`.
        CheckFailedError: a graph that `onnx.checker` refuses.
    """
    return write_graphs(trace_graphs(model, class_features, opset=opset), folder, metadata)


def trace_graphs(
    model: DearModel, class_features: Tensor, *, opset: int, half: bool = False
) -> Iterator[tuple[str, ir.Model]]:
    """Every graph of `io_spec.ALL_GRAPHS` with its name, one at a time, weights in memory.

    Args:
        model: the adapted model, on the CPU.
        class_features: adapted text features of the trained classes, (C, D), L2-normalised.
        opset: of `OPSETS`.
        half: in fp16 where that is safe (`export.half`); inputs and outputs stay fp32.

    Raises:
        ConfigError: an opset outside `OPSETS`.
    """
    check_opset(opset)
    examples = _examples(model)
    for side in sides(model, class_features, fused=opset >= FUSED_OPSET):
        wanted = {name: outputs for name, outputs in side.cuts.items() if name in ALL_GRAPHS}
        if not wanted:
            continue
        module = to_half(side.module) if half else side.module
        traced, program = _trace(module, side.spec, examples[side.spec.inputs[0].name], opset)
        places = {tensor.name: i for i, tensor in enumerate(side.spec.outputs)}
        for name, outputs in wanted.items():
            graph = cut(traced, outputs, ALL_GRAPHS[name])
            _clean(graph)
            graph.meta[TRACED] = count_traced(program.graph, [places[output] for output in outputs])
            yield name, graph


def write_graphs(
    graphs: Iterable[tuple[str, ir.Model]], folder: Path, metadata: Mapping[str, str]
) -> tuple[dict[str, GraphInfo], WeightsInfo]:
    """Write graphs into `folder`, weights into one file there.

    Args:
        graphs: with their names, of `io_spec.ALL_GRAPHS`.
        folder: exists; the graphs may not have their weights in its `WEIGHTS_FILE`.
        metadata: stored in each graph, which adds its own name.

    Raises:
        CheckFailedError: a graph that `onnx.checker` refuses.
    """
    infos: dict[str, GraphInfo] = {}
    with (folder / WEIGHTS_FILE).open("wb") as stream:
        store = _WeightStore(stream)
        for name, graph in graphs:
            path = folder / ALL_GRAPHS[name].file
            graph.metadata_props.update({**metadata, "dear.graph": name})
            for value in graph.graph.initializers.values():
                tensor = value.const_value
                if tensor is not None and tensor.nbytes >= _INLINE_BYTES:
                    value.const_value = store.add(tensor, str(value.name))
            onnx.save(ir.serde.serialize_model(graph), path)
            infos[name] = _describe(path, graph)
    for info in infos.values():
        _check(folder / info.file)
    weights = folder / WEIGHTS_FILE
    return infos, WeightsInfo(
        file=WEIGHTS_FILE,
        sha256=sha256_file(weights),
        size=weights.stat().st_size,
        referenced=store.referenced,
    )


def _examples(model: DearModel) -> dict[str, tuple[Tensor, ...]]:
    """Inputs to trace with, by the name of the first.

    Every dynamic axis is at 2 or more, and no two are alike, so that none can be frozen or tied.
    """
    clip, generator = model.clip.config, torch.Generator().manual_seed(0)
    size, width, count = clip.vision.image_size, clip.embed_dim, len(model.config.attributes)
    pixels = (torch.randn(2, 3, size, size, generator=generator),)
    length = min(clip.text.context_length, 7)
    tokens = (torch.randint(1, clip.text.vocab_size, (3, length), generator=generator),)
    features = tuple(torch.randn(s, generator=generator) for s in ((2, width), (2, count, width), (3, width)))
    return {"pixels": pixels, "tokens": tokens, "cls": features}


def _trace(
    module: nn.Module, spec: GraphSpec, inputs: tuple[Tensor, ...], opset: int
) -> tuple[ir.Model, torch.export.ExportedProgram]:
    """One module as an optimised graph whose inputs, outputs and axes are named as `spec` says; what was traced."""
    dims: dict[str, Any] = {}
    for tensor in spec.inputs:
        for letter in tensor.dynamic_axes().values():
            dims.setdefault(letter, Dim(letter, min=3) if letter == "L" else Dim(letter))
    shapes = tuple({i: dims[letter] for i, letter in t.dynamic_axes().items()} for t in spec.inputs)
    with torch.no_grad(), warnings.catch_warnings():
        # torch warns about its own internals while tracing; nothing of it concerns the caller.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings(
            "ignore", message="# The axis name"
        )  # B of two inputs is one axis, as it should be
        program = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=[t.name for t in spec.inputs],
            output_names=[t.name for t in spec.outputs],
            opset_version=opset,
            verbose=False,
        )
    assert program is not None
    found = program.model.opset_imports.get("")
    if found != opset:
        raise CheckFailedError(
            f"{spec.file} came out in opset {found}; {opset} was asked for: use another --opset"
        )
    assert program.exported_program is not None
    return program.model, program.exported_program


def _clean(model: ir.Model) -> None:
    """Drop what tracing left behind: source lines, paths and module names of the machine that exported."""
    graph = model.graph
    model.producer_name, model.producer_version, model.doc_string = "dear-serve", None, None
    model.metadata_props.clear()
    graph.metadata_props.clear()
    graph.doc_string = None
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
    values = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
    for value in [*values, *(output for node in graph.all_nodes() for output in node.outputs)]:
        value.metadata_props.clear()
        value.doc_string = None


def _describe(path: Path, model: ir.Model) -> GraphInfo:
    operators = Counter(node.op_type for node in model.graph.all_nodes())
    return GraphInfo(
        file=path.name,
        sha256=sha256_file(path),
        size=path.stat().st_size,
        nodes=sum(operators.values()),
        operators=dict(sorted(operators.items())),
        traced=model.meta.get(TRACED, 0),
    )


def _check(path: Path) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise CheckFailedError(f"{path.name} is not a valid graph: {error}") from error
