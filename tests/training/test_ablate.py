"""The ablation command: recipes, ways of scoring, tables, and a whole run that goes on where it was stopped."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F

from dear_serve.errors import ConfigError
from training import ablate
from training.ablate_bench import Bench
from training.ablate_recipe import Claim, Recipe, Row, TaskSpec, load_ablation
from training.ablate_score import Question, Sides, score
from training.ablate_table import figures, html_page, markdown, tables

RECIPE = """
[options]
epochs = 1
shots = 2
batch_size = 4
augmentation = {{ views = 2 }}
base = "{base}"

[[tasks]]
name = "tiny"
classes = 4
styles = ["night", "dusk"]
train = 2
test = 2

[[rows]]
name = "zero-shot"
kind = "zero-shot"

[[rows]]
name = "probe"
kind = "linear-probe"

[[rows]]
name = "DeAR"

[[rows]]
name = "open"
options = {{ roles = "mixed", attribute_reg = 0.5 }}

[[rows]]
name = "by class"
score = "class"

[[rows]]
name = "fitted"
score = "fitted"

[[claims]]
row = "open"
than = "DeAR"
column = "novel"
expect = "lower"
"""


# --- recipes --------------------------------------------------------------------------------------


def test_the_shipped_recipe_has_the_rows_of_the_paper_and_ours():
    recipe = load_ablation("demo")
    assert recipe.config("style", "layer-centric").roles == "mixed"
    assert recipe.config("style", "no attribute tokens").dear.attributes == ()
    assert recipe.config("style", "no fusion regularisation").fusion_reg == 0.0
    assert recipe.config("forgetting", "one-way").dear.beta == 0.5  # the task's, under the row's
    assert recipe.config("forgetting", "one-way").dear.mask == "one-way"
    assert recipe.config("style", "β 1", base="other").base == "other"
    assert {row.name for row in recipe.rows_of("few")} < {row.name for row in recipe.rows_of("style")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[options]", "[option]"), "no use for 'option'"),
        (('name = "DeAR"', 'name = "probe"'), "two tables of the row probe"),
        (('name = "DeAR"', 'name = "DeAR"\ntasks = ["huge"]'), "names the task 'huge'; known are tiny"),
        (("epochs = 1", "epoch = 1"), "no option 'epoch'"),
        (('than = "DeAR"', 'than = "Dear"'), "names the row 'Dear'"),
        (("train = 2", "train = 3"), "3 training and 2 test pictures a class for 2 styles"),
        (('expect = "lower"', 'expect = "less"'), "expect is 'less'"),
        (('kind = "zero-shot"', 'kind = "few-shot"'), "kind is 'few-shot'"),
    ],
)
def test_a_recipe_that_cannot_be_used_says_why(tmp_path, change, message):
    file = tmp_path / "r.toml"
    file.write_text(RECIPE.format(base="x").replace(*change), encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_ablation(str(file))


def test_a_recipe_needs_rows_and_a_name(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('[[tasks]]\nname = "a"\n')
    with pytest.raises(ConfigError, match="nothing to run"):
        load_ablation(str(file))
    with pytest.raises(ConfigError, match=r"no ablation recipe 'demos': give demo"):
        load_ablation("demos")


# --- scores ---------------------------------------------------------------------------------------


class Text:
    """Class features as given."""

    def __init__(self, adapted, frozen):
        self.adapted, self.frozen = adapted, frozen

    def features(self, model):
        return self.adapted


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_ways_of_scoring_meet_at_their_ends():
    cls, side, frozen = unit(40, 6), 0.4 * unit(40, 6, seed=1), unit(40, 6, seed=2)
    sides = Sides(frozen=frozen, cls=cls, attributes=side, fused=0.6 * cls + side)
    g, g0 = unit(4, 6, seed=3), unit(4, 6, seed=4)
    labels = torch.randint(4, (40,), generator=torch.Generator().manual_seed(5))

    def ask(trained):
        question = Question(text=Text(g, g0), trained=torch.tensor(trained), labels=labels)
        return score(None, sides, question)

    def accuracy(image, text):
        return pytest.approx(((image @ text.T).argmax(1) == labels).float().mean().item())

    novel, base, both = ask([False] * 4), ask([True] * 4), ask([True, True, False, False])
    assert novel["zero_shot"] == novel["mix 0.0"] == novel["whole 0.0"] == accuracy(frozen, g0)
    assert novel["fused"] == novel["mix 1.0"] == novel["whole 1.0"] == accuracy(sides.fused, g)
    assert novel["class"] == novel["class x adapted"] == accuracy(cls, g)
    assert base["class"] == base["mix 0.3"] == base["fused"]  # trained names are scored as trained
    assert base["whole 0.0"] == base["zero_shot"]
    assert novel["attributes x frozen"] == accuracy(side, g0)
    logits = torch.cat([sides.fused @ g[:2].T, cls @ g[2:].T], dim=1)
    assert both["class"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_the_constant_share_tells_an_offset_from_a_look_at_the_picture():
    same = unit(1, 6).expand(8, 6)
    away = torch.cat([unit(4, 6), -unit(4, 6)])
    for side, expected in ((same, 1.0), (away, 0.0), (torch.zeros(8, 6), 0.0)):
        sides = Sides(frozen=away, cls=away, attributes=side, fused=away)
        assert sides.constant() == pytest.approx(expected, abs=1e-6)
    assert Sides(frozen=away, cls=away, attributes=same, fused=away).rows([1, 2]).cls.shape == (2, 6)


# --- tables ---------------------------------------------------------------------------------------


def recipe_of(*claims):
    return Recipe(
        name="r",
        tasks=(TaskSpec(name="t", about="A task."),),
        rows=(Row(name="a"), Row(name="b")),
        claims=claims,
        _options={},
    )


def test_claims_are_checked_on_equal_seeds():
    lower = Claim(row="b", than="a", column="novel", expect="lower")
    higher = Claim(row="b", than="a", column="hm", expect="higher", source="ours")
    cells = {("t", "a", s): {"base": 0.5, "novel": 0.7 + s / 100, "hm": 0.5} for s in (1, 2, 3)}
    cells |= {("t", "b", s): {"base": 0.5, "novel": 0.6 + s / 99, "hm": 0.5 + (-1) ** s / 50} for s in (1, 2)}
    *_, claims = tables(recipe_of(lower, higher), cells, (1, 2, 3))
    assert [row[0] for row in claims.body] == ["t", "t"]
    assert claims.body[0][3:] == ("-10.0 ± 0.0", "2", "yes")
    assert claims.body[1][2:] == ("ours", "+0.0 ± 2.0", "2", "no difference shown")
    opposite = Claim(row="b", than="a", column="novel", expect="higher")
    assert tables(recipe_of(opposite), cells, (1, 2))[-1].body[0][-1] == "no: the opposite"
    one = tables(recipe_of(lower), cells, (1,))[-1].body[0]
    assert one[3:] == ("-10.0", "1", "no difference shown")  # one seed shows nothing


def test_tables_as_text_and_page():
    cells = {("t", "a", s): {"base": 0.5 + s / 100, "novel": 0.5, "alpha_cls": 0.6} for s in (1, 2)}
    cells["t", "b", 1] = {"base": 0.25}
    found = tables(recipe_of(), cells, (1, 2))
    text = markdown(found)
    assert "| a                | 51.5 ± 0.7 | 50.0 ± 0.0 | 0.60 ± 0.00 |" in text
    assert "| b (1 of 2 seeds) |       25.0 |            |             |" in text
    page = html_page("a < b", found)
    assert "<h1>a &lt; b</h1>" in page
    assert "<td>51.5 ± 0.7</td>" in page
    assert "http" not in page


def test_figures_of_a_training():
    sides = {
        f"{i} x {t}": 0.3 for i in ("frozen", "class", "attributes", "fused") for t in ("frozen", "adapted")
    }
    scores = {
        name: {"fused": value, "zero_shot": 0.1, "constant": 0.9, **sides}
        for name, value in {"base": 0.8, "novel": 0.4, "all": 0.5, "old novel": 0.9}.items()
    }
    scores |= {name: {"fused": 0.7, "zero_shot": 0.6} for name in ("color", "shape", "texture", "location")}
    found = figures(scores, 0.65, "fused")
    assert found["hm"] == pytest.approx(2 * 0.8 * 0.4 / 1.2)
    assert (found["others"], found["alpha_cls"], found["constant"]) == (pytest.approx(0.7), 0.65, 0.9)
    assert found["old novel: class x adapted"] == 0.3
    assert "alpha_cls" not in figures(scores, 1.0, "zero_shot")


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ablation(train_set, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablation")
    recipe = folder / "tiny.toml"
    recipe.write_text(RECIPE.format(base=train_set.base), encoding="utf-8")
    arguments = ["--recipe", str(recipe), "--seeds", "1,2", "--out", str(folder / "out"), "--quiet"]
    assert ablate.main(arguments) == 0
    return folder / "out", arguments


def test_every_row_has_its_figures(ablation):
    out, _ = ablation
    lines = {(line["row"], line["seed"]): line for line in json.loads((out / "table.json").read_text())}
    assert len(lines) == 6 * 2
    zero, dear, fitted = lines["zero-shot", 1], lines["DeAR", 1], lines["fitted", 1]
    assert {"base", "novel", "hm", "all", "old novel", "old wide", "others"} <= zero.keys()
    assert 0 < dear["alpha_cls"] < 1
    assert lines["by class", 1]["base"] == dear["base"] == fitted["base"]
    assert 0 <= fitted["factor"] <= 1
    assert set(lines["probe", 2]) == {"task", "row", "seed", "base"}
    text = (out / "table.md").read_text()
    assert "### tiny: accuracy in %" in text
    assert "open: novel lower than DeAR" in text
    assert (out / "table.html").stat().st_size > 1000


def test_rows_of_one_training_share_it(ablation):
    out, _ = ablation
    kinds = [file.stem.rsplit("-", 1)[-1] for file in (out / "results" / "tiny").glob("*.json")]
    assert kinds.count("adapted") == 2 * 2  # two trainings, two seeds, for four rows
    assert not list((out / "results").glob(".*.state"))


def test_what_is_done_is_not_done_again(ablation, monkeypatch, capsys):
    out, arguments = ablation
    before = (out / "table.json").read_bytes()
    capsys.readouterr()

    def never(*_, **__):
        raise AssertionError("trained again")

    for name in ("run", "probe", "held_back"):
        monkeypatch.setattr(Bench, name, never)
    assert ablate.main(arguments) == 0
    assert (out / "table.json").read_bytes() == before
    assert capsys.readouterr().out == (out / "table.md").read_text()


def test_a_stopped_ablation_goes_on(ablation, monkeypatch):
    out, arguments = ablation
    files = sorted((out / "results" / "tiny").glob("*-2-adapted.json"))
    before = {file: json.loads(file.read_text()) for file in files}
    files[0].unlink()

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bench, "run", interrupted)
        assert ablate.main(arguments) == 130
    assert (out / "table.md").is_file()  # of what there is
    assert ablate.main(arguments) == 0
    after = json.loads(files[0].read_text())
    assert {k: v for k, v in after.items() if k != "seconds"} == {
        k: v for k, v in before[files[0]].items() if k != "seconds"
    }


def test_only_some_rows_and_unknown_ones(ablation, capsys):
    out, arguments = ablation
    assert ablate.main([*arguments, "--rows", "DeAR, open", "--tasks", "tiny"]) == 0
    assert {line["row"] for line in json.loads((out / "table.json").read_text())} == {"DeAR", "open"}
    assert ablate.main([*arguments, "--rows", "Dear"]) == 2
    assert "no row 'Dear'; known are zero-shot" in capsys.readouterr().err
    assert ablate.main([*arguments, "--tasks", "huge"]) == 2


def test_tables_of_what_is_done(ablation, monkeypatch):
    out, arguments = ablation
    for file in (out / "results" / "tiny").glob("*-2-held-*.json"):
        file.rename(file.with_suffix(".away"))
    monkeypatch.setattr(Bench, "held_back", None)
    assert ablate.main([*arguments, "--done"]) == 0
    assert "fitted (1 of 2 seeds)" in (out / "table.md").read_text()
    for file in (out / "results" / "tiny").glob("*.away"):
        file.rename(file.with_suffix(".json"))
