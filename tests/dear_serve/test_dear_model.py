"""The adapted model: what must equal frozen CLIP, what may not, and what is learned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dear_serve.backbone.clip import Clip
from dear_serve.backbone.text import end_of_text
from dear_serve.config import DearConfig, default_first_block
from dear_serve.dear.fusion import Fusion
from dear_serve.dear.model import DearModel
from dear_serve.dear.roles import HeadRole, Roles
from dear_serve.dear.tokens import LearnableTokens
from dear_serve.errors import BundleError, ConfigError

ATTRIBUTES = ("color", "shape", "texture")


@pytest.fixture
def clip(tiny_clip_config):
    torch.manual_seed(0)
    return Clip(tiny_clip_config)


def uniform(role: str, first_block: int = 2) -> Roles:
    return Roles.uniform(role, layers=3, heads_per_layer=4, first_block=first_block, attributes=ATTRIBUTES)


def build(clip: Clip, roles: Roles, **options) -> DearModel:
    torch.manual_seed(1)
    options = {"first_block": 2, **options}
    config = DearConfig(attributes=ATTRIBUTES, text_first_block=2, text_tokens=3, **options)
    model = DearModel(clip, roles, config)
    torch.nn.init.normal_(model.attribute_tokens.tokens)  # large tokens: leaks would show
    torch.nn.init.normal_(model.text_tokens.tokens)
    return model


def pixels(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def tokens() -> torch.Tensor:
    ids = torch.zeros(3, 16, dtype=torch.long)
    ids[:, 0] = 49406
    for row, end in enumerate((3, 8, 15)):
        ids[row, 1:end] = torch.arange(320, 319 + end)
        ids[row, end] = 49407
    return ids


def train(model: DearModel, steps: int = 5) -> None:
    """A few real steps on everything that is learned."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        logits, _ = model.fuse(*model.image_features(pixels()), model.text_features(tokens()))
        F.cross_entropy(logits, torch.tensor([0, 1, 2, 0])).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_the_last_block_computes_only_what_is_read(clip):
    """Class and attribute features are those of a last block that computes every token, text features too."""
    model = build(clip, uniform("mixed"))
    visual = clip.visual
    with torch.no_grad():
        trunk = model.image_trunk(pixels())
        y = list(model.head_steps(trunk))[-1].after
        cls, attributes = model.image_head(trunk)
        whole = F.normalize(visual.ln_post(y[:, model.originals :]) @ model.attribute_projection, dim=-1)
        assert y.shape[1] == model.originals + len(ATTRIBUTES)
        assert torch.allclose(cls, F.normalize(visual.pool(y), dim=-1), atol=1e-6)
        assert torch.allclose(attributes, whole, atol=1e-6)
        x = clip.text.run(clip.text.embed(tokens()), 1, 3)
        text = F.normalize(clip.text.pool(x, end_of_text(tokens())), dim=-1)
        none = DearConfig(attributes=ATTRIBUTES, first_block=2, text_first_block=2, text_tokens=0)
        assert torch.allclose(
            DearModel(clip, uniform("mixed"), none).text_features(tokens()), text, atol=1e-6
        )


@pytest.mark.parametrize("variant", ["paper", "one-way"])
def test_all_generalization_heads_leave_cls_and_patches_alone(clip, variant):
    model = build(clip, uniform("generalization"), mask=variant)
    frozen = clip.encode_image(pixels())
    for _ in range(2):  # before and after training
        with torch.no_grad():
            cls, _ = model.image_features(pixels())
        assert (cls - frozen).abs().max() <= 1e-6
        train(model)


def test_one_way_mask_keeps_the_class_feature_whatever_the_roles(clip):
    model = build(clip, uniform("mixed"), mask="one-way")
    train(model)
    with torch.no_grad():
        cls, attributes = model.image_features(pixels())
    assert (cls - clip.encode_image(pixels())).abs().max() <= 1e-6
    assert attributes.std(0).min() > 0  # yet the tokens read the picture


