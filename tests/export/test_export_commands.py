"""dear-export on graphs that are there: the TensorRT check, other tools' layouts; and options that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from dear_serve.bundle import Bundle, sha256_file
from dear_serve.errors import CheckFailedError
from export import check_trt, cli, pipeline
from export.check_trt import Support


@pytest.fixture
def bundle(tiny_bundle: Bundle, monkeypatch) -> Path:
    """A bundle without graphs; exporting is not allowed."""
    monkeypatch.setattr(pipeline, "export_bundle", lambda *args, **kwargs: pytest.fail("must not export"))
    return tiny_bundle.paths.root


def test_check_without_graphs_is_exit_2(bundle: Path, capsys) -> None:
    assert cli.main([str(bundle), "--check-trt"]) == 2
    assert "lists no onnx/image.onnx; run: dear-export" in capsys.readouterr().err


def test_check_prints_what_each_graph_needs(bundle: Path, monkeypatch, capsys) -> None:
    support = Support(
        graph="image", opset=20, nodes=112, operators=("Add", "Conv"), needs="10.0", problems=()
    )
    monkeypatch.setattr(check_trt, "check_bundle", lambda bundle: [support])
    assert cli.main([str(bundle), "--check-trt"]) == 0
    out = capsys.readouterr().out
    assert "image                20    112          2  10.0 and newer" in out
    assert "no GPU was used" in out


def test_check_that_fails_is_exit_1(bundle: Path, monkeypatch, capsys) -> None:
    def refuse(bundle: Bundle) -> None:
        raise CheckFailedError("image: Attention n: input 0 has 3 axes; 4 are needed")

    monkeypatch.setattr(check_trt, "check_bundle", refuse)
    assert cli.main([str(bundle), "--check-trt"]) == 1
    assert "input 0 has 3 axes" in capsys.readouterr().err


def test_open_clip_layout_from_the_command_line(bundle: Path, tmp_path: Path, capsys) -> None:
    assert cli.main([str(bundle), "--format", "open_clip", "--out", str(tmp_path / "frozen")]) == 0
    assert (tmp_path / "frozen" / "open_clip_model.safetensors").is_file()
    assert "its README says what is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "triton"], "name a new one with --out"),
        (["--format", "tflite", "--out", "x"], "format is 'tflite'; use one of triton, open_clip"),
        (["--check-trt", "--trt"], "leave out --check-trt and --format"),
        (["--opset", "17"], "opset is 17; use one of 18 to 23"),
        (["--opset", "99"], "opset is 99; use one of 18 to 23"),
        (["--batch", "1,8,"], "write numbers, such as 1,8,64"),
        (["--batch", "1.5"], "write numbers, such as 1,8,64"),
        (["--batch", ""], "write numbers, such as 1,8,64"),
        (["--batch", "1,2,3,4"], "--batch has 4 numbers"),
        (["--batch=-1"], "numbers must rise, from 1"),
        (["--batch", "1,8,99999"], "numbers must rise, from 1 to 1024"),
    ],
)
def test_options_that_make_no_sense_are_exit_2(
    bundle: Path, capsys, options: list[str], message: str
) -> None:
    before = {p: sha256_file(p) for p in bundle.rglob("*") if p.is_file()}
    assert cli.main([str(bundle), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert {p: sha256_file(p) for p in bundle.rglob("*") if p.is_file()} == before
