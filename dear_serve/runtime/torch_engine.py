"""Runs a bundle with torch: the frozen base, loaded by its name, plus the bundle's adapter. The reference."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dear_serve.bundle import Bundle
from dear_serve.dear.explain import attention_maps
from dear_serve.errors import BaseModelError, BundleError, MissingDependencyError
from dear_serve.io_spec import ALL_GRAPHS
from dear_serve.runtime.base import (
    Engine,
    EngineInfo,
    Float32,
    FusedLogits,
    ImageFeatures,
    Int64,
    as_pixels,
    as_tokens,
    in_chunks,
)
from dear_serve.runtime.classes import TrainedClasses

if TYPE_CHECKING:
    import torch

    from dear_serve.dear.model import DearModel

__all__ = ["MAX_BATCH", "TorchEngine", "core_head_features", "load_model"]

MAX_BATCH = 64


def load_model(bundle: Bundle) -> DearModel:
    """The adapted model of a bundle, on the CPU, in evaluation mode.

    Raises:
        BaseModelError: the base cannot be loaded here, or its weights are not those the adapter was
        trained on. BundleError: the roles or the adapter do not fit. MissingDependencyError: torch is not
        installed.
    """
    _import_torch()
    from dear_serve.backbone.zoo import load_base
    from dear_serve.dear.model import DearModel

    expected = bundle.manifest.base
    base = load_base(expected.name)
    if base.sha256 != expected.sha256:
        raise BaseModelError(
            f"base {expected.name!r} has weights of sha256 {base.sha256} here; the bundle was trained on "
            f"{expected.sha256}: get those weights back, or train again",
            field="base",
        )
    model = DearModel(base.clip, bundle.roles(), bundle.manifest.dear)
    model.load_adapter_state(_read_adapter(bundle))
    return model.eval()


def core_head_features(bundle: Bundle) -> Callable[[Float32], dict[str, Float32]]:
    """Readout 2 of method.md §8: what the core heads of each attribute add to the frozen class feature (§1.1), summed.

    Returns:
        A function of pixels (B, 3, S, S) that gives (B, D) float32, of any length, for each attribute with core heads.

    Raises as `load_model`.
    """
    torch = _import_torch()
    model = load_model(bundle)
    roles = model.roles
    experts = {name: roles.experts(name) for name in bundle.manifest.dear.attributes}

    def run(pixels: Float32) -> dict[str, Float32]:
        with torch.inference_mode():
            heads = model.clip.visual.contributions(
                torch.from_numpy(pixels), first_block=roles.first_block
            ).heads
        return {
            name: torch.stack([heads[:, layer - roles.first_block, head] for layer, head in chosen])
            .sum(0)
            .numpy()
            for name, chosen in experts.items()
            if chosen
        }

    return run


class TorchEngine(Engine):
    """Engine over a `DearModel`.

    Args:
        bundle: an opened bundle; exported graphs are not needed.
        threads: torch's CPU threads, which are the process's, not the engine's alone; default: as they are.
        providers: one torch device, such as ["cuda:0"]; default: the CPU.

    Raises:
        MissingDependencyError: torch, or the asked device, is not there.
        BaseModelError, BundleError: as `load_model`.
    """

    def __init__(
        self, bundle: Bundle, *, threads: int | None = None, providers: Sequence[str] | None = None
    ) -> None:
        self._torch = _import_torch()
        self._manifest = bundle.manifest
        self._device = _resolve_device(self._torch, providers)
        if threads is not None:
            self._torch.set_num_threads(threads)
        self._model = load_model(bundle).to(self._device)
        self._trained = TrainedClasses(bundle)
        self._info = EngineInfo(
            engine="torch",
            provider=str(self._device),
            precision="fp32",
            threads=self._torch.get_num_threads(),
        )

    @property
    def info(self) -> EngineInfo:
        return self._info

    def encode_image(self, pixels: Float32) -> ImageFeatures:
        width, count = self._manifest.base.clip.embed_dim, len(self._manifest.dear.attributes)
        cls, attributes = in_chunks(
            lambda rows: self._call(self._model.image_features, rows),
            as_pixels(pixels, self._manifest.preprocess.size),
            limit=MAX_BATCH,
            empty=(np.zeros((0, width), np.float32), np.zeros((0, count, width), np.float32)),
        )
        return ImageFeatures(cls=cls, attributes=attributes)

    def encode_image_zero_shot(self, pixels: Float32) -> Float32:
        return self._rows(self._model.zero_shot_image, as_pixels(pixels, self._manifest.preprocess.size))

    def encode_text(self, tokens: Int64) -> Float32:
        return self._rows(self._model.text_features, as_tokens(tokens, self._manifest.context_length))

    def encode_text_zero_shot(self, tokens: Int64) -> Float32:
        return self._rows(self._model.zero_shot_text, as_tokens(tokens, self._manifest.context_length))

    def fuse(self, features: ImageFeatures, class_features: Float32) -> FusedLogits:
        logits, contributions = self._call(
            self._model.fuse, features.cls, features.attributes, np.asarray(class_features, np.float32)
        )
        return FusedLogits(logits=logits, contributions=contributions)

    def classify(self, pixels: Float32) -> Float32:
        return self.fuse(self.encode_image(pixels), self._trained.get(self)).logits

    def has(self, graph: str) -> bool:
        return graph in ALL_GRAPHS

    def joint(self, pixels: Float32) -> tuple[Float32, ImageFeatures]:
        width, count = self._manifest.base.clip.embed_dim, len(self._manifest.dear.attributes)

        def run(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            trunk = self._model.image_trunk(rows)
            return self._model.zero_shot_head(trunk), *self._model.image_head(trunk)

        zero_shot, cls, attributes = in_chunks(
            lambda rows: self._call(run, rows),
            as_pixels(pixels, self._manifest.preprocess.size),
            limit=MAX_BATCH,
            empty=tuple(np.zeros(s, np.float32) for s in ((0, width), (0, width), (0, count, width))),
        )
        return zero_shot, ImageFeatures(cls=cls, attributes=attributes)

    def explain(self, pixels: Float32) -> Float32:
        patches, count = self._manifest.base.clip.vision.patches, len(self._manifest.dear.attributes)
        (maps,) = in_chunks(
            lambda rows: self._call(lambda x: attention_maps(self._model, x), rows),
            as_pixels(pixels, self._manifest.preprocess.size),
            limit=MAX_BATCH,
            empty=(np.zeros((0, count, patches), np.float32),),
        )
        return maps

    def _rows(self, function: Callable[..., Any], rows: npt.NDArray[Any]) -> Float32:
        empty = np.zeros((0, self._manifest.base.clip.embed_dim), np.float32)
        (result,) = in_chunks(lambda part: self._call(function, part), rows, limit=MAX_BATCH, empty=(empty,))
        return result

    def _call(self, function: Callable[..., Any], *arrays: npt.NDArray[Any]) -> tuple[Float32, ...]:
        """`function` of the arrays as tensors on the device, its tensors as arrays."""
        with self._torch.inference_mode():
            results = function(*(self._torch.tensor(array, device=self._device) for array in arrays))
        results = results if isinstance(results, tuple) else (results,)
        return tuple(result.float().cpu().numpy() for result in results)


def _import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise MissingDependencyError(
            'engine torch needs PyTorch: pip install "dear-serve[train]"', field="engine"
        ) from error


def _resolve_device(module: Any, providers: Sequence[str] | None) -> torch.device:
    """The device that was asked for, tried with one small tensor."""
    name = providers[0] if providers else "cpu"
    try:
        device: torch.device = module.zeros(1, device=name).device
        return device
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build without CUDA
        raise MissingDependencyError(
            f"torch cannot use device {name!r} here: {error}", field="providers"
        ) from error


def _read_adapter(bundle: Bundle) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, torch.Tensor] = load_file(str(bundle.file("adapter.safetensors")))
        return tensors
    except SafetensorError as error:
        raise BundleError(f"adapter.safetensors cannot be read ({error}); train again") from error