def test_tokens_may_start_from_the_class_token(clip):
    """With nothing learned yet and every head open, each of them is the class token's twin in blocks J..L."""
    model = build(clip, uniform("mixed", 3), first_block=3, mask="one-way", token_start="class")
    torch.nn.init.zeros_(model.attribute_tokens.tokens)
    with torch.no_grad():
        trunk = model.image_trunk(pixels())
        (step,) = model.head_steps(trunk)
        assert torch.equal(step.before[:, model.originals :], trunk[:, :1].expand(-1, 3, -1))
    model = build(clip, uniform("mixed"), token_start="class")  # two blocks: mixed with the same start
    with torch.no_grad():
        first, second = model.head_steps(model.image_trunk(pixels()))
        start = first.before[:, model.originals :]
        mixed = 0.9 * start + 0.1 * first.after[:, model.originals :]
        assert torch.allclose(second.before[:, model.originals :], mixed, atol=1e-6)


def test_mixed_heads_let_tokens_in(clip):
    model = build(clip, uniform("mixed"))
    with torch.no_grad():
        cls, _ = model.image_features(pixels())
    assert (cls - clip.encode_image(pixels())).abs().max() > 1e-3


def test_one_core_head_carries_only_its_token(clip):
    """All heads generalize but one expert of "shape" in the last block: CLS may depend on that token alone."""
    roles = uniform("generalization", 3)
    heads = (HeadRole(layer=3, head=0, role="attribute", concept="shape", entropy=0.0), *roles.heads[1:])
    roles = Roles.from_dict({**roles.to_dict(), "heads": [h.to_dict() for h in heads]})
    torch.manual_seed(1)
    model = DearModel(clip, roles, DearConfig(attributes=ATTRIBUTES, first_block=3, text_tokens=0))
    with torch.no_grad():
        before, _ = model.image_features(pixels())
        for k in range(3):
            model.attribute_tokens.tokens.copy_(torch.zeros(3, 32))
            zero, _ = model.image_features(pixels())
            model.attribute_tokens.tokens[k] = torch.randn(32)
            changed = (model.image_features(pixels())[0] - zero).abs().max()
            assert (changed > 1e-4) == (k == 1)
    assert before.shape == (4, 24)


def test_trunk_and_head_are_the_whole(clip):
    model = build(clip, uniform("mixed"))
    with torch.no_grad():
        trunk = model.image_trunk(pixels())
        assert all(
            torch.equal(a, b)
            for a, b in zip(model.image_head(trunk), model.image_features(pixels()), strict=True)
        )
        assert torch.allclose(model.zero_shot_head(trunk), clip.encode_image(pixels()), atol=1e-6)
        assert torch.equal(model.zero_shot_image(pixels()), clip.encode_image(pixels()))
        text = model.text_head(model.text_trunk(tokens()), end_of_text(tokens()))
        assert torch.equal(text, model.text_features(tokens()))
        assert torch.equal(model.zero_shot_text(tokens()), clip.encode_text(tokens()))


def test_without_text_tokens_the_text_side_is_frozen_clip(clip):
    model = DearModel(clip, uniform("mixed", 3), DearConfig(attributes=ATTRIBUTES, text_tokens=0))
    with torch.no_grad():
        assert (model.text_features(tokens()) - clip.encode_text(tokens())).abs().max() <= 1e-6


def test_adapted_text_does_not_depend_on_padding(clip):
    model = build(clip, uniform("mixed"))
    short = tokens()[:2]
    with torch.no_grad():
        assert (model.text_features(short) - model.text_features(short[:, :9])).abs().max() <= 1e-6
        assert (model.text_features(short) - clip.encode_text(short)).abs().max() > 1e-3


