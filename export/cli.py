"""dear-export: add ONNX graphs, and on request TensorRT engines, to a bundle, and check them against torch."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dear_serve.command import run_command
from dear_serve.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from export.check_trt import Support
    from export.pipeline import ExportReport

__all__ = ["main"]

_EXAMPLES = """examples:
  dear-export runs/flowers                         graphs in fp32, checked against torch
  dear-export runs/flowers --images photos/        check on your own pictures
  dear-export runs/flowers --precision int8 --images photos/   for CPUs: smaller and faster, calibrated on photos/
  dear-export runs/flowers --opset 20              for ONNX Runtime before 1.23
  dear-export runs/flowers --bench                 how fast the graphs are, and which share of the machine that is
  dear-export runs/flowers --trt --batch 1,8,64    TensorRT engines too, for batches 1 to 64, best at 8
  dear-export runs/flowers --check-trt             whether TensorRT would take the graphs that are there; needs no GPU
  dear-export runs/flowers --format triton --out models/       the graphs that are there as a Triton model repository
  dear-export runs/flowers --format open_clip --out frozen/    the frozen base for open_clip.create_model("local-dir:…")

exit codes: 0 done, 1 a check failed, 2 bad usage or input, 3 an optional part is missing
If anything fails, the graphs that were there stay."""
_NEEDED = ("torch", "onnx", "onnxscript", "onnxruntime")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments), debug=arguments.debug)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dear-export",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="folder that training.run made")
    parser.add_argument(
        "--precision",
        default="fp32",
        metavar="P",
        help="of the graphs: fp32, fp16 (CUDA, TensorRT) or int8 (CPU); default: fp32",
    )
    parser.add_argument(
        "--opset",
        type=int,
        metavar="N",
        help="ONNX operator set, 18 to 23; default: 23, attention as one operator (ONNX Runtime 1.23 on), "
        "and 20 with fp16 or --trt",
    )
    parser.add_argument("--images", type=Path, metavar="DIR", help="pictures to check with")
    parser.add_argument("--trt", action="store_true", help="also build TensorRT engines (needs a GPU)")
    parser.add_argument(
        "--batch",
        default="1,8,64",
        metavar="MIN,OPT,MAX",
        help="batches the TensorRT engines take (default: 1,8,64)",
    )
    parser.add_argument(
        "--bench", action="store_true", help="only time the bundle's graphs: a table, then one JSON line"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="of --bench; default: all CPUs")
    parser.add_argument(
        "--check-trt",
        action="store_true",
        help="only check the bundle's graphs against TensorRT's operator list",
    )
    parser.add_argument(
        "--format",
        metavar="F",
        help="only write the bundle for another tool: triton or open_clip, into --out",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder for --format")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f'exporting needs {", ".join(missing)}: pip install "dear-serve[train,cpu]"', field=missing[0]
        )
    if arguments.bench:
        _bench(arguments)
        return
    if arguments.check_trt or arguments.format is not None:
        _use_graphs(arguments)
        return
    from export.pipeline import ExportSettings, export_bundle
    from export.to_onnx import PORTABLE_OPSET
    from export.to_tensorrt import build_engines, parse_batches, require_tensorrt

    if arguments.trt and arguments.precision == "int8":
        raise ConfigError("int8 graphs are for CPUs; use --precision fp16 with --trt", field="precision")
    opset = PORTABLE_OPSET if arguments.trt and arguments.opset is None else arguments.opset
    settings = ExportSettings(precision=arguments.precision, opset=opset)
    batches = parse_batches(arguments.batch)
    if arguments.trt:
        require_tensorrt()  # before the graphs that are there are replaced
    bundle, report = export_bundle(arguments.bundle, settings, images=arguments.images)
    print(_table(report))
    if arguments.trt:
        build_engines(bundle, batches)
        print(f"TensorRT engines for batches {', '.join(map(str, batches))} are in {bundle.paths.trt}")


def _bench(arguments: argparse.Namespace) -> None:
    """Latency and throughput of the graphs that are there."""
    from dear_serve.bundle import Bundle
    from export.bench import bench_bundle

    if arguments.trt or arguments.check_trt or arguments.format is not None:
        raise ConfigError(
            "--bench only times graphs; leave out --trt, --check-trt and --format", field="bench"
        )
    threads = (os.cpu_count() or 1) if arguments.threads is None else arguments.threads
    report = bench_bundle(Bundle.open(arguments.bundle), threads=threads)
    print(
        f"{report.precision}, {report.provider}, {report.threads} threads; "
        f"one fp32 matrix product: {report.sgemm:.0f} GFLOP/s"
    )
    print(f"{'graph':<17}{'batch':>6}{'ms':>9}{'±':>7}{'rows/s':>10}{'GFLOP/s':>9}{'of product':>12}")
    for row in report.rows:
        print(
            f"{row.graph:<17}{row.batch:>6}{row.milliseconds:>9.2f}{row.spread:>7.2f}{row.per_second:>10.1f}"
            f"{row.gflops:>9.1f}{row.share:>12.0%}"
        )
    print(json.dumps({"bench": "graphs", **report.to_dict()}))


def _use_graphs(arguments: argparse.Namespace) -> None:
    """What reads the graphs that are there and writes none: the check for TensorRT, other tools' layouts."""
    from dear_serve.bundle import Bundle
    from export.check_trt import check_bundle
    from export.formats import write_format

    if arguments.trt:
        raise ConfigError("--trt exports and builds; leave out --check-trt and --format", field="trt")
    if arguments.format is not None and arguments.out is None:
        raise ConfigError("--format writes a folder; name a new one with --out", field="out")
    bundle = Bundle.open(arguments.bundle)
    if arguments.check_trt:
        print(_support(check_bundle(bundle)))
    if arguments.format is not None:
        out = write_format(bundle, arguments.format, arguments.out)
        print(f"{out} holds {bundle.name} for {arguments.format}; its README says what is left out")


