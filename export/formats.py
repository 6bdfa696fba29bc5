"""A bundle in the layouts of other tools: a Triton model repository, and the frozen part as open_clip knows it.

What neither can say is left out and named in the README that is written beside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import onnx

from dear_serve.atomic import FolderWriter
from dear_serve.bundle import Bundle
from dear_serve.config import ClipConfig
from dear_serve.errors import BundleError, ConfigError
from dear_serve.io_spec import ALL_GRAPHS, OPTIONAL_GRAPHS, GraphSpec, TensorSpec
from dear_serve.runtime.onnx_engine import MAX_BATCH, graph_sizes
from dear_serve.runtime.tensorrt import read_build

__all__ = ["FORMATS", "open_clip_config", "triton_config", "write_format"]

_TRITON_TYPES = {"float32": "TYPE_FP32", "int64": "TYPE_INT64"}
_QUEUE_MICROSECONDS = 1000
_TRITON_README = """Triton model repository of {name}
Start: tritonserver --model-repository=THIS_FOLDER

Every model takes and gives what dear_serve's io_spec says: pixels are float32 (B, 3, {size}, {size}) as
dear_serve.preprocess makes them, tokens int64 as dear_serve.tokenizer does. Left out, because Triton has no model for
them: reading pictures, tokenizing, labels and templates (tokens -> text or zero_shot_text, averaged over templates and
normalised), search. A client does those; `dear-serve serve` does all of it. Every model has weights of its own, as
Triton shares none between models.
"""
_OPEN_CLIP_README = """The frozen base of {name}, as open_clip knows it
Load: open_clip.create_model_and_transforms("local-dir:THIS_FOLDER")

