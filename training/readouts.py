"""How each attribute of a picture is read out for search: the bases of the span readouts (method.md §8).

The basis of an attribute is the right singular vectors of its phrases' centred text features. Where an attribute has so
many values that their span is nearly the whole joint space ("object"), the spans of the other attributes are removed
from its phrases first (ours): what is left of the class feature is then what the others do not explain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dear_serve.manifest import Readout
from dear_serve.readout import span_basis
from dear_serve.runtime.base import Float32
from training.phrases import PHRASES, REMAINDERS

__all__ = ["build_readouts", "span_bases"]

_EXPLAINED = 0.99  # share of the phrases' variance that a basis keeps; the rest is wording


def span_bases(
    attributes: Sequence[str],
    encode: Callable[[Sequence[str]], Float32],
    *,
    own: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Float32]:
    """Basis Q (r, D) of each attribute that has phrases.

    Args:
        attributes: names; those without phrases are left out, and "object" where the other spans leave nothing.
        encode: texts to frozen text features (n, D), L2-normalised.
        own: phrases of attributes of one's own (`Roles.phrases`), which go before those of `PHRASES`. Their spans are
            never removed from another attribute's.
    """
    phrases = {**PHRASES, **(own or {})}
    features = {name: encode(phrases[name]) for name in attributes if name in phrases}
    bases = {name: _explaining(f, span_basis(f)) for name, f in features.items() if name not in REMAINDERS}
    removed = [basis for name, basis in bases.items() if name in PHRASES]
    others = np.concatenate(removed) if removed else None
    for name, f in features.items():
        if name in REMAINDERS and (others is None or np.linalg.matrix_rank(others) < others.shape[1]):
            bases[name] = _explaining(f, span_basis(f, without=others))
    return bases


def build_readouts(
    attributes: Sequence[str],
    kinds: Mapping[str, str],
    encode: Callable[[Sequence[str]], Float32],
    *,
    own: Mapping[str, Sequence[str]] | None = None,
) -> tuple[tuple[Readout, ...], dict[str, Float32]]:
    """The readouts that a bundle records, and the bases of those that are spans.

    Args:
        attributes: of the model.
        kinds: attribute to "token" or "span"; an attribute without phrases is read by its token.
        encode: as in `span_bases`.
        own: as in `span_bases`.
    """
    bases, phrases = span_bases(attributes, encode, own=own), {**PHRASES, **(own or {})}
    spans = {n: b for n, b in bases.items() if kinds.get(n, "token") == "span"}
    others = tuple(n for n in bases if n in PHRASES and n not in REMAINDERS)
    readouts = tuple(
        Readout(
            attribute=name,
            kind="span",
            phrases=tuple(phrases[name]),
            without=others if name in REMAINDERS else (),
        )
        if name in spans
        else Readout(attribute=name, kind="token")
        for name in attributes
    )
    return readouts, spans


def _explaining(features: Float32, basis: Float32) -> Float32:
    """The first rows of `basis` (r, D) that together explain enough of what it explains of `features` (n, D)."""
    variances = (((features - features.mean(axis=0)) @ basis.T) ** 2).sum(axis=0)
    shares = np.cumsum(variances) / variances.sum()
    return basis[: int(np.searchsorted(shares, _EXPLAINED)) + 1]
