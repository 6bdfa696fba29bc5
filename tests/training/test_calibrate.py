"""Temperature, calibration error and threshold on made-up logits whose truth is known; which pictures are taken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dear_serve.bundle import Bundle
from dear_serve.runtime import open_engine
from dear_serve.tokenizer import Tokenizer
from training.calibrate import (
    MIN_PICTURES,
    PER_CLASS,
    Texts,
    calibrate,
    calibration_error,
    fit_temperature,
    fit_threshold,
    validation_logits,
    validation_pictures,
)
from training.checks import PictureCheck
from training.items import DataSet, Item, Task
from training.run import main
from training.scoring import EngineTowers


def drawn(temperature: float, count: int = 4000, classes: int = 5):
    """Logits, and labels drawn from softmax(logits / temperature)."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 6, (count, classes)).astype(np.float32)
    powers = np.exp(logits.astype(np.float64) / temperature)
    cumulated = (powers / powers.sum(1, keepdims=True)).cumsum(1)
    return logits, (rng.random((count, 1)) > cumulated).sum(1).clip(0, classes - 1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_that_drew_the_labels_is_found(temperature):
    assert fit_temperature(*drawn(temperature)) == pytest.approx(temperature, rel=0.08)


def test_the_temperature_is_the_likeliest():
    logits, labels = drawn(2.0, count=300)

    def loss(t: float) -> float:
        rows = logits.astype(np.float64) / t
        return float(np.mean(np.log(np.exp(rows).sum(1)) - rows[np.arange(len(rows)), labels]))

    best = fit_temperature(logits, labels)
    assert loss(best) <= min(loss(best * 1.02), loss(best / 1.02))


def test_a_model_that_is_never_wrong_gets_the_lowest_temperature():
    logits = np.eye(4, dtype=np.float32) * 5
    assert fit_temperature(logits, np.arange(4)) == pytest.approx(0.25, rel=1e-3)


def test_calibration_error_of_known_cases():
    sure = np.array([[100.0, 0.0]] * 10, np.float32)
    assert calibration_error(sure, np.zeros(10, int)) == pytest.approx(0, abs=1e-6)
    assert calibration_error(sure, np.array([0] * 6 + [1] * 4)) == pytest.approx(0.4, abs=1e-6)
    even = np.zeros((10, 2), np.float32)  # confidence 0.5, first class
    assert calibration_error(even, np.array([0] * 5 + [1] * 5)) == pytest.approx(0, abs=1e-6)


def test_calibration_is_better_after_on_pictures_it_was_not_fitted_on():
    found = calibrate(*drawn(3.0), logit_scale=10.0, source="val")
    assert found.temperature == pytest.approx(3.0, rel=0.1)
    assert found.ece_after < 0.05 < found.ece_before
    assert (found.pictures, found.source) == (4000, "val")


def test_a_temperature_that_does_not_help_elsewhere_is_not_kept():
    """Calibrated already, and few pictures: what is fitted is chance."""
    logits, labels = drawn(1.0, count=40)
    found = calibrate(logits, labels, logit_scale=10.0, source="val")
    assert fit_temperature(logits, labels) != 1.0
    assert (found.temperature, found.ece_after) == (1.0, found.ece_before)


def test_the_threshold_parts_pictures_with_their_class_from_those_without():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 4, 200)
    cosines = rng.uniform(0.0, 0.2, (200, 4))
    cosines[np.arange(200), labels] = rng.uniform(0.3, 0.5, 200)
    logits = np.asarray(cosines * 50, np.float32)
    assert 0.2 <= fit_threshold(logits, labels, 50.0) <= 0.3
    found = calibrate(logits, labels, 50.0, "val")
    assert found.threshold_accuracy == 1.0


def test_a_threshold_that_nothing_can_part_is_still_a_cosine():
    logits = np.ones((40, 3), np.float32)
    assert -1 <= fit_threshold(logits, np.zeros(40, int), 1.0) <= 1
    assert calibrate(logits, np.zeros(40, int), 1.0, "val").threshold_accuracy == pytest.approx(0.5)


