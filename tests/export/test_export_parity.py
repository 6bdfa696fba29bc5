"""The parity check: passes what is equal, and names everything that is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from PIL import Image

from dear_serve.bundle import Bundle
from dear_serve.dear.model import DearModel
from dear_serve.errors import CheckFailedError, DataError
from dear_serve.runtime.onnx_engine import graph_sizes
from export.parity import BATCHES, GraphParity, check_graphs, signature_mismatches
from export.pipeline import ExportReport
from export.samples import PICTURES, Samples, collect

Exported = tuple[Bundle, ExportReport]


@pytest.fixture(scope="session")
def samples(tiny_bundle: Bundle) -> Samples:
    return collect(tiny_bundle, None)


@pytest.fixture
def folder(tmp_path: Path, exported: Exported) -> Path:
    path = tmp_path / "onnx"
    shutil.copytree(exported[0].paths.onnx, path)
    return path


def check(folder: Path, exported: Exported, model: DearModel, samples: Samples) -> dict[str, GraphParity]:
    proto = onnx.load(exported[0].paths.onnx / "classifier.onnx")
    classes = next(numpy_helper.to_array(t).T for t in proto.graph.initializer if list(t.dims) == [24, 3])
    features = torch.from_numpy(np.ascontiguousarray(classes))
    return check_graphs(folder, model, features, samples, sizes=graph_sizes(exported[0].manifest))


def test_report_of_equal_graphs(exported: Exported) -> None:
    report = exported[1].parity
    assert all(p.max_difference < 1e-5 and p.batches == BATCHES for p in report.values())
    assert report["image"].rows == sum(BATCHES) + 5
    assert report["image"].min_cosine == pytest.approx(1, abs=1e-5)
    assert report["classifier"].top1_agreement == 1
    assert set(report["text"].lengths) >= set(range(4, 17))


def test_other_weights_are_found_in_every_graph_that_has_them(exported, tiny_model, samples, folder) -> None:
    data = bytearray((folder / "weights.bin").read_bytes())
    array = np.frombuffer(data, dtype=np.float32).copy()
    (folder / "weights.bin").write_bytes((array * np.float32(1.01)).tobytes())
    with pytest.raises(CheckFailedError) as caught:
        check(folder, exported, tiny_model, samples)
    message = caught.value.message
    assert "image: cls at batch 1[0, " in message
    assert "torch gives" in message
    assert "more" in message.splitlines()[-1]


def test_nan_is_a_mismatch(exported, tiny_model, samples, folder) -> None:
    proto = onnx.load(folder / "fusion.onnx")
    constant = next(t for t in proto.graph.initializer if "weights" in t.name)
    constant.CopyFrom(numpy_helper.from_array(np.full((3, 1), np.nan, dtype=np.float32), name=constant.name))
    onnx.save(proto, folder / "fusion.onnx")
    with pytest.raises(
        CheckFailedError, match=r"fusion: logits at batch 1, 3 classes\[0, 0\] is nan; torch gives"
    ):
        check(folder, exported, tiny_model, samples)


def test_signature_errors_are_each_named(exported: Exported, folder: Path) -> None:
    proto = onnx.load(folder / "image.onnx", load_external_data=False)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2
    proto.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 25
    proto.graph.output[1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    onnx.save(proto, folder / "image.onnx")
    proto = onnx.load(folder / "text.onnx", load_external_data=False)
    proto.graph.output[0].name = "vectors"
    onnx.save(proto, folder / "text.onnx")
    proto = onnx.load(folder / "fusion.onnx", load_external_data=False)
    proto.graph.output[0].type.tensor_type.shape.dim.add().dim_value = 1
    onnx.save(proto, folder / "fusion.onnx")
    found = [str(m) for m in signature_mismatches(folder, graph_sizes(exported[0].manifest))]
    assert found == [
        "image: input pixels axis 0 is frozen at 2; B is dynamic",
        "image: output cls axis 1 is 25; 24 is expected",
        "image: output attributes is float16; float32 is expected",
        "text: outputs are ['vectors']; ['features'] are expected",
        "fusion: output logits has axes ['B', 'C', 1]; ['B', 'C'] are expected",
    ]


def test_graph_that_does_not_run_is_a_mismatch(exported, tiny_model, samples, folder) -> None:
    proto = onnx.load(folder / "fusion.onnx")
    for node in proto.graph.node:
        if node.op_type == "Transpose":
            node.attribute[0].ints[:] = [1, 0, 2]
    onnx.save(proto, folder / "fusion.onnx")
    with pytest.raises(CheckFailedError, match="fusion: batch 1, 3 classes does not run"):
        check(folder, exported, tiny_model, samples)


def test_samples_are_pictures_and_texts_of_every_kind(samples: Samples, tiny_bundle: Bundle) -> None:
    assert samples.pixels.shape == (PICTURES, 3, 32, 32)
    assert len(np.unique(samples.pixels.reshape(PICTURES, -1), axis=0)) == PICTURES
    lengths = samples.tokens.argmax(1) + 1
    assert {3, 16} <= set(lengths.tolist())
    assert np.isfinite(samples.hostile).all()
    assert samples.source == "64 drawn pictures"


def test_pictures_of_a_folder_are_used(tiny_bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    for i in range(3):
        Image.new("RGB", (40 + i, 30), (200, 10 * i, 0)).save(tmp_path / "photos" / "cats" / f"{i}.png")
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no picture")
    found = collect(tiny_bundle, tmp_path / "photos")
    assert found.source == "3 pictures of photos"
    assert found.pixels.shape == (PICTURES, 3, 32, 32)


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_folder_without_pictures_is_refused(tiny_bundle: Bundle, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=name):
        collect(tiny_bundle, tmp_path / name)
