"""Tiny random models and bundles for every test; no network, no downloaded weights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dear_serve.bundle import Bundle, BundleWriter, save_arrays
from dear_serve.config import ClipConfig, DearConfig, PreprocessConfig, TextConfig, VisionConfig
from dear_serve.dear.roles import HeadRole, Role, Roles
from dear_serve.manifest import BaseRef, Manifest, Readout
from dear_serve.readout import span_basis
from dear_serve.tokenizer import Tokenizer

os.environ.setdefault("OMP_NUM_THREADS", "2")


def tiny_config() -> ClipConfig:
    """A CLIP of 3 blocks a tower that runs in milliseconds; the vocabulary is CLIP's own, so real tokens fit."""
    return ClipConfig(
        embed_dim=24,
        vision=VisionConfig(image_size=32, patch_size=8, width=32, layers=3, heads=4, mlp_width=128),
        text=TextConfig(context_length=16, vocab_size=49408, width=32, layers=3, heads=4, mlp_width=128),
        preprocess=PreprocessConfig(size=32),
    )


@pytest.fixture(scope="session")
def tiny_clip_config() -> ClipConfig:
    return tiny_config()


TINY_PHRASES = ("something red", "something green", "something blue", "something white")


def tiny_manifest(base: BaseRef) -> Manifest:
    """Manifest of a bundle on a tiny base: two attributes, one read by a span, three classes."""
    return Manifest(
        base=base,
        dear=DearConfig(attributes=("color", "shape"), first_block=3, text_first_block=3, text_tokens=2),
        alpha=(0.6, 0.3, 0.1),
        logit_scale=10.0,
        class_names=("cat", "red cup", "tree"),
        templates=("a {}", "the {}"),
        preprocess=base.clip.preprocess,
        context_length=base.clip.text.context_length,
        readouts=(
            Readout(attribute="color", kind="span", phrases=TINY_PHRASES),
            Readout(attribute="shape", kind="token"),
        ),
        metrics={"zero_shot": 0.3, "adapted": 0.7},
    )


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return Tokenizer.from_open_clip(context_length=16)


@pytest.fixture(scope="session")
def fake_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Bundle:
    """A bundle for `engine="fake"`: everything but weights. Shared by all tests: read only."""
    manifest = tiny_manifest(BaseRef(name="tiny", sha256="0" * 64, clip=tiny_config()))
    phrases = np.random.default_rng(0).standard_normal((len(TINY_PHRASES), 24)).astype(np.float32)
    with BundleWriter(tmp_path_factory.mktemp("fake") / "tiny") as writer:
        save_arrays(writer.paths.adapter, random_adapter(manifest))
        save_arrays(writer.paths.readouts, {"color": span_basis(phrases)})
        tiny_roles(manifest).save(writer.paths.roles)
        tiny_tokenizer.to_file(writer.paths.tokenizer)
        return writer.commit(manifest)


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Bundle:
    """A bundle with a real model (random weights) that engine "torch" runs; not exported. Shared: read only."""
    import torch
    from safetensors.torch import save_file

    from dear_serve.backbone.clip import Clip
    from dear_serve.backbone.weights import to_open_clip
    from dear_serve.backbone.zoo import load_base
    from dear_serve.dear.model import DearModel

    folder = tmp_path_factory.mktemp("tiny")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        save_file(to_open_clip(Clip(tiny_config()).state_dict()), folder / "base.safetensors")
    (folder / "base.json").write_text(json.dumps(open_clip_config(tiny_config())))
    base = load_base(str(folder / "base.safetensors"))
    manifest = tiny_manifest(BaseRef(name=base.name, sha256=base.sha256, clip=base.config))
    roles = tiny_roles(manifest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = DearModel(base.clip, roles, manifest.dear)
    adapter = random_adapter(manifest)
    model.load_adapter_state({name: torch.tensor(array) for name, array in adapter.items()})
    with torch.inference_mode():
        phrases = model.zero_shot_text(torch.tensor(tiny_tokenizer(TINY_PHRASES))).numpy()
    manifest = replace(manifest, logit_scale=base.clip.tau, alpha=softmax_of(adapter["fusion.weights"]))
    with BundleWriter(folder / "bundle") as writer:
        save_arrays(writer.paths.adapter, adapter)
        save_arrays(writer.paths.readouts, {"color": span_basis(phrases)})
        roles.save(writer.paths.roles)
        tiny_tokenizer.to_file(writer.paths.tokenizer)
        return writer.commit(manifest)


def open_clip_config(config: ClipConfig) -> dict[str, object]:
    """`config` as open_clip writes it."""
    vision, text = config.vision, config.text
    return {
        "embed_dim": config.embed_dim,
        "vision_cfg": {
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            "width": vision.width,
            "layers": vision.layers,
            "head_width": vision.width // vision.heads,
        },
        "text_cfg": {
            "context_length": text.context_length,
            "vocab_size": text.vocab_size,
            "width": text.width,
            "layers": text.layers,
            "heads": text.heads,
        },
    }


def tiny_roles(manifest: Manifest) -> Roles:
    """One head of each kind: expert of color, expert of shape, mixed, generalization."""
    kinds: list[tuple[Role, str]] = [
        ("attribute", "color"),
        ("attribute", "shape"),
        ("mixed", "scene"),
        ("generalization", "scene"),
    ]
    return Roles(
        base=manifest.base.name,
        base_sha256=manifest.base.sha256,
        layers=3,
        heads_per_layer=4,
        first_block=3,
        attributes=manifest.dear.attributes,
        thresholds=(1.0, 2.0),
        heads=tuple(
            HeadRole(layer=3, head=i, role=role, concept=concept, entropy=float(i))
            for i, (role, concept) in enumerate(kinds)
        ),
    )


def random_adapter(manifest: Manifest) -> dict[str, npt.NDArray[np.float32]]:
    """Learned tensors of the right shapes, far from their initial values."""
    rng, count, clip = np.random.default_rng(2), len(manifest.dear.attributes), manifest.base.clip
    shapes = {
        "attribute_tokens.tokens": (count, clip.vision.width),
        "attribute_projection": (clip.vision.width, clip.embed_dim),
        "text_tokens.tokens": (manifest.dear.text_tokens, clip.text.width),
        "fusion.weights": (count + 1,),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def softmax_of(weights: npt.NDArray[np.float32]) -> tuple[float, ...]:
    powers = np.exp(weights.astype(np.float64))
    return tuple((powers / powers.sum()).tolist())


@dataclass(frozen=True)
class Demo:
    """What `dear-serve demo --quick --no-serve` left: a folder with runs/demo in it, and what it printed."""

    folder: Path
    output: str

    @property
    def root(self) -> Path:
        return self.folder / "runs" / "demo"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The whole path on dear-mini, once for all tests that look at behaviour. About a minute."""
    folder = tmp_path_factory.mktemp("demo")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "dear_serve.cli", "demo", "--quick", "--no-serve", "--port", str(port)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return Demo(folder=folder, output=result.stdout)
