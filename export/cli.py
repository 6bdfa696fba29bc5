"""dear-export: add ONNX graphs, and on request TensorRT engines, to a bundle, and check them against torch."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dear_serve.command import run_command
from dear_serve.errors import MissingDependencyError

if TYPE_CHECKING:
    from export.pipeline import ExportReport

__all__ = ["main"]

_EXAMPLES = """examples:
  dear-export runs/flowers                         graphs in fp32, checked against torch
  dear-export runs/flowers --images photos/        check on your own pictures
  dear-export runs/flowers --opset 23              attention as one operator (newer runtimes)
  dear-export runs/flowers --trt --batch 1,8,64    TensorRT engines too, for batches 1 to 64, best at 8

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
    parser.add_argument("--precision", default="fp32", metavar="P", help="of the graphs (default: fp32)")
    parser.add_argument("--opset", type=int, default=20, metavar="N", help="ONNX operator set (default: 20)")
    parser.add_argument("--images", type=Path, metavar="DIR", help="pictures to check with")
    parser.add_argument("--trt", action="store_true", help="also build TensorRT engines (needs a GPU)")
    parser.add_argument(
        "--batch",
        default="1,8,64",
        metavar="MIN,OPT,MAX",
        help="batches the TensorRT engines take (default: 1,8,64)",
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f'exporting needs {", ".join(missing)}: pip install "dear-serve[train,cpu]"', field=missing[0]
        )
    from export.pipeline import ExportSettings, export_bundle
    from export.to_tensorrt import build_engines, parse_batches

    settings = ExportSettings(precision=arguments.precision, opset=arguments.opset)
    batches = parse_batches(arguments.batch)
    bundle, report = export_bundle(arguments.bundle, settings, images=arguments.images)
    print(_table(report))
    if arguments.trt:
        build_engines(bundle, batches)
        print(f"TensorRT engines for batches {', '.join(map(str, batches))} are in {bundle.paths.trt}")


def _table(report: ExportReport) -> str:
    """What was written and how it compares with torch."""
    lines = [
        f"{'graph':<17}{'nodes':>6}{'rows':>7}{'max |Δ|':>10}{'allowed':>10}{'cosine':>11}{'top-1':>8}",
    ]
    for name, parity in report.parity.items():
        cosine = "" if parity.min_cosine is None else f"{parity.min_cosine:.7f}"
        top1 = "" if parity.top1_agreement is None else f"{parity.top1_agreement:.1%}"
        lines.append(
            f"{name:<17}{report.graphs[name].nodes:>6}{parity.rows:>7}{parity.max_difference:>10.1e}"
            f"{parity.tolerance:>10.1e}{cosine:>11}{top1:>8}"
        )
    total = report.weights.size + sum(graph.size for graph in report.graphs.values())
    shared = report.weights.referenced - report.weights.size
    batches = ", ".join(map(str, next(iter(report.parity.values())).batches))
    lines.append(
        f"checked against torch {report.versions['torch']} on {report.pictures} and 5 hostile ones, batches {batches}"
    )
    lines.append(
        f"{report.precision}, opset {report.opset}, mask {report.mask}; {total / 1e6:.1f} MB on disk, "
        f"{max(shared, 0) / 1e6:.1f} MB saved by sharing weights"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
