"""How steps are computed: in parts, in bfloat16, by two processes; what a step that cannot be taken leaves."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dear_serve.backbone.clip import Clip
from dear_serve.errors import CheckFailedError, ConfigError, DataError
from training.cache import CachedTrunks
from training.distributed import World, joined
from training.execution import Execution, default_keep, resolve_precision
from training.experiment import Options, run
from training.memory import KEEP, activation_bytes, chunk_size, in_chunks
from training.run import main
from training.state import load_state, save_state


def gradients(fit):
    fit.step(0)
    return {name: p.grad.clone() for name, p in fit.named.items()}


# --- gradient checkpointing -----------------------------------------------------------------------


def test_recomputed_parts_give_the_same_gradients(make_fit, train_set):
    config = replace(train_set.config, roles="mixed")
    whole = make_fit(config)
    parts = make_fit(config, execution=Execution(keep=0))
    assert (whole.text.chunk, parts.text.chunk) == (8, 1)
    expected, found = gradients(whole), gradients(parts)
    assert parts.history[0] == pytest.approx(whole.history[0], abs=1e-6)
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-6 + 1e-5 * gradient.abs().max(), name


def test_parts_keep_less(make_fit, train_set):
    """Tensors that the backward pass holds, as autograd itself tells."""
    kept = {}
    for name, execution in (("whole", Execution()), ("parts", Execution(keep=0))):
        fit = make_fit(train_set.config, execution=execution)
        tensors = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, tensors=tensors: tensors.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
        ):
            fit._losses(fit._batch(0))
        frozen = {p.untyped_storage().data_ptr() for p in fit.model.parameters()}
        kept[name] = sum(t.untyped_storage().nbytes() for p, t in tensors.items() if p not in frozen)
    assert kept["parts"] < 0.5 * kept["whole"]


def test_the_estimate_is_what_autograd_keeps(tiny_clip_config):
    """Of two blocks in the middle of a tower, whose input has a gradient; a softmax keeps its result once more."""
    clip = Clip(tiny_clip_config).requires_grad_(False)
    x = torch.randn(16, 17, 32, requires_grad=True)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        y = clip.visual.run(x, 1, 2)
    frozen = {p.untyped_storage().data_ptr() for p in clip.parameters()}
    found = sum(t.untyped_storage().nbytes() for p, t in kept.items() if p not in frozen)
    assert y.requires_grad
    estimate = 16 * activation_bytes(tiny_clip_config.vision, tokens=17, blocks=2)
    assert 0.75 <= estimate / found <= 1.35


def test_chunk_size():
    assert chunk_size(100, 10, keep=1000) == 100
    assert chunk_size(101, 10, keep=1000) == 25
    assert chunk_size(5, 10**6, keep=1000) == 1
    items = torch.arange(10.0)
    assert torch.equal(in_chunks(lambda part: (part * 2,), items, 3)[0], items * 2)


# --- precision ------------------------------------------------------------------------------------


def test_bfloat16_stays_near_and_keeps_float32_weights(make_fit, train_set, tmp_path):
    full = make_fit(train_set.config)
    half = make_fit(train_set.config, execution=Execution(precision="bf16"))
    full.run(tmp_path / "full.safetensors")
    half.run(tmp_path / "half.safetensors")
    a, b = np.array(full.history)[:, 0], np.array(half.history)[:, 0]
    assert 0 < np.abs(a - b).max() < 0.02
    assert {p.dtype for p in half.named.values()} == {torch.float32}
    assert half.text.features(half.model).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gpu_gives_the_losses_of_the_cpu(train_set, tmp_path, precision):
    histories = []
    for device, kind in (("cpu", "fp32"), ("cuda", precision)):
        options = Options(out=tmp_path / device, device=device, execution=Execution(precision=kind))
        histories.append(np.array(run(train_set.pictures, train_set.config, options).seeds[0].history)[:, 0])
    assert np.abs(histories[0] - histories[1]).max() < (1e-3 if precision == "fp32" else 0.02)


def test_resolving():
    assert resolve_precision("auto", "cpu") == "fp32"
    assert resolve_precision("bf16", "cpu") == "bf16"
    assert resolve_precision("fp32", "cuda") == "fp32"
    assert default_keep("cpu") == KEEP
    with pytest.raises(ConfigError, match="0 or more"):
        Execution(keep=-1)


# --- several processes ----------------------------------------------------------------------------


def test_shares_go_round():
    for count in range(1, 9):
        for size in range(1, 5):
            shares = [World(rank=rank, size=size).share(count) for rank in range(size)]
            assert len({len(share) for share in shares}) == 1
            assert [i for share in shares for i in share][:count] == list(range(count))
    with pytest.raises(ConfigError, match="process 2 of 2"):
        World(rank=2, size=2)


def test_one_process_joins_nobody(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with joined("cpu") as (world, device):
        assert (world, device) == (World(), "cpu")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"no GPU of its own.*--nproc-per-node 1"), joined("cuda"):
        pass


def test_two_processes_give_the_result_of_one(train_set, tmp_path):
    """Batches of 5 and 2 pictures: shares that don't go round; the cache is filled by both."""
    arguments = [
        str(train_set.pictures), "--base", train_set.base, "--epochs", "3", "--batch-size", "5", "--shots", "3",
        "--views", "2", "--device", "cpu", "--lr", "0.01",
    ]  # fmt: skip
    assert main([*arguments, "--out", str(tmp_path / "one" / "noise"), "--quiet"]) == 0
    result = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "training.run", *arguments, "--out", str(tmp_path / "two" / "noise"),
        ],
        capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("accuracy in %") == 1
    one, two = (load_file(tmp_path / name / "noise" / "adapter.safetensors") for name in ("one", "two"))
    for name, array in one.items():
        assert np.abs(array - two[name]).max() <= 1e-4 * np.abs(array).max(), name
    caches = [sorted(p.name for p in (tmp_path / n / ".cache").rglob("*.npy")) for n in ("one", "two")]
    assert caches[0] == caches[1] != []


