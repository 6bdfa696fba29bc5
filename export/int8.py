"""fp32 graphs in, int8 graphs written: calibration and search per tower, then all its graphs with the same layers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from dear_serve.io_spec import ALL_GRAPHS
from export.quantize import Feed, QuantizationInfo, Quantizer, quantize
from export.to_onnx import TRACED, GraphInfo, WeightsInfo, write_graphs

__all__ = ["TOWERS", "tower_of", "write_int8"]

TOWERS = {"pixels": "image", "tokens": "text"}
"""By the name of a graph's input: the tower, which is also the name of the graph that its search is done on."""


def tower_of(graph: str) -> str | None:
    """Tower of a graph of `io_spec`, None for the fusion, which has no weights to speak of."""
    return TOWERS.get(ALL_GRAPHS[graph].inputs[0].name)


def write_int8(
    graphs: Iterable[tuple[str, ir.Model]],
    folder: Path,
    metadata: Mapping[str, str],
    feeds: Mapping[str, Sequence[Feed]],
    *,
    threads: int = 0,
) -> tuple[dict[str, GraphInfo], WeightsInfo, dict[str, QuantizationInfo]]:
    """Write graphs in int8 into `folder`.

    Which layers stay fp32 is decided once per tower, on its adapted graph, so that all graphs share their weights;
    ranges are measured in every graph.

    Args:
        graphs: in fp32, with their names; the adapted graph of every tower among them.
        folder: see `to_onnx.write_graphs`.
        metadata: see there.
        feeds: calibration inputs by tower.
        threads: CPU threads; 0 is all.

    Raises:
        CheckFailedError: int8 loses too much, or a graph is not valid.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fp32-") as name:
        plain = Path(name)
        infos, _ = write_graphs(graphs, plain, metadata)
        quantizers = {tower: Quantizer(plain, inputs, threads=threads) for tower, inputs in feeds.items()}
        ranges = {graph: quantizers[graph].ranges(infos[graph].file) for graph in quantizers}
        reports = {graph: quantizers[graph].search(infos[graph].file, ranges[graph]) for graph in quantizers}

        def quantized() -> Iterator[tuple[str, ir.Model]]:
            for graph, info in infos.items():
                model, tower = ir.load(plain / info.file), tower_of(graph)
                model.meta[TRACED] = info.traced
                if tower is not None:
                    spans = ranges.get(graph) or quantizers[tower].ranges(info.file)
                    quantize(model, spans, reports[tower].kept)
                yield graph, model

        written, weights = write_graphs(quantized(), folder, metadata)
    return written, weights, reports
