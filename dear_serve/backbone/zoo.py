"""Base models by name: dear-mini from this package, open_clip's names, local files.

dear-mini                  the small base that ships in `dear_serve/assets`
ViT-B-16/openai            open_clip's model and pretrained tag (open_clip's own download and cache)
ViT-B-16/random            that architecture with seeded random weights (tests and benchmarks)
ViT-B-16/path/to/weights   that architecture with weights from a local file
path/to/weights            a local file with `open_clip_config.json` (or the file's name with .json) beside it
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dear_serve.backbone import ASSETS
from dear_serve.backbone.clip import Clip
from dear_serve.backbone.weights import clip_config, convert, load_weights, weights_sha256
from dear_serve.config import ClipConfig, PreprocessConfig
from dear_serve.errors import BaseModelError, MissingDependencyError

__all__ = ["ASSETS", "Base", "load_base"]

_RANDOM_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Base:
    """A frozen base model and its identity."""

    clip: Clip
    name: str
    """What to write after `--base` to get it again."""
    sha256: str
    """`weights.weights_sha256` of the tensors."""

    @property
    def config(self) -> ClipConfig:
        """Shape and preprocessing."""
        return self.clip.config


def load_base(name: str) -> Base:
    """Load a base by one of the names in the module docstring.

    Raises:
        BaseModelError: unknown name, unsupported architecture, missing file, wrong tensors.
        MissingDependencyError: an open_clip name without open_clip installed.
    """
    if name == "dear-mini":
        clip = _from_file(ASSETS / "dear-mini" / "open_clip_model.safetensors", name=name)
    elif Path(name).is_file():
        clip = _from_file(Path(name), name=name)
    else:
        clip = _from_open_clip(name)
    return Base(clip=clip, name=name, sha256=weights_sha256(clip))


def _from_file(path: Path, *, name: str) -> Clip:
    if not path.is_file():
        raise BaseModelError(f"base {name!r} has no weights file {path.name}", field="base")
    candidates = [path.with_suffix(".json"), path.parent / "open_clip_config.json"]
    config_file = next((c for c in candidates if c.is_file()), None)
    if config_file is None:
        raise BaseModelError(
            f"base {name!r} has no configuration beside it: add open_clip_config.json, or name the architecture "
            f"as ViT-B-16/{name}",
            field="base",
        )
    try:
        data = json.loads(config_file.read_text(encoding="utf-8"))
        model = data.get("model_cfg", data)
        preprocess = _preprocess(data.get("preprocess_cfg", {}), model["vision_cfg"]["image_size"])
        config = clip_config(model, name=name, preprocess=preprocess)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaseModelError(
            f"base {name!r}: {config_file.name} cannot be read: {error}", field="base"
        ) from error
    return load_weights(config, convert(_read_tensors(path, name), config, name=name))


def _read_tensors(path: Path, name: str) -> dict[str, Tensor]:
    """Tensors of a .safetensors file, or of a torch file that holds nothing but tensors."""
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return load_file(str(path))
        data: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise BaseModelError(
            f"base {name!r} cannot be read as tensors ({type(error).__name__}); save it as .safetensors",
            field="base",
        ) from error
    data = data.get("state_dict", data) if isinstance(data, dict) else {}
    return {k.removeprefix("module."): v for k, v in data.items() if isinstance(v, Tensor)}


def _preprocess(data: dict[str, Any], size: int) -> PreprocessConfig:
    """open_clip's preprocess_cfg as ours; what is not given is CLIP's."""
    if data.get("resize_mode", "shortest") != "shortest" or data.get("mode", "RGB") != "RGB":
        raise BaseModelError(
            f"preprocessing {data!r} is not supported: RGB, resize_mode shortest", field="base"
        )
    given = data.get("size", size)
    size = given[0] if isinstance(given, (list, tuple)) else given
    values: dict[str, Any] = {k: data[k] for k in ("mean", "std", "interpolation") if k in data}
    return PreprocessConfig.from_dict({"size": size, **values}, where="preprocess_cfg")


def _from_open_clip(name: str) -> Clip:
    if importlib.util.find_spec("open_clip") is None:
        raise MissingDependencyError(
            f'base {name!r} needs open_clip: pip install "dear-serve[train]"', field="base"
        )
    import open_clip

    model_name, _, tag = name.partition("/")
    config = open_clip.get_model_config(model_name)
    if config is None:
        raise BaseModelError(
            f"base {name!r} is neither dear-mini, a file, nor an open_clip model/tag such as ViT-B-16/openai",
            field="base",
        )
    if not tag:
        tags = ", ".join(open_clip.list_pretrained_tags_by_model(model_name)) or "none known"
        raise BaseModelError(
            f"base {name!r} names no weights: add a tag ({tags}), a file, or random, as {model_name}/TAG",
            field="base",
        )
    ours = clip_config(config, name=name)  # refuses before anything is downloaded
    if tag == "random":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_RANDOM_SEED)
            return load_weights(ours, Clip(ours).state_dict())
    if Path(tag).is_file():
        return load_weights(ours, convert(_read_tensors(Path(tag), name), ours, name=name))
    try:
        model = open_clip.create_model(model_name, pretrained=tag, precision="fp32")
    except Exception as error:  # open_clip and its hub client raise many kinds
        raise BaseModelError(f"base {name!r} cannot be loaded by open_clip: {error}", field="base") from error
    quick = any(type(m).__name__ == "QuickGELU" for m in model.modules())
    preprocess = _preprocess(open_clip.get_model_preprocess_cfg(model), ours.vision.image_size)
    ours = clip_config(config, name=name, quick_gelu=quick, preprocess=preprocess)
    return load_weights(ours, convert(model.state_dict(), ours, name=name))
