"""Exported models: every file predicts what the run's own net predicts, and describes itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from exports.conftest import HERE, Apart
from safetensors import safe_open
from support.runs import run
from support.toy import DOMAINS, Toy, toy_settings
from torch import nn

from common import choices
from common.data.batches import Augmentation
from common.errors import CheckpointError, ConfigError
from common.exports import load_model
from common.models.base import Model
from common.models.convolutional import SmallBackbone
from common.overrides import quoted_override
from common.prototypes import PrototypeSet
from common.regular_files import file_sha256
from common.storage import read_tensors, under_prefix, write_tensors
from goldfinch.cli import main
from goldfinch.commands.device_evaluation import evaluate_on_devices
from goldfinch.commands.export import RULE, export
from goldfinch.commands.export import _of_run as of_run
from goldfinch.exports import formats
from goldfinch.exports.card import model_card
from goldfinch.exports.formats import FORMATS, READERS, ExportError
from goldfinch.record import RunRecord
from goldfinch.run_model import RunModel
from server.run.checkpoint import Checkpoints
from strategies.fdse import ERASERS
from strategies.fedproto import FedProto
from strategies.fedsr import FixedDraws, ProbabilisticModel

needs_onnx = pytest.mark.skipif("onnx" not in HERE, reason="the export extra is not installed")


def accuracy(predict: Any, domain: str) -> float:
    test = Toy().load(domain).test
    with torch.no_grad():
        right = predict(test.images.float() / 255).argmax(1) == test.labels
    return 100 * float(right.double().mean())


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["safetensors", pytest.param("onnx", marks=needs_onnx)])
@pytest.mark.long
def test_each_file_scores_as_the_run_did(name: str, trained: RunRecord, exported: Path) -> None:
    predict = READERS[name](exported / FORMATS[name])
    found = {domain: accuracy(predict, domain) for domain in DOMAINS}
    assert found == trained.summary["accuracy"]
    assert len(set(found.values())) > 1, "a net that predicts one class would pass"
    assert predict(torch.zeros(1, 3, 16, 16)).shape == (1, 4)  # any number of images


def test_an_exported_model_normalises_each_image_as_its_training_did(tmp_path: Path) -> None:
    """test_onnx.py compares ONNX with the exported model."""
    data = Toy(augmentation=Augmentation(normalisation="image"))
    run(toy_settings("fedavg", tmp_path / "run", data=data))
    export(tmp_path / "run", tmp_path / "model")
    predict = READERS["safetensors"](tmp_path / "model" / FORMATS["safetensors"])
    found = {domain: accuracy(predict, domain) for domain in DOMAINS}
    assert found == RunRecord(tmp_path / "run").summary["accuracy"]


def reference(record: RunRecord, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return RunModel(record).inference()((images - 0.5) / 0.25)[1].softmax(1)


def test_a_card_keeps_strangers_names_in_their_cells(exported: Path) -> None:
    description = load_model(exported).description
    odd = ("cat | dog", "<script>x</script>", *description.classes[2:])
    card = model_card(dataclasses.replace(description, classes=odd, notes=("a note\n# with a heading",)))
    assert "cat \\| dog, &lt;script>x&lt;/script>" in card
    assert not any(line.startswith("# with") for line in card.splitlines())


def test_the_description_of_an_exported_model(trained: RunRecord, exported: Path) -> None:
    description = json.loads((exported / "model.json").read_text())
    assert description["classes"] == list(Toy().class_names)
    assert (description["image_size"], description["mean"], description["std"]) == (16, [0.5], [0.25])
    assert (description["method"], description["data"]["domains"], description["round"]) == ("fpl", list(DOMAINS), 4)
    assert description["chosen"] == "last round, 4"
    assert description["score"]["accuracy"] == trained.summary["accuracy"]
    assert description["score"]["worst"] == trained.summary["worst"]
    assert description["licence"] == "CC-BY-4.0"
    assert description["architecture"]["model"]["_target_"] == "common.models.specs.Small"
    assert set(description["files"]) == {"safetensors", *HERE}
    card = (exported / "README.md").read_text()
    for entry in description["files"].values():
        digest = hashlib.sha256((exported / entry["name"]).read_bytes()).hexdigest()
        assert entry["sha256"] == digest
        assert digest in card
    assert str(trained.folder.parent) not in json.dumps(description) + card, "a folder of this machine"
    assert sorted(path.name for path in exported.iterdir()) == sorted(
        [*(FORMATS[name] for name in ("safetensors", *HERE)), "README.md", "model.json"]
    )


def test_the_weights_file_alone_says_its_classes_and_has_plain_names(trained: RunRecord, exported: Path) -> None:
    with safe_open(exported / "model.safetensors", "pt") as stream:
        assert json.loads(stream.metadata()["goldfinch"])["classes"] == list(Toy().class_names)
        names = set(stream.keys())
    prototypes = {f"prototypes.{part}" for part in ("vectors", "labels", "weights")}
    assert names == set(RunModel(trained).model().state_dict()) | prototypes


ALONE = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "common", "strategies", "client", "server", "conf"):
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Refused())
import json
import numpy
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
facts = json.loads(session.get_modelmeta().custom_metadata_map["goldfinch"])
images = numpy.frombuffer(sys.stdin.buffer.read(), numpy.uint8).reshape(-1, 3, facts["image_size"], facts["image_size"])
probabilities = session.run(["probabilities"], {"images": images.astype("float32") / 255})[0]
print([facts["classes"][index] for index in probabilities.argmax(1)])
"""


