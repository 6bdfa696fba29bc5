"""Pretrain dear-mini, a small CLIP, from scratch on the attribute world (ours).

    python -m training.pretrain --out runs/mini               # starts, or goes on where it was stopped
    python -m training.pretrain --out runs/late --start runs/mini/last.pt --quiet 1 --texture 2 --steps 2400
    python -m training.pretrain --out runs/mini --ship        # writes dear_serve/assets/dear-mini from the last state
    python -m training.pretrain --check                       # figures of the shipped file, in about a minute

The contrastive loss knows the *truth matrix*: caption j is true of picture i for many i and j, exactly. Captions come
in groups (every object name; every color, shape, texture and location; one random subset of attributes a picture), and
within a group each picture's targets are its true captions in equal parts, and each caption's its true pictures.

What makes experts of the late heads (ours): left alone, a small tower moves color and place into the class token in its
first two blocks, and no head of the adapted blocks has anything to do with them. `quiet` penalises what the class token
knows of a picture before the last third of the blocks, so that the heads there have to read everything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dear_serve.backbone.clip import Clip
from dear_serve.backbone.weights import clip_config, to_open_clip
from dear_serve.backbone.zoo import ASSETS, load_base
from dear_serve.command import run_command
from dear_serve.config import StrictConfig, default_first_block
from dear_serve.errors import CheckFailedError, ConfigError
from training.captions import Captions, captions_of, merge_equal, sample_captions, truth_matrix
from training.mini import MINI, PREPROCESS, caption_recall, pixels_from, tokens_from, zero_shot_accuracy
from training.world import SIZE, World, sample_scenes
from training.world_vocab import ATTRIBUTES, VOCABULARY, object_names

__all__ = ["PretrainConfig", "check", "main", "pretrain", "ship", "truth_loss"]

_MAX_LOGIT_SCALE = math.log(100.0)
_SUBSETS, _OBJECTS, _ATTRIBUTE = 1.0, 1.0, 0.5  # weights of the caption groups


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(StrictConfig):
    """What fixes a pretraining run; stored with its state, and a state of another one is refused."""

    steps: int = 8000
    batch_size: int = 256
    lr: float = 1e-3
    warmup: int = 300
    weight_decay: float = 0.05
    seed: int = 0
    n_objects: int = 0
    """Only the first so many objects; 0 for all."""
    texture: float = _ATTRIBUTE
    """Weight of the texture captions; the other attributes have 0.5."""
    quiet: float = 0.0
    """Weight of the penalty on what the class token knows before the last third of the blocks."""
    start: str = ""
    """SHA-256 of the state whose weights were taken to start from; none: random ones."""

    @property
    def group_weights(self) -> tuple[float, ...]:
        """Of the caption groups: random subsets, objects, and the other four attributes."""
        others = (self.texture if a == "texture" else _ATTRIBUTE for a in _single_order()[1:])
        return (_SUBSETS, _OBJECTS, *others)

    @property
    def objects(self) -> int | None:
        """As `training.world` takes it."""
        return self.n_objects or None


class Batches(Dataset[dict[str, Any]]):
    """Batch number `step` of a run, made from (seed, step) alone, so that a resumed run sees the same ones."""

    def __init__(self, config: PretrainConfig) -> None:
        self.config = config
        self.world: World | None = None

    def __len__(self) -> int:
        return self.config.steps

    def __getitem__(self, step: int) -> dict[str, Any]:
        config = self.config
        if self.world is None:
            self.world = World(config.objects)
        rng = np.random.default_rng((config.seed, step))
        scenes = sample_scenes(rng, config.batch_size, split="train", n_objects=config.objects)
        subsets = sample_captions(rng, scenes)
        last = slice(
            2 * len(scenes), None
        )  # the random subsets; objects and single attributes come whole below
        subsets, _ = merge_equal(Captions(texts=subsets.texts[last], parts=subsets.parts[last]))
        groups = [subsets, *(_every_value(a, rng, config.objects) for a in _single_order())]
        short = [t for g in groups[1:] for t in g.texts]
        truth = [torch.from_numpy(truth_matrix(scenes, g)) for g in groups]
        images = torch.from_numpy(self.world.render(scenes, rng))
        return {"images": images, "tokens": [tokens_from(subsets.texts), tokens_from(short)], "truth": truth}


def _single_order() -> list[str]:
    return ["object", *(a for a in ATTRIBUTES if a != "object")]


def _every_value(attribute: str, rng: np.random.Generator, n_objects: int | None) -> Captions:
    """One caption for each value of one attribute, in random wording."""
    count = len(object_names(n_objects)) if attribute == "object" else len(VOCABULARY[attribute])
    parts = np.full((count, len(ATTRIBUTES)), -1, np.int64)
    parts[:, ATTRIBUTES.index(attribute)] = np.arange(count)
    return captions_of(parts, rng)


def truth_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """Cross-entropy against a truth matrix, both directions, averaged (ours).

    Args:
        logits: (B, M) float32.
        truth: (B, M) bool; rows and columns without any True are left out.
    """
    losses = []
    for scores, target in ((logits, truth), (logits.t(), truth.t())):
        known = target.any(1)
        shares = target[known].float()
        shares = shares / shares.sum(1, keepdim=True)
        losses.append(-(shares * scores[known].log_softmax(1)).sum(1).mean())
    return torch.stack(losses).mean()


def _image_features(clip: Clip, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Image features (B, D), not normalised, and how much the class token knows before block J (a scalar).

    The latter is the class token's variance over the pictures as it enters block J, relative to its variance after the
    last block: 0 when it is the same for every picture.
    """
    tower = clip.visual
    first = default_first_block(tower.config.layers)
    early = tower.run(tower.embed(pixels), 1, first - 1)
    late = tower.run(early, first, tower.config.layers)
    known = early[:, 0].float().var(0).sum() / late[:, 0].float().var(0).sum().detach()
    return tower.pool(late), known