# --- steps that cannot be taken -------------------------------------------------------------------


def test_a_gradient_that_is_not_finite_leaves_the_weights(make_fit, train_set, tmp_path):
    """The loss is still finite: only the check before the step keeps the state good."""
    fit = make_fit(train_set.config)
    state = tmp_path / "s.safetensors"
    fit.model.attribute_tokens.tokens.register_hook(
        lambda gradient: gradient * (float("nan") if len(fit.history) == 4 else 1.0)
    )
    with pytest.raises(CheckFailedError, match=r"gradient of step 5 is nan.*\.png") as raised:
        fit.run(state)
    assert str(raised.value).count(".png") == 6  # the whole batch
    assert all(bool(torch.isfinite(p).all()) for p in fit.named.values())
    assert len(load_state(state, identity="")["history"]) == 3  # the first epoch


def test_a_full_disk_keeps_the_state_of_an_earlier_step(tmp_path, monkeypatch):
    state = tmp_path / "s.safetensors"
    save_state(state, {"a": torch.ones(2)}, identity="x")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left.*--resume"):
        save_state(state, {"a": torch.zeros(2)}, identity="x")
    assert load_state(state, identity="x")["a"].tolist() == [1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]


def test_a_run_does_without_a_cache_that_cannot_be_written(train_set, tmp_path, monkeypatch):
    def full(self, index, rows):
        raise self._unwritable("No space left on device")

    monkeypatch.setattr(CachedTrunks, "_store", full)
    lines = []

    class Console:
        def say(self, text):
            lines.append(text)

        def over(self, items, title):
            yield from items

        def step(self, title, done, total, loss):
            pass

    options = Options(out=tmp_path / "b", cache=tmp_path / "cache")
    run(train_set.pictures, replace(train_set.config, epochs=1), options, console=Console())
    assert any("No space left" in line and "in every step" in line for line in lines)
    assert Path(tmp_path / "b" / "dear.json").is_file()
