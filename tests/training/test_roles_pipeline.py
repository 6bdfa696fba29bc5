"""From head outputs to roles, the command line, the map, and ablation, on tiny random bases and planted heads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dear_serve.backbone.clip import Clip
from dear_serve.backbone.zoo import Base
from dear_serve.config import ClipConfig
from dear_serve.dear.roles import HeadRole, Roles
from dear_serve.errors import ConfigError, DataError, MissingDependencyError
from training import role_compute, role_map, roles
from training.concepts import NOISE, Lexicon
from training.descriptions import general_descriptions, unique
from training.head_values import HeadOutputs
from training.role_report import (
    BaseIdentity,
    RoleReport,
    RolesConfig,
    assign_role,
    classify,
    tercile_thresholds,
)

CONCEPTS = ("color", "shape", "texture", "object")
LEXICON = Lexicon(concepts={c: (f"{c} seed",) for c in CONCEPTS})
WORDS = [f"{c} {i}" for c in CONCEPTS for i in range(6)]
BASE = BaseIdentity(name="planted", sha256="0" * 64)
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
    rng = np.random.default_rng(0)
    codes = rng.standard_normal((200, 24))
    codes = np.linalg.qr(codes - codes.mean(0))[0] * np.sqrt(200)  # exactly uncorrelated, of variance 1
    variances = np.zeros((4, 24))
    for h, shares in enumerate(HEADS):
        for concept, share in shares.items():
            for i in range(6):
                variances[h, CONCEPTS.index(concept) * 6 + i] = share * (6 - i) / 21
    values = codes[:, None] * np.sqrt(variances)
    return HeadOutputs(
        values=values.reshape(200, 2, 2, 24),
        basis=np.broadcast_to(np.eye(24), (2, 2, 24, 24)),
        positions=tuple(range(200)),
        last_block=6,
        largest_error=0.0,
        checked=200,
    )


def pool() -> tuple[list[str], np.ndarray]:
    return WORDS, np.eye(24, dtype=np.float32)


def classified(**options: object) -> RoleReport:
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
    explained = [c.explained for c in report.chosen]
    assert explained == pytest.approx([1.0, 1.0, 1.0, 20 / 21], abs=1e-4)  # 24 texts, 20 chosen
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
    outputs.values[:, 0, 0] = 0
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


def write_pictures(folder: Path, n: int = 12) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(n):
        Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(folder / f"{i:02d}.png")


@pytest.fixture
def tiny_base(clip: Clip, monkeypatch: pytest.MonkeyPatch) -> Base:
    base = Base(clip=clip, name="tiny", sha256="1" * 64)
    monkeypatch.setattr(role_compute, "load_base", lambda name: base)
    return base


@pytest.mark.usefixtures("tiny_base")
def test_command_writes_the_same_bytes_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pictures(tmp_path / "in")
    (tmp_path / "texts").write_text("\n".join(unique(general_descriptions())[::20]))
    for out in ("a", "b"):
        options = [
            "--images",
            str(tmp_path / "in"),
            "--descriptions",
            str(tmp_path / "texts"),
            "--sentence-encoder",
            "clip",
            "--threads",
            "1",
            "--top-n",
            "5",
            "--bootstrap",
            "2",
        ]
        assert roles.main([*options, "--out", str(tmp_path / out / "roles.json")]) == 0
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [  # and no state is left
        "roles.html",
        "roles.json",
        "roles.png",
        "roles.report.json",
    ]
    for name in ("roles.json", "roles.report.json", "roles.png", "roles.html"):
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
        (["--layers", "2-9"], "blocks 1 to 3"),
        (["--layers", "1-2"], "up to the last one"),
        (["--bootstrap", "-1"], "--bootstrap -1"),
        (["--images", "in", "--phrases", "absent"], "cannot be read as JSON"),
        (["--images", "in", "--labelled", "absent"], "neither a CSV file nor a folder"),
        ([], "needs --images"),
        (["--images", "absent"], "not a folder"),
        (["--images", "in", "--attributes", "rust"], "give phrases for them"),
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
    "arguments",
    [[], *(["--out", "x.json", *x] for x in (["--thresholds", "low"], ["--share", "x"], ["--layers", "9"]))],
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
    for fill in role_map.FILLS.values():
        assert tuple(bytes.fromhex(fill[1:])) in colors
