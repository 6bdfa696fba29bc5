"""Names and templates stay plain text and are checked; features, logits and predictions are right."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from dear_serve.errors import LabelError
from dear_serve.labels import (
    DEFAULT_TEMPLATES,
    ClassFeatureCache,
    class_features,
    fill,
    fused_logits,
    l2_normalize,
    predictions,
    softmax,
    top_k,
    validate_labels,
    validate_templates,
    zero_shot_logits,
)
from dear_serve.tokenizer import Tokenizer

TOKENIZER = Tokenizer(["c a", "ca t</w>", "d o", "do g</w>"], context_length=16)


class CausalEncoder:
    """A stand-in for a causal text tower: the feature depends on the tokens up to end-of-text alone."""

    def __init__(self) -> None:
        self.batches: list[np.ndarray] = []

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        self.batches.append(tokens)
        rows = []
        for row in tokens:
            seen = row[: row.argmax() + 1]
            rows.append(np.random.default_rng(seen).standard_normal(8) * len(seen))
        return np.asarray(rows, np.float32)


def features(width: int, *shape: int) -> np.ndarray:
    return l2_normalize(np.random.default_rng(width).standard_normal((*shape, width)).astype(np.float32))


# --- labels ---------------------------------------------------------------------------------------


def test_good_labels_come_back_as_they_are():
    names = [
        "Cat",
        " dog ",
        "{0.__class__}",
        "%s",
        "'; DROP TABLE x",
        "../../etc",
        "<end_of_text>",
        "🐱",
        "猫",
    ]
    assert validate_labels(names) == tuple(names)


@pytest.mark.parametrize(
    ("names", "code", "words"),
    [
        ([], "no_labels", "at least one"),
        ("cat", "no_labels", "'cat'"),
        ({"cat": 1}, "no_labels", "list"),
        (["cat", ""], "empty_label", "label 1"),
        ([" \t\n\u3000"], "empty_label", "label 0"),
        (["\0"], "empty_label", "label 0"),
        (["&nbsp;"], "empty_label", "label 0"),
        (["cat", "dog", "cat"], "duplicate_label", "label 2 ('cat') is label 0"),
        (["red  cat", " Red\tCAT "], "duplicate_label", "label 0"),
        (["café", "cafe\u0301"], "duplicate_label", "label 0"),
        (["a & b", "a &amp; b"], "duplicate_label", "label 0"),
        (["cat", 3], "bad_label", "label 1 is 3"),
        (["cat", None], "bad_label", "None"),
        ([f"class {i}" for i in range(1001)], "too_many_labels", "1001 labels and 1000"),
    ],
)
def test_bad_labels_are_refused(names, code, words):
    with pytest.raises(LabelError) as caught:
        validate_labels(names)
    assert caught.value.code == code
    assert caught.value.field == "labels"
    assert words in caught.value.message


def test_the_limit_itself_is_allowed():
    assert len(validate_labels([f"class {i}" for i in range(1000)])) == 1000
    with pytest.raises(LabelError, match="3 labels and 2"):
        validate_labels(["a", "b", "c"], max_labels=2)


def test_messages_do_not_repeat_long_labels():
    with pytest.raises(LabelError) as caught:
        validate_labels(["x" * 10_000, "X" * 10_000])
    assert len(caught.value.message) < 200


# --- templates ------------------------------------------------------------------------------------


def test_good_templates_come_back_as_they_are():
    templates = ["{}", "a photo of a {}.", "{0} {name} %s {}", "{{}}"]
    assert validate_templates(templates) == tuple(templates)
    assert validate_templates(DEFAULT_TEMPLATES) == DEFAULT_TEMPLATES


@pytest.mark.parametrize(
    ("templates", "words"),
    [
        ([], "0 templates"),
        ("a {}", "'a {}'"),
        (["a photo"], "'a photo'"),
        (["{} and {}"], "exactly once"),
        (["{0}"], "exactly once"),
        ([None], "None"),
        (["{}"] * 101, "101 templates"),
    ],
)
def test_bad_templates_are_refused(templates, words):
    with pytest.raises(LabelError) as caught:
        validate_templates(templates)
    assert (caught.value.code, caught.value.field) == ("bad_template", "templates")
    assert words in caught.value.message


def test_filling_is_replacement_not_formatting():
    assert fill("a photo of a {}.", "cat") == "a photo of a cat."
    assert fill("{}!", "{}") == "{}!"
    assert fill("{0.__class__} {}", "{0.__class__} %s") == "{0.__class__} {0.__class__} %s"
    assert fill("{{}}", "x") == "{x}"


# --- class features -------------------------------------------------------------------------------


def test_features_are_the_normalised_mean_of_normalised_texts():
    names, templates = ["cat", "dog", "a dog and a cat"], ["a {}", "the {} here", "{}"]
    ours = class_features(names, templates, CausalEncoder(), TOKENIZER)
    encode = CausalEncoder()
    for row, name in zip(ours, names, strict=True):
        each = encode(TOKENIZER([template.replace("{}", name) for template in templates]))
        mean = (each / np.linalg.norm(each, axis=1, keepdims=True)).mean(axis=0)
        np.testing.assert_allclose(row, mean / np.linalg.norm(mean), atol=1e-6)
    assert ours.dtype == np.float32
    assert ours.shape == (3, 8)


def test_batches_are_cut_to_their_longest_text_and_change_nothing():
    names, templates = ["cat", "dog", "a very long cat"], ["{}", "a {}"]
    cut, whole = CausalEncoder(), CausalEncoder()
    short = class_features(names, templates, cut, TOKENIZER, batch_size=2)
    full = class_features(names, templates, whole, TOKENIZER, batch_size=100, dynamic_length=False)
    np.testing.assert_array_equal(short, full)
    lengths = [batch.shape[1] for batch in cut.batches]
    assert lengths[0] == 3  # start, one token, end
    assert lengths == sorted(lengths)
    assert [batch.shape for batch in whole.batches] == [(6, 16)]
    assert all(batch.dtype == np.int64 and batch.flags.c_contiguous for batch in cut.batches)


def test_equal_texts_are_encoded_once():
    encode = CausalEncoder()
    class_features(["cat", "a cat"], ["{}", "a {}", "A  {}"], encode, TOKENIZER)
    # "cat", "a cat" (three times) and "a a cat" (twice)
    assert sum(len(batch) for batch in encode.batches) == 3


def test_features_of_more_classes_than_a_request_may_have():
    names = [f"class {i}" for i in range(1200)]
    assert class_features(names, ["{}"], CausalEncoder(), TOKENIZER).shape == (1200, 8)


@pytest.mark.parametrize(
    ("names", "templates"), [([], ["{}"]), (["cat"], []), (["cat"], ["x"]), ([""], ["{}"])]
)
def test_features_of_bad_labels_are_refused(names, templates):
    with pytest.raises(LabelError):
        class_features(names, templates, CausalEncoder(), TOKENIZER)


# --- cache ----------------------------------------------------------------------------------------


def test_cache_computes_once_per_engine_names_and_templates():
    cache = ClassFeatureCache()
    calls = []

    def ask(*key):
        def compute():
            calls.append(key)
            return np.full((1, 2), len(calls), np.float32)

        return cache.get(*key, compute)

    first = ask("a", ["cat", "dog"], ["{}"])
    assert ask("a", ("cat", "dog"), ("{}",)) is first
    others = [("b", ["cat", "dog"], ["{}"]), ("a", ["dog", "cat"], ["{}"]), ("a", ["cat", "dog"], ["a {}"])]
    for key in [*others, ("a", ["cat"], ["dog", "{}"])]:
        assert ask(*key) is not first
    assert (len(calls), cache.hits, cache.misses, len(cache)) == (5, 1, 5, 5)
    cache.clear()
    assert len(cache) == 0


def test_cache_forgets_the_least_recently_used():
    cache = ClassFeatureCache(max_entries=2)

    def ask(name):
        return cache.get("e", [name], ["{}"], lambda: np.zeros((1, 2), np.float32))

    a, b = ask("a"), ask("b")
    assert ask("a") is a
    ask("c")
    assert len(cache) == 2
    assert ask("a") is a
    assert ask("b") is not b


def test_cached_features_are_read_only():
    features = ClassFeatureCache().get("e", ["a"], ["{}"], lambda: np.zeros((1, 2), np.float32))
    with pytest.raises(ValueError, match="read-only"):
        features[0, 0] = 1


def test_a_failed_computation_is_not_kept():
    cache = ClassFeatureCache()

    def fail():
        raise LabelError("no")

    with pytest.raises(LabelError):
        cache.get("e", ["a"], ["{}"], fail)
    assert len(cache) == 0
    assert cache.get("e", ["a"], ["{}"], lambda: np.ones((1, 2), np.float32)).sum() == 2


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_ask_at_once_share_one_computation(fails):
    cache = ClassFeatureCache()
    started, go = threading.Event(), threading.Event()
    calls, answers = [], []

    def compute():
        calls.append(1)
        started.set()
        assert go.wait(10)
        if fails:
            raise LabelError("no")
        return np.zeros((1, 2), np.float32)

    def ask():
        try:
            answers.append(id(cache.get("e", ["a"], ["{}"], compute)))
        except LabelError as error:
            answers.append(id(error))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    threads[0].start()
    assert started.wait(10)
    for thread in threads[1:]:
        thread.start()
    while cache.hits < 7:
        threading.Event().wait(0.001)
    go.set()
    for thread in threads:
        thread.join(10)
    assert len(calls) == 1
    assert len(answers) == 8
    assert len(set(answers)) == 1


# --- logits ---------------------------------------------------------------------------------------


def test_zero_shot_logits_are_scaled_cosines():
    image, classes = features(8, 3), features(8, 5)
    logits = zero_shot_logits(image, classes, 100.0)
    assert (logits.shape, logits.dtype) == ((3, 5), np.float32)
    assert logits[1, 2] == pytest.approx(100 * float(image[1] @ classes[2]), abs=1e-4)


def test_fused_logits_are_the_sum_of_their_contributions():
    cls, attributes, classes = features(8, 3), features(8, 3, 2), features(8, 5)
    alpha = [0.7, 0.2, 0.1]
    logits, shares = fused_logits(cls, attributes, classes, alpha, 50.0)
    assert (logits.shape, shares.shape) == ((3, 5), (3, 5, 3))
    np.testing.assert_allclose(shares.sum(axis=2), logits, atol=1e-5)
    np.testing.assert_allclose(shares[:, :, 0], 35 * cls @ classes.T, atol=1e-5)
    np.testing.assert_allclose(shares[:, :, 2], 5 * attributes[:, 1] @ classes.T, atol=1e-5)


def test_fusion_of_the_class_feature_alone_is_zero_shot():
    cls, classes = features(8, 3), features(8, 5)
    logits, _ = fused_logits(cls, np.zeros((3, 0, 8), np.float32), classes, [1.0], 100.0)
    np.testing.assert_allclose(logits, zero_shot_logits(cls, classes, 100.0), atol=1e-5)


def test_softmax_is_safe_and_sums_to_one():
    rows = softmax(np.array([[1e30, -1e30, 0.0], [0.0, 0.0, 0.0], [1.0, 2.0, 3.0]], np.float32))
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(rows[0], [1, 0, 0])
    np.testing.assert_allclose(rows[2], [0.09003057, 0.24472847, 0.66524096], atol=1e-6)


def test_top_k_is_sorted_and_keeps_the_order_of_ties():
    columns, values = top_k(np.array([[1, 3, 3, 2], [0, 0, 0, 0]], np.float32), 3)
    assert columns.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert values.tolist() == [[3, 3, 2], [0, 0, 0]]
    assert top_k(np.zeros((2, 4), np.float32), 99)[0].shape == (2, 4)
    assert top_k(np.zeros((0, 4), np.float32), 2)[0].shape == (0, 2)
    with pytest.raises(LabelError, match="top_k is 0") as caught:
        top_k(np.zeros((1, 4), np.float32), 0)
    assert caught.value.code == "bad_top_k"


def test_l2_normalize_keeps_zeros():
    rows = l2_normalize(np.array([[3, 4], [0, 0]], np.float32))
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0, 0]])


def test_predictions_name_labels_and_contributions():
    shares = {
        "class": np.array([[1.0, 2.0, 0.0]], np.float32),
        "color": np.array([[0.5, 1.0, 0.25]], np.float32),
    }
    logits = shares["class"] + shares["color"]
    best = predictions(logits, ["a", "b", "c"], cosines=logits / 10, contributions=shares, k=2)
    assert [[p.label for p in row] for row in best] == [["b", "a"]]
    first = best[0][0]
    assert first.logit == pytest.approx(3.0)
    assert first.cosine == pytest.approx(0.3)
    assert first.contributions == {"class": 2.0, "color": 1.0}
    assert first.probability == pytest.approx(float(softmax(logits)[0, 1]))
    assert type(first.probability) is float


def test_a_temperature_changes_probabilities_alone():
    logits = np.array([[3.0, 1.0]], np.float32)
    cool, warm = (predictions(logits, ["a", "b"], cosines=logits, temperature=t)[0][0] for t in (1.0, 2.0))
    assert warm.logit == cool.logit == 3.0
    assert warm.probability == pytest.approx(float(softmax(logits / 2)[0, 0]))
    assert warm.probability < cool.probability


def test_predictions_without_contributions_or_pictures():
    assert predictions(np.zeros((0, 2), np.float32), ["a", "b"], cosines=np.zeros((0, 2), np.float32)) == []
    rows = predictions(np.zeros((1, 2), np.float32), ["a", "b"], cosines=np.zeros((1, 2), np.float32))
    assert [p.contributions for p in rows[0]] == [{}, {}]
