"""Exported models on images: predictions, confidence, and scores on any domain."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.runs import run
from support.toy import DOMAINS, Toy, toy_settings

from common.confidence import CALIBRATION_BINS
from common.errors import DataError
from common.exports import load_model
from common.exports.description import DESCRIPTION
from common.models.pretrained import WEIGHTS
from common.regular_files import file_sha256
from common.storage import read_tensors, write_tensors
from goldfinch.cli import main
from goldfinch.commands.evaluate import domains_of, evaluate, measures
from goldfinch.commands.export import export
from goldfinch.commands.predict import predict
from goldfinch.exports.formats import Content, write_export
from goldfinch.record import RunRecord

NAMES = Toy().class_names

FOREIGN = "data.augmentation={mean:[0.5],std:[0.01],normalisation:fixed}"
"""The normalisation of another model, in one setting."""


@pytest.fixture
def picture(pictures: Path) -> Path:
    return min((pictures / "dark" / "test").rglob("*.png"))


@pytest.fixture
def overflowing(exported: Path, tmp_path: Path) -> Path:
    """An exported model with weights that are finite, and so large that the sums of its head are not."""
    folder = shutil.copytree(exported, tmp_path / "overflowing")
    path, description = folder / WEIGHTS, json.loads((folder / DESCRIPTION).read_text())
    tensors, metadata = read_tensors(path)
    for name in tensors:
        if name.startswith("head."):
            tensors[name] = torch.full_like(tensors[name], 3e38)
    write_tensors(path, tensors, metadata)
    description["files"]["safetensors"]["sha256"] = file_sha256(path)
    (folder / DESCRIPTION).write_text(json.dumps(description))
    return folder


NOT_FINITE = "the model's outputs for .* are not finite: training diverged; lower train.learning_rate"

# ---- predict ---------------------------------------------------------------------------------------------------------


def test_predictions_go_to_a_table(exported: Path, pictures: Path, tmp_path: Path) -> None:
    folders, output = [pictures / domain / "test" for domain in DOMAINS], tmp_path / "predictions.csv"
    assert main(["evaluate", str(exported), *map(str, folders), "--output", str(output)]) == 0
    with output.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["image"] for row in rows] == [str(path) for place in folders for path in sorted(place.rglob("*.png"))]
    model = load_model(exported)
    predicted = {domain: model(Toy().load(domain).test.images.float() / 255) for domain in DOMAINS}
    for row in rows:
        path = Path(row["image"])
        outputs = predicted[path.parts[-4]]
        probabilities, distances = (outputs[key][int(path.stem)] for key in ("probabilities", "distances"))
        assert row["class"] == NAMES[int(probabilities.argmax())]
        assert float(row["probability"]) == pytest.approx(float(probabilities.max()), abs=1e-5)
        assert row["nearest_prototype"] == NAMES[int(distances.argmin())]
        assert float(row["distance"]) == pytest.approx(float(distances.min()), abs=1e-5)
        assert row["none_of_these"] == str(float(distances.min()) > model.description.prototypes["threshold"])
    flagged = [row["none_of_these"] for row in rows].count("True")
    assert 0 < flagged <= math.ceil(0.05 * len(rows)), "one in twenty of the images that the threshold was set on"


def test_names_of_strangers_are_escaped_in_tables_and_on_the_screen(
    exported: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spreadsheet runs cells that begin with =, a terminal runs escape sequences, and no table holds other bytes."""
    monkeypatch.chdir(tmp_path)
    names = ["=1+1.png", "./data=1.png", "red\x1b[31m.png", os.fsdecode(b"not-utf8-\xff.png")]
    for name in names:
        shutil.copy(picture, name)
    assert main(["evaluate", str(exported), *names, "--output", "predictions.csv"]) == 0
    shown = capsys.readouterr().out
    with Path("predictions.csv").open(newline="", encoding="utf-8") as stream:
        images = [row["image"] for row in csv.DictReader(stream)]
    assert images == ["'=1+1.png", "data=1.png", "red\\x1b[31m.png", "not-utf8-\\udcff.png"]
    assert "\x1b" not in shown
    assert main(["evaluate", str(exported), *names, "--output", "predictions.json"]) == 0
    read = [row["image"] for row in json.loads(Path("predictions.json").read_text())]
    assert read == [str(Path(name)) for name in names]