def batch_loss(clip: Clip, batch: dict[str, Any], config: PretrainConfig) -> tuple[Tensor, float]:
    """Weighted mean over the caption groups of one batch plus the quiet penalty, and the unweighted penalty."""
    with torch.autocast("cpu", torch.bfloat16):
        image, known = _image_features(clip, pixels_from(batch["images"].numpy()))
        text = torch.cat([clip.encode_text(t, normalize=False) for t in batch["tokens"]])
    cosines = F.normalize(image.float(), dim=-1) @ F.normalize(text.float(), dim=-1).t()
    logits = clip.logit_scale.exp() * cosines
    parts = logits.split([t.shape[1] for t in batch["truth"]], dim=1)
    weights = config.group_weights
    losses = [w * truth_loss(p, t) for w, p, t in zip(weights, parts, batch["truth"], strict=True)]
    loss = torch.stack(losses).sum() / sum(weights)
    return (loss + config.quiet * known if config.quiet else loss), float(known.detach())


def _build(config: PretrainConfig) -> tuple[Clip, torch.optim.Optimizer]:
    torch.manual_seed(config.seed)
    clip = Clip(clip_config(MINI, name="dear-mini", preprocess=PREPROCESS))
    torch.nn.init.normal_(clip.text.token_embedding.weight, std=0.02)
    decayed = [p for n, p in clip.named_parameters() if p.dim() > 1 and "embedding" not in n]
    rest = [p for n, p in clip.named_parameters() if p.dim() < 2 or "embedding" in n]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return clip, torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), fused=True)


