"""Who sees whom: the role masks as tables, and the roles they come from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dear_serve.dear.mask import block_mask, head_mask
from dear_serve.dear.roles import Description, HeadRole, Roles
from dear_serve.errors import BundleError, ConfigError

# Rows see columns. Tokens: CLS, one patch, then attribute tokens a, b, c. "x" sees, "." does not.
TABLES = {
    ("generalization", None, "paper"): ["xx...", "xx...", "..xxx", "..xxx", "..xxx"],
    ("attribute", None, "paper"): ["xx...", "xx...", "..xxx", "..xxx", "..xxx"],
    ("attribute", 0, "paper"): ["xxx..", "xxx..", "xxx..", "...x.", "....x"],
    ("attribute", 1, "paper"): ["xx.x.", "xx.x.", "..x..", "xx.x.", "....x"],
    ("mixed", None, "paper"): ["xxxxx", "xxxxx", "xxxxx", "xxxxx", "xxxxx"],
    ("generalization", None, "one-way"): ["xx...", "xx...", "..xxx", "..xxx", "..xxx"],
    ("attribute", 1, "one-way"): ["xx...", "xx...", "..x..", "xx.x.", "....x"],
    ("mixed", None, "one-way"): ["xx...", "xx...", "xxxxx", "xxxxx", "xxxxx"],
}


@pytest.mark.parametrize(("case", "table"), TABLES.items(), ids=str)
def test_who_sees_whom(case, table):
    role, core, variant = case
    mask = head_mask(role, core=core, originals=2, attributes=3, variant=variant)
    assert ["".join("x" if seen else "." for seen in row) for row in mask] == table
    assert mask.any(axis=1).all()
    assert mask.diagonal().all()


def example_roles() -> Roles:
    kinds = [("attribute", "color"), ("attribute", "action"), ("mixed", "shape"), ("generalization", "color")]
    heads = tuple(
        HeadRole(
            layer=3,
            head=i,
            role=role,
            concept=concept,
            entropy=float(i),
            descriptions=(Description(text="t", variance=0.5),),
        )
        for i, (role, concept) in enumerate(kinds)
    )
    return Roles(
        base="b",
        base_sha256="0",
        layers=3,
        heads_per_layer=4,
        first_block=3,
        attributes=("color", "shape"),
        thresholds=(0.5, 2.5),
        heads=heads,
    )


def test_block_mask_follows_roles():
    mask = block_mask(example_roles(), 3, attributes=("color", "shape"), originals=2)
    assert mask.shape == (4, 4, 4)
    expected = [("attribute", 0), ("attribute", None), ("mixed", None), ("generalization", None)]
    for head, (role, core) in enumerate(expected):
        assert np.array_equal(mask[head], head_mask(role, core=core, originals=2, attributes=2))


def test_an_expert_of_an_attribute_without_token_is_another_expert():
    mask = block_mask(example_roles(), 3, attributes=("shape",), originals=2)
    assert np.array_equal(mask[0], head_mask("attribute", core=None, originals=2, attributes=1))


def test_core_heads_and_experts():
    roles = example_roles()
    assert [roles.core_attribute(3, h) for h in range(4)] == ["color", None, None, None]
    assert roles.experts("color") == [(3, 0)]
    assert roles.experts("shape") == []


def test_roles_round_trip(tmp_path):
    roles = example_roles()
    roles.save(tmp_path / "roles.json")
    assert Roles.load(tmp_path / "roles.json") == roles


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"layers": 4}, "4 heads; blocks 3 to 4"),
        ({"first_block": 2}, "blocks 2 to 3"),
    ],
)
def test_roles_that_do_not_fit_are_refused(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        replace(example_roles(), **change)
    data = {**example_roles().to_dict(), **change}
    with pytest.raises(ConfigError, match=message):
        Roles.from_dict(data)


def test_roles_file_errors(tmp_path):
    for content in (None, "{", "[]", '{"base": 1}'):
        if content is not None:
            (tmp_path / "roles.json").write_text(content)
        with pytest.raises(BundleError, match=r"roles\.json does not hold head roles"):
            Roles.load(tmp_path / "roles.json")


def test_permuted_keeps_the_counts():
    roles = Roles.uniform("mixed", layers=4, heads_per_layer=4, first_block=3, attributes=("color",))
    mixed = replace(roles, heads=tuple(replace(h, concept=str(i)) for i, h in enumerate(roles.heads)))
    dealt = mixed.permuted(1)
    assert sorted(h.concept for h in dealt.heads) == sorted(h.concept for h in mixed.heads)
    assert dealt.heads != mixed.heads
    assert dealt == mixed.permuted(1)
