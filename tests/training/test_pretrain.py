"""Pretraining: the loss is its formula, batches repeat, a resumed run is the uninterrupted one, shipped files load."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from dear_serve.backbone.zoo import load_base
from dear_serve.errors import CheckFailedError, ConfigError
from dear_serve.preprocess import preprocess
from training import pretrain as module
from training.mini import PREPROCESS, pixels_from
from training.pretrain import Batches, PretrainConfig, pretrain, ship, truth_loss

TINY = PretrainConfig(steps=4, batch_size=8, warmup=2, n_objects=12)


@pytest.fixture(autouse=True)
def small_model(monkeypatch):
    small = {
        **module.MINI,
        "embed_dim": 16,
        "vision_cfg": {
            **module.MINI["vision_cfg"],
            "width": 16,
            "layers": 2,
            "head_width": 8,
            "patch_size": 16,
        },
        "text_cfg": {**module.MINI["text_cfg"], "width": 16, "layers": 2, "heads": 2},
    }
    monkeypatch.setattr(module, "MINI", small)


def test_truth_loss_is_cross_entropy_with_shared_targets():
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]])
    truth = torch.tensor([[True, False, True], [False, False, False]])
    rows = -0.5 * (logits[0].log_softmax(0)[0] + logits[0].log_softmax(0)[2])
    columns = -0.5 * (logits[:, 0].log_softmax(0)[0] + logits[:, 2].log_softmax(0)[0])
    assert truth_loss(logits, truth).item() == pytest.approx(((rows + columns) / 2).item())
    uniform = truth_loss(torch.zeros(4, 4), torch.eye(4, dtype=torch.bool))
    assert uniform.item() == pytest.approx(math.log(4))


def test_batches_depend_on_seed_and_step_alone():
    first, again, other = Batches(TINY)[1], Batches(TINY)[1], Batches(TINY)[2]
    assert torch.equal(first["images"], again["images"])
    assert all(torch.equal(a, b) for a, b in zip(first["tokens"], again["tokens"], strict=True))
    assert not torch.equal(first["images"], other["images"])
    assert first["images"].shape == (8, 64, 64, 3)
    assert sum(t.shape[1] for t in first["truth"]) == sum(len(t) for t in first["tokens"])
    for truth in first["truth"][1:]:  # within one attribute every picture has exactly one true name
        assert truth.sum(1).tolist() == [1] * 8
    assert first["truth"][0].any(1).all()


def test_pixels_are_what_preprocessing_gives():
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    expected = preprocess(Image.fromarray(image), PREPROCESS)
    assert np.abs(pixels_from(image[None])[0].numpy() - expected).max() <= 1e-6


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, monkeypatch):
    whole = pretrain(TINY, tmp_path / "whole", every=2, pictures=20)
    real = module.batch_loss
    calls = []

    def killed(clip, batch, config):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(clip, batch, config)

    monkeypatch.setattr(module, "batch_loss", killed)
    with pytest.raises(KeyboardInterrupt):
        pretrain(TINY, tmp_path / "parts", every=2, pictures=20)
    monkeypatch.setattr(module, "batch_loss", real)
    resumed = pretrain(TINY, tmp_path / "parts", every=2, pictures=20)
    assert all(torch.equal(v, resumed.state_dict()[k]) for k, v in whole.state_dict().items())
    lines = [json.loads(line) for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert set(lines[0]) >= {"loss", "color", "shape", "texture", "object", "location"}


def test_a_state_of_another_run_is_refused(tmp_path):
    pretrain(TINY, tmp_path, every=4, pictures=20)
    with pytest.raises(ConfigError, match="choose another --out"):
        pretrain(PretrainConfig(steps=4, batch_size=9, n_objects=12), tmp_path)


def test_shipped_files_load_here_and_in_open_clip(tmp_path):
    pretrain(TINY, tmp_path / "run", every=4, pictures=20)
    ship(tmp_path / "run", to=tmp_path / "mini", pictures=50)
    base = load_base(str(tmp_path / "mini" / "open_clip_model.safetensors"))
    found = module.check(tmp_path / "mini")
    assert set(found["zero_shot"]) == {"seen", "unseen"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import open_clip

        theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'mini'}")
    theirs.eval()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8))
    pixels = preprocess(picture, base.config.preprocess)
    assert np.abs(transform(picture).numpy() - pixels).max() <= 1e-6
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'mini'}")(["a red heart"])
    with torch.no_grad():
        batch = torch.from_numpy(pixels)[None]
        assert (
            theirs.encode_image(batch, normalize=True) - base.clip.encode_image(batch)
        ).abs().max() <= 1e-5
        assert (
            theirs.encode_text(tokens, normalize=True) - base.clip.encode_text(tokens)
        ).abs().max() <= 1e-5


def test_check_notices_other_weights_and_other_figures(tmp_path):
    pretrain(TINY, tmp_path / "run", every=4, pictures=20)
    ship(tmp_path / "run", to=tmp_path / "mini", pictures=20)
    figures = json.loads((tmp_path / "mini" / "figures.json").read_text())
    wrong = {**figures, "zero_shot": {k: dict.fromkeys(v, 2.0) for k, v in figures["zero_shot"].items()}}
    for content, message in (
        (wrong, "2.0000 is expected"),
        ({**figures, "sha256": "0"}, "figures.json says 0"),
    ):
        (tmp_path / "mini" / "figures.json").write_text(json.dumps(content))
        with pytest.raises(CheckFailedError, match=message):
            module.check(tmp_path / "mini")


def test_command_line_errors(tmp_path, capsys):
    assert module.main(["--out", str(tmp_path / "none"), "--ship"]) == 2
    assert "pretrain first" in capsys.readouterr().err


def test_a_second_phase_starts_from_the_first_ones_weights(tmp_path, monkeypatch):
    pretrain(TINY, tmp_path / "first", every=4, pictures=20)
    saved = torch.load(tmp_path / "first" / "last.pt", weights_only=True)["model"]
    seen = []
    real = module.batch_loss
    monkeypatch.setattr(
        module,
        "batch_loss",
        lambda clip, *rest: (
            seen.append({k: v.clone() for k, v in clip.state_dict().items()}) or real(clip, *rest)
        ),
    )
    second = PretrainConfig(steps=2, batch_size=8, warmup=2, n_objects=12, quiet=1.0, texture=2.0)
    pretrain(second, tmp_path / "second", start=tmp_path / "first" / "last.pt", every=2, pictures=20)
    assert all(torch.equal(v, seen[0][k]) for k, v in saved.items())
    found = torch.load(tmp_path / "second" / "last.pt", weights_only=True)
    assert len(found["config"]["start"]) == 64
    with pytest.raises(ConfigError, match="choose another --out"):  # the same options, other first weights
        pretrain(second, tmp_path / "second", every=2, pictures=20)
    with pytest.raises(ConfigError, match=r"none\.pt does not exist"):
        pretrain(second, tmp_path / "third", start=tmp_path / "none.pt")


def test_the_quiet_penalty_is_the_class_tokens_early_variance():
    from dear_serve.backbone.clip import Clip
    from dear_serve.backbone.weights import clip_config

    torch.manual_seed(0)
    three = {**module.MINI, "vision_cfg": {**module.MINI["vision_cfg"], "layers": 3}}  # J is 3
    clip = Clip(clip_config(three, name="dear-mini", preprocess=PREPROCESS))
    batch = Batches(TINY)[0]
    with torch.no_grad():
        plain, known = module.batch_loss(clip, batch, TINY)
        quiet, again = module.batch_loss(clip, batch, PretrainConfig(**{**TINY.to_dict(), "quiet": 0.5}))
        assert known == pytest.approx(again)
        assert known > 0
        assert quiet.item() == pytest.approx(plain.item() + 0.5 * known, rel=1e-5)
        for block in clip.visual.blocks[:2]:  # nothing is added before J: one class token for all
            block.attention.out_proj.weight.zero_()
            block.mlp[2].weight.zero_()
        _, silent = module.batch_loss(clip, batch, TINY)
    assert silent == pytest.approx(0, abs=1e-6)


def test_weights_of_the_caption_groups():
    assert PretrainConfig().group_weights == (1.0, 1.0, 0.5, 0.5, 0.5, 0.5)
    assert PretrainConfig(texture=2.0).group_weights == (1.0, 1.0, 0.5, 0.5, 2.0, 0.5)