def _rate(config: PretrainConfig, step: int) -> float:
    """Learning rate of a step: linear warm-up, then cosine to 1 % of the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def _take_weights(clip: Clip, path: Path) -> str:
    """Load the weights of a run's state into `clip`; the file's SHA-256."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give the last.pt or best.pt of a run", field="start")
    clip.load_state_dict(torch.load(path, weights_only=True)["model"])
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _save(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _steps(config: PretrainConfig, first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    loader = DataLoader(
        Batches(config), batch_size=None, sampler=range(first, config.steps), num_workers=1, prefetch_factor=4
    )
    yield from zip(range(first, config.steps), loader, strict=True)


def pretrain(
    config: PretrainConfig, out: Path, *, start: Path | None = None, every: int = 500, pictures: int = 1000
) -> Clip:
    """Train to `config.steps`, going on from `out/last.pt` if it is there; logs to `out/log.jsonl`.

    Args:
        config: of the run.
        out: folder of the run.
        start: state of another run whose weights are the first ones (its hash becomes `config.start`).
        every: steps between evaluations and saved states (`last.pt`, and `best.pt` by mean accuracy).
        pictures: of an evaluation.

    Raises:
        ConfigError: the state in `out` belongs to another configuration, or `start` can't be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    clip, optimizer = _build(config)
    if start is not None:
        config = replace(config, start=_take_weights(clip, start))
    first, best, spent = 0, 0.0, 0.0
    if (out / "last.pt").exists():
        state = torch.load(out / "last.pt", weights_only=True)
        if state["config"] != config.to_dict():
            raise ConfigError(f"{out} holds a run of {state['config']}; choose another --out", field="out")
        clip.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, best, spent = state["step"], state["best"], state["seconds"]
    began, running = time.monotonic(), 0.0
    for step, batch in _steps(config, first):
        for group in optimizer.param_groups:
            group["lr"] = _rate(config, step)
        loss, known = batch_loss(clip, batch, config)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(clip.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            clip.logit_scale.clamp_(max=_MAX_LOGIT_SCALE)
        running += (float(loss.detach()) - running) / (min(step - first, 50) + 1)
        if (step + 1) % every and step + 1 != config.steps:
            continue
        seconds = spent + time.monotonic() - began
        accuracy = zero_shot_accuracy(clip.eval(), count=pictures, n_objects=config.objects)
        mean = sum(accuracy.values()) / len(accuracy)
        line = {
            "step": step + 1,
            "loss": round(running, 4),
            "seconds": round(seconds),
            "tau": round(clip.tau, 2),
            "early": round(known, 4),
        }
        line |= {k: round(v, 4) for k, v in accuracy.items()}
        with (out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        state = {"config": config.to_dict(), "model": clip.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"step": step + 1, "best": max(best, mean), "seconds": seconds}
        _save(out / "last.pt", state)
        if mean > best:
            best = mean
            _save(out / "best.pt", {"config": config.to_dict(), "model": clip.state_dict(), "step": step + 1})
    return clip


def ship(run: Path, *, state: str = "last.pt", to: Path = ASSETS / "dear-mini", pictures: int = 2000) -> None:
    """Write the shipped files from a run's state: fp16 safetensors, open_clip's configuration, figures.

    Args:
        run: folder of the run.
        state: which of its states.
        to: folder to write.
        pictures: to measure the figures on.

    Raises:
        ConfigError: there is no such state.
    """
    from safetensors.torch import save

    if not (run / state).exists():
        raise ConfigError(f"{run / state} does not exist; pretrain first", field="out")
    saved = torch.load(run / state, weights_only=True)
    to.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.half().contiguous() for k, v in to_open_clip(saved["model"]).items()}
    (to / "open_clip_model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    preprocess = {"size": SIZE, "mode": "RGB", "mean": list(PREPROCESS.mean), "std": list(PREPROCESS.std)}
    preprocess |= {"interpolation": "bicubic", "resize_mode": "shortest", "fill_color": 0}
    _write_json(to / "open_clip_config.json", {"model_cfg": MINI, "preprocess_cfg": preprocess})
    config = PretrainConfig.from_dict(saved["config"])
    base = load_base(str(to / "open_clip_model.safetensors"))
    about = {"sha256": base.sha256, "step": saved["step"], "config": saved["config"], "pictures": pictures}
    _write_json(to / "figures.json", {**about, **_figures(base.clip, config, pictures)})


def _figures(clip: Clip, config: PretrainConfig, pictures: int) -> dict[str, Any]:
    """Zero-shot accuracy on held-out-combination pictures in both wordings, and recall by full caption."""
    return {
        "zero_shot": {
            wording: zero_shot_accuracy(clip, count=pictures, wording=wording, n_objects=config.objects)
            for wording in ("seen", "unseen")
        },
        "caption_recall_at_1": caption_recall(clip, count=min(1000, pictures), n_objects=config.objects),
    }


def check(folder: Path = ASSETS / "dear-mini") -> dict[str, Any]:
    """Measure shipped files again.

    Args:
        folder: as `ship` wrote it.

    Returns:
        The figures found.

    Raises:
        CheckFailedError: the hash or a figure (by more than half a point) is not the one in `figures.json`.
    """
    stored = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    base = load_base(str(folder / "open_clip_model.safetensors"))
    if base.sha256 != stored["sha256"]:
        raise CheckFailedError(
            f"dear-mini's weights have SHA-256 {base.sha256}, figures.json says {stored['sha256']}"
        )
    found = _figures(base.clip, PretrainConfig.from_dict(stored["config"]), stored["pictures"])
    for wording, figures in found["zero_shot"].items():
        for attribute, value in figures.items():
            expected = stored["zero_shot"][wording][attribute]
            if abs(value - expected) > 0.005:
                raise CheckFailedError(
                    f"dear-mini {attribute} ({wording}) is {value:.4f}, {expected:.4f} is expected"
                )
    return found


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.pretrain", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/mini"), help="folder of the run (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=PretrainConfig.steps)
    parser.add_argument("--batch-size", type=int, default=PretrainConfig.batch_size)
    parser.add_argument("--lr", type=float, default=PretrainConfig.lr)
    parser.add_argument("--warmup", type=int, default=PretrainConfig.warmup, help="steps")
    parser.add_argument("--seed", type=int, default=PretrainConfig.seed)
    parser.add_argument("--objects", type=int, default=0, help="only the first so many objects (default all)")
    parser.add_argument(
        "--texture", type=float, default=PretrainConfig.texture, help="weight of the textures"
    )
    parser.add_argument("--quiet", type=float, default=0.0, help="weight of the penalty on early reading")
    parser.add_argument("--start", type=Path, help="take the first weights from this state of another run")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--every", type=int, default=500, help="steps between evaluations and saved states")
    parser.add_argument(
        "--ship", action="store_true", help="write the shipped files from the run's last state"
    )
    parser.add_argument("--check", action="store_true", help="verify the shipped files: hash and figures")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    return run_command(lambda: _run(args), debug=args.debug)


def _run(args: argparse.Namespace) -> int:
    if args.check:
        print(json.dumps(check(), indent=2))
    elif args.ship:
        ship(args.out)
    else:
        config = PretrainConfig(
            steps=args.steps,
            batch_size=args.batch_size,
            lr=args.lr,
            warmup=args.warmup,
            seed=args.seed,
            n_objects=args.objects,
            texture=args.texture,
            quiet=args.quiet,
        )
        pretrain(config, args.out, start=args.start, every=args.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
