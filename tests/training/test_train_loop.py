"""The loop: golden losses, cached = plain, stopped and resumed = uninterrupted, what stays frozen."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from dear_serve.errors import CheckFailedError, ConfigError, DearError
from training.loop import COLUMNS, rate
from training.prepare import prepare

_number = itertools.count()


def losses(fit, tmp_path):
    """Of an uninterrupted run: each has a state file of its own (an `id` may come again, and would resume)."""
    fit.run(tmp_path / f"{next(_number)}.safetensors")
    return np.array(fit.history)[:, 0]


GOLDEN = [
    1.47743, 1.4809, 1.49439, 1.42997, 1.49453, 1.46061, 1.42431, 1.43465, 1.47645, 1.46511,
    1.44731, 1.40179, 1.42712, 1.43179, 1.42345, 1.43282, 1.4421, 1.3507, 1.45099, 1.45197,
    1.35176,
]  # fmt: skip


def test_golden_losses(make_fit, train_set, tmp_path):
    """Twenty-one steps of a fixed seed, so that no change of the method goes unnoticed."""
    found = losses(make_fit(replace(train_set.config, epochs=7)), tmp_path)
    assert found == pytest.approx(GOLDEN, abs=1e-4)


def test_the_cache_changes_no_loss(make_fit, train_set, tmp_path):
    plain = losses(make_fit(train_set.config), tmp_path)
    cached = losses(make_fit(train_set.config, cache=tmp_path / "cache"), tmp_path)
    again = losses(make_fit(train_set.config, cache=tmp_path / "cache"), tmp_path)
    assert np.abs(plain - cached).max() <= 1e-5
    assert (cached == again).all()


def test_seeds_differ_and_repeat(make_fit, train_set, tmp_path):
    first = losses(make_fit(train_set.config, seed=1), tmp_path)
    assert (losses(make_fit(train_set.config, seed=1), tmp_path) == first).all()
    assert (losses(make_fit(train_set.config, seed=2), tmp_path) != first).any()


@pytest.mark.parametrize("stop_at", [1, 4, 8])
def test_resumed_equals_uninterrupted(make_fit, train_set, tmp_path, stop_at):
    whole = make_fit(train_set.config)
    whole.run(tmp_path / "whole.safetensors")
    state = tmp_path / "stopped.safetensors"
    stopped = make_fit(train_set.config)
    with pytest.raises(DearError, match=f"step {stop_at} of 9") as raised:
        stopped.run(state, should_stop=lambda: len(stopped.history) == stop_at)
    assert (raised.value.code, raised.value.exit_code) == ("stopped", 1)
    resumed = make_fit(train_set.config)
    seen = []
    resumed.run(state, on_step=lambda done, loss: seen.append(done))
    assert seen == list(range(stop_at + 1, 10))
    assert resumed.history == whole.history
    for name, tensor in whole.model.adapter_state().items():
        assert torch.equal(tensor, resumed.model.adapter_state()[name]), name
    assert state.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_a_state_of_another_run_is_refused(make_fit, train_set, tmp_path):
    state = tmp_path / "state.safetensors"
    make_fit(train_set.config).run(state, identity='{"lr": 1, "reg": 2}')
    with pytest.raises(ConfigError, match="lr was 1 and is 3"):
        make_fit(train_set.config).run(state, identity='{"lr": 3, "reg": 2}')
    state.write_bytes(b"broken")
    with pytest.raises(ConfigError, match="cannot be read"):
        make_fit(train_set.config).run(state)


def test_only_the_adapter_learns(make_fit, train_set, tmp_path):
    fit = make_fit(train_set.config)
    frozen = {n: t.clone() for n, t in fit.model.clip.state_dict().items()}
    before = {n: t.clone() for n, t in fit.model.adapter_state().items()}
    fit.run(tmp_path / "s.safetensors")
    for name, tensor in fit.model.clip.state_dict().items():
        assert torch.equal(tensor, frozen[name]), name
    for name, tensor in fit.model.adapter_state().items():
        assert not torch.equal(tensor, before[name]), name
    assert all(p.grad is None for p in fit.model.clip.parameters())


def test_all_generalization_keeps_the_class_feature(make_fit, train_set, tmp_path):
    """method.md §3: attribute tokens that no original sees cannot change CLS, before or after training."""
    config = replace(train_set.config, roles="generalization", reg=0.0)
    fit = make_fit(config, prepared=prepare(config))
    trunk, frozen = fit.trunks.batch(range(8), [0] * 8)
    for _ in range(2):
        with torch.inference_mode():
            cls, attributes = fit.model.image_head(trunk)
        assert (cls - frozen).abs().max() <= 1e-6
        assert (attributes - frozen[:, None]).abs().max() > 0.01
        fit.run(tmp_path / "s.safetensors")


def test_a_loss_that_is_not_finite_names_the_step_and_the_pictures(make_fit, train_set, tmp_path):
    fit = make_fit(train_set.config)
    with torch.no_grad():
        fit.model.attribute_projection.fill_(float("nan"))
    with pytest.raises(CheckFailedError, match=r"step 1 is nan.*\.png"):
        fit.run(tmp_path / "s.safetensors")
    assert not (tmp_path / "s.safetensors").exists()


def test_every_epoch_shows_every_picture_once_and_views_in_turn(make_fit, task, train_set):
    fit = make_fit(train_set.config)
    seen = {}
    for step in range(fit.steps):
        batch = fit._batch(step)
        for index, view in zip(batch.indices, batch.views, strict=True):
            seen.setdefault(index, []).append(view)
    assert sorted(seen) == list(range(len(task.train)))
    assert all(sorted(views) == [0, 1, 2] for views in seen.values())  # 3 epochs, 3 views


def test_rate():
    rates = [rate(s, per_epoch=4, epochs=3, peak=1.0) for s in range(12)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[8] == pytest.approx(0.5)
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert rate(0, per_epoch=4, epochs=1, peak=1.0) == 1.0


def test_class_features_are_those_of_the_labels_module(make_fit, prepared, task, train_set):
    """The loop's cut, cached text side against `labels.class_features`, which serving uses."""
    from dear_serve.labels import class_features

    fit = make_fit(train_set.config)
    encode = {
        True: fit.model.text_features,
        False: fit.model.zero_shot_text,
    }
    with torch.inference_mode():
        for adapted, ours in ((True, fit.text.features(fit.model)), (False, fit.text.frozen)):
            expected = class_features(
                task.class_names,
                prepared.templates,
                lambda t, adapted=adapted: encode[adapted](torch.from_numpy(t)).numpy(),
                prepared.tokenizer,
            )
            assert np.abs(ours.numpy() - expected).max() <= 1e-6


def test_columns_are_the_history(make_fit, train_set):
    fit = make_fit(train_set.config)
    numbers = fit.step(0)
    assert fit.history == [[numbers[c] for c in COLUMNS]]
    assert numbers["alpha_cls"] == pytest.approx(0.7)
