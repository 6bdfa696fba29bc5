"""Readouts that a bundle records: spans where there are phrases and they are chosen, "object" without the others."""

from __future__ import annotations

import numpy as np

from dear_serve.readout import span_basis
from training import readouts as readouts_module
from training.phrases import PHRASES, REMAINDERS
from training.readouts import build_readouts, span_bases

NAMES = ("color", "shape", "texture", "object", "location", "rust")


def encode(texts):
    """A text tower that gives every word an independent direction."""
    rows = []
    for text in texts:
        vectors = [
            np.random.default_rng(sum(map(ord, w)) * 97 + len(w)).standard_normal(96) for w in text.split()
        ]
        rows.append(np.sum(vectors, axis=0))
    rows = np.array(rows, dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_bases_are_narrow_and_object_is_what_the_others_leave():
    bases = span_bases(NAMES, encode)
    assert set(bases) == set(NAMES) - {"rust"}
    assert all(len(bases[n]) <= len(PHRASES[n]) - 1 for n in NAMES[:3])
    for name in set(bases) - set(REMAINDERS):
        assert np.abs(bases["object"] @ bases[name].T).max() < 1e-4


def test_attributes_do_not_show_in_one_another_unless_that_leaves_nothing(monkeypatch):
    bases = span_bases(NAMES, encode)
    plain = span_basis(encode(PHRASES["texture"]))
    assert np.abs(bases["shape"] @ plain.T).max() < 0.2  # what 1 % of wording leaves
    monkeypatch.setitem(readouts_module.PHRASES, "shape", PHRASES["color"])
    again = span_bases(NAMES, encode)
    np.testing.assert_allclose(np.abs(again["shape"] @ again["color"].T).max(), 1, atol=1e-4)


def test_recorded_readouts_follow_the_choice():
    readouts, bases = build_readouts(
        NAMES, {"color": "span", "object": "span", "rust": "span", "shape": "token"}, encode
    )
    assert {r.attribute: r.kind for r in readouts} == {
        "color": "span",
        "shape": "token",
        "texture": "token",
        "object": "span",
        "location": "token",
        "rust": "token",
    }
    assert set(bases) == {"color", "object"}
    by_name = {r.attribute: r for r in readouts}
    assert by_name["object"].without == ("color", "shape", "texture", "location")
    assert by_name["color"].without == ("shape", "texture", "location")
    assert by_name["color"].phrases == PHRASES["color"]


def test_a_space_that_the_others_fill_leaves_object_to_its_token():
    def narrow(texts):
        return encode(texts)[:, :24]

    assert set(span_bases(NAMES, narrow)) == {"color", "shape", "texture", "location"}
    readouts, _ = build_readouts(NAMES, dict.fromkeys(NAMES, "span"), narrow)
    assert {r.attribute: r.kind for r in readouts}["object"] == "token"
