"""dear-mini itself: its shape, its preprocessing, and how well a model of that shape sees the attribute world."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dear_serve.backbone.clip import Clip
from dear_serve.config import PreprocessConfig
from dear_serve.tokenizer import Tokenizer
from training.captions import attribute_prompts, full_captions, truth_matrix
from training.world import SIZE, World, sample_scenes
from training.world_vocab import ATTRIBUTES

__all__ = ["MINI", "PREPROCESS", "caption_recall", "pixels_from", "tokens_from", "zero_shot_accuracy"]

PREPROCESS = PreprocessConfig(size=SIZE, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
MINI: dict[str, Any] = {
    "embed_dim": 128,
    "vision_cfg": {"image_size": SIZE, "patch_size": 8, "width": 192, "layers": 6, "head_width": 24},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 128, "layers": 4, "heads": 8},
}


def pixels_from(images: np.ndarray) -> Tensor:
    """uint8 pictures (B, S, S, 3) -> float32 (B, 3, S, S), as `dear_serve.preprocess` gives for pictures of size S."""
    scaled = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    mean, std = torch.tensor(PREPROCESS.mean), torch.tensor(PREPROCESS.std)
    return (scaled - mean[:, None, None]) / std[:, None, None]


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_open_clip(context_length=MINI["text_cfg"]["context_length"])


@lru_cache(maxsize=200_000)
def _encode(text: str) -> tuple[int, ...]:
    return tuple(_tokenizer()([text])[0].tolist())


def tokens_from(texts: list[str]) -> Tensor:
    """int64 (M, L), cut to the longest end-of-text."""
    rows = np.array([_encode(t) for t in texts], dtype=np.int64)
    return torch.from_numpy(rows[:, : int(rows.argmax(1).max()) + 1])


@torch.no_grad()
def zero_shot_accuracy(
    clip: Clip, *, count: int = 1000, wording: str = "seen", n_objects: int | None = None, seed: int = 10**6
) -> dict[str, float]:
    """Share (0 to 1) of held-out-combination pictures whose attribute is named right, per attribute.

    Args:
        clip: the model.
        count: pictures.
        wording: of the prompts, "seen" in training or "unseen"; several a value, their features averaged.
        n_objects: of the world.
        seed: of the pictures.
    """
    rng = np.random.default_rng(seed)
    scenes = sample_scenes(rng, count, split="heldout", n_objects=n_objects)
    images = World(n_objects).render(scenes, rng)
    chunks = range(0, count, 250)
    features = torch.cat([clip.encode_image(pixels_from(images[i : i + 250])) for i in chunks])
    truth, result = scenes.attributes(), {}
    for k, attribute in enumerate(ATTRIBUTES):
        prompts = attribute_prompts(attribute, wording=wording, n_objects=n_objects)
        flat = clip.encode_text(tokens_from([t for row in prompts for t in row]))
        classes = F.normalize(flat.reshape(len(prompts), -1, flat.shape[-1]).mean(1), dim=-1)
        best = (features @ classes.t()).argmax(1).numpy()
        result[attribute] = float((best == truth[:, k]).mean())
    return result


@torch.no_grad()
def caption_recall(
    clip: Clip, *, count: int = 1000, n_objects: int | None = None, seed: int = 10**6
) -> float:
    """Recall at 1: share of full captions whose own picture is the nearest among `count` held-out ones.

    Pictures of which the caption is true as well count as its own.
    """
    rng = np.random.default_rng(seed)
    scenes = sample_scenes(rng, count, split="heldout", n_objects=n_objects)
    images = World(n_objects).render(scenes, rng)
    captions = full_captions(rng, scenes)
    chunks = range(0, count, 250)
    pictures = torch.cat([clip.encode_image(pixels_from(images[i : i + 250])) for i in chunks])
    texts = torch.cat([clip.encode_text(tokens_from(captions.texts[i : i + 250])) for i in chunks])
    nearest = (texts @ pictures.t()).argmax(1).numpy()
    return float(truth_matrix(scenes, captions)[nearest, np.arange(count)].mean())
