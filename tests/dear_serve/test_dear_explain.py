"""Attention maps of the attribute tokens, and the engines' two roads through the optional graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dear_serve.backbone.attention import Block
from dear_serve.backbone.clip import Clip
from dear_serve.config import DearConfig
from dear_serve.dear.explain import attention_maps, head_shares
from dear_serve.dear.model import DearModel
from dear_serve.dear.roles import Roles
from dear_serve.errors import BundleError
from dear_serve.runtime import open_engine

ATTRIBUTES = ("color", "shape")


def roles_of(kinds: list[tuple[str, str]]) -> Roles:
    """Four heads in each of blocks 2 and 3."""
    roles = Roles.uniform("mixed", layers=3, heads_per_layer=4, first_block=2, attributes=ATTRIBUTES)
    heads = [
        replace(head, role=role, concept=concept)
        for head, (role, concept) in zip(roles.heads, kinds, strict=True)
    ]
    return replace(roles, heads=tuple(heads))


GENERAL, MIXED, COLOR = ("generalization", ""), ("mixed", ""), ("attribute", "color")


def test_core_heads_share_evenly_and_mixed_heads_stand_in() -> None:
    shares = head_shares(roles_of([COLOR, MIXED, GENERAL, GENERAL, COLOR, MIXED, MIXED, COLOR]), ATTRIBUTES)
    assert shares.shape == (2, 4, 2)
    np.testing.assert_allclose(shares[..., 0], np.array([[1, 0, 0, 0], [1, 0, 0, 1]]) / 3)
    np.testing.assert_allclose(shares[..., 1], np.array([[0, 1, 0, 0], [0, 1, 1, 0]]) / 3)


def test_neither_core_nor_mixed_heads_leave_zeros() -> None:
    shares = head_shares(roles_of([COLOR, *[GENERAL] * 7]), ATTRIBUTES)
    assert shares[..., 0].sum() == 1
    assert not shares[..., 1].any()


@pytest.fixture(scope="module")
def model(tiny_clip_config) -> DearModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        roles = roles_of([COLOR, MIXED, GENERAL, GENERAL, COLOR, MIXED, MIXED, COLOR])
        model = DearModel(Clip(tiny_clip_config), roles, DearConfig(attributes=ATTRIBUTES, first_block=2))
        for parameter in (model.attribute_tokens.tokens, *model.clip.visual.blocks.parameters()):
            torch.nn.init.normal_(parameter, std=0.5)
    return model.eval()


def test_maps_are_the_softmax_of_the_named_heads(model: DearModel) -> None:
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        maps = attention_maps(model, pixels)
        steps = list(model.head_steps(model.image_trunk(pixels)))
        rows = []
        for step, head in ((steps[0], 0), (steps[1], 0), (steps[1], 3)):  # the core heads of color
            block = model.clip.visual.blocks[step.layer - 1]
            assert isinstance(block, Block)
            q, k, _ = block.attention.in_proj(block.ln_1(step.before)).chunk(3, -1)
            one = slice(8 * head, 8 * head + 8)
            scores = q[:, 17, one].unsqueeze(1) @ k[..., one].transpose(1, 2) / 8**0.5  # (B, 1, N')
            open_ = model.get_buffer(f"mask_{step.layer}")[head, 17]
            rows.append(scores.squeeze(1).masked_fill(~open_, -torch.inf).softmax(-1)[:, 1:17])
    assert maps.shape == (3, 2, 16)
    torch.testing.assert_close(maps[:, 0], torch.stack(rows).mean(0))
    assert (maps >= 0).all()
    assert (maps.sum(-1) < 1).all()


def test_weights_are_what_the_attention_uses(model: DearModel) -> None:
    block = model.clip.visual.blocks[1]
    assert isinstance(block, Block)
    x = torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(2))
    mask = model.get_buffer("mask_2")
    with torch.inference_mode():
        values = block.attention.in_proj(x).chunk(3, -1)[2].unflatten(-1, (4, 8)).transpose(1, 2)
        found = block.attention.weights(x, mask) @ values
        torch.testing.assert_close(found, block.attention.mix_values(x, mask))


# Engines


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, 3, 32, 32)).astype(np.float32)


def test_torch_engine_has_both(tiny_bundle, pixels) -> None:
    engine = open_engine(tiny_bundle, "torch")
    assert engine.has("joint")
    assert engine.has("explain")
    zero_shot, features = engine.joint(pixels)
    np.testing.assert_allclose(zero_shot, engine.encode_image_zero_shot(pixels), atol=2e-6)
    np.testing.assert_allclose(features.cls, engine.encode_image(pixels).cls, atol=2e-6)
    np.testing.assert_allclose(features.attributes, engine.encode_image(pixels).attributes, atol=2e-6)
    maps = engine.explain(pixels)
    assert maps.shape == (3, 2, 16)
    assert maps.dtype == np.float32
    assert engine.explain(pixels[:0]).shape == (0, 2, 16)
    assert [len(part) for part in (engine.joint(pixels[:0])[0], engine.joint(pixels[:0])[1].cls)] == [0, 0]


def test_fake_engine_draws_maps(fake_bundle, pixels) -> None:
    engine = open_engine(fake_bundle, "fake")
    maps = engine.explain(pixels)
    assert engine.has("explain")
    assert maps.shape == (3, 2, 16)
    np.testing.assert_allclose(maps.sum(-1), 1, atol=1e-6)
    np.testing.assert_array_equal(maps[1:2], engine.explain(pixels[1:2]))
    zero_shot, features = engine.joint(pixels)
    np.testing.assert_array_equal(zero_shot, engine.encode_image_zero_shot(pixels))
    np.testing.assert_array_equal(features.cls, engine.encode_image(pixels).cls)


def test_older_exports_are_told_what_to_run(hand_exported, pixels) -> None:
    engine = open_engine(hand_exported, "onnx", threads=1)
    assert not engine.has("explain")
    assert not engine.has("joint")
    assert engine.has("image")
    with pytest.raises(BundleError, match=r"no explain graph.*run dear-export on it again"):
        engine.explain(pixels)
    zero_shot, features = engine.joint(pixels)  # two passes instead
    np.testing.assert_array_equal(zero_shot, engine.encode_image_zero_shot(pixels))
    np.testing.assert_array_equal(features.attributes, engine.encode_image(pixels).attributes)


def test_unknown_graphs_are_not_there(tiny_bundle, fake_bundle, hand_exported) -> None:
    for bundle, name in ((tiny_bundle, "torch"), (fake_bundle, "fake"), (hand_exported, "onnx")):
        assert not open_engine(bundle, name).has("depth")
