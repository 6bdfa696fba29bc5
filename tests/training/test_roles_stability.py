"""Roles against chance and over samples, and the page that shows them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from dear_serve.dear.roles import Description, HeadRole, Roles
from training.ablation import Cost
from training.causal import CausalCheck
from training.concepts import Clusters
from training.role_html import Page, render
from training.role_pictures import Strongest
from training.role_report import Chosen, RoleReport, assign_role
from training.stability import against_chance, bootstrap, remembering

CONCEPTS = ("color", "shape", "texture", "object")


def report(rows: Sequence[Sequence[int]]) -> RoleReport:
    """One block of heads; `rows` holds the concept of each head's descriptions, all of one variance."""
    from training.concepts import concept_entropy

    chosen, texts, labels, heads, shares = [], [], [], [], []
    for index, row in enumerate(rows):
        own = [f"{CONCEPTS[c]} {index} {i}" for i, c in enumerate(row)]
        texts += own
        labels += row
        chosen.append(
            Chosen(
                descriptions=tuple(Description(text=t, variance=1.0) for t in own),
                explained=1.0,
                variance=float(len(row)),
            )
        )
        counts = np.bincount(row, minlength=4)
        concept, entropy = CONCEPTS[int(counts.argmax())], concept_entropy(counts.tolist())
        role = assign_role(entropy, (0.5, 1.9), concept)
        heads.append(
            HeadRole(
                layer=1,
                head=index,
                role=role,
                concept=concept,
                entropy=entropy,
                descriptions=chosen[-1].descriptions,
            )
        )
        shares.append({CONCEPTS[c]: float(counts[c] / len(row)) for c in np.flatnonzero(counts)})
    roles = Roles(
        base="<tiny>",
        base_sha256="",
        layers=1,
        heads_per_layer=len(rows),
        first_block=1,
        attributes=("color", "shape"),
        thresholds=(0.5, 1.9),
        heads=tuple(heads),
    )
    profiles = np.eye(4)[labels]
    clusters = Clusters(labels=np.array(labels), names=CONCEPTS, profiles=profiles)
    return RoleReport(
        roles=roles, shares=tuple(shares), chosen=tuple(chosen), descriptions=tuple(texts), clusters=clusters
    )


SPECIAL = [[0] * 12, [1] * 12, *[[0, 1, 2, 3] * 3] * 4]


def test_heads_of_one_concept_are_not_chance() -> None:
    chance = against_chance(report(SPECIAL), share="variance", draws=500)
    assert chance.specialized
    assert chance.p[:2] == pytest.approx((1 / 501, 1 / 501))
    assert min(chance.p[2:]) > 0.5
    assert chance.apart == 2
    assert 1.5 < chance.expected[0] < 2.0
    assert chance.to_dict()["p_overall"] == pytest.approx(1 / 501, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_descriptions_dealt_at_random_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.choice(4, p=[0.6, 0.2, 0.1, 0.1], size=(24, 12)).tolist()
    assert not against_chance(report(rows), share="count", draws=300).specialized


def test_the_same_concept_in_every_head_is_no_specialty() -> None:
    """All heads low in entropy, all alike: nothing tells them apart."""
    assert not against_chance(report([[0] * 12] * 6), share="variance", draws=100).specialized


def test_bootstrap_counts_heads_that_keep_role_and_attribute() -> None:
    whole = report(SPECIAL)
    asked: list[tuple[bool, bool]] = []

    def again(pictures: np.ndarray | None, descriptions: np.ndarray | None) -> RoleReport:
        asked.append((pictures is not None, descriptions is not None))
        if pictures is not None:
            assert pictures.sum() == 10
            return report([[1] * 12, *SPECIAL[1:]])  # head 0 becomes an expert of shape
        assert descriptions is not None and len(descriptions) == 30
        return whole

    told: list[int] = []
    first, second = bootstrap(whole, again, sizes=(10, 30), rounds=3, progress=lambda: told.append(1))
    assert asked == [(True, False)] * 3 + [(False, True)] * 3
    assert first.kept == (0.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert first.share == pytest.approx(5 / 6)
    assert first.experts == {"color": (0.0,), "shape": (1.0,)}
    assert (second.over, second.share, len(told)) == ("descriptions", 1.0, 6)
    assert first.to_dict()["share_of_heads"] == 0.8333


def test_each_text_is_encoded_once() -> None:
    asked: list[str] = []

    def encode(texts: Sequence[str]) -> np.ndarray:
        asked.extend(texts)
        return np.array([[len(t)] for t in texts], np.float32)

    encoder = remembering(encode)
    assert encoder(["a", "bb", "a"]).tolist() == [[1], [2], [1]]
    assert encoder(["bb", "ccc"]).tolist() == [[2], [3]]
    assert asked == ["a", "bb", "ccc"]


def page() -> Page:
    whole = report(SPECIAL)
    return Page(
        report=whole,
        facts={"pictures": {"what": "x & y", "count": 3}},
        concepts=CONCEPTS,
        chance=against_chance(whole, share="variance", draws=50),
    )


def full_page() -> Page:
    plain = page()
    cost = Cost(
        lost={"color": 0.25, "shape": 0.0},
        error={"color": 0.01, "shape": 0.01},
        nats={"color": 1.5, "shape": 0},
    )
    causal = CausalCheck(
        what="pictures",
        pictures=40,
        accuracy={"color": 0.9, "shape": 0.8},
        heads=(cost,) * 6,
        groups={"all heads": (((1, 0),), cost)},
    )
    first, second = bootstrap(plain.report, lambda a, b: plain.report, sizes=(4, 4), rounds=2)
    return replace(
        plain,
        causal=causal,
        stability=(first, second),
        pictures=[Strongest(overall=(0, 2), along={"a <b> text": (2,)})] * 6,
        thumbnails={0: b"\xff\xd8a", 2: b"\xff\xd8b"},
    )


def test_page_says_what_is_absent() -> None:
    text = render(page(), ["no expert & so on"])
    assert "no expert &amp; so on" in text
    assert "Absent: there were no labelled pictures" in text
    assert "Not measured (--bootstrap 0)" in text
    assert "&lt;tiny&gt;" in text and "<tiny>" not in text


def test_page_shows_everything_in_one_file() -> None:
    text = render(full_page(), [])
    assert not re.search(r"(src|href)=.https?:|<script|url\((?!data:)", text)
    assert "a &lt;b&gt; text" in text
    assert text.count("background-image:url(data:image/jpeg") == 2
    assert 'href="#h1-5"' in text and 'id="h1-5"' in text
    assert '<span class="own">25.0</span> <small class="note">+1.50</small>' in text
    assert "color 1 of 1, shape 0 of 1" in text
    assert "4 clusters" in text and "color 0 3: color" in text
    assert text == render(full_page(), [])
