"""From head outputs to roles, the command line, the map, and ablation, on tiny random bases and planted heads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dear_serve.backbone.clip import Clip
from dear_serve.backbone.zoo import Base
from dear_serve.config import ClipConfig, PreprocessConfig
from dear_serve.dear.roles import HeadRole, Roles
from dear_serve.errors import CheckFailedError, ConfigError, DataError, MissingDependencyError
from training import role_map, roles
from training.ablation import LabelledPictures, ablate_heads, mean_ablated, value_means
from training.concepts import NOISE, Lexicon
from training.probe import HeadOutputs, folder_pictures, head_outputs
from training.role_report import BaseIdentity, RolesConfig, assign_role, classify, tercile_thresholds

CONCEPTS = ("color", "shape", "texture", "object")
LEXICON = Lexicon(concepts={c: (f"{c} seed",) for c in CONCEPTS})
WORDS = [f"{c} {i}" for c in CONCEPTS for i in range(6)]
BASE = BaseIdentity(name="planted", sha256="0" * 64, head_width=24)
# variance that each concept explains in each of 4 heads
HEADS = (
    {"color": 1.0},
    {"shape": 0.9, "color": 0.1},
    {"shape": 0.5, "texture": 0.5},
    dict.fromkeys(CONCEPTS, 0.25),
)


def encode(texts: Sequence[str]) -> np.ndarray:
    return np.eye(4, dtype=np.float32)[[CONCEPTS.index(t.split()[0]) for t in texts]]


def planted() -> HeadOutputs:
    """Head outputs (2 blocks, 2 heads, width 24) made of the features of WORDS, which are unit vectors."""
    covariance = np.zeros((4, 24, 24))
    for h, shares in enumerate(HEADS):
        for concept, share in shares.items():
            for i in range(6):
                k = CONCEPTS.index(concept) * 6 + i
                covariance[h, k, k] = share * (6 - i) / 21
    return HeadOutputs(
        covariance=covariance.reshape(2, 2, 24, 24),
        mean=np.zeros((2, 2, 24)),
        pictures=9,
        last_block=6,
        largest_error=0.0,
    )


def pool() -> tuple[list[str], np.ndarray]:
    return WORDS, np.eye(24, dtype=np.float32)


def classified(**options: object) -> roles.RoleReport:
    config = RolesConfig.from_dict(
        {"attributes": ["color", "shape", "texture"], "clusters": {"min_cluster_size": 4}, **options}
    )
    return classify(planted(), pool=pool(), encode=encode, lexicon=LEXICON, base=BASE, config=config)


def test_planted_heads_get_their_roles() -> None:
    report = classified(thresholds=[0.6, 1.5])
    found = report.roles
    assert [(h.layer, h.head) for h in found.heads] == [(5, 0), (5, 1), (6, 0), (6, 1)]
    assert [h.role for h in found.heads] == ["attribute", "attribute", "mixed", "generalization"]
    assert [h.concept for h in found.heads[:2]] == ["color", "shape"]
    np.testing.assert_allclose([h.entropy for h in found.heads], [0.0, 0.468996, 1.0, 2.0], atol=1e-4)
    assert [d.text for d in found.heads[0].descriptions] == WORDS[:6]
    assert found.experts("color") == [(5, 0)]
    assert report.shares[1] == pytest.approx({"shape": 0.9, "color": 0.1}, abs=1e-3)
    assert report.explained == pytest.approx([1.0, 1.0, 1.0, 20 / 21], abs=1e-4)  # 24 texts, 20 chosen
    assert report.warnings() == ["no expert head for texture: its token will be seen by mixed heads only"]
    assert report.noise == 0.0
    assert found == classified(thresholds=[0.6, 1.5]).roles


def test_shares_by_count_are_the_papers() -> None:
    report = classified(share="count", top_n=24)
    assert report.shares[1] == {"color": 0.5, "shape": 0.5}
    assert report.roles.heads[3].entropy == pytest.approx(2.0)
    assert report.roles.heads[0].entropy == 0.0


def test_thresholds_are_terciles_by_default() -> None:
    assert tercile_thresholds([0.0, 1.0, 2.0, 3.0]) == (1.0, 2.0)
    found = classified().roles
    assert found.thresholds == tercile_thresholds([h.entropy for h in found.heads])


@pytest.mark.parametrize(
    ("entropy", "concept", "role"),
    [
        (0.5, "color", "attribute"),
        (0.51, "color", "mixed"),
        (1.5, "color", "generalization"),
        (0.0, NOISE, "generalization"),
        (0.0, "", "generalization"),
    ],
)
def test_role_of_an_entropy(entropy: float, concept: str, role: str) -> None:
    assert assign_role(entropy, (0.5, 1.5), concept) == role


def test_one_threshold_for_both() -> None:
    assert assign_role(1.0, (1.0, 1.0), "color") == "attribute"
    assert assign_role(1.1, (1.0, 1.0), "color") == "generalization"
    assert any("thresholds" in w for w in classified(thresholds=[2.0, 2.0]).warnings())


def test_head_that_does_not_vary_is_left_alone() -> None:
    outputs = planted()
    outputs.covariance[0, 0] = 0
    found = classify(
        outputs,
        pool=pool(),
        encode=encode,
        lexicon=LEXICON,
        base=BASE,
        config=RolesConfig(attributes=("color",)),
    )
    assert found.roles.heads[0].role == "generalization"
    assert found.roles.heads[0].descriptions == ()


@pytest.mark.parametrize(
    "options",
    [
        {"attributes": []},
        {"attributes": ["color", "color"]},
        {"attributes": ["rust level"]},
        {"top_n": 0},
        {"rank": -1},
        {"share": "votes"},
        {"thresholds": [2.0, 1.0]},
    ],
)
def test_wrong_parameters_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        classified(**options)


@pytest.fixture
def clip(tiny_clip_config: ClipConfig) -> Clip:
    torch.manual_seed(0)
    return Clip(tiny_clip_config).eval()


def batches(n: int = 6) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(n):
        yield torch.randn(4, 3, 32, 32, generator=generator)


def test_contributions_add_up_and_are_streamed(clip: Clip) -> None:
    seen: list[int] = []
    outputs = head_outputs(clip, batches(), first_block=2, progress=seen.append)
    assert outputs.covariance.shape == (2, 4, 24, 24)
    assert outputs.largest_error < 1e-4
    assert seen == [4, 8, 12, 16, 20, 24]
    with torch.no_grad():
        heads = clip.visual.contributions(torch.cat(list(batches())), first_block=2).heads
    expected = np.cov(heads[:, 1, 2].numpy().T.astype(np.float64), bias=True)
    np.testing.assert_allclose(outputs.covariance[1, 2], expected, atol=1e-8)
    # a head writes into as many directions as it is wide
    assert np.linalg.matrix_rank(outputs.covariance[1, 2], tol=1e-9) <= 8


def test_contributions_that_do_not_add_up_are_refused(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = clip.visual.forward
    monkeypatch.setattr(clip.visual, "forward", lambda x: forward(x) + 0.01)
    with pytest.raises(CheckFailedError, match=r"miss the image feature by 0\.01"):
        head_outputs(clip, batches(), first_block=2)


def test_one_picture_is_too_few(clip: Clip) -> None:
    with pytest.raises(DataError, match="1 pictures"):
        head_outputs(clip, [torch.zeros(1, 3, 32, 32)], first_block=3)


def write_pictures(folder: Path, n: int = 12) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(n):
        Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(folder / f"{i:02d}.png")


def test_folder_of_pictures(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in")
    (tmp_path / "in" / "broken.png").write_bytes(b"no picture")
    skipped: list[str] = []
    config = PreprocessConfig(size=32)
    found = torch.cat(
        list(folder_pictures(tmp_path / "in", 99, config, skipped=lambda path, _: skipped.append(path.name)))
    )
    assert found.shape == (12, 3, 32, 32)
    assert skipped == ["broken.png"]
    assert sum(len(b) for b in folder_pictures(tmp_path / "in", 5, config, seed=3)) in (4, 5)
    with pytest.raises(DataError, match="not a folder"):
        next(folder_pictures(tmp_path / "absent", 5, config))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no picture"):
        next(folder_pictures(tmp_path / "empty", 5, config))


@pytest.fixture
def tiny_base(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> Base:
    base = Base(clip=clip, name="tiny", sha256="1" * 64)
    monkeypatch.setattr(roles, "load_base", lambda name: base)
    return base


@pytest.mark.usefixtures("tiny_base")
def test_command_writes_the_same_bytes_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(tmp_path / "in")
    for out in ("a", "b"):
        options = [
            "--images",
            str(tmp_path / "in"),
            "--sentence-encoder",
            "clip",
            "--threads",
            "1",
            "--top-n",
            "5",
        ]
        assert roles.main([*options, "--out", str(tmp_path / out / "roles.json")]) == 0
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "roles.json",
        "roles.png",
        "roles.report.json",
    ]
    for name in ("roles.json", "roles.report.json", "roles.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    found = Roles.load(tmp_path / "a" / "roles.json")
    assert (found.base, found.first_block, found.layers, found.heads_per_layer) == ("tiny", 3, 3, 4)
    assert all(1 <= len(h.descriptions) <= 5 for h in found.heads)
    report = json.loads((tmp_path / "a" / "roles.report.json").read_text())
    assert "text tower" in report["sentence_encoder"]
    assert report["pictures"]["count"] == 12
    assert len(report["heads"]) == 4
    printed = capsys.readouterr().out
    assert "thresholds" in printed
    assert "noise" in printed
    with Image.open(tmp_path / "a" / "roles.png") as image:
        assert image.size[0] > 200


@pytest.mark.usefixtures("tiny_base")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "roles.txt"], "must end in .json"),
        (["--count", "1"], "--count 1"),
        (["--first-block", "9"], "blocks 1 to 3"),
        ([], "needs --images"),
        (["--images", "absent"], "not a folder"),
        (["--images", "in", "--attributes", "rust"], "add seed phrases"),
        (["--images", "in", "--descriptions", "absent"], "cannot be read"),
        (["--images", "in", "--concepts", "absent"], "does not hold a lexicon"),
        (["--images", "in", "--sentence-encoder", "absent"], "neither sbert"),
        (["--images", "in", "--thresholds", "2,1"], "the lower one first"),
    ],
)
def test_command_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "in", 3)
    arguments = ["--out", "roles.json", "--sentence-encoder", "clip", *options]
    assert roles.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "roles.json").exists()
    with pytest.raises((ConfigError, DataError)):
        roles.main([*arguments, "--debug"])


@pytest.mark.parametrize(
    "arguments", [[], ["--out", "x.json", "--thresholds", "low"], ["--out", "x.json", "--share", "x"]]
)
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        roles.main(arguments)
    assert exit_.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_map_needs_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(role_map.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="matplotlib"):
        role_map.check_matplotlib()
    assert roles.main(["--out", str(tmp_path / "roles.json")]) == 3
    assert 'pip install "dear-serve[train]"' in capsys.readouterr().err


def test_map_shows_every_kind_of_head(tmp_path: Path) -> None:
    kinds = (("attribute", "color"), ("attribute", "weather"), ("mixed", "shape"), ("generalization", ""))
    heads = tuple(
        HeadRole(layer=1, head=i, role=role, concept=concept, entropy=0.5)  # type: ignore[arg-type]
        for i, (role, concept) in enumerate(kinds)
    )
    drawn = Roles(
        base="x",
        base_sha256="",
        layers=1,
        heads_per_layer=4,
        first_block=1,
        attributes=("color",),
        thresholds=(1, 2),
        heads=heads,
    )
    role_map.draw_role_map(drawn, tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as image:
        colors = {c for _, c in image.convert("RGB").getcolors(2**24)}
    for fill in role_map._FILLS.values():
        assert tuple(bytes.fromhex(fill[1:])) in colors


def task(clip: Clip) -> LabelledPictures:
    """Labels that the whole model gets right by construction."""
    pixels = torch.cat(list(batches()))
    rng = np.random.default_rng(0)
    with torch.no_grad():
        features = clip.encode_image(pixels).numpy()
    features = features - features.mean(0)
    classes = {"color": rng.standard_normal((3, 24)), "shape": rng.standard_normal((4, 24))}
    with torch.no_grad():
        raw = clip.encode_image(pixels).numpy()
    labels = {name: (raw @ c.T).argmax(1) for name, c in classes.items()}
    return LabelledPictures(pixels=pixels, labels=labels, classes=classes)


def test_ablating_nothing_costs_nothing_and_everything_everything(clip: Clip) -> None:
    every = [(layer, head) for layer in (1, 2, 3) for head in range(4)]
    whole, losses = ablate_heads(clip, task(clip), [[], [(3, 0)], every])
    assert whole == {"color": 1.0, "shape": 1.0}
    assert losses[0] == {"color": 0.0, "shape": 0.0}
    assert all(0.0 <= v <= 1.0 for v in losses[1].values())


def test_ablated_heads_write_their_mean(clip: Clip) -> None:
    pixels = torch.cat(list(batches()))
    every = [(layer, head) for layer in (1, 2, 3) for head in range(4)]
    means = value_means(clip, pixels, [1, 2, 3])
    assert means[2].shape == (4, 17, 8)
    with torch.no_grad():
        before = clip.visual(pixels)
        with mean_ablated(clip, [(3, 1)], means):
            one = clip.visual(pixels)
        with mean_ablated(clip, every, means):
            none = clip.visual(pixels)
        after = clip.visual(pixels)
    torch.testing.assert_close(before, after)
    assert (one - before).abs().max() > 1e-4
    # only attention brings pictures to the CLS token, so without any all features are the same
    assert none.std(0).max() < 1e-5
    assert before.std(0).max() > 1e-3


def test_ablating_a_head_the_model_lacks(clip: Clip) -> None:
    with pytest.raises(ConfigError, match=r"no head \(4, 0\)"):
        ablate_heads(clip, task(clip), [[(4, 0)]])