def _support(found: Sequence[Support]) -> str:
    """What the operator list says of each graph."""
    lines = [f"{'graph':<17}{'opset':>6}{'nodes':>7}{'operators':>11}  TensorRT"]
    lines += [
        f"{s.graph:<17}{s.opset:>6}{s.nodes:>7}{len(s.operators):>11}  {s.needs} and newer" for s in found
    ]
    return "\n".join(
        [*lines, "every operator, type, attribute and dynamic axis is in the parser's list; no GPU was used"]
    )


def _table(report: ExportReport) -> str:
    """What was written and how it compares with torch."""
    lines = [
        f"{'graph':<17}{'traced':>7}{'nodes':>6}{'rows':>7}{'max |Δ|':>10}{'allowed':>10}{'cosine':>11}{'top-1':>8}",
    ]
    for name, parity in report.parity.items():
        cosine = "" if parity.min_cosine is None else f"{parity.min_cosine:.7f}"
        top1 = "" if parity.top1_agreement is None else f"{parity.top1_agreement:.1%}"
        lines.append(
            f"{name:<17}{report.graphs[name].traced:>7}{report.graphs[name].nodes:>6}{parity.rows:>7}{parity.max_difference:>10.1e}"
            f"{parity.tolerance:>10.1e}{cosine:>11}{top1:>8}"
        )
    total = report.weights.size + sum(graph.size for graph in report.graphs.values())
    shared = report.weights.referenced - report.weights.size
    batches = ", ".join(map(str, next(iter(report.parity.values())).batches))
    lines.append(
        f"checked against torch {report.versions['torch']} on {report.pictures} and 5 hostile ones, batches {batches}"
    )
    lines += [
        f"int8, {tower} tower: {info.layers} layers, {len(info.kept)} weights kept fp32, cosine with fp32 "
        f"{info.cosine:.4f} on the {info.inputs} inputs it was calibrated on"
        for tower, info in report.quantization.items()
    ]
    lines.append(
        f"{report.precision}, opset {report.opset}, mask {report.mask}; {total / 1e6:.1f} MB on disk, "
        f"{max(shared, 0) / 1e6:.1f} MB saved by sharing weights"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
