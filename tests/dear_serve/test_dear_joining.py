"""Gradients to the attribute tokens alone: the same numbers and gradients as through the whole block."""

from __future__ import annotations

import pytest
import torch

from dear_serve.backbone.clip import Clip
from dear_serve.config import DearConfig
from dear_serve.dear.joining import joining_block
from dear_serve.dear.mask import block_mask
from dear_serve.dear.model import DearModel
from dear_serve.dear.roles import Roles

ATTRIBUTES = ("color", "shape", "texture")


def roles(kind: str) -> Roles:
    uniform = Roles.uniform("mixed", layers=3, heads_per_layer=4, first_block=1, attributes=ATTRIBUTES)
    if kind != "of each":
        return Roles.from_dict(
            {**uniform.to_dict(), "heads": [{**h.to_dict(), "role": kind} for h in uniform.heads]}
        )
    kinds = [("attribute", "shape"), ("mixed", ""), ("generalization", ""), ("attribute", "lines")]
    heads = [
        {**h.to_dict(), "role": kinds[i % 4][0], "concept": kinds[i % 4][1]}
        for i, h in enumerate(uniform.heads)
    ]
    return Roles.from_dict({**uniform.to_dict(), "heads": heads})


@pytest.mark.parametrize("variant", ["paper", "one-way"])
@pytest.mark.parametrize("kind", ["of each", "mixed", "generalization"])
def test_a_joining_block_is_the_block(tiny_clip_config, kind, variant):
    torch.manual_seed(0)
    block = Clip(tiny_clip_config).requires_grad_(False).visual.blocks[0]
    mask = torch.from_numpy(block_mask(roles(kind), 1, attributes=ATTRIBUTES, originals=17, variant=variant))
    x = 2 * torch.randn(2, 17, 32)
    tokens = torch.randn(2, 3, 32, requires_grad=True)
    weights = torch.randn(2, 20, 32)

    expected = block(torch.cat([x, tokens], dim=1), mask)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), tokens)
    originals, read = joining_block(block, x, tokens, mask)
    found = torch.cat([originals, read], dim=1)
    (gradient,) = torch.autograd.grad((found * weights).sum(), tokens)
    assert (found - expected).abs().max() <= 1e-5
    assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert originals.requires_grad == (variant == "paper" and kind != "generalization")


@pytest.mark.parametrize("variant", ["paper", "one-way"])
def test_features_with_gradients_are_those_without(tiny_clip_config, variant):
    torch.manual_seed(0)
    config = DearConfig(attributes=ATTRIBUTES, first_block=1, text_first_block=1, mask=variant)
    model = DearModel(Clip(tiny_clip_config), roles("of each"), config)
    torch.nn.init.normal_(model.attribute_tokens.tokens)
    trunk = model.image_trunk(torch.randn(2, 3, 32, 32))
    with torch.inference_mode():
        without = model.image_head(trunk)
    for a, b in zip(model.image_head(trunk), without, strict=True):
        assert (a - b).abs().max() <= 1e-6


@pytest.mark.parametrize("count", [1, 3, 8])  # 8 queries in 4 heads are no longer few: width 32
def test_a_few_queries_get_the_rows_and_gradients_of_the_whole(tiny_clip_config, count):
    torch.manual_seed(0)
    block = Clip(tiny_clip_config).requires_grad_(False).visual.blocks[0]
    torch.nn.init.normal_(block.attention.in_proj.bias)
    x = torch.randn(2, 20, 32, requires_grad=True)
    mask = torch.rand(4, 20, 20) < 0.7
    mask[:, :, 0] = True
    weights = torch.randn(2, count, 32)
    expected = block(x, mask)[:, :count]
    found = block(x, mask[:, :count], x[:, :count])
    assert (found - expected).abs().max() <= 1e-5
    wanted, gradient = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (expected, found))
    assert (gradient - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    with torch.inference_mode():
        assert (block(x, mask[:, :count], x[:, :count]) - expected).abs().max() <= 1e-5
