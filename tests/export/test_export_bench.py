"""dear-export --bench: operations counted right, every graph timed, and a line a program can read."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import helper

from dear_serve.bundle import Bundle
from dear_serve.errors import BundleError, ConfigError
from dear_serve.io_spec import ALL_GRAPHS
from export import cli
from export.bench import bench_bundle, graph_flops, summarize, timed_rounds
from export.pipeline import ExportReport

Exported = tuple[Bundle, ExportReport]


def test_operations_are_counted(tmp_path: Path) -> None:
    tensor = helper.make_tensor_value_info
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"]),
        helper.make_node("Attention", ["q", "q", "q"], ["y"], q_num_heads=2, kv_num_heads=2),
    ]
    weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, [6, 8], [0.0] * 48)
    inputs = [tensor("x", onnx.TensorProto.FLOAT, ["B", 5, 6])]
    outputs = [tensor("y", onnx.TensorProto.FLOAT, ["B", 5, 8])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]), tmp_path / "g.onnx")
    product, attention = 2 * 5 * 6 * 8, 2 * 2 * 5 * 5 * 8
    assert graph_flops(tmp_path / "g.onnx", {"x": (3, 5, 6)}) == 3 * (product + attention)


@pytest.mark.parametrize(("transposed", "shape"), [(0, (5, 6)), (1, (6, 5))])
def test_operations_of_gemm(tmp_path: Path, transposed: int, shape: tuple[int, int]) -> None:
    tensor = helper.make_tensor_value_info
    weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, [6, 8], [0.0] * 48)
    nodes = [helper.make_node("Gemm", ["x", "w"], ["y"], transA=transposed)]
    inputs = [tensor("x", onnx.TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "g", inputs, [tensor("y", onnx.TensorProto.FLOAT, [5, 8])], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "g.onnx")
    assert graph_flops(tmp_path / "g.onnx", {"x": shape}) == 2 * 5 * 6 * 8


def test_operations_of_the_image_tower(exported: Exported) -> None:
    path = exported[0].file("onnx/zero_shot_image.onnx")
    one, four = (graph_flops(path, {"pixels": (batch, 3, 32, 32)}) for batch in (1, 4))
    assert four == pytest.approx(4 * one)
    vision = exported[0].manifest.base.clip.vision
    tokens, d = 17, vision.width
    block = 2 * tokens * (4 * d * d + 2 * d * vision.mlp_width)
    assert 2 * block < one < 3.3 * block  # 3 blocks, the last for CLS alone


def test_runs_take_turns_and_the_first_do_not_count() -> None:
    order: list[str] = []
    times = timed_rounds({name: lambda n=name: order.append(n) for name in "ab"}, rounds=3)
    assert "".join(order) == "ababababab"
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}


def test_row_of_times() -> None:
    row = summarize("image", 8, [0.3, 0.1, 0.2], flops=4e9, sgemm=40.0)
    assert (row.milliseconds, row.per_second, row.gflops, row.share) == pytest.approx((200, 40, 20, 0.5))
    assert row.spread == pytest.approx(100)


def test_every_graph_is_timed(exported: Exported) -> None:
    report = bench_bundle(exported[0], threads=1, batches=(1, 3), rounds=1)
    assert [(r.graph, r.batch) for r in report.rows] == [(n, b) for n in ALL_GRAPHS for b in (1, 3)]
    assert (report.precision, report.threads) == ("fp32", 1)
    assert all(r.milliseconds > 0 and r.gflops > 0 for r in report.rows)


def test_command_prints_a_table_and_json(exported: Exported, capsys) -> None:
    assert cli.main([str(exported[0].paths.root), "--bench", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fp32, CPUExecutionProvider, 1 threads; one fp32 matrix product: ")
    assert len(json.loads(lines[-1])["rows"]) == 2 * len(ALL_GRAPHS)


@pytest.mark.parametrize(("name", "options"), [("threads", {"threads": 0}), ("batch", {"batches": ()})])
def test_numbers_below_one_are_refused(exported: Exported, name: str, options) -> None:
    with pytest.raises(ConfigError, match=f"{name} is"):
        bench_bundle(exported[0], **{"threads": 1, **options})


def test_bundle_without_graphs_is_refused(tiny_bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="has no graphs; run: dear-export"):
        bench_bundle(tiny_bundle, threads=1)


def test_bench_writes_nothing_else(exported: Exported, capsys) -> None:
    assert cli.main([str(exported[0].paths.root), "--bench", "--trt"]) == 2
    assert "--bench only times graphs" in capsys.readouterr().err
