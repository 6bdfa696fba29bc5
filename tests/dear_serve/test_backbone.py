"""Towers against open_clip on random weights, block ranges, contributions, and what is refused."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from dear_serve.backbone.clip import Clip
from dear_serve.backbone.text import end_of_text
from dear_serve.backbone.weights import clip_config, convert, load_weights, to_open_clip, weights_sha256
from dear_serve.backbone.zoo import load_base
from dear_serve.errors import BaseModelError

REAL = ["ViT-B-32", "ViT-B-32-quickgelu", "ViT-B-16", "ViT-L-14"]
LAYER_SCALE = "ViT-M-16-alt"


@pytest.fixture(scope="module")
def open_clip():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import open_clip
    return open_clip


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def clip(tiny_clip_config):
    torch.manual_seed(0)
    return Clip(tiny_clip_config).eval()


@pytest.mark.parametrize("name", [*REAL, LAYER_SCALE])
def test_towers_equal_open_clip(open_clip, name):
    torch.manual_seed(0)
    theirs = open_clip.create_model(name).eval()
    if name == LAYER_SCALE:  # its initial factors hide the branches
        for key, value in theirs.named_parameters():
            if key.endswith("gamma"):
                value.uniform_(0.5, 1.5)
    config = clip_config(open_clip.get_model_config(name), name=name)
    ours = load_weights(config, convert(theirs.state_dict(), config, name=name))
    size = config.vision.image_size
    pixels = torch.randn(2, 3, size, size)
    tokens = open_clip.get_tokenizer(name)(["a photo of a cat", "a much longer text about two dogs"])
    for normalize in (False, True):
        image = ours.encode_image(pixels, normalize=normalize)
        assert (image - theirs.encode_image(pixels, normalize=normalize)).abs().max() <= 1e-5
        text = ours.encode_text(tokens, normalize=normalize)
        assert (text - theirs.encode_text(tokens, normalize=normalize)).abs().max() <= 1e-5
    parts = ours.visual.contributions(pixels, first_block=9 if config.vision.layers > 9 else 3)
    assert (parts.total() - ours.visual(pixels)).abs().max() <= 1e-4


def test_without_ln_pre_equals_open_clip(open_clip):
    """The pre-norm variant that open_clip calls no_ln_pre, with its CLIP tokenizer."""
    from open_clip.model import CLIP

    vision = {
        "image_size": 32,
        "patch_size": 8,
        "width": 64,
        "layers": 2,
        "head_width": 16,
        "no_ln_pre": True,
    }
    text = {"context_length": 16, "vocab_size": 600, "width": 32, "layers": 2, "heads": 4}
    theirs = CLIP(24, vision, text).eval()
    config = clip_config({"embed_dim": 24, "vision_cfg": vision, "text_cfg": text})
    ours = load_weights(config, convert(theirs.state_dict(), config))
    pixels = torch.randn(3, 3, 32, 32)
    assert not config.vision.ln_pre
    assert (ours.encode_image(pixels) - theirs.encode_image(pixels, normalize=True)).abs().max() <= 1e-5


def test_custom_text_layout_is_the_same(clip):
    """open_clip stores some models with a `text.` prefix; both layouts give the same tensors."""
    plain = to_open_clip(clip.state_dict())
    prefixed = {k if k.startswith(("visual.", "logit_scale")) else f"text.{k}": v for k, v in plain.items()}
    for state in (plain, prefixed):
        back = convert(state, clip.config)
        assert all(torch.equal(back[k], v) for k, v in clip.state_dict().items())


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("RN50", "ResNet"),
        ("ViT-B-16-SigLIP", "init_logit_bias|custom|logit bias|timm_model_name"),
        ("ViT-H-14-CLIPA", "tokenizer|pool_type"),
        ("coca_ViT-B-32", "multimodal_cfg|embed_cls|attentional_pool"),
        ("roberta-ViT-B-32", "hf_"),
        ("convnext_base", "timm_model_name"),
    ],
)
def test_unsupported_bases_are_refused_by_name(open_clip, name, option):
    with pytest.raises(BaseModelError, match=option) as error:
        clip_config(open_clip.get_model_config(name), name=name)
    assert name in error.value.message


def test_convert_is_strict(clip):
    state = to_open_clip(clip.state_dict())
    missing = {k: v for k, v in state.items() if k != "ln_final.weight"}
    with pytest.raises(BaseModelError, match=r"lacks the tensor 'ln_final\.weight'"):
        convert(missing, clip.config, name="x")
    with pytest.raises(BaseModelError, match="does not use"):
        convert({**state, "extra": torch.zeros(1)}, clip.config, name="x")
    with pytest.raises(BaseModelError, match=r"\(7,\), \(32,\) is expected"):
        convert({**state, "ln_final.weight": torch.zeros(7)}, clip.config, name="x")


def test_any_range_of_blocks_composes(clip):
    pixels = torch.randn(2, 3, 32, 32)
    visual = clip.visual
    x = visual.run(visual.run(visual.embed(pixels), 1, 1), 2, 3)
    assert torch.equal(visual.pool(x), visual(pixels))
    assert visual.run(x, 1, 0) is x


def test_contributions_name_every_part(clip):
    pixels = torch.randn(4, 3, 32, 32)
    whole = clip.visual.contributions(pixels)
    late = clip.visual.contributions(pixels, first_block=3)
    assert whole.heads.shape == (4, 3, 4, 24)
    assert late.heads.shape == (4, 1, 4, 24)
    assert torch.allclose(late.heads[:, 0], whole.heads[:, 2], atol=1e-6)
    assert torch.allclose(late.rest, whole.heads[:, :2].sum((1, 2)), atol=1e-5)
    for parts in (whole, late):
        assert (parts.total() - clip.encode_image(pixels, normalize=False)).abs().max() <= 1e-4


def test_a_head_that_is_silenced_contributes_nothing(clip):
    block = clip.visual.blocks[2]
    block.attention.out_proj.weight[:, 8:16] = 0  # head 1 of 4, width 8
    heads = clip.visual.contributions(torch.randn(2, 3, 32, 32)).heads
    assert heads[:, 2, 1].abs().max() == 0
    assert heads[:, 2, 0].abs().max() > 0


def test_masked_heads_see_only_what_they_may(clip):
    """A head that sees only CLS at every token gives CLS's value there."""
    attention = clip.visual.blocks[0].attention
    x = torch.randn(1, 5, 32)
    mask = torch.ones(4, 5, 5, dtype=torch.bool)
    mask[2] = False
    mask[2, :, 0] = True
    free, masked = attention.mix_values(x), attention.mix_values(x, mask)
    values = attention.in_proj(x)[0, 0, 64:].reshape(4, 8)
    assert torch.allclose(masked[0, 2], values[2].expand(5, 8), atol=1e-6)
    assert torch.allclose(masked[0, [0, 1, 3]], free[0, [0, 1, 3]], atol=1e-6)


