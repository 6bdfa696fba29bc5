"""Exported graphs against torch: names, types, axes, and values row by row at many batch sizes and text lengths.

Every mismatch is collected before the check fails, so that one run shows all that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dear_serve.config import StrictConfig
from dear_serve.dear.explain import attention_maps
from dear_serve.dear.model import DearModel
from dear_serve.errors import CheckFailedError
from dear_serve.io_spec import ALL_GRAPHS, DYNAMIC, TensorSpec
from dear_serve.runtime.onnx_header import TensorHeader, read_header
from export.precision import Precision, precision_of
from export.samples import Samples

__all__ = ["BATCHES", "GraphParity", "Mismatch", "check_graphs", "signature_mismatches"]

BATCHES = (1, 2, 3, 7, 64)
_NO_FEATURES = ("attention", "contributions", "logits")
_SHOWN = 20

Array = npt.NDArray[Any]
Runner = Callable[[Mapping[str, Array]], list[Array]]


@dataclass(frozen=True)
class Mismatch:
    """One thing that does not hold."""

    graph: str
    message: str

    def __str__(self) -> str:
        return f"{self.graph}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class GraphParity(StrictConfig):
    """How close one graph is to torch."""

    rows: int
    max_difference: float
    tolerance: float
    min_cosine: float | None = None
    """Of feature outputs, row by row; without the hostile pictures where the precision excuses them."""
    hostile_cosine: float | None = None
    """The same over the hostile pictures alone."""
    top1_agreement: float | None = None
    """Share of rows whose best class is torch's, or ties with it (`Precision.tie`)."""
    top1_strict: float | None = None
    """Share of rows whose best class is torch's, ties not excused."""
    batches: tuple[int, ...] = BATCHES
    lengths: tuple[int, ...] = ()


@dataclass
class _Score:
    """Running worst of one graph."""

    tolerance: float
    limits: Precision
    rows: int = 0
    difference: float = 0.0
    cosine: float | None = None
    hostile_cosine: float | None = None
    agreed: int = 0
    strict: int = 0
    ranked: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)


def check_graphs(
    folder: Path,
    model: DearModel,
    class_features: torch.Tensor,
    samples: Samples,
    *,
    sizes: Mapping[str, int],
    precision: str = "fp32",
) -> dict[str, GraphParity]:
    """Check every graph in `folder`.

    Args:
        folder: with the files of `io_spec.ALL_GRAPHS`.
        model: the reference, on the CPU.
        class_features: adapted text features of the trained classes, (C, D).
        samples: what to feed.
        sizes: of the fixed axes, by letter (`runtime.onnx_engine.graph_sizes`).
        precision: of the graphs, whose limits hold (`export.precision`).

    Raises:
        CheckFailedError: naming every mismatch: graph, output, element, both values.
    """
    mismatches = signature_mismatches(folder, sizes)
    _raise(mismatches)  # values of a graph with another signature cannot be compared
    cases, limits = _Cases(model, class_features, samples), precision_of(precision)
    report: dict[str, GraphParity] = {}
    for name in ALL_GRAPHS:
        score = _Score(tolerance=cases.tolerance(name, limits), limits=limits)
        run = _runner(folder / ALL_GRAPHS[name].file)
        lengths: set[int] = set()
        for case in cases.of(name):
            lengths |= {case.length} if case.length else set()
            try:
                outputs = run(case.inputs)
            except Exception as error:  # ONNX Runtime's exceptions have no common ancestor below this
                score.mismatches.append(Mismatch(name, f"{case.label} does not run: {error}"))
                continue
            _compare(name, case, outputs, score)
        _check_top1(name, score)
        mismatches += score.mismatches
        report[name] = GraphParity(
            rows=score.rows,
            max_difference=score.difference,
            tolerance=score.tolerance,
            min_cosine=score.cosine,
            hostile_cosine=score.hostile_cosine,
            top1_agreement=score.agreed / score.ranked if score.ranked else None,
            top1_strict=score.strict / score.ranked if score.ranked else None,
            lengths=tuple(sorted(lengths)),
        )
    _raise(mismatches)
    return report


def _raise(mismatches: list[Mismatch]) -> None:
    if mismatches:
        more = [f"and {len(mismatches) - _SHOWN} more"] if len(mismatches) > _SHOWN else []
        lines = [str(m) for m in mismatches[:_SHOWN]] + more
        raise CheckFailedError(
            f"the graphs differ from torch in {len(mismatches)} places:\n  " + "\n  ".join(lines),
            code="parity",
        )


# --- signatures -------------------------------------------------------------------------------------


