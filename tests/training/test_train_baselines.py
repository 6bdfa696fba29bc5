"""Linear probe and other prompts: against scikit-learn, and what is never used to choose."""

from __future__ import annotations

import numpy as np
import pytest

from training.baselines import STRENGTHS, add_baselines, ensemble, fit_probe
from training.data import PictureCheck, load_data, make_task
from training.items import Task
from training.scoring import ModelTowers, evaluate, summary

NAMES = ("a", "b", "c")


def clouds(count, *, seed, spread=0.5):
    """Unit features (3 * count, 6) around three centers, and their labels."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(3), count)
    features = np.eye(3, 6)[labels] + spread * rng.standard_normal((3 * count, 6))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return features.astype(np.float32), labels


def test_the_probe_is_the_optimum_that_scikit_learn_finds():
    from sklearn.linear_model import LogisticRegression

    x, y = clouds(12, seed=0)
    probe = fit_probe(x, y, NAMES)
    other = LogisticRegression(C=probe.strength, max_iter=5000, tol=1e-10).fit(x.astype(np.float64), y)
    own = x @ probe.weight.T + probe.bias
    expected = other.decision_function(x)
    # Biases have a free common offset: compare differences between classes.
    np.testing.assert_allclose(
        own - own.mean(1, keepdims=True), expected - expected.mean(1, keepdims=True), atol=2e-3
    )


def test_strength_is_chosen_on_validation_pictures_or_by_folds():
    x, y = clouds(12, seed=0)
    noise = np.random.default_rng(1).permutation(y)  # validation labels that nothing can predict
    assert fit_probe(x, y, NAMES, val=(x, noise)).strength == STRENGTHS[0]
    assert fit_probe(x, y, NAMES, val=(x, y)).strength == STRENGTHS[-1]
    assert fit_probe(x, y, NAMES).strength not in (STRENGTHS[0], STRENGTHS[-1])
    one = [0, 12, 24]
    assert fit_probe(x[one], y[one], NAMES).strength == 100.0


def test_the_probe_answers_for_trained_classes_alone():
    x, y = clouds(12, seed=0, spread=0.1)
    probe = fit_probe(x, y, NAMES)
    assert (probe.predict(x, NAMES) == y).all()
    assert (probe.predict(x[y < 2], ("B", "a")) == 1 - y[y < 2]).all()  # some of them, in another order
    assert probe.predict(x, ("a", "d")) is None


def test_ensemble():
    assert len(ensemble(("a photo of a {}.",))) == 8
    assert ensemble(("a {}", "the {}")) == ("a {}", "the {}")


@pytest.fixture
def scored(prepared, train_set):
    from training.prepare import build_model

    task = make_task(
        load_data(train_set.pictures), protocol="base-to-novel", shots=4, seed=1, check=PictureCheck()
    )
    towers = ModelTowers(build_model(prepared, 1))
    options = {
        "tokenizer": prepared.tokenizer,
        "templates": prepared.templates,
        "preprocess": prepared.base.config.preprocess,
    }
    return evaluate(towers, task.tests, **options), task, towers, options


def test_rows_of_a_task(scored):
    scores, task, towers, options = scored
    numbers = summary(add_baselines(scores, task, towers, **options))
    assert numbers["zero_shot_ensemble_base"] == numbers["zero_shot_base"]  # the run's templates are several
    assert {k for k in numbers if k.startswith("linear")} == {"linear_probe_base"}
    assert {"zero_shot_single_hm", "zero_shot_ensemble_hm"} <= set(numbers)
    none = Task(class_names=task.class_names, train=(), tests=task.tests)
    assert not any(k.startswith("linear") for k in summary(add_baselines(scores, none, towers, **options)))


def test_one_template_is_the_first(scored):
    scores, task, towers, options = scored
    first = options["templates"][:1]
    expected = evaluate(towers, task.tests, **{**options, "templates": first})
    found = add_baselines(scores, task, towers, **options)
    for a, b in zip(expected, found, strict=True):
        assert (a.zero_shot == b.predicted("zero_shot_single")).all()
