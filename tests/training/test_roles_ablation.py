"""Silencing heads: what it costs each attribute, on which pictures, and what is said about roles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dear_serve.backbone.clip import Clip
from dear_serve.config import ClipConfig
from dear_serve.dear.roles import HeadRole, Roles
from dear_serve.errors import ConfigError, DataError
from training.ablation import Cost, ablate_heads, mean_ablated, value_means
from training.causal import CausalCheck, causal_check, groups_of
from training.labelled import LabelledPictures, read_labelled

NOISE = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def clip(tiny_clip_config: ClipConfig) -> Clip:
    torch.manual_seed(0)
    return Clip(tiny_clip_config).eval()


def task(clip: Clip) -> LabelledPictures:
    """Labels that the whole model gets right by construction."""
    pixels = NOISE
    rng = np.random.default_rng(0)
    with torch.no_grad():
        features = clip.encode_image(pixels).numpy()
    features = features - features.mean(0)
    classes = {"color": rng.standard_normal((3, 24)), "shape": rng.standard_normal((4, 24))}
    with torch.no_grad():
        raw = clip.encode_image(pixels).numpy()
    labels = {name: (raw @ c.T).argmax(1) for name, c in classes.items()}
    return LabelledPictures(pixels=pixels, labels=labels, classes=classes)


def test_ablating_nothing_costs_nothing(clip: Clip) -> None:
    every = [(layer, head) for layer in (1, 2, 3) for head in range(4)]
    told: list[int] = []
    found = ablate_heads(clip, task(clip), [every, [], [(3, 0)], [(2, 1)]], progress=lambda: told.append(1))
    assert found.accuracy == {"color": 1.0, "shape": 1.0}
    assert found.costs[1].lost == {"color": 0.0, "shape": 0.0}
    assert found.costs[1].nats == pytest.approx({"color": 0.0, "shape": 0.0}, abs=1e-5)
    assert found.costs[1].dearest() is None
    # without attention all pictures have the same feature, so one class is left of each attribute
    labels = task(clip).labels
    for name, lost in found.costs[0].lost.items():
        assert 1 - lost in {float((labels[name] == c).mean()) for c in range(-1, 4)} | {0.0}
    assert len(told) == 4


def test_costs_are_those_of_a_whole_pass(clip: Clip) -> None:
    """Blocks before the silenced one are shared, and only CLS runs through the last: the numbers stay the same."""
    pictures, group = task(clip), [(2, 1), (2, 3), (3, 0)]
    found = ablate_heads(clip, pictures, [[(3, 2)], group])
    means = value_means(clip, NOISE, [2, 3])
    with torch.no_grad(), mean_ablated(clip, group, means):
        features = clip.encode_image(NOISE).numpy()
    for name, labels in pictures.labels.items():
        right = (features @ pictures.classes[name].T).argmax(1) == labels
        assert found.costs[1].lost[name] == pytest.approx(1 - right.mean())
        assert found.costs[1].error[name] == pytest.approx(right.std() / np.sqrt(len(right)))


def test_pictures_without_a_label_do_not_count(clip: Clip) -> None:
    pictures = task(clip)
    pictures.labels["shape"][5:] = -1
    pictures.labels["shape"][:5] = (pictures.labels["shape"][:5] + 1) % 4
    assert ablate_heads(clip, pictures, []).accuracy == {"color": 1.0, "shape": 0.0}


def test_ablated_heads_write_their_mean(clip: Clip) -> None:
    pixels = NOISE
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


def roles_of_three() -> Roles:
    kinds = [("attribute", "color"), ("attribute", "color"), ("attribute", "shape"), ("attribute", "weather")]
    kinds += [("mixed", "shape"), ("generalization", "color"), ("generalization", ""), ("mixed", "color")]
    heads = tuple(
        HeadRole(layer=2 + i // 4, head=i % 4, role=role, concept=concept, entropy=0.1 * i)  # type: ignore[arg-type]
        for i, (role, concept) in enumerate(kinds)
    )
    return Roles(
        base="tiny",
        base_sha256="",
        layers=3,
        heads_per_layer=4,
        first_block=2,
        attributes=("color", "shape", "texture"),
        thresholds=(0.35, 0.45),
        heads=heads,
    )


def test_groups_of_roles() -> None:
    groups = groups_of(roles_of_three())
    assert list(groups) == [
        "experts of color",
        "experts of shape",
        "other experts",
        "mixed",
        "generalization",
        "all heads",
    ]
    assert groups["experts of color"] == ((2, 0), (2, 1))
    assert groups["other experts"] == ((2, 3),)
    assert len(groups["all heads"]) == 8


def cost(color: float, shape: float, error: float = 0.01) -> Cost:
    both = {"color": error, "shape": error}
    return Cost(lost={"color": color, "shape": shape}, error=both, nats=both)


def test_an_expert_must_cost_its_own_attribute_most() -> None:
    assert cost(0.1, 0.05).dearest() == "color"
    assert cost(0.02, 0.01).dearest() is None  # within two standard errors
    roles = roles_of_three()
    heads = (cost(0.1, 0.0), cost(0.1, 0.2), cost(0.0, 0.01), *[cost(0, 0)] * 5)
    check = CausalCheck(what="x", pictures=9, accuracy={"color": 1.0, "shape": 1.0}, heads=heads, groups={})
    assert check.agreeing(roles) == {"color": (1, 2), "shape": (0, 1)}  # texture isn't labelled
    assert check.finding(roles).endswith(": color 1 of 2, shape 0 of 1")
    assert check.to_dict(roles)["heads"][1]["lost"] == {"color": 0.1, "shape": 0.2}


def test_causal_check_silences_every_head_and_every_role(clip: Clip) -> None:
    told: list[int] = []
    check = causal_check(clip, task(clip), roles_of_three(), progress=lambda: told.append(1))
    assert len(check.heads) == 8
    assert len(told) == 8 + len(check.groups)
    assert check.groups["other experts"][1] == check.heads[3]
    assert check.groups["other experts"][0] == ((2, 3),)


def write_labelled(folder: Path) -> Path:
    for i, name in enumerate(("red", "green", "blue")):
        (folder / "color" / name).mkdir(parents=True)
        for j in range(3):
            color = [30 * j] * 3
            color[i] = 250
            Image.new("RGB", (20, 24), tuple(color)).save(folder / "color" / name / f"{j}.png")
    (folder / "color" / "red" / "note.txt").write_text("no picture")
    lines = [
        f"color/{c}/{j}.png,{c},{'round' if j else ''}" for c in ("red", "green", "blue") for j in range(3)
    ]
    (folder / "labels.csv").write_text(
        "path,color,shape\n" + "\n".join([*lines, "color/absent.png,red,square"])
    )
    return folder


def test_labelled_pictures_of_folders_and_of_a_table(clip: Clip, tmp_path: Path) -> None:
    folder = write_labelled(tmp_path)
    found = read_labelled(folder, clip, ("color", "shape"))
    assert found.pixels.shape == (9, 3, 32, 32)
    assert found.labels["color"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]  # blue, green, red
    assert found.classes["color"].shape == (3, 24)
    np.testing.assert_allclose(np.linalg.norm(found.classes["color"], axis=1), 1, rtol=1e-5)
    table = read_labelled(folder / "labels.csv", clip, ("color", "shape"))
    assert list(table.labels) == ["color"]  # of shape only one value is left: the square cannot be read
    assert table.labels["color"].tolist() == [2, 2, 2, 1, 1, 1, 0, 0, 0]
    assert len(read_labelled(folder, clip, ("color",), count=5).pixels) == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"name,color\na.png,red\n", "no column path"),
        (b"path,color\na.png,red\n", "no attribute with two values"),
        (b"\xff\xfe\x00", "cannot be read as CSV"),
    ],
)
def test_labels_that_serve_nothing(clip: Clip, tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "labels.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_labelled(tmp_path / "labels.csv", clip, ("color",))
    with pytest.raises(DataError, match="neither a CSV file nor a folder"):
        read_labelled(tmp_path / "absent", clip, ("color",))
    with pytest.raises(DataError, match="no attribute with two values"):
        read_labelled(tmp_path, clip, ("color",))