def test_one_class_has_no_threshold():
    found = calibrate(np.ones((40, 1), np.float32), np.zeros(40, int), 1.0, "train")
    assert (found.threshold, found.threshold_accuracy) == (None, None)


# Which pictures


class Readable(PictureCheck):
    """Every picture can be read but those named bad."""

    def __call__(self, items):
        self.bad |= {item.path: "bad" for item in items if "bad" in item.path.name}
        return any(item.path in self.bad for item in items)


def items(count: int, label: int, name: str = "x") -> tuple[Item, ...]:
    return tuple(Item(path=Path(f"{name}-{label}-{i}"), label=label) for i in range(count))


def sets(train, val=(), shots=()):
    data = DataSet(
        root=Path("d"), class_names=("a", "b", "c"), train=train, val=val, test=items(99, 0, "test")
    )
    task = Task(class_names=("a", "b"), train=shots, tests={}, val=val)
    return data, task


def test_validation_pictures_come_first():
    val = (*items(MIN_PICTURES, 0, "val"), *items(3, 1, "val"))
    assert validation_pictures(*sets(items(50, 0), val), seed=1, check=Readable()) == (val, "val")


def test_otherwise_training_pictures_that_were_not_used():
    train = (*items(60, 0), *items(60, 1), *items(60, 2))
    shots = (*train[:16], *train[60:76])
    chosen, source = validation_pictures(*sets(train, shots=shots), seed=1, check=Readable())
    assert source == "train"
    assert not set(chosen) & set(shots)
    assert [sum(i.label == label for i in chosen) for label in (0, 1, 2)] == [PER_CLASS, PER_CLASS, 0]
    again, _ = validation_pictures(*sets(train, shots=shots), seed=1, check=Readable())
    assert again == chosen


def test_too_few_are_none_and_unreadable_ones_are_left_out():
    train = items(40, 0)
    assert validation_pictures(*sets(train, shots=train), seed=1, check=Readable()) == ((), "")
    left = (*items(18, 0, "bad"), *items(20, 1), *items(20, 0))
    chosen, source = validation_pictures(*sets(left), seed=1, check=Readable(skip=True))
    assert all("bad" not in item.path.name for item in chosen)
    assert source == ("train" if len(chosen) >= MIN_PICTURES else "")


def test_a_run_calibrates_its_bundle_and_says_so_in_the_report(train_set, tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 16), ("test", 2)):
        for name in ("blue_cup", "green_tree"):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                noise = rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(noise).save(folder / f"{i}.png")
    options = [
        "--base",
        train_set.base,
        "--epochs",
        "1",
        "--batch-size",
        "6",
        "--shots",
        "2",
        "--seeds",
        "1,2",
    ]
    out = tmp_path / "bundle"
    assert main([str(tmp_path / "data"), *options, "--quiet", "--device", "cpu", "--out", str(out)]) == 0
    bundle = Bundle.open(out)
    found = bundle.manifest.calibration
    assert found is not None
    assert (found.pictures, found.source) == (32, "val")
    assert f"{found.temperature:.3f}" in bundle.paths.report.read_text()
    # As anybody who opens the bundle would find it.
    texts = Texts(
        class_names=bundle.manifest.class_names,
        templates=bundle.manifest.templates,
        tokenizer=Tokenizer.from_file(bundle.paths.tokenizer),
    )
    val = [
        Item(path=path, label=label)
        for label, name in enumerate(("blue_cup", "green_tree"))
        for path in sorted((tmp_path / "data" / "val" / name).iterdir())
    ]
    towers = EngineTowers(open_engine(bundle, "torch"), bundle)
    logits, labels = validation_logits(towers, texts, val, preprocess=bundle.manifest.preprocess)
    again = calibrate(logits, labels, towers.logit_scale, "val")
    for name in ("temperature", "threshold", "threshold_accuracy", "ece_before", "ece_after"):
        assert getattr(again, name) == pytest.approx(getattr(found, name), abs=1e-4), name
