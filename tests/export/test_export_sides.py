"""One trace a tower, cut into graphs: the cuts equal the modules they stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from dear_serve.backbone.clip import Clip
from dear_serve.bundle import Bundle
from dear_serve.config import ClipConfig
from dear_serve.dear.model import DearModel
from dear_serve.dear.roles import Roles
from dear_serve.io_spec import ALL_GRAPHS
from export.sides import count_traced, sides
from export.wrappers import wrap


@pytest.mark.parametrize(
    "changes", [{}, {"mask": "one-way"}, {"text_tokens": 0}, {"first_block": 1}], ids=str
)
def test_cuts_equal_the_modules(tiny_clip_config: ClipConfig, tiny_bundle: Bundle, changes: dict) -> None:
    dear = replace(tiny_bundle.manifest.dear, **changes)
    roles = Roles.uniform(
        "mixed", layers=3, heads_per_layer=4, first_block=dear.first_block, attributes=dear.attributes
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DearModel(Clip(tiny_clip_config), roles, dear).eval()
        classes = torch.randn(4, 24)
        inputs = {
            "pixels": (torch.randn(2, 3, 32, 32),),
            "tokens": (torch.tensor([[49406, 320, 2368, 49407], [49406, 320, 49407, 0]]),),
            "cls": (torch.randn(2, 24), torch.randn(2, 2, 24), classes),
        }
    modules, seen = wrap(model, classes, fused=False), set()
    with torch.inference_mode():
        for side in sides(model, classes, fused=False):
            feeds = inputs[side.spec.inputs[0].name]
            results = side.module(*feeds)
            results = results if isinstance(results, tuple) else (results,)
            named = dict(zip((t.name for t in side.spec.outputs), results, strict=True))
            for name, outputs in side.cuts.items():
                expected = modules[name](*feeds)
                expected = expected if isinstance(expected, tuple) else (expected,)
                for output, reference in zip(outputs, expected, strict=True):
                    torch.testing.assert_close(named[output], reference, msg=f"{name} {output}")
                seen.add(name)
    assert seen == set(ALL_GRAPHS)


def test_operations_are_counted_for_each_cut() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shared = torch.relu(x)
        return torch.sin(shared), torch.cos(torch.exp(shared))

    graph = fx.symbolic_trace(both).graph
    assert [count_traced(graph, places) for places in ([0], [1], [0, 1])] == [2, 3, 4]
