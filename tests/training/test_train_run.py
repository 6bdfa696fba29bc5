"""The command from pictures to bundle: what it writes, tables, exit status, stopping and resuming."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from dear_serve.bundle import Bundle
from dear_serve.errors import BaseModelError, BundleError, ConfigError, DearError
from dear_serve.runtime import open_engine
from training import evaluate
from training.data import Item
from training.experiment import Options, run
from training.prepare import choose_roles, prepare, resolve_device
from training.run import main
from training.scoring import Scores, summary
from training.tables import harmonic_mean, spread, table


@pytest.fixture(scope="module")
def command(train_set):
    """Arguments of a short run; `--out` and the cache are the test's."""
    return [
        str(train_set.pictures), "--base", train_set.base, "--epochs", "2", "--batch-size", "6",
        "--shots", "3", "--views", "2", "--quiet", "--device", "cpu", "--lr", "0.01",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(command, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "noise"
    assert main([*command, "--out", str(out), "--protocol", "base-to-novel", "--seeds", "1,2"]) == 0
    return out


def files(bundle):
    return {
        p.relative_to(bundle).as_posix(): p.read_bytes() for p in sorted(bundle.rglob("*")) if p.is_file()
    }


def test_the_bundle(trained, train_set):
    bundle = Bundle.open(trained)
    manifest = bundle.manifest
    assert set(manifest.files) == {
        "adapter.safetensors", "metrics.jsonl", "readouts.safetensors", "report.html", "roles.json", "tokenizer.json",
    }  # fmt: skip
    assert manifest.class_names == ("blue cup", "green tree")
    assert manifest.templates == ("a picture of a {}", "the {}")
    assert (manifest.dear.first_block, manifest.dear.text_first_block) == (3, 3)
    assert bundle.roles().experts("color") == [(3, 0)]
    assert {r.attribute: r.kind for r in manifest.readouts} == {
        "color": "span", "shape": "span", "texture": "span", "object": "token", "location": "span",
    }  # fmt: skip
    for basis in bundle.basis().values():
        assert np.abs(basis @ basis.T - np.eye(len(basis))).max() < 1e-5
    assert not (trained.parent / ".noise.state").exists()
    assert sorted(p.name for p in trained.parent.iterdir()) == [".cache", "noise"]


def test_the_bundle_answers_as_its_metrics_say(trained, train_set, capsys):
    """Trained, written, opened again by the torch engine: the same accuracies."""
    metrics = Bundle.open(trained).manifest.metrics
    assert evaluate.main([str(trained), str(train_set.pictures), "--protocol", "base-to-novel"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["base", "novel", "harmonic", "mean"]
    for row, mode in ((rows[2], "zero_shot"), (rows[3], "adapted")):
        assert [float(v) for v in row[1:]] == pytest.approx(
            [100 * metrics[f"{mode}_{s}"] for s in ("base", "novel", "hm")], abs=0.051
        )


def test_metrics(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [(line["seed"], line.get("epoch")) for line in lines] == [
        (1, 1), (1, 2), (1, None), (2, 1), (2, 2), (2, None),
    ]  # fmt: skip
    metrics = Bundle.open(trained).manifest.metrics
    assert metrics["adapted_base"] == lines[2]["adapted_base"]
    both = [lines[2]["adapted_base"], lines[5]["adapted_base"]]
    assert metrics["adapted_base_mean"] == pytest.approx(np.mean(both))
    assert metrics["adapted_base_sd"] == pytest.approx(np.std(both, ddof=1))
    assert lines[0]["loss"] == pytest.approx(
        lines[0]["cross_entropy"]
        + lines[0]["image_reg"]
        + lines[0]["text_reg"]
        + 0.1 * lines[0]["fusion_reg"]
    )


def test_the_bundle_works_in_the_engine(trained):
    bundle = Bundle.open(trained)
    pixels = np.random.default_rng(0).standard_normal((2, 3, 32, 32)).astype(np.float32)
    assert open_engine(bundle, "torch").classify(pixels).shape == (2, 2)


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links, self.tags = [], [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.links += [v for k, v in attrs if k in ("src", "href")]
        if tag not in ("meta", "img", "br", "rect", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("rect", "polyline"):
            assert self.open.pop() == tag


def test_the_report_is_one_closed_page(trained):
    text = (trained / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert {"table", "svg"} <= page.tags
    assert "script" not in page.tags
    assert all(link.startswith("data:image/jpeg;base64,") for link in page.links)
    assert "http" not in text
    for words in (
        "zero-shot",
        "adapted",
        "harmonic mean",
        "Head roles",
        "Fusion weights",
        "Confusion: novel",
    ):
        assert words in text


def test_texts_in_the_report_are_escaped(command, train_set, tmp_path):
    """Class names and templates are text, whatever they contain."""
    rows = ["path,label,split"]
    for split in ("train", "test"):
        for i, label in enumerate(("<script>alert(1)</script>", "a & {b}")):
            rows += [
                f"{train_set.pictures}/{split}/{('red_fox', 'blue_cup')[i]}/{n}.png,{label},{split}"
                for n in range(3)
            ]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    args = [
        str(tmp_path / "list.csv"),
        *command[1:],
        "--out",
        str(tmp_path / "b"),
        "--no-cache",
        "--epochs",
        "1",
    ]
    assert main(args) == 0
    text = (tmp_path / "b" / "report.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert Bundle.open(tmp_path / "b").manifest.class_names == ("<script>alert(1)</script>", "a & {b}")


# --- stopping and resuming ------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(3,), (0, 5)], ids=["once", "twice"])
def test_stopped_and_resumed_gives_the_same_bytes(train_set, tmp_path, stops):
    """Both seeds, cache included; what comes out is the uninterrupted run's bundle, byte for byte."""
    config = replace(train_set.config, seeds=(1, 2), epochs=2)

    def go(name, *, resume=False, stop_after=None):
        done = []

        class Console(_Recorder):
            def step(self, title, number, total, loss):
                done.append(number)

        options = Options(out=tmp_path / name / "noise", cache=tmp_path / name / "cache", resume=resume)
        run(
            train_set.pictures, config, options, console=Console(),
            should_stop=lambda: stop_after is not None and len(done) >= stop_after,
        )  # fmt: skip
        return files(options.out)

    expected = go("whole")
    for i, stop in enumerate(stops):
        with pytest.raises(DearError, match="stopped") as raised:
            go("stopped", resume=i > 0, stop_after=stop)
        assert raised.value.code == "stopped"
        assert not (tmp_path / "stopped" / "noise").exists()
    assert go("stopped", resume=True) == expected


class _Recorder:
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)

    def over(self, items, title):
        yield from items

    def step(self, title, done, total, loss):
        pass


def test_sigterm_leaves_a_state_and_no_bundle(command, tmp_path):
    out = tmp_path / "noise"
    args = [*command, "--out", str(out), "--epochs", "2000", "--no-cache"]
    process = subprocess.Popen(
        [sys.executable, "-m", "training.run", *args], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    state = tmp_path / ".noise.state" / "seed-1.safetensors"
    deadline = time.monotonic() + 120
    while not state.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.fullmatch(r"error: stopped after step \d+ of 4000; go on with --resume\n", stderr)
    assert state.exists()
    assert not out.exists()


def test_a_changed_option_is_not_resumed(train_set, tmp_path):
    options = Options(out=tmp_path / "b", resume=True)
    stopped = lambda: (tmp_path / ".b.state").exists()  # noqa: E731 (after the first state)
    with pytest.raises(DearError, match="stopped"):
        run(train_set.pictures, train_set.config, options, should_stop=stopped)
    with pytest.raises(ConfigError, match=r"lr was 0\.001 and is 0\.1"):
        run(train_set.pictures, replace(train_set.config, lr=0.1), options)
    with pytest.raises(ConfigError, match="shots was 4 and is 2"):
        run(train_set.pictures, replace(train_set.config, shots=2), options)


def test_without_resume_a_stopped_run_is_forgotten_and_a_missing_one_is_said(train_set, tmp_path):
    state = tmp_path / ".b.state"
    state.mkdir()
    (state / "seed-1.safetensors").write_bytes(b"old")
    run(train_set.pictures, train_set.config, Options(out=tmp_path / "b"))
    assert not state.exists()
    console = _Recorder()
    run(train_set.pictures, train_set.config, Options(out=tmp_path / "b", resume=True), console=console)
    assert any("no stopped run" in line for line in console.lines)


def test_a_cache_over_its_limit_is_not_used_and_that_is_said(train_set, tmp_path):
    console = _Recorder()
    options = Options(out=tmp_path / "b", cache=tmp_path / "cache", cache_limit=1000)
    run(train_set.pictures, train_set.config, options, console=console)
    assert any(line.startswith("no cache") for line in console.lines)
    assert not (tmp_path / "cache").exists()


# --- exit status and errors -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--lr", "0"], "lr is 0"),
        (["--crop", "2"], "crop is 2"),
        (["--base", "no-such-base"], "no-such-base"),
        (["--roles", "none.json"], "none.json"),
        (["--roles", "random:x"], "random:1"),
        (["--recipe", "none.toml"], "none.toml"),
        (["--templates", "none.txt"], "none.txt"),
        (["--template", "a {}", "--templates", "none.txt"], "not both"),
        (["--template", "a photo"], "a photo"),
        (["--device", "tpu9"], "tpu9"),
    ],
)
def test_bad_options_end_with_2_and_no_traceback(command, tmp_path, capsys, extra, words):
    assert main([*command, "--out", str(tmp_path / "b"), *extra]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert words in err
    assert "Traceback" not in err
    assert out == ""


def test_bad_places(command, tmp_path, capsys):
    assert main(["/no/such/data", *command[1:], "--out", str(tmp_path / "b")]) == 2
    assert "/no/such/data" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("")
    assert main([*command, "--out", str(tmp_path / "full")]) == 2
    assert "not a bundle" in capsys.readouterr().err
    with pytest.raises(BundleError):
        main([*command, "--out", str(tmp_path / "full"), "--debug"])


def test_help_has_examples_and_statuses(capsys):
    for program in (main, evaluate.main):
        with pytest.raises(SystemExit) as raised:
            program(["--help"])
        assert raised.value.code == 0
        assert "examples:" in capsys.readouterr().out


def test_usage_errors_end_with_2(capsys):
    for args in (
        [],
        ["data", "--seeds", "a"],
        ["data", "--seed", "1", "--seeds", "2"],
        ["data", "--mask", "none"],
    ):
        with pytest.raises(SystemExit) as raised:
            main(args)
        assert raised.value.code == 2


def test_evaluate_reports_errors(tmp_path, train_set, capsys):
    assert evaluate.main([str(tmp_path), str(train_set.pictures)]) == 2
    assert "dear.json" in capsys.readouterr().err


# --- roles, tables --------------------------------------------------------------------------------


def test_roles_by_option(train_set, tmp_path):
    prepared = prepare(train_set.config)
    base, dear, own = prepared.base, prepared.dear, prepared.roles
    assert {h.role for h in choose_roles("mixed", base, dear).heads} == {"mixed"}
    assert choose_roles("mixed", base, dear).base_sha256 == base.sha256
    dealt = choose_roles("random:3", base, dear)
    assert sorted(h.role for h in dealt.heads) == sorted(h.role for h in own.heads)
    assert dealt.method == "permuted-3"
    other = tmp_path / "roles.json"
    replace(own, base_sha256="f" * 64).save(other)
    with pytest.raises(BaseModelError, match=r"python -m training\.roles"):
        choose_roles(str(other), base, dear)
    with pytest.raises(BaseModelError, match=r"python -m training\.roles"):
        choose_roles("", replace(base, name="ViT-B-32/random"), dear)


def test_unknown_device():
    with pytest.raises(ConfigError):
        resolve_device("tpu9")
    assert resolve_device("cpu") == "cpu"


def scores(split, zero_shot, adapted):
    items = tuple(Item(path=f"{i}", label=0) for i in range(4))
    return Scores(
        split=split, class_names=("a", "b"), items=items, zero_shot=np.array(zero_shot), adapted=np.array(adapted),
        confidence=np.ones(4, np.float32),
    )  # fmt: skip


def test_summary_and_table():
    runs = [
        summary([scores("base", [0, 0, 1, 1], [0, 0, 0, 1]), scores("novel", [0, 1, 1, 1], [0, 0, 1, 1])]),
        summary([scores("base", [0, 0, 1, 1], [0, 0, 0, 0]), scores("novel", [0, 1, 1, 1], [0, 0, 1, 1])]),
    ]
    assert runs[0]["adapted_hm"] == pytest.approx(0.6)
    assert runs[0] | {"adapted_hm": 0} == {
        "zero_shot_base": 0.5, "zero_shot_novel": 0.25, "adapted_base": 0.75, "adapted_novel": 0.5,
        "zero_shot_hm": pytest.approx(1 / 3), "adapted_hm": 0,
    }  # fmt: skip
    mean, sd = spread(runs)
    assert (mean["adapted_base"], sd["adapted_base"]) == (0.875, pytest.approx(0.1768, abs=1e-4))
    lines = table(runs).splitlines()
    assert lines[1].split() == ["zero-shot", "50.0", "±", "0.0", "25.0", "±", "0.0", "33.3", "±", "0.0"]
    assert lines[2].split()[:7] == ["adapted", "87.5", "±", "17.7", "50.0", "±", "0.0"]
    assert lines[3].split()[1:3] == ["+37.5", "+25.0"]
    assert "2 seeds" in lines[4]
    assert table(runs[:1]).splitlines()[1].split() == ["zero-shot", "50.0", "25.0", "33.3"]


def test_harmonic_mean():
    assert harmonic_mean(0.5, 1.0) == pytest.approx(2 / 3)
    assert harmonic_mean(0.0, 1.0) == 0.0