def test_beta_mixing(clip):
    learnable = LearnableTokens(2, 8, beta=0.75)
    output = torch.randn(5, 2, 8)
    assert torch.allclose(learnable.mix(output), 0.75 * learnable.tokens + 0.25 * output)
    assert learnable.first(5).shape == (5, 2, 8)
    fixed = build(clip, uniform("mixed"), beta=1.0)
    with torch.no_grad():  # beta 1: block 3 gets the initial tokens again, so the last block alone decides
        trunk = fixed.image_trunk(pixels())
        block = clip.visual.blocks
        x = block[1](torch.cat([trunk, fixed.attribute_tokens.first(4)], 1))[:, :17]
        y = block[2](torch.cat([x, fixed.attribute_tokens.first(4)], 1))
        assert torch.allclose(F.normalize(clip.visual.pool(y), dim=-1), fixed.image_head(trunk)[0], atol=1e-6)


def test_attribute_projection_starts_from_the_frozen_one(clip):
    model = build(clip, uniform("mixed"))
    assert torch.equal(model.attribute_projection, clip.visual.proj)
    train(model)
    assert not torch.equal(model.attribute_projection, clip.visual.proj)


def test_fusion_is_the_formula():
    fusion = Fusion(2, alpha_cls=0.7, tau=50.0)
    assert torch.allclose(fusion.alpha, torch.tensor([0.7, 0.15, 0.15]))
    with torch.no_grad():
        fusion.weights.copy_(torch.tensor([0.3, -0.2, 1.0]))
    alpha = torch.tensor([0.3, -0.2, 1.0]).softmax(0)
    f = F.normalize(torch.randn(4, 3, 8), dim=-1)
    g = F.normalize(torch.randn(5, 8), dim=-1)
    logits, contributions = fusion(f[:, 0], f[:, 1:], g)
    expected = 50.0 * sum(alpha[k] * f[:, k] @ g.t() for k in range(3))
    assert torch.allclose(logits, expected, atol=1e-5)
    assert contributions.shape == (4, 5, 3)
    assert torch.allclose(contributions.sum(-1), logits)
    assert Fusion(0, alpha_cls=1.0, tau=1.0).alpha.tolist() == [1.0]


def test_only_the_adapter_learns(clip):
    before = {k: v.clone() for k, v in clip.state_dict().items()}
    model = build(clip, uniform("mixed"))
    start = {k: v.clone() for k, v in model.adapter_state().items()}
    train(model)
    assert all(torch.equal(v, before[k]) for k, v in clip.state_dict().items())
    assert set(start) == {
        "attribute_tokens.tokens",
        "text_tokens.tokens",
        "attribute_projection",
        "fusion.weights",
    }
    assert all(not torch.equal(v, start[k]) for k, v in model.adapter_state().items())


def test_adapter_state_round_trip_is_strict(clip):
    first, second = build(clip, uniform("mixed")), build(clip, uniform("mixed"))
    train(first)
    second.load_adapter_state(first.adapter_state())
    with torch.no_grad():
        assert torch.equal(first.image_features(pixels())[1], second.image_features(pixels())[1])
    state = first.adapter_state()
    with pytest.raises(BundleError, match=r"fusion\.weights"):
        second.load_adapter_state({k: v for k, v in state.items() if k != "fusion.weights"})
    with pytest.raises(BundleError, match=r"\(2,\), the model has \(4,\)"):
        second.load_adapter_state({**state, "fusion.weights": torch.zeros(2)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first_block": 4}, "first_block is 4; the tower has blocks 1 to 3"),
        ({"text_first_block": 9}, "text_first_block is 9"),
        ({"text_tokens": 65}, "text_tokens is 65; at most 64"),
        ({"first_block": 3}, "roles are for 3 blocks of 4 heads from block 2"),
    ],
)
def test_what_does_not_fit_is_refused(clip, options, message):
    with pytest.raises(ConfigError, match=message):
        DearModel(
            clip, uniform("mixed"), DearConfig(**{"attributes": ATTRIBUTES, "first_block": 2, **options})
        )


def test_default_first_block():
    assert [default_first_block(n) for n in (3, 4, 6, 12, 24)] == [3, 4, 5, 9, 17]
