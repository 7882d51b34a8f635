"""ONNX as other programs take it: each opset, any number of images, and quantised, compared by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import run
from support.toy import Toy, toy_settings

from common.data.batches import Augmentation
from common.errors import ConfigError
from common.exports import load_model
from goldfinch.cli import main
from goldfinch.commands.export import export
from goldfinch.exports.formats import OPSETS, check_opset

onnxruntime = pytest.importorskip("onnxruntime", reason="the export extra is not installed")
onnx = pytest.importorskip("onnx", reason="the export extra is not installed")
pytest.importorskip("onnxscript", reason="the export extra is not installed")


@pytest.fixture(scope="module")
def trained_by_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FPL, so with prototypes, whose images are each normalised by their own values."""
    folder = tmp_path_factory.mktemp("onnx") / "run"
    run(toy_settings("fpl", folder, data=Toy(augmentation=Augmentation(normalisation="image")), train={"rounds": 2}))
    return folder


def outputs_of(path: Path, images: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, {"images": images}), strict=True))


def opset_of(path: Path) -> int:
    (version,) = [each.version for each in onnx.load(path).opset_import if not each.domain]
    return int(version)


def test_without_the_option_the_opset_is_that_of_the_help(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch's exporter has a default of its own, which changes with its version."""
    assert main(["export", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert f"Of the ONNX file: {opset_of(exported / 'model.onnx')} (default), 19 or 20." in help_text


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.long
def test_each_opset_predicts_as_the_net_does(opset: int, trained_by_image: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export(trained_by_image, folder, ["onnx"], opset=opset)
    assert opset_of(folder / "model.onnx") == opset
    model = load_model(folder)
    assert model.description.normalisation == "image"
    for count in (1, 2, 33):
        images = torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(count))
        expected = model(images)
        found = outputs_of(folder / "model.onnx", images.numpy())
        assert found.keys() == expected.keys() == {"probabilities", "features", "distances"}
        for name, values in expected.items():
            assert np.abs(found[name] - values.numpy()).max() < 1e-4, name


def test_a_quantised_model_is_half_as_large_and_predicts_nearly_the_same(exported: Path, tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    large, small = exported / "model.onnx", tmp_path / "quantised.onnx"
    quantize_dynamic(large, small, weight_type=QuantType.QUInt8)
    assert small.stat().st_size < 0.5 * large.stat().st_size
    images = torch.rand(33, 3, 16, 16, generator=torch.Generator().manual_seed(33)).numpy()
    whole, quantised = outputs_of(large, images), outputs_of(small, images)
    difference = np.abs(whole["probabilities"] - quantised["probabilities"]).max()
    assert 0 < difference < 0.05


@pytest.mark.parametrize(
    ("opset", "formats", "message"),
    [(17, ["onnx"], "writes 18, 19, 20"), (19, ["safetensors"], "add --format onnx")],
    ids=["too early", "no ONNX"],
)
def test_what_cannot_be_written_is_refused(opset: int, formats: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_opset(opset, formats)
    check_opset(None, formats)
