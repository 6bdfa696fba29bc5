"""The loss against method.md §5, computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dear_serve.dear.fusion import Fusion
from training.losses import Features, cosine_distance, dear_loss


def unit(*shape):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))), dim=-1)


def test_cosine_distance_of_known_angles():
    a = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    b = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    assert float(cosine_distance(a, b)) == pytest.approx((0 + 1 + 2) / 3)


def test_parts_and_total():
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 0])
    features = Features(
        cls=unit(2, 8),
        frozen_cls=unit(2, 9)[:, :8],
        text=unit(2, 8),
        frozen_text=unit(2, 8),
        alpha_cls=torch.tensor(0.25),
    )
    losses = dear_loss(logits, labels, features, reg=2.0, fusion_reg=0.5, attribute_reg=3.0)
    numbers = losses.numbers()
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1))) / 2
    assert numbers["cross_entropy"] == pytest.approx(expected, abs=1e-6)
    image = 1 - (features.cls * features.frozen_cls).sum(1).mean()
    assert numbers["image_reg"] == pytest.approx(float(image), abs=1e-6)
    assert numbers["text_reg"] == pytest.approx(0.0, abs=1e-6)
    assert numbers["fusion_reg"] == pytest.approx(math.log(4), abs=1e-6)
    assert numbers["attribute_reg"] == 0.0  # not asked for
    assert numbers["loss"] == pytest.approx(expected + 2 * float(image) + 0.5 * math.log(4), abs=1e-6)


def test_the_attributes_are_held_to_the_frozen_class_feature():
    """1 - cos of what the attributes add together; its weight; single attributes may differ."""
    frozen = unit(2, 8)
    away = F.normalize(unit(2, 7)[:, :1] * frozen.roll(1, 0), dim=-1)
    fusion = Fusion(2, alpha_cls=0.5, tau=10.0)
    both = torch.stack([frozen + away, frozen - away], dim=1)  # each off, their sum along the frozen feature
    features = Features(
        cls=frozen,
        frozen_cls=frozen,
        text=frozen,
        frozen_text=frozen,
        alpha_cls=torch.tensor(1.0),
        attributes=fusion.attribute_side(both),
    )
    logits, labels = torch.zeros(2, 2), torch.tensor([0, 1])
    held = dear_loss(logits, labels, features, reg=0.0, fusion_reg=0.0, attribute_reg=3.0)
    assert held.attribute_reg.item() == pytest.approx(0.0, abs=1e-6)
    off = replace(features, attributes=fusion.attribute_side(-both))
    held = dear_loss(logits, labels, off, reg=0.0, fusion_reg=0.0, attribute_reg=3.0)
    assert held.total.item() == pytest.approx(math.log(2) + 3 * 2, abs=1e-5)
