"""All graphs of one tower in one module, traced once and cut apart: tracing takes most of an export's time.

B batch, N patch tokens, K attributes, L text length, d tower width, D joint width, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor, nn

from dear_serve.backbone.text import end_of_text
from dear_serve.dear.model import DearModel
from dear_serve.io_spec import ALL_GRAPHS, GraphSpec, TensorSpec
from export.wrappers import ClassHead, Explain, Fusion, Text

__all__ = ["ImageSide", "Side", "TextSide", "count_traced", "cut", "sides"]


class ImageSide(nn.Module):
    """Every graph that takes pixels, over one tower."""

    def __init__(self, model: DearModel, class_features: Tensor, *, fused: bool) -> None:
        super().__init__()
        self.tower = Explain(model, fused=fused)
        self.head = ClassHead(model, class_features)
        self.one_way = model.config.mask == "one-way"

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """(B, 3, S, S) -> frozen (B, D), (B, D), (B, K, D), logits (B, C), attention (B, K, N), and see below."""
        tower = self.tower
        trunk = tower.trunk(tower.embed(pixels))
        steps = list(tower.inputs(trunk, len(tower.blocks)))
        cls, attributes = tower.finish(steps[-1][1])
        outputs = (tower.frozen(trunk), cls, attributes, self.head(cls, attributes), tower.maps(steps))
        # With the one-way mask nothing reaches CLS from the attribute tokens: the joint graph is the adapted one.
        return (*outputs, cls.clone()) if self.one_way else outputs


class TextSide(nn.Module):
    """Both graphs that take tokens, over one tower."""

    def __init__(self, model: DearModel, *, fused: bool) -> None:
        super().__init__()
        self.tower = Text(model, fused=fused)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """int64 (B, L) -> adapted (B, D), and frozen (B, D) where there are learned tokens to tell them apart."""
        tower = self.tower
        bias, position = tower.causal_bias(tokens.shape[1]), end_of_text(tokens)
        trunk = tower.trunk(tower.embed(tokens), bias)
        frozen = tower.frozen(trunk, bias, position)
        return (tower.adapted(trunk, position), frozen) if tower.extra else (frozen,)


@dataclass(frozen=True, kw_only=True)
class Side:
    """A module to trace and what is cut from it."""

    module: nn.Module
    spec: GraphSpec
    """Its inputs and outputs; no file has this name."""
    cuts: Mapping[str, tuple[str, ...]]
    """By graph of `io_spec`: which outputs of the module are its outputs, in its order."""


def sides(model: DearModel, class_features: Tensor, *, fused: bool) -> tuple[Side, ...]:
    """What to trace for all graphs of `io_spec.ALL_GRAPHS`.

    Args:
        model: the adapted model.
        class_features: adapted text features of the trained classes, (C, D), L2-normalised.
        fused: see `LeanAttention`.
    """
    one_way, learned = model.config.mask == "one-way", model.config.text_tokens > 0
    pictures = ("frozen", "cls", "attributes", "logits", "attention", *(["same"] if one_way else []))
    texts = ("adapted", "frozen") if learned else ("frozen",)
    image = {
        "image": ("cls", "attributes"),
        "classifier": ("logits",),
        "zero_shot_image": ("frozen",),
        "joint": ("same" if one_way else "frozen", "cls", "attributes"),
        "explain": ("attention",),
    }
    text = {"text": (texts[0],), "zero_shot_text": ("frozen",)}
    fusion = {"fusion": tuple(t.name for t in ALL_GRAPHS["fusion"].outputs)}
    return (
        _side(ImageSide(model, class_features, fused=fused), "image", pictures, image),
        _side(TextSide(model, fused=fused), "text", texts, text),
        _side(Fusion(model), "fusion", fusion["fusion"], fusion),
    )


def _side(module: nn.Module, like: str, outputs: Sequence[str], cuts: Mapping[str, tuple[str, ...]]) -> Side:
    named = tuple(TensorSpec(name=name, dtype="float32", axes=()) for name in outputs)
    spec = GraphSpec(file=f"{like} side", inputs=ALL_GRAPHS[like].inputs, outputs=named)
    return Side(module=module.eval(), spec=spec, cuts=cuts)


def cut(traced: ir.Model, outputs: Sequence[str], spec: GraphSpec) -> ir.Model:
    """The part of a traced side that gives `outputs`, named as `spec` says; weights are shared with it, not copied."""
    graph = ir.convenience.extract(traced.graph, [t.name for t in spec.inputs], outputs)
    # Its constants come in the order of a set; the same model must give the same bytes.
    place = {name: i for i, name in enumerate(traced.graph.initializers)}
    constants = sorted(graph.initializers.values(), key=lambda value: place[str(value.name)])
    graph.initializers.clear()
    for value in constants:
        graph.register_initializer(value)
    for value, tensor in zip(graph.outputs, spec.outputs, strict=True):
        value.name = tensor.name
    graph.name = spec.file.partition(".")[0]
    # extract() collects constants in a set, whose order changes from run to run; the same model gives the same bytes.
    places = {name: place for place, name in enumerate(traced.graph.initializers)}
    for name in sorted(graph.initializers, key=lambda name: places[name]):
        graph.initializers[name] = graph.initializers.pop(name)
    return ir.Model(graph, ir_version=traced.ir_version)


def count_traced(graph: torch.fx.Graph, outputs: Sequence[int]) -> int:
    """Operations of a traced program that its outputs at the given places depend on."""
    (results,) = graph.output_node().args
    assert isinstance(results, (list, tuple))
    waiting, seen = [results[i] for i in outputs], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, torch.fx.Node) and node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return sum(node.op == "call_function" for node in seen)