def test_predictions_go_to_json_with_all_probabilities(exported: Path, picture: Path, tmp_path: Path) -> None:
    output = tmp_path / "predictions.JSON"
    assert main(["evaluate", str(exported), str(picture), str(picture), "--output", str(output)]) == 0
    (row,) = json.loads(output.read_text())  # named twice, predicted once
    assert set(row["probabilities"]) == set(NAMES)
    assert sum(row["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert max(row["probabilities"], key=row["probabilities"].__getitem__) == row["class"]


def test_outputs_that_overflow_are_no_prediction_no_score_and_no_export(
    overflowing: Path, picture: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "predictions.csv"
    assert main(["evaluate", str(overflowing), str(picture), "--output", str(output)]) == 1
    assert re.search(f"skipped: {NOT_FINITE}".replace(".*", re.escape(str(picture))), capsys.readouterr().err)
    assert "nan" not in output.read_text()
    assert main(["evaluate", str(overflowing), "data=folder", f"data.root={pictures}"]) == 1
    assert re.search(f"^error: {NOT_FINITE}", capsys.readouterr().err)
    model = load_model(overflowing)
    images = torch.zeros(2, 3, model.image_size, model.image_size, dtype=torch.uint8)
    content = Content(replace(model.description, files={}), model.net.state_dict(), model.prototypes, images)
    with pytest.raises(DataError, match=NOT_FINITE):
        write_export(tmp_path / "again", content, ["safetensors"])


def test_images_in_a_folder_that_a_link_leads_to_are_predicted(exported: Path, picture: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    elsewhere = tmp_path / "elsewhere"
    for folder in (place, elsewhere):
        folder.mkdir()
        shutil.copy(picture, folder / "one.png")
    (place / "more").symlink_to(elsewhere)
    assert predict(exported, [place], tmp_path / "all.json") == 0
    images = [row["image"] for row in json.loads((tmp_path / "all.json").read_text())]
    assert images == [str(place / "more" / "one.png"), str(place / "one.png")]


def test_what_cannot_be_read_is_named_and_skipped(
    exported: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(picture.read_bytes()[:60])
    (tmp_path / "b.png").write_bytes(picture.read_bytes())
    output = tmp_path / "predictions.csv"
    assert main(["evaluate", str(exported), str(tmp_path), "--output", str(output)]) == 1
    printed = capsys.readouterr()
    assert f"skipped: image {tmp_path / 'a.png'}" in printed.err
    assert "data.broken" not in printed.err, "it was skipped"
    assert str(tmp_path / "b.png") in printed.out
    assert len(output.read_text().splitlines()) == 2


def test_images_that_training_would_refuse_are_predicted_with_a_warning(
    exported: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values of 0 to 1 are read as black, and the net is as sure of black as of anything."""
    values = np.asarray(Image.open(picture).convert("L"), dtype=np.float32) / 255
    values[0, :2] = 0, 1
    Image.fromarray(values).save(tmp_path / "shares.tiff")
    assert main(["evaluate", str(exported), str(tmp_path / "shares.tiff")]) == 0
    printed = capsys.readouterr()
    assert "shares.tiff" in printed.out
    assert "warning: training would refuse such images: 1 of 1 images are black" in printed.err
    assert "(mode F) and is read as 0 to 1 of 0 to 255" in printed.err
    assert main(["evaluate", str(exported), str(picture)]) == 0
    assert "warning" not in capsys.readouterr().err


def test_many_predictions_are_cut_on_the_screen_alone(
    exported: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(exported), str(pictures / "bright" / "test"), str(pictures / "dark")]) == 0
    assert "... and 16 more: --output FILE.csv holds all" in capsys.readouterr().out  # 16 + 40 images


def test_mistakes_are_named(exported: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("a file, not a folder")
    model, image = str(exported), str(pictures)
    for words, message in (
        ([model, str(tmp_path / "absent.png")], "does not exist"),
        ([model, str(tmp_path / "empty")], "holds no images"),
        ([model, image, "--output", "predictions.txt"], "name a .csv or a .json file"),
        ([model, "data=glyphs", "--output", "scores.csv"], "--output scores.csv: scores are written as JSON"),
        ([str(tmp_path), image], "goldfinch export RUN --to"),
        ([model, image, "--output", str(tmp_path / "file" / "predictions.csv")], "cannot write"),
    ):
        assert main(["evaluate", *words]) == 1
        assert message in capsys.readouterr().err


def test_nets_without_prototypes_have_fewer_outputs(picture: Path, tmp_path: Path) -> None:
    run(toy_settings("fedavg", tmp_path / "run", train={"rounds": 1}))
    export(tmp_path / "run", tmp_path / "model")
    output = tmp_path / "predictions.csv"
    assert main(["evaluate", str(tmp_path / "model"), str(picture), "--output", str(output)]) == 0
    assert output.read_text().splitlines()[0] == "image,class,probability"


# ---- evaluate --------------------------------------------------------------------------------------------------------


def test_calibration_error_is_the_mean_gap_by_bins() -> None:
    sure = torch.tensor([0.95, 0.97, 0.55, 0.51, 0.35])
    right = [True, False, True, True, False]
    probabilities = torch.stack([sure, *([(1 - sure) / 3] * 3)], 1)
    found = measures(probabilities, torch.tensor([0 if good else 1 for good in right]))
    expected = 0.0
    bins = CALIBRATION_BINS
    for low in range(bins):
        inside = [place for place, value in enumerate(sure.tolist()) if low / bins < value <= (low + 1) / bins]
        gap = sum(float(sure[place]) for place in inside) - sum(right[place] for place in inside)
        expected += abs(gap) / len(sure)
    assert (found["count"], found["accuracy"]) == (5, pytest.approx(60))
    assert found["confidence"] == pytest.approx(66.6)
    assert found["calibration_error"] == pytest.approx(100 * expected)


def test_a_domain_scores_as_in_the_run(
    trained: RunRecord, exported: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data=folder", f"data.root='{pictures}'", "--output", str(tmp_path / "predictions.json")]
    assert main(["evaluate", str(exported), *words]) == 0
    found = json.loads((tmp_path / "predictions.json").read_text())
    assert {name: row["accuracy"] for name, row in found["domains"].items()} == trained.summary["accuracy"]
    assert all(row["trained_on"] for row in found["domains"].values())
    assert found["data"] == "folder"
    assert f"{exported} on folder: test images" in capsys.readouterr().out, "a data set by default is named, too"
    assert found["together"]["count"] == sum(map(sum, found["confusion"])) == 48
    counts = np.array(found["confusion"])
    assert found["recall"]["lower left"] == pytest.approx(100 * counts[2, 2] / counts[2].sum())
    assert found["precision"]["lower left"] == pytest.approx(100 * counts[2, 2] / counts[:, 2].sum())


def test_a_domain_that_no_client_had_and_lacks_classes(
    exported: Path, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMES[2:]:  # labels 0 and 1 there are classes 2 and 3 here
        shutil.copytree(pictures / "bright" / "test" / name, tmp_path / "new site" / name)
    data = ["data=folder", f"data.root={tmp_path}"]
    counts = evaluate(exported, data, "all")["confusion"]
    more = tmp_path / "new site" / NAMES[2] / "more.png"
    shutil.copy(min(more.parent.iterdir()), more)
    shown_now = evaluate(exported, data, "all")["confusion"]
    assert np.sum(shown_now) == np.sum(counts) + 1, "files may change between two calls of a process"
    more.unlink()
    found = evaluate(exported, data, "all")
    assert not found["domains"]["new site"]["trained_on"]
    assert "new site (not trained on)" in capsys.readouterr().out
    assert [sum(row) for row in found["confusion"]] == [0, 0, 4, 4]
    assert found["recall"]["upper left"] is None
    with torch.no_grad():
        test = Toy().load("bright").test
        predicted = load_model(exported)(test.images.float() / 255)["probabilities"].argmax(1)
    chosen = test.labels >= 2
    assert found["together"]["accuracy"] == 100 * float((predicted == test.labels)[chosen].double().mean())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=office_caltech"], "the model knows no class 'backpack' of office_caltech;"),
        ([], "neither images nor data were given"),
        (["method=fpl"], "only the data can be chosen"),
        (["data=foldr"], "did you mean 'folder'"),
        (["data=folder", "--split", "tset"], "did you mean 'test'"),
        (["data=folder", "data.image_size=64"], "data.image_size=64: the model takes images with 16; leave"),
        (["data=folder", "data.augmentation.normalisation=image"], "the model takes images with fixed"),
        (["data=folder", "engine=inline", "data.augmentation.mean=[0.1,0.1,0.1]"], "data.augmentation.mean=[0.1"),
        (["data=folder", FOREIGN], "data.augmentation.std=[0.01]: the model takes images with"),
        (["data=folder", "engine=inline", FOREIGN], "data.augmentation.std=[0.01]: the model takes images with"),
        (["data=folder", "data.augmentation={flip:true}"], "no data.augmentation.mean: the model takes images with"),
    ],
)
def test_data_that_do_not_fit_are_named(
    words: list[str], message: str, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(exported), *words]) == 1
    assert message in capsys.readouterr().err


def test_files_are_read_as_the_model_reads_unless_a_setting_says_otherwise(exported: Path, tmp_path: Path) -> None:
    place = tmp_path / "site" / NAMES[0]
    place.mkdir(parents=True)
    wide = np.zeros((16, 48, 3), np.uint8)
    wide[:, 16:32] = np.linspace(150, 250, 16, dtype=np.uint8)[:, None, None]
    for number in range(4):
        Image.fromarray(wide + np.uint8(number)).save(place / f"{number}.png")
    data, description = ["data=folder", f"data.root={tmp_path}"], load_model(exported).description
    means = []
    for words in ([], ["data.resize=crop"], ["data.resize=pad", "data.range=[150,250]"]):
        _, domains = domains_of([*data, *words], description)
        means.append(float(domains["site"].whole.images.float().mean()))
    assert means[0] == pytest.approx(67, abs=4), "squashed"
    assert means[1] == pytest.approx(200, abs=4), "its middle"
    assert means[2] == pytest.approx(67 / 3 * 127 / 200, abs=4), "between black, and darker"
