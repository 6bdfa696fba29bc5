"""report.html in detail: what it says of each class, of mistakes and of the data."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from training.items import Item
from training.loop import COLUMNS
from training.report import Report, render
from training.report_split import split_section
from training.scoring import Scores, summary


@pytest.fixture
def picture(train_set):
    return sorted((train_set.pictures / "test").rglob("*.png"))[0]


def made(picture, names, labels, zero_shot, adapted, split="all"):
    return Scores(
        split=split,
        class_names=tuple(names),
        items=tuple(Item(path=picture, label=label) for label in labels),
        zero_shot=np.array(zero_shot),
        adapted=np.array(adapted),
        confidence=np.linspace(0.5, 0.9, len(labels)).astype(np.float32),
    )


def rows(page):
    """Texts of the cells of every table row."""
    return [
        [re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", page)
    ]


def test_classes_are_ordered_from_loss_to_gain(picture):
    labels = [0, 0, 0, 0, 1, 1, 2]
    page = split_section(
        made(picture, ["a", "b", "c<"], labels, [0, 0, 1, 1, 0, 0, 2], [0, 2, 2, 1, 1, 1, 2])
    )
    assert rows(page)[1:4] == [
        ["a", "4", "50", "25", "-25", "", "c&lt; (2)"],
        ["c&lt;", "1", "100", "100", "+0", "", ""],
        ["b", "2", "0", "100", "+100", "", ""],
    ]


def test_mistakes_say_what_the_base_said(picture):
    page = split_section(made(picture, ["a", "b"], [0, 0, 1], [0, 1, 1], [1, 1, 1]))
    captions = re.findall("<figcaption>(.*?)</figcaption>", page)
    assert captions == ["a, taken for b (70 %); zero-shot: b", "a, taken for b (50 %); zero-shot: a"]
    assert "(2 of 3 wrong)" in page
    assert "<p>None.</p>" in split_section(made(picture, ["a", "b"], [0], [0], [0]))


def test_of_many_classes_the_ends_and_the_commonest_mistakes_are_shown(picture):
    names = [f"class {i:02}" for i in range(70)]
    labels = list(range(70)) * 2
    adapted = [*range(69), 3, *range(69), 3]
    page = split_section(made(picture, names, labels, labels, adapted))
    assert "… 10 classes between …" in page
    assert ["class 69", "class 03", "2"] in rows(page)
    assert 'class="confusion"' not in page


def test_page(picture, prepared):
    scores = made(picture, ["a", "b"], [0, 1], [0, 0], [0, 1])
    report = Report(
        title="t",
        settings={"lr": "0.1"},
        attributes=("color",),
        alpha=(0.7, 0.3),
        roles=prepared.roles,
        scores=[scores],
        history=[[1.0] * len(COLUMNS)],
        runs=[summary([scores])],
        seeds=(1,),
        notes=("two <pictures> stand in more than one split",),
    )
    page = render(report)
    assert page == render(report)
    assert "<li>two &lt;pictures&gt; stand" in page
    assert page.count("<svg") == page.count("</svg>") == 3
    assert "Of the data" not in render(replace(report, notes=()))
    assert "Mean and standard deviation over seeds 1, 2; below, seed 1." in render(
        replace(report, seeds=(1, 2), runs=report.runs * 2)
    )
