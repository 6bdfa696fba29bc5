"""open_clip's configuration and state dict to ours, strictly: every tensor is used, or the base is refused by name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dear_serve.backbone.clip import Clip
from dear_serve.config import ClipConfig, PreprocessConfig, TextConfig, VisionConfig
from dear_serve.errors import BaseModelError

__all__ = ["clip_config", "convert", "load_weights", "to_open_clip", "weights_sha256"]

# Options of open_clip's configurations that change the computation, with the one value that our towers compute.
_BLOCKS_ONLY: dict[str, Any] = {
    "final_ln_after_pool": False,
    "act_kwargs": None,
    "norm_kwargs": None,
    "block_type": None,
    "qk_norm": False,
    "scaled_cosine_attn": False,
    "scale_heads": False,
    "scale_attn_inner": False,
    "scale_attn": False,
    "scale_fc": False,
}
_VISION_ONLY: dict[str, Any] = {
    **_BLOCKS_ONLY,
    "attentional_pool": False,
    "pos_embed_type": "learnable",
    "pool_type": "tok",
    "timm_model_name": None,
}
_TEXT_ONLY: dict[str, Any] = {
    **_BLOCKS_ONLY,
    "hf_model_name": None,
    "hf_tokenizer_name": None,
    "tokenizer_mode": None,
    "tokenizer_kwargs": None,
    "embed_cls": False,
    "no_causal_mask": False,
    "pool_type": "argmax",
    "proj_bias": False,
    "proj_type": "linear",
}
_VISION_SHAPE = {
    "image_size",
    "patch_size",
    "width",
    "layers",
    "head_width",
    "mlp_ratio",
    "ls_init_value",
    "no_ln_pre",
}
_VISION_TRAINING = {"patch_dropout", "attn_pooler_queries", "attn_pooler_heads", "output_tokens"}
_TEXT_SHAPE = {"context_length", "vocab_size", "width", "layers", "heads", "mlp_ratio", "ls_init_value"}
_TEXT_TRAINING = {"pad_id", "eos_id", "output_tokens"}
_TOP = {
    "embed_dim",
    "vision_cfg",
    "text_cfg",
    "quick_gelu",
    "custom_text",
    "init_logit_scale",
    "init_logit_bias",
}

# Ours -> open_clip's, within a block and within a tower.
_BLOCK = {
    "ln_1": "ln_1",
    "attention.in_proj.weight": "attn.in_proj_weight",
    "attention.in_proj.bias": "attn.in_proj_bias",
    "attention.out_proj": "attn.out_proj",
    "ls_1": "ls_1",
    "ln_2": "ln_2",
    "mlp.0": "mlp.c_fc",
    "mlp.2": "mlp.c_proj",
    "ls_2": "ls_2",
}
_VISION = {"patch_embedding": "conv1"}
_TEXT = {"projection": "text_projection"}


def _refuse(
    config: Mapping[str, Any], tower: str, only: Mapping[str, Any], known: set[str], name: str
) -> None:
    """Raise BaseModelError if `config` asks for something that our towers do not compute."""
    for key, value in config.items():
        if key in only:
            if value != only[key] and not (value is False and only[key] is None):
                raise BaseModelError(
                    f"base {name!r} has {tower} {key}={value!r}, which is not supported", field="base"
                )
        elif key not in known and not (key.startswith(("timm_", "hf_"))):
            raise BaseModelError(f"base {name!r} has an unknown {tower} option {key}={value!r}", field="base")


def clip_config(
    config: Mapping[str, Any],
    *,
    name: str = "",
    quick_gelu: bool | None = None,
    preprocess: PreprocessConfig | None = None,
) -> ClipConfig:
    """open_clip's model configuration (the content of its JSON files) as ours.

    Args:
        config: keys embed_dim, vision_cfg, text_cfg and optionally quick_gelu.
        name: for messages.
        quick_gelu: overrides the configuration (open_clip forces it for OpenAI's weights).
        preprocess: how pictures are prepared; default: CLIP's mean and std at the tower's size.

    Raises:
        BaseModelError: not a ViT-CLIP that our towers compute; the message names the option.
    """
    vision, text = config.get("vision_cfg", {}), config.get("text_cfg", {})
    _refuse(config, "model", {"multimodal_cfg": None}, _TOP, name)
    if config.get("init_logit_bias") is not None:
        raise BaseModelError(f"base {name!r} has a logit bias (SigLIP), which is not supported", field="base")
    _refuse(vision, "vision", _VISION_ONLY, _VISION_SHAPE | _VISION_TRAINING, name)
    _refuse(text, "text", _TEXT_ONLY, _TEXT_SHAPE | _TEXT_TRAINING, name)
    if not isinstance(vision.get("layers", 12), int):
        raise BaseModelError(f"base {name!r} is a ResNet; a ViT is needed, such as ViT-B-16", field="base")
    if not isinstance(vision.get("image_size", 224), int):
        raise BaseModelError(f"base {name!r} has non-square pictures, which are not supported", field="base")
    width, text_width = vision.get("width", 768), text.get("width", 512)
    image_size = vision.get("image_size", 224)
    return ClipConfig(
        embed_dim=config["embed_dim"],
        quick_gelu=bool(config.get("quick_gelu", False)) if quick_gelu is None else quick_gelu,
        vision=VisionConfig(
            image_size=image_size,
            patch_size=vision.get("patch_size", 16),
            width=width,
            layers=vision.get("layers", 12),
            heads=width // vision.get("head_width", 64),
            mlp_width=int(width * vision.get("mlp_ratio", 4.0)),
            ln_pre=not vision.get("no_ln_pre", False),
            layer_scale=vision.get("ls_init_value") is not None,
        ),
        text=TextConfig(
            context_length=text.get("context_length", 77),
            vocab_size=text.get("vocab_size", 49408),
            width=text_width,
            layers=text.get("layers", 12),
            heads=text.get("heads", 8),
            mlp_width=int(text_width * text.get("mlp_ratio", 4.0)),
            layer_scale=text.get("ls_init_value") is not None,
        ),
        preprocess=preprocess or PreprocessConfig(size=image_size),
    )


def _open_clip_name(name: str) -> str:
    """The name of our tensor in open_clip's state dict (the layout without a `text.` prefix)."""
    if name == "logit_scale":
        return name
    tower, rest = name.split(".", 1)
    prefix = "visual." if tower == "visual" else ""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", rest)
    if match:
        number, inner = match.groups()
        ours = next(k for k in _BLOCK if inner == k or inner.startswith(k + "."))
        return f"{prefix}transformer.resblocks.{number}.{_BLOCK[ours]}{inner[len(ours) :]}"
    for ours, theirs in (_VISION if tower == "visual" else _TEXT).items():
        if rest == ours or rest.startswith(ours + "."):
            return f"{prefix}{theirs}{rest[len(ours) :]}"
    return prefix + rest


def convert(state: Mapping[str, Tensor], config: ClipConfig, *, name: str = "") -> dict[str, Tensor]:
    """open_clip's state dict as ours, in float32.

    Args:
        state: tensors under open_clip's names, either layout (`text.` prefix or not).
        config: the shape they must have.
        name: for messages.

    Raises:
        BaseModelError: a tensor is missing, left over, or has another shape; the message names it.
    """
    theirs = {k.removeprefix("text."): v for k, v in state.items() if not k.endswith("attn_mask")}
    ours: dict[str, Tensor] = {}
    with torch.device("meta"):
        expected = Clip(config).state_dict()
    for key, like in expected.items():
        source = _open_clip_name(key)
        if source not in theirs:
            raise BaseModelError(
                f"base {name!r} lacks the tensor {source!r}: not the weights of this model", field="base"
            )
        value = theirs.pop(source)
        if value.shape != like.shape:
            raise BaseModelError(
                f"base {name!r}: tensor {source!r} is {tuple(value.shape)}, {tuple(like.shape)} is expected",
                field="base",
            )
        ours[key] = value.detach().float().contiguous()
    if theirs:
        raise BaseModelError(
            f"base {name!r} has tensors that this model does not use: {sorted(theirs)[:5]}", field="base"
        )
    return ours


def to_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict under open_clip's names (the layout without a `text.` prefix)."""
    return {_open_clip_name(k): v for k, v in state.items()}


def load_weights(config: ClipConfig, state: Mapping[str, Tensor]) -> Clip:
    """A frozen Clip in evaluation mode that holds `state` (our names)."""
    clip = Clip(config)
    clip.load_state_dict(dict(state))
    return clip.eval().requires_grad_(False)


def weights_sha256(clip: Clip) -> str:
    """Identity of a base: SHA-256 over names, shapes and float32 bytes of its tensors, in name order."""
    digest = hashlib.sha256()
    for key, value in sorted(clip.state_dict().items()):
        digest.update(f"{key}{tuple(value.shape)}".encode())
        digest.update(value.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
