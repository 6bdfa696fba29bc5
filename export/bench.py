"""Latency and throughput of a bundle's graphs, and the share of the machine's matrix-product rate that they reach.

All graphs and the matrix product are timed in turn within each round, so that a machine whose speed drifts is fair to
all; figures are medians over the rounds, with the distance between the quartiles.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from dear_serve.bundle import Bundle
from dear_serve.config import StrictConfig
from dear_serve.errors import BundleError, ConfigError
from dear_serve.io_spec import ALL_GRAPHS
from dear_serve.runtime.onnx_engine import graph_sizes

__all__ = ["BenchReport", "BenchRow", "bench_bundle", "graph_flops", "products", "summarize", "timed_rounds"]

ROUNDS = 7
_WARMUP = 2
_LENGTH = 16  # tokens of a prompt
_CLASSES = 100
_PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")

Feed = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class BenchRow(StrictConfig):
    """One graph at one batch."""

    graph: str
    batch: int
    milliseconds: float
    """Median of a run."""
    spread: float
    """Distance between the quartiles, in milliseconds."""
    per_second: float
    """Rows."""
    gflops: float
    """10^9 floating-point operations of matrix products, convolution and attention in a second, as if in fp32."""
    share: float
    """Of the matrix product's rate; above 1 where integers are faster than fp32."""


@dataclass(frozen=True, kw_only=True)
class BenchReport(StrictConfig):
    """What `dear-export --bench` measured."""

    precision: str
    provider: str
    threads: int
    sgemm: float
    """Rate of two fp32 matrix products of the image tower's size on the same runtime and threads, 10^9 operations/s."""
    rows: tuple[BenchRow, ...]


def bench_bundle(
    bundle: Bundle, *, threads: int, batches: Sequence[int] = (1, 8), rounds: int = ROUNDS
) -> BenchReport:
    """Time the graphs of a bundle.

    Args:
        bundle: with graphs.
        threads: CPU threads, 1 or more.
        batches: rows of a run, each 1 or more.
        rounds: how often each is timed.

    Raises:
        BundleError: the bundle has no graphs.
        ConfigError: threads, batches or rounds below 1.
    """
    for name, numbers in (("threads", [threads]), ("batch", list(batches)), ("rounds", [rounds])):
        if not numbers or min(numbers) < 1:
            raise ConfigError(f"{name} is {numbers}; use 1 or more", field=name)
    present = [name for name in ALL_GRAPHS if f"onnx/{ALL_GRAPHS[name].file}" in bundle.manifest.files]
    if not present:
        raise BundleError(f"{bundle.paths.root} has no graphs; run: dear-export {bundle.paths.root}")
    vision = bundle.manifest.base.clip.vision
    run_product, product_flops = products(1576, vision.width, vision.mlp_width, threads=threads)
    runs: dict[tuple[str, int], Callable[[], Any]] = {("", 0): run_product}
    flops: dict[tuple[str, int], float] = {("", 0): product_flops}
    provider = ""
    for name in present:
        path = bundle.file(f"onnx/{ALL_GRAPHS[name].file}")
        session = _session(path, threads)
        provider = session.get_providers()[0]
        for batch in batches:
            feed = _feed(bundle, name, batch)
            runs[name, batch] = lambda session=session, feed=feed: session.run(None, feed)  # type: ignore[misc]
            flops[name, batch] = graph_flops(path, {k: v.shape for k, v in feed.items()})
    times = timed_rounds(runs, rounds=rounds)
    sgemm = product_flops / statistics.median(times.pop(("", 0))) / 1e9
    return BenchReport(
        precision=_precision(bundle),
        provider=provider,
        threads=threads,
        sgemm=sgemm,
        rows=tuple(
            summarize(graph, batch, seconds, flops[graph, batch], sgemm)
            for (graph, batch), seconds in times.items()
        ),
    )


def timed_rounds(runs: Mapping[Any, Callable[[], Any]], *, rounds: int) -> dict[Any, list[float]]:
    """Seconds of every run in every round, each run once a round in turn, after two rounds that do not count."""
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for done in range(rounds + _WARMUP):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            if done >= _WARMUP:
                times[key].append(time.perf_counter() - start)
    return times