def signature_mismatches(folder: Path, sizes: Mapping[str, int]) -> list[Mismatch]:
    """What is wrong with names, types and axes of the graphs' inputs and outputs."""
    found: list[Mismatch] = []
    for name, spec in ALL_GRAPHS.items():
        inputs, outputs = read_header(folder / spec.file)
        found += _tensors(name, "input", spec.inputs, inputs, sizes)
        found += _tensors(name, "output", spec.outputs, outputs, sizes)
    return found


def _tensors(
    graph: str,
    kind: str,
    specs: tuple[TensorSpec, ...],
    headers: list[TensorHeader],
    sizes: Mapping[str, int],
) -> Iterator[Mismatch]:
    names, expected = [h.name for h in headers], [s.name for s in specs]
    if names != expected:
        yield Mismatch(graph, f"{kind}s are {names}; {expected} are expected")
        return
    for spec, header in zip(specs, headers, strict=True):
        if header.dtype != spec.dtype:
            yield Mismatch(graph, f"{kind} {spec.name} is {header.dtype}; {spec.dtype} is expected")
        shape = spec.shape(sizes)
        if len(shape) != len(header.axes):
            yield Mismatch(
                graph, f"{kind} {spec.name} has axes {list(header.axes)}; {list(shape)} are expected"
            )
            continue
        for i, (axis, size) in enumerate(zip(header.axes, shape, strict=True)):
            if size in DYNAMIC and not isinstance(axis, str):
                yield Mismatch(graph, f"{kind} {spec.name} axis {i} is frozen at {axis}; {size} is dynamic")
            elif size not in DYNAMIC and axis != size:
                yield Mismatch(graph, f"{kind} {spec.name} axis {i} is {axis}; {size} is expected")


# --- values -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One run of a graph and what torch says."""

    label: str
    inputs: dict[str, Array]
    expected: tuple[Array, ...]
    length: int = 0
    hostile: bool = False


class _Cases:
    """Torch's answers, each computed once, cut into runs."""

    def __init__(self, model: DearModel, class_features: torch.Tensor, samples: Samples) -> None:
        self._model, self._samples = model, samples
        self._pixels = np.concatenate([samples.pixels, samples.hostile])
        classes = class_features.numpy()
        with torch.inference_mode():
            rows = [model.image_features(p) for p in torch.from_numpy(self._pixels).split(16)]
            cls, attributes = torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])
            logits, _ = model.fuse(cls, attributes, class_features)
            frozen = torch.cat([model.zero_shot_image(p) for p in torch.from_numpy(self._pixels).split(16)])
            maps = torch.cat([attention_maps(model, p) for p in torch.from_numpy(self._pixels).split(16)])
            tokens = torch.from_numpy(samples.tokens)
            text, frozen_text = model.text_features(tokens), model.zero_shot_text(tokens)
        self._image = {
            "image": (cls.numpy(), attributes.numpy()),
            "classifier": (logits.numpy(),),
            "zero_shot_image": (frozen.numpy(),),
            "joint": (frozen.numpy(), cls.numpy(), attributes.numpy()),
            "explain": (maps.numpy(),),
        }
        self._text = {"text": (text.numpy(),), "zero_shot_text": (frozen_text.numpy(),)}
        self._classes = classes

    def tolerance(self, graph: str, limits: Precision) -> float:
        """Largest |difference| of an output's element."""
        logits = graph in ("classifier", "fusion")
        return limits.logit_tolerance(self._model.fusion.tau) if logits else limits.tolerance

    def of(self, graph: str) -> Iterator[_Case]:
        if graph in self._image:
            return self._images(graph)
        return self._texts(graph) if graph in self._text else self._fusions()

    def _images(self, graph: str) -> Iterator[_Case]:
        hostile = np.arange(len(self._samples.pixels), len(self._pixels))
        runs = [(f"batch {size}", rows) for size, rows in _windows(len(self._samples.pixels))]
        for label, rows in [*runs, ("hostile pixels", hostile)]:
            expected = tuple(output[rows] for output in self._image[graph])
            yield _Case(
                label=label,
                inputs={"pixels": self._pixels[rows]},
                expected=expected,
                hostile=rows is hostile,
            )

    def _texts(self, graph: str) -> Iterator[_Case]:
        tokens = self._samples.tokens
        lengths, context = tokens.argmax(1) + 1, tokens.shape[1]
        runs = [(f"batch {size}", rows, int(lengths[rows].max())) for size, rows in _windows(len(tokens))]
        for length in range(int(lengths.min()), context + 1):
            fitting = np.flatnonzero(lengths <= length)[-3:]
            runs.append((f"length {length}", fitting, length))
        for label, rows, length in runs:
            cut = np.ascontiguousarray(tokens[rows, :length])
            expected = tuple(output[rows] for output in self._text[graph])
            yield _Case(label=label, inputs={"tokens": cut}, expected=expected, length=length)

    def _fusions(self) -> Iterator[_Case]:
        cls, attributes = self._image["image"]
        banks = [self._classes, self._classes[:1], np.concatenate([o[0] for o in self._text.values()])]
        for size, rows in _windows(len(self._samples.pixels)):
            for bank in banks:
                with torch.inference_mode():
                    arrays = (cls[rows], attributes[rows], bank)
                    expected = self._model.fuse(*(torch.from_numpy(a) for a in arrays))
                names = (t.name for t in ALL_GRAPHS["fusion"].inputs)
                yield _Case(
                    label=f"batch {size}, {len(bank)} classes",
                    inputs=dict(zip(names, arrays, strict=True)),
                    expected=tuple(e.numpy() for e in expected),
                )


