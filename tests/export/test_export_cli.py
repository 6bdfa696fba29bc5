"""dear-export: exit codes, messages, and a bundle that survives whatever happens."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from dear_serve.bundle import Bundle, sha256_file
from dear_serve.errors import CheckFailedError
from export import cli, pipeline


def state(path: Path) -> dict[str, str]:
    return {str(p.relative_to(path)): sha256_file(p) for p in sorted(path.rglob("*")) if p.is_file()}


def test_table_of_an_export(copy: Path, monkeypatch, capsys, exported) -> None:
    bundle, report = exported
    monkeypatch.setattr(pipeline, "export_bundle", lambda *args, **kwargs: (bundle, report))
    assert cli.main([str(copy)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:9]] == list(report.parity)
    assert "batches 1, 2, 3, 7, 64" in out
    assert "MB saved by sharing weights" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "bf8"], "precision is 'bf8'; use one of fp32, fp16, int8"),
        (["--precision", "int8", "--trt"], "int8 graphs are for CPUs; use --precision fp16 with --trt"),
        (["--opset", "9"], "opset is 9; use one of 18 to 23"),
        (["--batch", "8,1"], "--batch has 2 numbers"),
        (["--batch", "8,1,64"], "numbers must rise"),
        (["--batch", "0"], "numbers must rise, from 1"),
        (["--batch", "many"], "write numbers, such as 1,8,64"),
    ],
)
def test_bad_options_are_exit_2(copy: Path, capsys, options: list[str], message: str) -> None:
    before = state(copy)
    assert cli.main([str(copy), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert state(copy) == before


def test_no_bundle_is_exit_2(tmp_path: Path, capsys) -> None:
    assert cli.main([str(tmp_path / "none")]) == 2
    assert "holds no dear.json" in capsys.readouterr().err


def test_changed_file_is_exit_2(copy: Path, capsys) -> None:
    roles = copy / "roles.json"
    roles.write_text(roles.read_text().replace("mixed", "mIxed"))
    assert cli.main([str(copy)]) == 2
    assert "roles.json has sha256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CheckFailedError("image: cls differs"), 1, "image: cls differs"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
        (RuntimeError("tracing"), 1, "RuntimeError: tracing (--debug shows where)"),
    ],
)
def test_failure_halfway_leaves_the_old_graphs(copy: Path, monkeypatch, capsys, error, code, message) -> None:
    def half(graphs, folder: Path, metadata) -> None:
        (folder / "image.onnx").write_bytes(b"half")
        raise error

    before = state(copy)
    monkeypatch.setattr(pipeline, "write_graphs", half)
    assert cli.main([str(copy)]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert state(copy) == before
    assert [p.name for p in copy.parent.iterdir()] == ["tiny"]
    Bundle.open(copy)


def test_failed_check_leaves_the_old_graphs(copy: Path, monkeypatch, exported) -> None:
    def differ(*args, **kwargs) -> None:
        raise CheckFailedError("differs")

    _, report = exported
    before = state(copy)
    monkeypatch.setattr(pipeline, "write_graphs", lambda *args, **kwargs: (report.graphs, report.weights))
    monkeypatch.setattr(pipeline, "check_graphs", differ)
    assert cli.main([str(copy)]) == 1
    assert state(copy) == before


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"holds no dear\.json"):
        cli.main([str(tmp_path), "--debug"])


def test_folder_that_cannot_be_written_is_exit_2(copy: Path, monkeypatch, capsys) -> None:
    def refuse(self, *args, **kwargs) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert cli.main([str(copy)]) == 2
    assert "cannot write beside" in capsys.readouterr().err


def test_missing_package_is_exit_3(copy: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(cli, "_NEEDED", ("torch", "no_such_package"))
    assert cli.main([str(copy)]) == 3
    assert 'exporting needs no_such_package: pip install "dear-serve[train,cpu]"' in capsys.readouterr().err


def test_help_has_examples(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    assert "dear-export runs/flowers --trt --batch 1,8,64" in capsys.readouterr().out
