"""An exported bundle whose adapter was never trained, for benchmarks of speed: made once, then kept.

python benchmarks/random_bundle.py ViT-B-16/random runs/bench/vit-b-16
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from bench_image_tower import model_of

from dear_serve import load_base
from dear_serve.bundle import BaseRef, Bundle, BundleWriter, Manifest, save_arrays
from dear_serve.dear.roles import Roles
from dear_serve.tokenizer import Tokenizer
from export.to_onnx import DEFAULT_OPSET, export_graphs

CLASSES = (
    "apple",
    "bicycle",
    "cat",
    "dog",
    "elephant",
    "flower",
    "guitar",
    "house",
    "key",
    "lamp",
    "moon",
    "tree",
)


def random_bundle(base_name: str, folder: Path) -> Path:
    """`folder`, with a bundle on this base in it; as it is where there is one already. A minute for ViT-B-16."""
    if (folder / "onnx").is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    base = load_base(base_name)
    model = model_of(base_name)
    vision = base.config.vision
    dear = model.config
    roles = Roles.uniform(
        "mixed",
        layers=vision.layers,
        heads_per_layer=vision.heads,
        first_block=dear.first_block,
        attributes=dear.attributes,
    )
    manifest = Manifest(
        base=BaseRef(name=base.name, sha256=base.sha256, clip=base.config),
        dear=dear,
        alpha=tuple(model.fusion.alpha.detach().tolist()),
        logit_scale=base.clip.tau,
        class_names=CLASSES,
        templates=("a photo of a {}.",),
        preprocess=base.config.preprocess,
        context_length=base.config.text.context_length,
    )
    with BundleWriter(folder) as writer:
        save_arrays(writer.paths.adapter, {n: t.detach().numpy() for n, t in model.adapter_state().items()})
        roles.save(writer.paths.roles)
        Tokenizer.from_open_clip(context_length=manifest.context_length).to_file(writer.paths.tokenizer)
        writer.commit(manifest)
    features = torch.nn.functional.normalize(
        torch.randn(len(CLASSES), base.config.embed_dim, generator=torch.Generator().manual_seed(0)), dim=1
    )
    Bundle.open(folder).replace_folder(
        "onnx",
        lambda onnx: export_graphs(model, features, onnx, opset=DEFAULT_OPSET, metadata={}) and None,
    )
    return folder


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(random_bundle(sys.argv[1], Path(sys.argv[2])))