def summarize(graph: str, batch: int, seconds: Sequence[float], flops: float, sgemm: float) -> BenchRow:
    """A row out of its times, operations and the matrix product's rate (10^9 operations/s)."""
    median = statistics.median(seconds)
    low, high = np.percentile(seconds, [25, 75])
    gflops = flops / median / 1e9
    return BenchRow(
        graph=graph,
        batch=batch,
        milliseconds=1e3 * median,
        spread=1e3 * float(high - low),
        per_second=batch / median,
        gflops=gflops,
        share=gflops / sgemm,
    )


def products(rows: int, width: int, hidden: int, *, threads: int) -> tuple[Callable[[], Any], float]:
    """Two fp32 products in ONNX Runtime, (rows, width) to (rows, hidden) and back: a run, and its operations.

    Two, as in a block's MLP, so that what is big stays in the runtime's own memory: the pages of a big output that is
    handed out anew in each run cost as much as a third of the product.
    """
    rng = np.random.default_rng(0)
    shapes = {"up": (width, hidden), "down": (hidden, width)}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "up"], ["h"]), helper.make_node("MatMul", ["h", "down"], ["y"])],
        "products",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, width])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [rows, width])],
        [
            numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name)
            for name, shape in shapes.items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = _session(model.SerializeToString(), threads)
    feed = {"x": rng.standard_normal((rows, width)).astype(np.float32)}
    return lambda: session.run(None, feed), 4.0 * rows * width * hidden


def graph_flops(path: Path, shapes: Mapping[str, Sequence[int]]) -> float:
    """Operations of a graph's matrix products, convolutions and attention for inputs of these shapes.

    A multiplication and its addition are two; what is elementwise is not counted.
    """
    model = onnx.load(path, load_external_data=False)
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
            dim.dim_value = size
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    known = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in [*graph.input, *graph.value_info, *graph.output]
    } | {t.name: list(t.dims) for t in graph.initializer}
    return float(sum(_node_flops(node, known) for node in graph.node))


def _node_flops(node: onnx.NodeProto, known: Mapping[str, list[int]]) -> float:
    out = float(np.prod(known.get(node.output[0], [0])))
    if node.op_type == "MatMul":
        return 2.0 * out * known[node.input[0]][-1]
    if node.op_type == "Gemm":
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        return 2.0 * out * known[node.input[0]][0 if transposed else 1]
    if node.op_type == "Conv":
        return 2.0 * out * float(np.prod(known[node.input[1]][1:]))
    if node.op_type == "Attention":
        q, k = known[node.input[0]], known[node.input[1]]
        return 4.0 * q[0] * q[1] * k[1] * q[2]  # (B, M, d) and (B, N, d): q k^T and the weights times v
    return 0.0


def _session(model: Path | bytes, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, threads
    available = onnxruntime.get_available_providers()
    return onnxruntime.InferenceSession(
        model if isinstance(model, bytes) else str(model),
        options,
        providers=[name for name in _PROVIDERS if name in available],
    )


def _feed(bundle: Bundle, graph: str, batch: int) -> Feed:
    """Noise of the shapes a graph takes: B = `batch`, prompts of 16 tokens, 100 classes."""
    rng = np.random.default_rng(0)
    length = min(_LENGTH, bundle.manifest.context_length)
    sizes = {**graph_sizes(bundle.manifest), "B": batch, "L": length, "C": _CLASSES}
    feed: Feed = {}
    for tensor in ALL_GRAPHS[graph].inputs:
        shape = tuple(int(n) for n in tensor.shape(sizes))
        if tensor.dtype == "int64":
            feed[tensor.name] = rng.integers(1, bundle.manifest.base.clip.text.vocab_size, shape)
        else:
            feed[tensor.name] = rng.standard_normal(shape).astype(np.float32)
    return feed


def _precision(bundle: Bundle) -> str:
    report = bundle.paths.export_report
    data = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    return str(data.get("precision", "fp32"))
