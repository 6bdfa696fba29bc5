"""The manifest's own rules, and what the identity of a bundle depends on."""

from __future__ import annotations

import dataclasses

import pytest

from dear_serve.config import DearConfig
from dear_serve.errors import ConfigError
from dear_serve.manifest import Calibration, FileEntry, LabelSet, Manifest, Readout

# The manifest's own rules


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"alpha": (0.5, 0.5)}, "alpha"),
        ({"alpha": (0.5, 0.5, 0.5)}, "alpha"),
        ({"logit_scale": 0.0}, "logit_scale"),
        ({"logit_scale": float("nan")}, "logit_scale"),
        ({"class_names": ()}, "class_names"),
        ({"class_names": ("a", "a")}, "class_names"),
        ({"readouts": (Readout(attribute="smell", kind="token"),)}, "readouts"),
        (
            {"dear": DearConfig(attributes=("color", "shape"), first_block=0, text_first_block=3)},
            "dear.first_block",
        ),
        (
            {"dear": DearConfig(attributes=("color", "shape"), first_block=4, text_first_block=3)},
            "dear.first_block",
        ),
        ({"dear": DearConfig(attributes=("color", "shape"), first_block=3)}, "dear.text_first_block"),
    ],
)
def test_manifest_refuses_what_cannot_be(manifest, change, field):
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(manifest, **change)
    assert caught.value.field == field


def test_preprocessing_must_fit_the_base(manifest):
    with pytest.raises(ConfigError, match="size is 64; the base takes 32"):
        dataclasses.replace(manifest, preprocess=dataclasses.replace(manifest.preprocess, size=64))


def test_a_span_needs_phrases():
    with pytest.raises(ConfigError, match="1 phrases; a span needs 2 or more"):
        Readout(attribute="color", kind="span", phrases=("red",))


def test_identity_is_that_of_the_vectors(bundles, bundle, manifest, tmp_path):
    """Graphs, reports and metrics do not change it; the adapter, the base and the readouts do."""
    complete = bundle.manifest
    entry = FileEntry(sha256="1" * 64, size=1)
    for same in (
        {"files": complete.files | {"onnx/image.onnx": entry, "trt/x.plan": entry, "report.html": entry}},
        {"metrics": {}, "library_version": "9.9", "alpha": (0.8, 0.1, 0.1), "class_names": ("z",)},
    ):
        assert dataclasses.replace(complete, **same).identity() == bundle.sha256
    for other in (
        {"files": complete.files | {"adapter.safetensors": entry}},
        {"files": complete.files | {"readouts.safetensors": entry}},
        {"base": dataclasses.replace(complete.base, sha256="1" * 64)},
        {"context_length": 15},
    ):
        assert dataclasses.replace(complete, **other).identity() != bundle.sha256
    assert bundles.write(tmp_path / "elsewhere", manifest).sha256 == bundle.sha256


CALIBRATION = {
    "temperature": 1.5, "threshold": 0.2, "ece_before": 0.1, "ece_after": 0.05, "pictures": 9, "source": "val"
}  # fmt: skip


def test_calibration_and_label_sets_survive_and_are_optional(manifest):
    complete = dataclasses.replace(
        manifest,
        calibration=Calibration(**CALIBRATION),
        label_sets={"pets": LabelSet(labels=("cat", "dog"), templates=("a {}",))},
    )
    data = complete.to_dict()
    assert Manifest.from_dict(data) == complete
    assert complete.identity() == manifest.identity()
    del data["calibration"], data["label_sets"]
    old = Manifest.from_dict(data)
    assert (old.calibration, old.label_sets) == (None, {})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": 0.0}, "calibration.temperature"),
        ({"temperature": float("nan")}, "calibration.temperature"),
        ({"threshold": 1.5}, "calibration.threshold"),
    ],
)
def test_a_calibration_that_cannot_be(change, field):
    with pytest.raises(ConfigError) as caught:
        Calibration(**CALIBRATION | change)
    assert caught.value.field == field


@pytest.mark.parametrize("labels", [(), ("a", "a")])
def test_a_label_set_that_cannot_be(labels):
    with pytest.raises(ConfigError, match="distinct and at least one"):
        LabelSet(labels=labels)