def _windows(count: int) -> Iterator[tuple[int, Array]]:
    """Batches of `BATCHES` over different rows: a frozen batch or a mix-up of rows shows."""
    start = 0
    for size in BATCHES:
        yield size, (np.arange(size) + start) % count
        start += size


def _runner(path: Path) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, dict(inputs))


def _compare(graph: str, case: _Case, outputs: list[Array], score: _Score) -> None:
    """Shapes, finiteness and values of one run; what is wrong goes into `score`."""
    score.rows += len(next(iter(case.inputs.values())))
    for spec, expected, found in zip(ALL_GRAPHS[graph].outputs, case.expected, outputs, strict=True):
        where = f"{spec.name} at {case.label}"
        if found.shape != expected.shape or found.dtype != expected.dtype:
            text = f"{where} is {found.dtype} {found.shape}; torch gives {expected.dtype} {expected.shape}"
            score.mismatches.append(Mismatch(graph, text))
            continue
        difference = np.abs(found - expected)
        difference[~np.isfinite(found)] = np.inf
        excused = case.hostile and not score.limits.hostile
        if excused and np.isfinite(found).all():
            if spec.name not in _NO_FEATURES:
                _angles(graph, where, expected, found, score, hostile=True)
            continue
        worst = np.unravel_index(int(difference.argmax()), difference.shape)
        score.difference = max(score.difference, float(difference[worst]))
        if difference[worst] > score.tolerance:
            text = (
                f"{where}{[int(i) for i in worst]} is {float(found[worst]):.7g}; torch gives "
                f"{float(expected[worst]):.7g}, which is {float(difference[worst]):.2g} away "
                f"({score.tolerance:.2g} is allowed)"
            )
            score.mismatches.append(Mismatch(graph, text))
        if spec.name == "logits":
            _rank(graph, where, expected, found, score)
        elif spec.name not in _NO_FEATURES:
            _angles(graph, where, expected, found, score, hostile=case.hostile)


def _angles(
    graph: str, where: str, expected: Array, found: Array, score: _Score, *, hostile: bool = False
) -> None:
    """Cosine of each feature with torch's."""
    with np.errstate(invalid="ignore"):
        norms = np.linalg.norm(expected, axis=-1) * np.linalg.norm(found, axis=-1)
        cosine = float(np.nan_to_num((expected * found).sum(-1) / norms, nan=-1.0).min())
    if hostile:
        score.hostile_cosine = min(cosine, score.hostile_cosine or 1.0)
        if not score.limits.hostile:
            return
    score.cosine = cosine if score.cosine is None else min(score.cosine, cosine)
    if cosine < score.limits.min_cosine:
        needed = score.limits.min_cosine
        score.mismatches.append(
            Mismatch(graph, f"{where} has cosine {cosine:.6f} with torch; {needed} is needed")
        )


def _rank(graph: str, where: str, expected: Array, found: Array, score: _Score) -> None:
    """Best class of each row; classes that torch holds equal within the tie are equally right."""
    rows, best = np.arange(len(found)), found.argmax(-1)
    behind = expected.max(-1) - expected[rows, best]
    tie = 2 * score.tolerance if score.limits.tie is None else score.limits.tie
    wrong = np.flatnonzero(~(behind <= tie))
    score.ranked += len(rows)
    score.agreed += len(rows) - len(wrong)
    score.strict += int((best == expected.argmax(-1)).sum())
    if score.limits.min_top1 < 1:
        return  # judged over all rows
    for row in wrong:
        text = f"{where} row {int(row)} is best at class {int(best[row])}; torch says {int(expected[row].argmax())}"
        score.mismatches.append(Mismatch(graph, text))


def _check_top1(graph: str, score: _Score) -> None:
    """Share of rows whose best class is torch's, where it may be less than all."""
    needed = score.limits.min_top1
    if needed < 1 and score.agreed < needed * score.ranked:
        text = f"the best class is torch's in {score.agreed} of {score.ranked} rows; {needed:.0%} is needed"
        score.mismatches.append(Mismatch(graph, text))