@needs_onnx
def test_a_device_needs_neither_goldfinch_nor_torch(trained: RunRecord, exported: Path) -> None:
    images = Toy().load("bright").test.images
    command = [sys.executable, "-I", "-c", ALONE, str(exported / "model.onnx")]
    done = subprocess.run(command, input=images.numpy().tobytes(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    expected = reference(trained, images.float() / 255).argmax(1)
    assert done.stdout.decode().strip() == str([Toy().class_names[index] for index in expected])


def test_the_threshold_holds_what_it_says(exported: Path) -> None:
    model = load_model(exported)
    images = torch.cat([Toy().load(domain).test.images for domain in DOMAINS]).float() / 255
    outputs = model(images)
    near = outputs["distances"].amin(1)
    assert near.quantile(0.95) == pytest.approx(model.description.prototypes["threshold"])
    rows = nn.functional.normalize(model.prototypes.vectors)
    cosine = nn.functional.normalize(outputs["features"]) @ rows.T
    assert torch.allclose(near, 1 - cosine.amax(1), atol=1e-6)
    nearest = model.prototypes.labels[cosine.argmax(1)]
    assert torch.equal(outputs["distances"].argmin(1), nearest)


def test_with_validation_the_threshold_is_chosen_on_validation_samples(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(toy_settings("fpl", folder, overrides=("protocol.validation=0.25",)))
    export(folder, tmp_path / "model")
    model = load_model(tmp_path / "model")
    own = RunModel(RunRecord(folder))
    held = torch.cat([own.validation_split(client).images for client in own.clients]).float() / 255
    assert f"{len(held)} validation samples" in model.description.prototypes["rule"]
    assert model(held)["distances"].amin(1).quantile(0.95) == pytest.approx(model.description.prototypes["threshold"])


@pytest.mark.parametrize("given", [False, True], ids=["validation", "given data"])
def test_files_are_compared_on_images_of_all_classes(
    given: bool, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images in folders are sorted by class: the first few are of one, and a threshold of them is of that class."""
    data = ["data=folder", quoted_override("data.root", pictures)]
    words = ["run", "method=fpl", "model=small", *data, "data.image_size=16", "protocol.validation=0.4"]
    words += ["train.rounds=1", "train.local_steps=1", "train.device=cpu", f"output={tmp_path / 'run'}"]
    assert main(words) == 0
    monkeypatch.setattr("goldfinch.commands.export.SAMPLES", len(Toy().class_names))
    own = RunModel(RunRecord(tmp_path / "run"))
    images = of_run(own, None, data if given else []).images
    for part, domain in zip(images.chunk(len(DOMAINS)), own.test_domains, strict=True):
        whole = own.settings.data.load(domain).whole
        found = {int(whole.labels[(whole.images == image).flatten(1).all(1)][0]) for image in part}
        lacks = domain == "noisy" and not given  # in training
        assert len(found) == len(Toy().class_names) - lacks


# ---- methods ---------------------------------------------------------------------------------------------------------

SHARED = [("fedadg", {}), ("fedproto", {"predict_with": "prototypes"})]
OWN = [("fedbn", {}), ("fedpall", {})]
"""One of each kind; tests/conformance compares the inference of every method with its scores."""


@pytest.mark.parametrize(
    ("method", "client", "domains", "images"),
    [
        ("pooled", None, DOMAINS, "pooled-0"),
        ("fedavg", None, DOMAINS, "bright-0, bright-1, dark-0, dark-1, noisy-0, noisy-1"),
        ("single_set", "bright-1", ("bright",), "bright-1"),
        ("fedbn", "bright-1", DOMAINS, "bright-1"),
    ],
)
def test_a_model_names_the_domains_that_it_was_trained_on(
    method: str,
    client: str | None,
    domains: tuple[str, ...],
    images: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = (
        "protocol=skewed",
        "protocol.skew=none",
        "protocol.client_count=2",
        "protocol.least=8",
        "protocol.validation=0.25",
    )
    run(toy_settings(method, tmp_path / "run", overrides=words, train={"rounds": 1}))
    description = export(tmp_path / "run", tmp_path / "model", client=client)
    assert list(description.data["domains"]) == list(domains)
    assert re.search(rf"compared with the net on \d+ validation samples of {images}\n", capsys.readouterr().out)


def test_an_evaluation_has_no_model_to_export(trained: RunRecord, exported: Path, tmp_path: Path) -> None:
    evaluate_on_devices(exported, ["engine=inline", "data=support.toy.Toy", "train.device=cpu"], tmp_path / "run")
    with pytest.raises(ConfigError, match=f"trained no model: it evaluated {exported}"):
        export(tmp_path / "run", tmp_path / "model")


@pytest.mark.parametrize(("method", "hyper"), SHARED + OWN)
@pytest.mark.long
def test_what_leaves_is_what_was_scored(method: str, hyper: Mapping[str, Any], tmp_path: Path) -> None:
    run(toy_settings(method, tmp_path / "run", hyper=hyper))
    own = (method, hyper) in OWN
    description = export(tmp_path / "run", tmp_path / "model", client="dark-0" if own else None)
    model, summary = load_model(tmp_path / "model"), RunRecord(tmp_path / "run").summary
    found = {name: accuracy(lambda x: model(x)["probabilities"], name) for name in (["dark"] if own else DOMAINS)}
    assert found == {name: summary["accuracy"][name] for name in found}
    assert description.score is not None
    assert description.score["accuracy"] == found
    names = set(model.net.state_dict())
    assert all(name.startswith(("backbone.", "head.")) for name in names), "what only training needs stays"
    if own:
        with pytest.raises(ConfigError, match=r"choose by --client.*dark-0"):
            export(tmp_path / "run", tmp_path / "other")


def test_a_simulation_exports_what_its_clients_share_as_a_server_does(
    apart: Callable[[str], Apart], trained: RunRecord, tmp_path: Path
) -> None:
    """On a server the clients' state is not there; in the folder of a simulation it is."""
    found = apart("fedbn")
    shutil.copytree(found.run, tmp_path / "run")
    shutil.copytree(found.devices, tmp_path / "run" / "clients")
    with pytest.raises(ConfigError, match="or shared, which is what they have in common"):
        export(tmp_path / "run", tmp_path / "model")
    description = export(tmp_path / "run", tmp_path / "model", client="shared")
    assert description.client is None
    assert not description.complete
    name = description.files["safetensors"]["name"]
    assert (tmp_path / "model" / name).read_bytes() == (found.shared / name).read_bytes()
    card = (tmp_path / "model" / "README.md").read_text()
    assert "what all clients share" in card
    assert "goldfinch evaluate" not in card, "which refuses it"
    with pytest.raises(ConfigError, match="all clients of fpl have one model"):
        export(trained.folder, tmp_path / "other", client="shared")


def test_scores_of_something_else_are_marked(tmp_path: Path) -> None:
    run(toy_settings("rucr", tmp_path / "rucr", train={"rounds": 1}))
    assert "before its last exchange" in " ".join(export(tmp_path / "rucr", tmp_path / "first").notes)
    run(toy_settings("per_fedavg", tmp_path / "adapted", train={"rounds": 1}, hyper={"adapt_steps": 1}))
    description = export(tmp_path / "adapted", tmp_path / "second")
    assert "adapted to each client's training images" in " ".join(description.notes)
    assert description.notes[0] in (tmp_path / "second" / "README.md").read_text()
    run(toy_settings("fedsr", tmp_path / "drawn", train={"rounds": 1}))
    assert "by draws of the features of each image" in " ".join(export(tmp_path / "drawn", tmp_path / "third").notes)


def test_the_model_of_a_run_that_has_not_finished_says_so(
    trained: RunRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(trained.folder, tmp_path / "run"))
    events = folder / "events.jsonl"
    kept = [line for line in events.read_text().splitlines() if '"finish"' not in line]
    events.write_text("\n".join(kept))
    (folder / "summary.json").unlink()
    description = export(folder, tmp_path / "model")
    note = "The run has not finished: this is round 4 of 4."
    assert note in description.notes
    assert f"note: {note}" in capsys.readouterr().out
    assert note in (tmp_path / "model" / "README.md").read_text()
    assert not any("not finished" in remark for remark in export(trained.folder, tmp_path / "whole").notes)


def test_fixed_draws_average_as_fedsr_does() -> None:
    torch.manual_seed(0)
    net = ProbabilisticModel(Model(SmallBackbone(), nn.Linear(128, 4), 128, 4), 8).eval()
    draws, images = torch.randn(20, 8), torch.randn(3, 3, 16, 16)
    mean, deviation = net.distribution(images)
    chances = torch.stack([net.classify(mean + deviation * draw).softmax(1) for draw in draws]).mean(0)
    features, scores = FixedDraws(net, draws)(images)
    assert torch.equal(features, mean)
    assert torch.allclose(scores.exp(), chances, atol=1e-6)


def test_the_nearest_prototype_is_fedproto_s_and_absent_classes_are_never_predicted() -> None:
    torch.manual_seed(0)
    net = Model(SmallBackbone(), nn.Linear(128, 4), 128, 4).eval()
    prototypes = PrototypeSet(torch.rand(2, 128), torch.tensor([1, 3]), torch.ones(2))
    method, images = FedProto(predict_with="prototypes"), torch.randn(5, 3, 16, 16)
    features, scores = method.inference(net, prototypes, 0)(images)
    distances = torch.cdist(features, prototypes.vectors)
    assert torch.allclose(scores[:, [1, 3]], -distances.square(), atol=1e-4)
    assert bool(scores[:, [0, 2]].isneginf().all())
    assert method.inference(net, PrototypeSet.empty(128), 0) is net  # before there are any


def test_the_rule_of_a_score_on_a_part_of_the_images_names_how_many(tmp_path: Path) -> None:
    for name, rounds in (("part", {"test_samples": 2}), ("all", {})):
        run(toy_settings("fedavg", tmp_path / name, rounds=rounds))
        score = export(tmp_path / name, tmp_path / f"{name} model").score
        assert score is not None
        if name == "part":
            assert "a part of each domain's test split, 2 images of" in score["rule"]
        else:
            assert score["rule"] == RULE


# ---- which round -----------------------------------------------------------------------------------------------------


def test_the_best_round_is_taken_where_the_run_kept_it(tmp_path: Path) -> None:
    place = tmp_path / "run"
    run(toy_settings("fedavg", place))
    with pytest.raises(ConfigError, match=r"protocol\.validation"):
        export(place, tmp_path / "model", chosen="best")
    first = RunModel(RunRecord(place), "1")
    assert export(place, tmp_path / "first", chosen="1").chosen == "chosen round, 1"
    Checkpoints(place / "checkpoint", kind="best").save(first.checkpoint)
    description = export(place, tmp_path / "best")
    assert (description.chosen, description.round) == ("best round by validation, 1", 1)
    assert description.score["accuracy"] == dict(RunRecord(place).round_scores[1].accuracy)
    taken, newest = load_model(tmp_path / "best").net, RunModel(RunRecord(place)).model()
    assert torch.equal(taken.head.weight, first.model().head.weight)
    assert not torch.equal(taken.head.weight, newest.head.weight)
    assert export(place, tmp_path / "last", chosen="last").round == 2
    for wrong, message in (("7", "which has 1, 2"), *((word, "best, last or") for word in ("newest", "²", "٢"))):
        with pytest.raises((CheckpointError, ConfigError), match=message):
            export(place, tmp_path / "model", chosen=wrong)
    assert not (tmp_path / "model").exists()


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedbn", "single_set"])
def test_a_device_completes_what_the_server_shares(
    method: str, tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, shared = tmp_path / "run", tmp_path / "shared"
    run(toy_settings(method, place))
    whole, personal = RunModel(RunRecord(place)).model("dark-0").state_dict(), RunRecord(place)
    (place / "clients").rename(tmp_path / "devices")  # as after a run on real devices
    assert main(["export", str(place), "--to", str(shared)]) == 0
    printed = capsys.readouterr().out
    assert "on each device: goldfinch export STATE --shared shared --to DIR" in printed
    assert ("which is no weight of the net" in printed) is (method == "single_set")
    with safe_open(shared / "model.safetensors", "pt") as stream:
        travelled = {name for name in whole if ".bn" not in name} if method == "fedbn" else set()
        assert set(stream.keys()) == travelled
    with pytest.raises(ConfigError, match="each client keeps the rest"):
        load_model(shared)
    command = ["export", str(tmp_path / "devices"), "--shared", str(shared), "--to", str(tmp_path / "mine")]
    assert main(command) == 1
    assert "--client is needed: choices: bright-0, dark-0, noisy-0" in capsys.readouterr().err
    assert main([*command, "--client", "dark-0"]) == 0
    assert "compared with the net on noise" in capsys.readouterr().out
    model = load_model(tmp_path / "mine")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model.net.state_dict().items())
    assert model.description.client == "dark-0"
    assert list(model.description.data["domains"]) == (list(DOMAINS) if method == "fedbn" else ["dark"])
    assert dict(model.description.score["accuracy"]) == {"dark": personal.summary["accuracy"]["dark"]}
    data = ["data=folder", f"data.root='{pictures}'", "data.domains=[dark]"]
    assert main([*command, "--client", "dark-0", "--overwrite", *data]) == 0
    assert "compared with the net on 16 test images of dark" in capsys.readouterr().out


def test_a_device_whose_folder_holds_the_classes_completes_and_scores(
    apart: Callable[[str], Apart], pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the error advises, as a person on the device does."""
    found, folder = apart("fedbn"), tmp_path / "images"
    shutil.copytree(pictures / "dark" / "test", folder)
    data = ["data=folder", f"data.root={folder}", "data.domains=[dark]"]
    export_it = ["export", str(found.devices), "--shared", str(found.shared), "--to", str(tmp_path / "mine")]
    export_it += ["--client", "dark-0"]
    named = f"data.classes=[{','.join(Toy().class_names)}]"
    assert main([*export_it, *data, named]) == 1
    assert "data.path=class reads it as 'dark' alone" in capsys.readouterr().err
    for words in ([named], []):
        assert main([*export_it, *data, *words, "data.path=class", "--overwrite"]) == 0
        assert "compared with the net on 4 test images of dark" in capsys.readouterr().out
        assert main(["evaluate", str(tmp_path / "mine"), *data, *words, "data.path=class"]) == 0
        assert "(not trained on)" not in capsys.readouterr().out


@pytest.mark.parametrize("scored", ["trained", "mixture"])
def test_a_device_exports_the_model_that_fdse_scored_or_says_that_it_cannot(scored: str, tmp_path: Path) -> None:
    folder, shared = tmp_path / "run", tmp_path / "shared"
    run(toy_settings("fdse", folder, hyper={"scored": scored}))
    record = RunModel(RunRecord(folder))
    whole = record.model("dark-0").state_dict()
    for name, table in under_prefix(ERASERS, record.checkpoint.state.extra).items():
        assert torch.equal(whole[name], table[1]) == (scored == "mixture")
    export(folder, shared, client="shared")
    export(folder / "clients", tmp_path / "mine", shared=shared, client="dark-0")
    model = load_model(tmp_path / "mine")
    same = all(torch.equal(tensor, whole[name]) for name, tensor in model.net.state_dict().items())
    assert same == (scored == "trained")
    noted = any("tensors that the server has for each client" in note for note in model.description.notes)
    assert noted == (scored == "mixture")


def test_a_device_keeps_the_licence_and_the_round_that_the_server_exported(
    apart: Callable[[str], Apart], tmp_path: Path
) -> None:
    found = apart("fedrep")
    export(found.run, tmp_path / "shared", licence="CC-BY-4.0")
    of_device = {"shared": tmp_path / "shared", "client": "dark-0"}
    assert export(found.devices, tmp_path / "mine", **of_device).licence == "CC-BY-4.0"
    assert export(found.devices, tmp_path / "other", **of_device, licence="MIT").licence == "MIT"
    with pytest.raises(ConfigError, match=r"--round 1: the round is that of .*shared, which"):
        export(found.devices, tmp_path / "first", **of_device, chosen="1")


@needs_onnx
def test_a_part_of_a_net_is_no_graph(apart: Callable[[str], Apart], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="made on devices"):
        export(apart("fedrep").run, tmp_path / "shared", ["onnx"])


def test_parts_that_a_device_does_not_have_are_reported(
    apart: Callable[[str], Apart], exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="the whole net"):
        export(tmp_path, tmp_path / "model", shared=exported)
    shared = apart("fedrep").shared
    with pytest.raises(ConfigError, match="state-dir"):
        export(tmp_path, tmp_path / "model", shared=shared)
    shutil.copytree(apart("fedrep").devices, tmp_path / "devices")
    for path in (tmp_path / "devices").rglob("dark-0/*.safetensors"):
        path.unlink()
    with pytest.raises(CheckpointError, match="dark-0's own state"):
        export(tmp_path / "devices", tmp_path / "model", shared=shared, client="dark-0")


# ---- nothing half-written --------------------------------------------------------------------------------------------


def test_a_file_with_other_content_is_not_kept(
    trained: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "model"
    export(trained.folder, place)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    whole = formats.READERS["safetensors"]
    monkeypatch.setitem(formats.READERS, "safetensors", lambda path: lambda images: whole(path)(images).flip(1))
    with pytest.raises(ExportError, match=r"model\.safetensors differs by .* from the run's own net"):
        export(trained.folder, place, overwrite=True)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_only_an_exported_model_is_replaced(trained: RunRecord, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to a friend").write_text("dear")
    with pytest.raises(ConfigError, match="not an exported model"):
        export(trained.folder, tmp_path / "letters")
    with pytest.raises(ConfigError, match="not an exported model"):
        export(trained.folder, tmp_path / "letters" / "to a friend")
    export(trained.folder, tmp_path / "model")
    with pytest.raises(ConfigError, match=r"holds an exported model already .*--overwrite"):
        export(trained.folder, tmp_path / "model", licence="another")
    export(trained.folder, tmp_path / "model", licence="another", overwrite=True)
    assert load_model(tmp_path / "model").description.licence == "another"


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new)


WEIGHTS, DESCRIPTION, SMALL = "model.safetensors", "model.json", b"common.models.specs.Small"
DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "a bit": (WEIGHTS, flipped, "SHA-256"),
    "torn": (DESCRIPTION, lambda content: content[:-20], "damaged or of another version"),
    "another key": (DESCRIPTION, replaced(b'"classes"', b'"klasses"'), "klasses: no such key"),
    "a class with an escape": (DESCRIPTION, replaced(b"upper left", rb"\u001b[2J"), "must be printable"),
    "another size": (DESCRIPTION, replaced(b'"features": 128', b'"features": 64'), "not those of the network"),
    "a stranger": (DESCRIPTION, replaced(SMALL, b"subprocess.Popen"), "not one of Goldfinch's own"),
    "a method": (DESCRIPTION, replaced(SMALL, b"strategies.fedprox.FedProx"), "not one of Goldfinch's own"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_folder_is_named(case: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_OWN_NAMES", set())  # other tests of this process may have named the class
    name, change, message = DAMAGED[case]
    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(change(path.read_bytes()) if path.name == name else path.read_bytes())
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load_model(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_no_model(value: float, exported: Path, tmp_path: Path) -> None:
    """Such a model predicted the first class for every image, with a probability of nan."""
    tensors, _ = read_tensors(exported / WEIGHTS)
    name = next(name for name in tensors if name.startswith("head."))
    tensors[name].view(-1)[0] = value
    write_tensors(tmp_path / WEIGHTS, tensors)
    known = json.loads((exported / DESCRIPTION).read_text())
    known["files"]["safetensors"]["sha256"] = file_sha256(tmp_path / WEIGHTS)
    (tmp_path / DESCRIPTION).write_text(json.dumps(known))
    with pytest.raises(CheckpointError, match=rf"{name} has values that are not finite.*export the run again"):
        load_model(tmp_path)


def test_missing_packages_are_an_error_before_any_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[export\]"):
        export(tmp_path / "nowhere", tmp_path / "model", ["onnx"])


def test_a_loaded_model_is_a_module_in_evaluation_mode(exported: Path) -> None:
    model = load_model(exported)
    assert isinstance(model, nn.Module)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.classes == Toy().class_names
