"""The `dear-serve` command: what it prints, its exit codes, and how a server is started."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dear_serve import cli
from dear_serve.bundle import Bundle
from dear_serve.doctor import Finding, examine
from dear_serve.errors import BundleError, CheckFailedError, InputError
from dear_serve.launch import run_server, serve_command, serve_environment, server_process


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    lines = ["path,price"]
    for i in range(6):
        Image.fromarray(rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{i}")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def indexed(tiny_bundle, pictures, tmp_path_factory):
    """Bundle, pictures and gallery, indexed by the command."""
    gallery = tmp_path_factory.mktemp("gallery") / "g"
    bundle = str(tiny_bundle.paths.root)
    assert cli.main(["index", bundle, str(pictures), "--gallery", str(gallery), "--engine", "torch"]) == 0
    return bundle, pictures, str(gallery)


def search(indexed, *options: str) -> int:
    bundle, _, gallery = indexed
    return cli.main(["search", bundle, "--gallery", gallery, "--engine", "torch", *options])


def test_index_skips_what_is_there_and_lists_what_is_bad(indexed, capsys, tmp_path):
    bundle, pictures, gallery = indexed
    command = ["index", bundle, str(pictures), "--gallery", gallery, "--engine", "torch"]
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "0 added, 6 already there, 0 bad" in capsys.readouterr().out
    more = tmp_path / "more"
    more.mkdir()
    (more / "broken.png").write_bytes(b"no picture")
    bad = tmp_path / "bad.tsv"
    code = cli.main(
        ["index", bundle, str(more), "--gallery", gallery, "--engine", "torch", "--bad-list", str(bad)]
    )
    assert code == 1
    assert "broken.png" in capsys.readouterr().err
    assert bad.read_text().startswith("broken.png\t")


def test_search_by_picture_text_and_id(indexed, capsys):
    _, pictures, _ = indexed
    assert search(indexed, "--image", str(pictures / "3.png"), "--top-k", "2", "--json") == 0
    hits = json.loads(capsys.readouterr().out)["results"]
    assert len(hits) == 2
    assert hits[0]["id"] == "3.png"
    assert hits[0]["score"] == pytest.approx(1.0, abs=1e-5)
    assert hits[0]["metadata"] == {"price": 3}
    options = ("--attribute", "color", "--attribute", "class=0.5", "--filter", "price < 3", "--json")
    assert search(indexed, "--id", "3.png", *options) == 0
    hits = json.loads(capsys.readouterr().out)["results"]
    assert {h["id"] for h in hits} == {"0.png", "1.png", "2.png"}
    assert all(
        h["score"] == pytest.approx(h["scores"]["color"] + 0.5 * h["scores"]["class"], abs=1e-5) for h in hits
    )
    assert search(indexed, "--text", "a red cup", "--top-k", "1") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--id", "none.png"), "none.png"),
        (("--text", "a cup", "--attribute", "size"), "size"),
        (("--text", "a cup", "--attribute", "color=much"), "'much' is not a number"),
        (("--text", "a cup", "--attribute", "color=-1"), "-1"),
        (("--text", "a cup", "--filter", "price <"), "filter"),
        (("--text", ""), "text"),
        (("--image", "nowhere.png"), "nowhere.png cannot be read"),
    ],
)
def test_bad_searches_exit_2_with_one_line(indexed, capsys, options, message):
    assert search(indexed, *options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert "Traceback" not in error


def test_debug_lets_the_traceback_through(tmp_path):
    with pytest.raises(BundleError):
        cli.main(["serve", str(tmp_path), "--debug"])
    assert cli.main(["serve", str(tmp_path)]) == 2


def test_usage_errors_exit_2():
    for arguments in ([], ["nonsense"], ["search", "B", "--gallery", "G"]):
        with pytest.raises(SystemExit) as error:
            cli.main(arguments)
        assert error.value.code == 2


@pytest.mark.parametrize("command", ["demo", "serve", "labels", "index", "search", "doctor"])
def test_every_command_has_help_with_an_example(command, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main([command, "--help"])
    assert error.value.code == 0
    assert f"dear-serve {command}" in capsys.readouterr().out.split("example:")[1]


def test_serving_needs_graphs(tiny_bundle, capsys):
    assert cli.main(["serve", str(tiny_bundle.paths.root)]) == 2
    assert "dear-export" in capsys.readouterr().err
    environment = serve_environment(tiny_bundle.paths.root, engine="torch", threads=3)
    assert environment["DEAR_BUNDLE"] == str(tiny_bundle.paths.root)
    assert environment["DEAR_THREADS"] == "3"
    assert environment["DEAR_GALLERY"] == ""
    with pytest.raises(InputError, match="--threads is 0"):
        serve_environment(tiny_bundle.paths.root, engine="torch", threads=0)


def test_several_bundles_and_options_reach_the_server(tiny_bundle, tmp_path):
    root = tiny_bundle.paths.root
    environment = serve_environment(
        [str(root), f"pets={root}"], engine="torch", options={"DEAR_LOG": "json", "DEAR_BATCH": "8"}
    )
    assert environment["DEAR_BUNDLE"] == os.pathsep.join((str(root), f"pets={root}"))
    assert (environment["DEAR_LOG"], environment["DEAR_BATCH"]) == ("json", "8")
    odd = tmp_path / f"a{os.pathsep}b"
    shutil.copytree(root, odd)
    with pytest.raises(InputError, match="parts bundles"):
        serve_environment([odd], engine="torch")
    named = tmp_path / "x=y"
    shutil.copytree(root, named)
    assert serve_environment([named], engine="torch")["DEAR_BUNDLE"] == str(named)


def test_labels_are_kept_in_a_bundle_by_name(tiny_bundle, tmp_path, capsys):
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle.paths.root, bundle)
    names = tmp_path / "garden.txt"
    names.write_text("rose\n\n tulip \n", encoding="utf-8")
    assert cli.main(["labels", str(bundle), "garden", str(names), "--template", "a {}"]) == 0
    assert "garden: 2 labels" in capsys.readouterr().out
    assert Bundle.open(bundle).manifest.label_sets["garden"].labels == ("rose", "tulip")
    assert cli.main(["labels", str(bundle), "garden"]) == 0
    assert cli.main(["labels", str(bundle), "garden"]) == 2
    assert "no label set 'garden'" in capsys.readouterr().err


def test_serve_command_checks_address_and_port():
    assert serve_command(host="localhost", port=3000)[-4:] == ["--host", "127.0.0.1", "--port", "3000"]
    with pytest.raises(InputError, match="--port is 0"):
        serve_command(host="127.0.0.1", port=0)
    with pytest.raises(InputError, match="--host is 'nowhere'"):
        serve_command(host="nowhere", port=3000)


def test_a_server_has_its_own_folder_and_is_stopped_with_its_children(tmp_path):
    """The process starts a child of its own; both must be gone afterwards, and so must the folder."""
    note = tmp_path / "note"
    code = (
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"note = pathlib.Path({str(note)!r})\n"
        "note.with_suffix('.part').write_text(f'{child.pid} ' + os.environ['BENTOML_HOME'])\n"
        "note.with_suffix('.part').rename(note)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log"
    with server_process(
        [sys.executable, "-c", "print('up', flush=True)\n" + code], dict(os.environ), log=log
    ) as process:
        assert wait_for(note.exists)
        assert log.read_text() == "up\n"
        child, home = note.read_text().split()
        assert running(child)
        assert Path(home).is_dir()
    assert process.returncode == -signal.SIGTERM
    assert not Path(home).exists()
    assert wait_for(lambda: not running(child))


def wait_for(condition) -> bool:
    """Whether `condition` comes true within 30 s."""
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def running(pid: str) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_run_server_passes_the_signal_on_and_returns_the_exit_code():
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\ntime.sleep(600)"
    timer = threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        assert run_server([sys.executable, "-c", code], dict(os.environ)) == 7
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_doctor_reports_every_part(capsys, monkeypatch):
    findings = examine()
    parts = {f.part for f in findings}
    assert {
        "python",
        "CPU",
        "onnxruntime",
        "GPU",
        "bentoml",
        "lancedb",
        "torch",
        "tensorrt",
        "dear-mini",
    } <= parts
    assert all(f.remedy for f in findings if not f.ok and f.part != "dear-mini")
    assert cli.main(["doctor", "--json"]) == 0
    assert {f["part"] for f in json.loads(capsys.readouterr().out)} == parts
    broken = [Finding(part="onnxruntime", ok=False, detail="the serving engine", remedy="pip", needed=True)]
    monkeypatch.setattr("dear_serve.doctor.examine", lambda: broken)
    assert cli.main(["doctor"]) == 3
    assert "missing  onnxruntime" in capsys.readouterr().out


def test_demo_stops_at_a_failed_step(tmp_path, monkeypatch, capsys):
    from dear_serve import demo

    ran = []

    class Failed:
        returncode = 2

    monkeypatch.setattr(demo.subprocess, "run", lambda command, check: ran.append(command) or Failed())
    with pytest.raises(CheckFailedError, match="ended with exit code 2"):
        demo.run_demo(tmp_path / "demo")
    assert len(ran) == 1
    assert "training.world_data demo" in capsys.readouterr().out


def test_a_server_that_ends_or_a_port_that_is_taken(tmp_path, monkeypatch):
    from dear_serve import demo

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ending = [sys.executable, "-c", "print('no bundle'); raise SystemExit(3)"]
    monkeypatch.setattr(demo, "serve_command", lambda **_: ending)
    log = tmp_path / "server.log"
    with (
        pytest.raises(CheckFailedError, match=r"ended with exit code 3; see .*server\.log"),
        demo.running_server(dict(os.environ), port=port, log=log),
    ):
        pass
    assert log.read_text() == "no bundle\n"
    monkeypatch.setattr(demo, "_ready", lambda client: 404)
    with (
        pytest.raises(CheckFailedError, match=f"port {port} already"),
        demo.running_server(dict(os.environ), port=port, log=log),
    ):
        pass