Left out, because open_clip has no place for them: the attribute tokens, the role masks, the text tokens, the attribute
projection and the fusion weights. So this is the zero-shot model; the adapted one is in the bundle.
"""


def write_format(bundle: Bundle, kind: str, out: Path) -> Path:
    """Write a bundle as another tool's layout into the new folder `out`.

    Args:
        bundle: with graphs for "triton"; its base must load here for "open_clip".
        kind: one of `FORMATS`.
        out: must not exist, or be empty.

    Raises:
        ConfigError: an unknown kind, or an `out` that holds something.
        BundleError: the bundle has no graphs, or `out` cannot be written; nothing is left behind then.
    """
    if kind not in FORMATS:
        raise ConfigError(f"format is {kind!r}; use one of {', '.join(FORMATS)}", field="format")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already; name a new folder with --out", field="out")
    try:
        with FolderWriter(out) as writer:
            FORMATS[kind](bundle, writer.temporary)
            writer.commit()
    except OSError as error:
        raise BundleError(
            f"{out} cannot be written ({error.strerror or error}); nothing was left there"
        ) from error
    return out


# --- Triton -----------------------------------------------------------------------------------------


def _triton(bundle: Bundle, folder: Path) -> None:
    """One model a graph: `<graph>/config.pbtxt` and `<graph>/1/`, the engine where there is one, else the graph."""
    report, sizes = read_build(bundle), graph_sizes(bundle.manifest)
    for name, spec in ALL_GRAPHS.items():
        if name in OPTIONAL_GRAPHS and f"onnx/{spec.file}" not in bundle.manifest.files:
            continue  # exported before there was such a graph
        graph, plan = bundle.file(f"onnx/{spec.file}"), report.plans.get(name) if report else None
        version = folder / name / "1"
        if report is not None and plan is not None:
            version.mkdir(parents=True)
            shutil.copy2(bundle.file(f"trt/{plan.file}"), version / "model.plan")
            platform, batch = "tensorrt_plan", report.batches[-1]
        else:
            _own_weights(graph, version / "model.onnx")
            platform, batch = "onnxruntime_onnx", MAX_BATCH
        text = triton_config(name, spec, sizes, platform=platform, batch=batch)
        (folder / name / "config.pbtxt").write_text(text, encoding="utf-8")
    size = bundle.manifest.preprocess.size
    (folder / "README").write_text(_TRITON_README.format(name=bundle.name, size=size), encoding="utf-8")


def triton_config(name: str, spec: GraphSpec, sizes: Mapping[str, int], *, platform: str, batch: int) -> str:
    """`config.pbtxt` of one graph.

    Requests are batched together where every input has the batch first; fusion, whose classes are none, takes its
    batch as a plain axis.
    """
    batched = all(tensor.axes[0] == "B" for tensor in (*spec.inputs, *spec.outputs))
    lines = [f'name: "{name}"', f'platform: "{platform}"', f"max_batch_size: {batch if batched else 0}"]
    for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        entries = ",\n".join(f"  {_tensor(tensor, sizes, batched=batched)}" for tensor in tensors)
        lines.append(f"{kind} [\n{entries}\n]")
    if batched:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {_QUEUE_MICROSECONDS} }}")
    return "\n".join(lines) + "\n"


def _tensor(tensor: TensorSpec, sizes: Mapping[str, int], *, batched: bool) -> str:
    shape = tensor.shape(sizes)[1 if batched else 0 :]
    dims = ", ".join(str(size) if isinstance(size, int) else "-1" for size in shape)
    return f'{{ name: "{tensor.name}" data_type: {_TRITON_TYPES[tensor.dtype]} dims: [ {dims} ] }}'


def _own_weights(graph: Path, folder: Path) -> None:
    """A graph whose weights are in a file of their own is a folder of the model's name to Triton.

    Copied, not linked to the bundle's: `onnx` refuses weights with several hard links.
    """
    folder.mkdir(parents=True)
    options: dict[str, Any] = {"save_as_external_data": True, "location": "weights.bin"}
    onnx.save_model(onnx.load(graph), folder / "model.onnx", **options)
    for path in folder.iterdir():
        shutil.copymode(graph, path)  # `onnx` lets only the owner read weights


# --- open_clip --------------------------------------------------------------------------------------


def _open_clip(bundle: Bundle, folder: Path) -> None:
    """`open_clip_model.safetensors` and `open_clip_config.json`, as open_clip's `local-dir:` reads them."""
    from safetensors.torch import save_file

    from dear_serve.backbone.weights import to_open_clip
    from dear_serve.runtime.torch_engine import load_model

    clip = load_model(bundle).clip
    tensors = {name: tensor.contiguous() for name, tensor in to_open_clip(clip.state_dict()).items()}
    save_file(tensors, folder / "open_clip_model.safetensors")
    text = json.dumps(open_clip_config(clip.config), indent=1) + "\n"
    (folder / "open_clip_config.json").write_text(text, encoding="utf-8")
    (folder / "README").write_text(_OPEN_CLIP_README.format(name=bundle.name), encoding="utf-8")


def open_clip_config(config: ClipConfig) -> dict[str, Any]:
    """Shape and preprocessing as open_clip writes them; `backbone.weights.clip_config` reads them back."""
    vision, text, preprocess = config.vision, config.text, config.preprocess
    towers: list[dict[str, Any]] = []
    for tower in (vision, text):
        values: dict[str, Any] = {"width": tower.width, "layers": tower.layers}
        values["mlp_ratio"] = tower.mlp_width / tower.width
        if tower.layer_scale:
            values["ls_init_value"] = 1.0  # the weights replace it
        towers.append(values)
    seeing, reading = towers
    seeing |= {
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "head_width": vision.width // vision.heads,
    }
    if not vision.ln_pre:
        seeing["no_ln_pre"] = True
    reading |= {"context_length": text.context_length, "vocab_size": text.vocab_size, "heads": text.heads}
    model = {"embed_dim": config.embed_dim, "vision_cfg": seeing, "text_cfg": reading}
    if config.quick_gelu:
        model["quick_gelu"] = True
    prepared = {
        "size": [preprocess.size, preprocess.size],
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "interpolation": preprocess.interpolation,
        "resize_mode": preprocess.resize_mode,
    }
    return {"model_cfg": model, "preprocess_cfg": prepared}


FORMATS: dict[str, Callable[[Bundle, Path], None]] = {"triton": _triton, "open_clip": _open_clip}