def test_training_attention_equals_inference(clip):
    """With gradients the CPU takes an explicit form; the numbers are the same."""
    attention, x = clip.visual.blocks[0].attention, torch.randn(2, 9, 32)
    mask = torch.rand(4, 9, 9) < 0.5
    mask |= torch.eye(9, dtype=torch.bool)
    fused = attention(x, mask)
    with torch.enable_grad():
        explicit = attention(x.requires_grad_(), mask)
    assert explicit.requires_grad
    assert (fused - explicit).abs().max() <= 1e-6


def test_text_may_be_cut_at_its_end(clip):
    tokens = torch.zeros(2, 16, dtype=torch.long)
    tokens[:, 0], tokens[0, 1], tokens[0, 2], tokens[1, 5] = 49406, 320, 49407, 49407
    assert end_of_text(tokens).tolist() == [2, 5]
    assert (clip.encode_text(tokens) - clip.encode_text(tokens[:, :6])).abs().max() <= 1e-6


def test_identity_of_a_base_follows_its_weights(clip):
    before = weights_sha256(clip)
    assert before == weights_sha256(clip)
    clip.visual.proj[0, 0] += 1
    assert weights_sha256(clip) != before


def test_random_bases_are_reproducible():
    state = torch.random.get_rng_state()
    first, second = load_base("ViT-S-32/random"), load_base("ViT-S-32/random")
    assert first.sha256 == second.sha256
    assert torch.equal(torch.random.get_rng_state(), state)


MINI = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 32, "layers": 3, "head_width": 8},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "layers": 3, "heads": 4},
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_local_file_with_open_clip_config(clip, tmp_path, suffix):
    from safetensors.torch import save_file

    file = tmp_path / f"open_clip_model{suffix}"
    state = {k: v.contiguous() for k, v in to_open_clip(clip.state_dict()).items()}
    if suffix == ".pt":
        torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, file)
    else:
        save_file(state, str(file))
    config = {"model_cfg": MINI, "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    base = load_base(str(file))
    assert base.sha256 == weights_sha256(clip)
    assert base.config.preprocess.mean == (0.5, 0.5, 0.5)
    assert not any(p.requires_grad for p in base.clip.parameters())


def test_files_that_cannot_be_a_base(tmp_path):
    lonely = tmp_path / "model.safetensors"
    lonely.write_bytes(b"junk")
    with pytest.raises(BaseModelError, match=r"no configuration beside it.*ViT-B-16/"):
        load_base(str(lonely))
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(BaseModelError, match=r"model\.json cannot be read"):
        load_base(str(lonely))
    (tmp_path / "model.json").write_text(json.dumps(MINI))
    with pytest.raises(BaseModelError, match=r"save it as \.safetensors"):
        load_base(str(lonely))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-model", "neither dear-mini, a file, nor an open_clip model/tag"),
        ("ViT-B-16", r"names no weights: add a tag \(.*openai"),
        ("ViT-B-16/no-such-tag", "cannot be loaded by open_clip"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(BaseModelError, match=message):
        load_base(name)


def test_preprocessing_that_is_not_supported(clip, tmp_path):
    from safetensors.torch import save_file

    file = tmp_path / "m.safetensors"
    save_file({k: v.contiguous() for k, v in to_open_clip(clip.state_dict()).items()}, str(file))
    (tmp_path / "m.json").write_text(
        json.dumps({"model_cfg": MINI, "preprocess_cfg": {"resize_mode": "squash"}})
    )
    with pytest.raises(BaseModelError, match="squash"):
        load_base(str(file))
