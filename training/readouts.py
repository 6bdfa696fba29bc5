"""How each attribute of a picture is read out for search: the bases of the span readouts (method.md §8).

The basis of an attribute is the right singular vectors of its phrases' centred text features, the spans of the other
attributes removed first (ours): what is left is what no other attribute explains. Precision at 10 on 1,000 rendered
pictures, without and with: by texture 87 and 87 for texture, 38 and 13 for shape (chance 10); by shape 100 and 100 for
shape, 30 and 19 for texture (chance 17). "object" has so many values that its span is nearly the whole joint space, and
needs it; any other attribute that would lose more than half of its variance keeps its span as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from dear_serve.manifest import Readout
from dear_serve.readout import span_basis
from dear_serve.runtime.base import Float32
from training.phrases import PHRASES, REMAINDERS

__all__ = ["build_readouts", "span_bases"]

_LEFT = 0.5  # share of an attribute's variance that has to be left once the others' spans are removed
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
    return {name: basis for name, (basis, _) in _spans(attributes, encode, own).items()}


def _spans(
    attributes: Sequence[str],
    encode: Callable[[Sequence[str]], Float32],
    own: Mapping[str, Sequence[str]] | None,
) -> dict[str, tuple[Float32, tuple[str, ...]]]:
    """Basis of each attribute, and the attributes whose spans were removed from it."""
    phrases = {**PHRASES, **(own or {})}
    features = {name: encode(phrases[name]) for name in attributes if name in phrases}
    plain = {name: _explaining(f, span_basis(f)) for name, f in features.items() if name not in REMAINDERS}
    bases: dict[str, tuple[Float32, tuple[str, ...]]] = {}
    for name, f in features.items():
        names = _removed_from(name, plain)
        others = np.concatenate([plain[n] for n in names]) if names else None
        full = others is not None and np.linalg.matrix_rank(others) >= others.shape[1]
        left = 1.0 if others is None else 0.0 if full else _left(f, others)
        if name in REMAINDERS and full:
            continue
        if name in REMAINDERS or left >= _LEFT:
            bases[name] = _explaining(f, span_basis(f, without=others)), names
        else:
            bases[name] = plain[name], ()
    return bases


def _removed_from(name: str, spans: Iterable[str]) -> tuple[str, ...]:
    """Attributes whose spans are removed from this one's; own ones are not touched."""
    if name not in PHRASES:
        return ()
    return tuple(n for n in spans if n in PHRASES and n not in REMAINDERS and n != name)


def _left(features: Float32, others: Float32) -> float:
    """Share of the variance of `features` (n, D) outside of the span of `others` (s, D)."""
    centred = (features - features.mean(axis=0)).astype(np.float64)
    axes = np.linalg.qr(others.astype(np.float64).T)[0]
    inside = ((centred @ axes) ** 2).sum()
    return float(1 - inside / (centred**2).sum())


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
    found, phrases = _spans(attributes, encode, own), {**PHRASES, **(own or {})}
    spans = {n: basis for n, (basis, _) in found.items() if kinds.get(n, "token") == "span"}
    readouts = tuple(
        Readout(
            attribute=name,
            kind="span",
            phrases=tuple(phrases[name]),
            without=found[name][1],
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
