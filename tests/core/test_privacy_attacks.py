"""What a server that attacks a deployed device is told: a bound that is none, a walk around a budget, error texts."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import datasets
import pytest
import torch
from support.attacks import (
    EPSILON,
    NOISED,
    Attacker,
    chosen,
    initial_weights,
    name_of,
    replace_image,
    scores_of,
    write_folder,
)
from support.exchanges import device_of, request_to
from support.runs import run
from support.toy import Toy, toy_settings

import common.settings
import strategies.core.protection
from client.border import BORDER, SCORED, Border, Images, scored_images, trained_on, training_images
from client.node import answer_question
from client.reasons import REASONS, reason_for, says_private
from client.resident.messages import Question
from common import errors
from common.config import checked
from common.data.digits import Digits
from common.data.domain import DataSource, Domain
from common.data.folder import Folder
from common.data.glyphs import Glyphs
from common.data.image_folders import ImageFolders
from common.data.office_caltech import OfficeCaltech
from common.data.table import Table
from common.errors import ConfigError, ContractError, DataError, ImageSideError, PayloadError
from common.settings import load_settings, with_method
from common.text import printable
from common.wire.messages import Registration, Request, header_of, read_header
from common.wire.payload import TENSOR_TYPE, Payload, decode, encode
from strategies.core.codec import read_registrations
from strategies.feddg_ga import FedDGGA

WRONG_SIDE = REASONS[ImageSideError]
NEGATIVE = Path("negative")


def private_attacker(folder: Path, **configuration: Any) -> Attacker:
    """A server that asks a device with a budget of its own, whose state is beside its data."""
    state = folder.parent / f"{folder.name} state"
    return Attacker(folder, state, **{"domain": "clinic", "privacy_max_epsilon": EPSILON, **configuration})


# ---- a printed epsilon that is no bound ------------------------------------------------------------------------------


def copied(folder: Path) -> Path:
    """A data set with a test folder, of which one training image is a copy of a test image."""
    write_folder(folder / "train")
    write_folder(folder / "test", 6, seed=1)
    replace_image(folder / "train" / NEGATIVE / name_of(3), folder / "test" / NEGATIVE / name_of(0))
    return folder


def test_an_epsilon_is_not_printed_where_training_images_decide_what_is_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: 12 images are scored, or 11 if one training image is a copy, and epsilon is 0.0486 for both."""
    sides = [tmp_path / "a" / "clinic", copied(tmp_path / "b" / "clinic")]
    write_folder(sides[0] / "train")
    write_folder(sides[0] / "test", 6, seed=1)
    drop = "data.duplicates=drop"
    words = [
        chosen(*NOISED, "privacy.randomness=system", f"data.root={side.parent}", f"output={side.parent / 'run'}", drop)
        for side in sides
    ]
    with pytest.raises(ConfigError, match=r"data\.duplicates=drop: training images would decide"):
        load_settings(words[0])
    reply = private_attacker(sides[0]).register(*NOISED, drop)
    assert (reply.ok, reply.text) == (False, REASONS[ConfigError])
    for module in (common.settings, strategies.core.protection):
        monkeypatch.setattr(module, "check_test_images", lambda *rest: None)
    done = [run(load_settings(each)).summary["privacy"] for each in words]
    assert done[0]["epsilon"] == done[1]["epsilon"] == {"clinic-0": pytest.approx(0.0486)}
    assert done[0]["unprotected"] == []
    scored = [scores_of(private_attacker(side).ask(*NOISED, drop, score=["clinic"]))[0]["count"] for side in sides]
    assert scored == [12, 11]


IMAGES = {"classes", "train_fraction", "duplicates", "broken", "range", "page", "resize"}
FIELDS = {
    "folder": IMAGES | {"path"},
    "table": IMAGES | {"path", "image", "label", "domain", "split", "group"},
    "office_caltech": {"split", "train_fraction", "duplicates"},
    "digits": {"split"},
    "glyphs": set(),
}
"""Settings of data sets: those that :func:`test_training_images_decide_nothing_that_is_scored` tries, the split of
digits, which is by labels alone, and the path of folders, which is by their names alone."""

EVERY_SOURCE = {"domains", "image_size", "augmentation", "root"}


@pytest.mark.parametrize("source", [Folder, Table, OfficeCaltech, Digits, Glyphs], ids=lambda kind: kind.name)
def test_every_setting_of_a_data_set_is_tried(source: type[DataSource]) -> None:
    """A new setting must be tried below, or be known to follow no training image, before a private run may have it."""
    assert {field.name for field in fields(source)} - EVERY_SOURCE == FIELDS[source.name]


class TwoClasses(ImageFolders):
    """Class folders of the data sets that papers use, with the classes of these tests."""

    name = "two_classes"
    known_classes = ("negative", "positive")


def folders(root: Path) -> list[DataSource]:
    """Data sets on the same images, with each setting at other values than its default."""
    classes = ("negative", "positive")
    base: dict[str, Any] = {"domains": ("clinic",), "root": str(root), "image_size": 16}
    several: list[dict[str, Any]] = [
        {},
        {"classes": ()},
        {"train_fraction": 0.5},
        {"duplicates": "drop"},
        {"duplicates": "refuse"},
        {"broken": "skip"},
        {"range": (0.0, 200.0)},
        {"page": 2},
        {"resize": "pad"},
    ]
    rules: list[dict[str, Any]] = [
        {},
        {"duplicates": "drop"},
        {"split": "per_class_fraction", "train_fraction": 0.5},
    ]
    tables: list[dict[str, Any]] = [
        {"path": "list.csv"},
        {"path": "list.csv", "image": "path", "label": "label"},
        {"path": "list.csv", "split": "part", "domain": "place"},
        {"path": "list.csv", "split": "none", "group": "path"},
        {"path": "images.parquet", "classes": classes},
    ]
    found: list[DataSource] = [Folder(**{**base, "classes": classes, **each}) for each in several]
    found += [Table(**base, **each) for each in tables]
    return found + [TwoClasses(**base, **each) for each in rules]


def part_of(path: Path) -> str:
    """Three of ten images of a class are test images."""
    if path.name[8:12] >= "0007":
        return "test"
    return "train"


def write_table(place: Path, paths: list[Path]) -> None:
    """Write a table that holds its images."""
    columns = {"image": [path.read_bytes() for path in paths], "label": [path.parent.name for path in paths]}
    datasets.Dataset.from_dict(columns).to_parquet(place)


CHANGES = {"noise": None, "a copy of a test image": name_of(9), "a copy of a training image": name_of(0)}


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_training_images_decide_nothing_that_is_scored(change: str, tmp_path: Path) -> None:
    """Of neighbours, test images, classes, sizes and every protocol's split are equal, or the setting is refused."""
    found: list[list[Domain]] = []
    sources: list[DataSource] = []
    for side in ("a", "b"):
        folder = write_folder(tmp_path / side / "clinic")
        paths = sorted(folder.rglob("*.png"))
        lines = [f"{path.relative_to(folder)},{path.parent.name},{part_of(path)},clinic" for path in paths]
        (folder / "list.csv").write_text("\n".join(["path,label,part,place", *lines]) + "\n")
        if side == "b":
            name = CHANGES[change]
            replace_image(folder / NEGATIVE / name_of(3), None if name is None else folder / NEGATIVE / name)
        write_table(folder / "images.parquet", paths)
        sources = folders(tmp_path / side)
        found.append([source.load("clinic") for source in sources])
    refused = 0
    for source, ours, theirs in zip(sources, *found, strict=True):
        assert not torch.equal(ours.train.images, theirs.train.images)
        if source.test_follows_training:
            refused += 1
            continue
        assert torch.equal(ours.test.images, theirs.test.images)
        assert torch.equal(ours.test.labels, theirs.test.labels)
        assert torch.equal(ours.train.labels, theirs.train.labels), "all protocols split by labels and sizes alone"
        assert source.class_names == ("negative", "positive")
    assert refused == 4


# ---- a budget that the border between training and test images walks around ------------------------------------------

TWO = "data.domains=[clinic,ward]"
TABLE = ("data=table", "data.classes=[negative,positive]", "data.image_size=16", "data.domains=[clinic]")
WALKS: dict[str, dict[str, Any]] = {
    "another fraction": {"words": ["data.train_fraction=0.3"]},
    "a list": {"words": [*TABLE, "data.path=list.csv"], "pins": {"data": "table", "data-path": "list.csv"}},
    "a table with the images": {
        "words": [*TABLE, "data.path=images.parquet"],
        "pins": {"data": "table", "data-path": "images.parquet", "domain": "clinic"},
    },
    "the whole domain": {
        "words": [TWO, "protocol=leave_one_out", "protocol.leave_out=[clinic]", "protocol.unseen=whole"],
        "client": "ward-0",
    },
}
"""Settings with which a server calls images that were trained on test images, and what the owner allows of them."""


def walked(folder: Path, walk: str) -> tuple[Any, Any]:
    """A server has one update, which spends the budget, and asks for scores by other settings."""
    write_folder(folder / "clinic")
    write_folder(folder / "ward", seed=5)
    lines = [f"negative/{name_of(place)},negative,{'test' if place < 9 else 'train'}" for place in range(10)]
    lines += [f"positive/{name_of(place, 'positive')},positive,train" for place in range(10)]
    (folder / "clinic" / "list.csv").write_text("\n".join(["path,label,split", *lines]) + "\n")
    if folder.name == "b":
        replace_image(folder / "clinic" / NEGATIVE / name_of(5))
    paths = sorted((folder / "clinic").rglob("*.png"), key=lambda path: (path.name == name_of(5), path.name))
    write_table(folder / "clinic" / "images.parquet", paths)
    attacker = private_attacker(folder, domain=None, partition_id=0, num_partitions=1)
    del attacker.configuration["domain"]
    first = attacker.ask(*NOISED, TWO, train=True, score=["clinic"])
    spent = attacker.ask(*NOISED, TWO, train=True)
    assert (spent.ok, spent.text) == (False, REASONS[errors.BudgetSpentError])
    asked = WALKS[walk]
    own = attacker.configuration
    attacker.configuration = {**own, **asked.get("pins", {})}
    again = attacker.ask(*NOISED, *asked["words"], score=["clinic"], client=asked.get("client", "clinic-0"))
    attacker.configuration = own
    assert attacker.ask(*NOISED, TWO, score=["clinic"]).ok, "the first run's own scores go on"
    return scores_of(first)[0]["loss"], again


@pytest.mark.parametrize("walk", WALKS)
@pytest.mark.long
def test_no_image_is_scored_that_was_trained_on(walk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack: the exact loss of images that were trained on, after the budget is spent."""
    before, reply = walked(tmp_path / "a", walk)
    assert (reply.ok, reply.text, reply.traceback) == (False, WRONG_SIDE, "")
    monkeypatch.setattr(Border, "_add", lambda *rest: False)
    told = [walked(tmp_path / "c" / side, walk) for side in ("a", "b")]
    assert told[0][0] == told[1][0] == before, "the scores of test images do not differ"
    losses = [scores_of(reply)[0]["loss"] for _, reply in told]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_no_image_is_trained_on_that_was_scored(tmp_path: Path) -> None:
    """Its exact loss is known, so an epsilon that covers it would be no bound."""
    attacker = private_attacker(write_folder(tmp_path / "clinic"))
    assert attacker.ask(*NOISED, "data.train_fraction=0.3", score=["clinic"]).ok
    for reply in (attacker.register(*NOISED), attacker.ask(*NOISED, train=True)):
        assert (reply.ok, reply.text) == (False, WRONG_SIDE)
    assert attacker.ask(*NOISED, "data.train_fraction=0.3", train=True).ok


def test_a_run_that_moves_images_is_refused_at_registration(tmp_path: Path) -> None:
    attacker = private_attacker(write_folder(tmp_path / "clinic"))
    assert attacker.ask(*NOISED, train=True).ok
    assert attacker.register(*NOISED, "data.train_fraction=0.3").text == WRONG_SIDE
    assert attacker.register(*NOISED, "protocol.samples=8").ok, "another choice of the same training images"


def test_a_folder_under_another_name_has_no_other_budget(tmp_path: Path) -> None:
    """The attack: ledgers are kept by domain, and a node without a domain takes any name for its folder."""
    attacker = private_attacker(write_folder(tmp_path / "clinic"), partition_id=0, num_partitions=1)
    del attacker.configuration["domain"]
    found = [attacker.ask(*NOISED, f"data.domains=[{name}]", train=True, client=f"{name}-0") for name in "aab"]
    assert [reply.ok for reply in found] == [True, False, False]
    assert [reply.text for reply in found[1:]] == [REASONS[errors.BudgetSpentError], REASONS[errors.ContractError]]


def test_a_copy_of_a_test_image_is_not_refused(tmp_path: Path) -> None:
    """If images were known by their content, a refusal would tell that a training image is a copy."""
    attacker = private_attacker(copied(tmp_path / "clinic"))
    assert scores_of(attacker.ask(*NOISED, train=True, score=["clinic"]))[0]["count"] == 12
    assert scores_of(attacker.ask(*NOISED, score=["clinic"]))[0]["count"] == 12


def test_a_device_may_score_nothing(tmp_path: Path) -> None:
    attacker = private_attacker(write_folder(tmp_path / "clinic"), privacy_scores="none")
    registered: list[Registration] = read_registrations(attacker.register(*NOISED).text)
    assert registered[0].scores == []
    assert attacker.ask(*NOISED, train=True).ok
    assert not attacker.ask(*NOISED, score=["clinic"]).ok
    assert attacker.register(*NOISED, "data.train_fraction=0.3").ok, "no image is scored in either run"
    attacker.configuration["privacy-scores"] = "all"
    assert attacker.register(*NOISED).text == REASONS[ConfigError]


def test_a_device_that_scores_nothing_scores_no_validation_samples(tmp_path: Path) -> None:
    """The attack: without a budget, a server had the exact score of images that it took from the training samples."""
    attacker = Attacker(write_folder(tmp_path / "clinic"), tmp_path / "state", domain="clinic", privacy_scores="none")
    taking = "protocol.validation=0.5"
    for reply in (attacker.register(taking), attacker.ask(taking, train=True, validate=True)):
        assert (reply.ok, reply.text) == (False, REASONS[ContractError])
    lying = attacker.ask(train=True, validate=True)
    assert lying.ok, lying.text
    assert decode(lying.tensors[0]).header["validation"]["count"] == 0, "without the setting there are no such samples"


def test_no_model_is_scored_that_a_file_of_the_device_holds(tmp_path: Path) -> None:
    """The attack: the initial weights are the model that MOON keeps, trained and without noise; no other is sent."""
    network = ("model=torchvision", "model.name=shufflenet_v2_x0_5", "data.image_size=32")
    folder, state = write_folder(tmp_path / "clinic"), tmp_path / "state"
    attacker = Attacker(folder, state, domain="clinic", privacy_max_epsilon=EPSILON)
    assert attacker.ask(*NOISED, *network, "method=moon", train=True).ok
    (kept,) = state.rglob("*.safetensors")
    words = (*NOISED, *network, f"model.weights={kept}")
    empty = Payload({})
    reply = attacker.ask(*words, score=["clinic"], message=empty)
    assert (reply.ok, reply.text) == (False, REASONS[PayloadError])
    assert attacker.ask(*words, message=empty).ok, "nothing is asked of the model"
    assert attacker.ask(*words, score=["clinic"]).ok, "the server sent what is scored"


@pytest.mark.parametrize("method", ["fedbn", "per_fedavg method.adapt_steps=1"])
def test_a_budget_of_updates_is_not_walked_around_by_scores(method: str, tmp_path: Path) -> None:
    """The scores of a personal or adapted model are exact functions of training images, and nothing counts them."""
    folder = write_folder(tmp_path / "clinic")
    words = [f"method={method.split()[0]}", *method.split()[1:]]
    limited = Attacker(folder, tmp_path / "state", domain="clinic", privacy_max_releases=3)
    assert limited.ask(*words, score=["clinic"]).text == REASONS[ConfigError]
    assert limited.ask(*words, "protocol.validation=0.2", train=True).ok
    assert Attacker(folder, tmp_path / "free", domain="clinic").ask(*words, score=["clinic"]).ok


def test_a_budget_of_updates_is_not_walked_around_by_validation(tmp_path: Path) -> None:
    """The attack: without noise, the server calls training images validation samples, whose scores nothing counts."""
    folder = write_folder(tmp_path / "clinic")
    limited = Attacker(folder, tmp_path / "state", domain="clinic", privacy_max_releases=3)
    free = Attacker(folder, tmp_path / "free", domain="clinic")
    for trains in (True, False):
        reply = limited.ask("protocol.validation=0.2", train=trains, validate=True)
        assert (reply.ok, reply.text) == (False, REASONS[ConfigError])
        assert free.ask("protocol.validation=0.2", train=trains, validate=True).ok


# ---- the border's file -----------------------------------------------------------------------------------------------


def images(*names: str, split: str = "files") -> Images:
    return Images("clinic", names, split)


def test_a_border_keeps_the_first_side_of_each_image(tmp_path: Path) -> None:
    border = Border(tmp_path / "border")
    border.check(SCORED, images("a"))
    border.keep(trained_on("clinic"), images("a", "b"))
    border.keep(SCORED, images("c"))
    again = Border(tmp_path / "border")
    for side, names in ((SCORED, "ca"), (trained_on("clinic"), "bc"), (trained_on("ward"), "b")):
        for act in (again.check, again.keep):
            with pytest.raises(ImageSideError, match="each image keeps its side"):
                act(side, images(*names))
    with pytest.raises(ImageSideError, match="divided into training and test images"):
        again.keep(SCORED, images("d", split="places"))
    text = (tmp_path / "border" / BORDER).read_text()
    assert len(json.loads(text)["sides"]) == 3
    assert not {"a", "b", "c"} & set(json.loads(text)["sides"])


@pytest.mark.parametrize("damage", ["", "[]", '{"sides": 3, "splits": {}}'], ids=["empty", "list", "number"])
def test_a_damaged_border_sends_nothing(damage: str, tmp_path: Path) -> None:
    attacker = private_attacker(write_folder(tmp_path / "clinic"))
    assert attacker.ask(*NOISED, train=True).ok
    (path,) = (tmp_path / "clinic state").rglob(BORDER)
    path.write_text(damage)
    assert attacker.ask(*NOISED, score=["clinic"]).text == REASONS[DataError]
    with pytest.raises(DataError, match="restore it"):
        Border(path.parent).keep(SCORED, images("a"))


def test_images_without_files_have_one_division_for_good(tmp_path: Path) -> None:
    """Places mean other images where the settings of the data set differ, or its number of images."""
    domain = Toy().load("bright")
    border = Border(tmp_path)
    border.keep(trained_on("bright"), training_images(Toy(), domain, torch.arange(3)))
    border.keep(SCORED, scored_images(Toy(), domain, whole=False))
    with pytest.raises(ImageSideError, match="each image keeps its side"):
        border.check(SCORED, scored_images(Toy(), domain, whole=True))
    with pytest.raises(ImageSideError, match="in another way"):
        border.check(SCORED, scored_images(Toy(missing_class=False), domain, whole=False))


# ---- the hash of a registration --------------------------------------------------------------------------------------


def test_no_hash_tells_whether_an_image_is_square(tmp_path: Path) -> None:
    """The attack: cropped and squashed, images have one hash only if all are square; no registration spends budget."""
    attacker = private_attacker(write_folder(tmp_path / "clinic"))
    hashes: list[str] = []
    for resize in ("squash", "crop", "squash"):
        hashes.append(read_registrations(attacker.register(*NOISED, f"data.resize={resize}").text)[0].content)
    assert hashes[0] == hashes[2] != hashes[1]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_the_error_of_a_private_device_names_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The attack: the path of the image that cannot be decoded, and 4,000 characters of traceback."""
    folder = write_folder(tmp_path / "clinic")
    (folder / "positive" / "patient_0417_positive.png").write_bytes(b"no image")
    private = [
        (private_attacker(folder), NOISED),
        (Attacker(folder, tmp_path / "plain", domain="clinic"), NOISED),
        (Attacker(folder, tmp_path / "own", domain="clinic", privacy_max_releases=3), ()),
    ]
    for attacker, words in private:
        for trains in (False, True):
            reply = attacker.ask(*words, train=True) if trains else attacker.register(*words)
            assert (reply.ok, reply.text, reply.traceback) == (False, REASONS[DataError], "")
            assert "patient_0417_positive.png cannot be decoded" in capsys.readouterr().err, "its own log has the rest"
    pins = {"data": "folder", "data_path": "", "data_classes": "negative,positive"}
    told = Attacker(folder, tmp_path / "open", domain="clinic", **pins).register()
    assert "patient_0417_positive.png cannot be decoded" in told.text
    assert "Traceback" in told.traceback


def test_a_device_that_scores_no_image_measures_no_model(tmp_path: Path) -> None:
    """The attack: FedDG-GA sent how many training images the received model classifies, exactly."""
    folder = write_folder(tmp_path / "clinic")
    attacker = Attacker(folder, tmp_path / "state", domain="clinic", privacy_scores="none")
    for reply in (attacker.register("method=feddg_ga"), attacker.ask("method=feddg_ga", train=True)):
        assert (reply.ok, reply.text) == (False, REASONS[ContractError])
    assert attacker.register("method=fedavg").ok


@checked
class Undeclared(FedDGGA):
    """A method that measures models and does not say so."""

    validates: ClassVar[bool] = False


def test_an_undeclared_measurement_is_refused_as_well(tmp_path: Path) -> None:
    settings = with_method(toy_settings("feddg_ga", tmp_path), Undeclared())
    weights = Payload(initial_weights(settings, 3))
    with pytest.raises(ContractError, match="this device scores no image"):
        device_of(settings, scores=()).answer(request_to(settings, score=[]), weights)
    assert device_of(settings).answer(request_to(settings, score=[]), weights).extra


FORGED = "x\n2026-11-28T00:00:00.000Z INFO goldfinch.node: epsilon spent 0.001 of 8\n\x1b]0;title\x07\x1b[2J\x9b31m"


@pytest.mark.parametrize(
    "changes",
    [
        *({key: FORGED} for key in ("run", "identity", "method", "exchange", "client", "code")),
        {"score": [FORGED]},
        {"own": {"round": 1, "exchange": FORGED, "attempt": 0}},
        {FORGED: 1},
        {"client": "other"},
    ],
    ids=lambda changes: next(iter(changes)).partition("\n")[0],
)
def test_no_server_writes_a_line_of_the_device_s_log(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The attack: the request's client was a line of the log, with a time of its own."""
    attacker = Attacker(write_folder(tmp_path / "clinic"), tmp_path / "state", domain="clinic")
    words = chosen()
    settings = load_settings(words)
    request = {**header_of(request_to(settings, "clinic", client_count=1)), **changes}
    blob = encode(Payload(initial_weights(settings, 1)))
    content = {"request": json.dumps(request), "tensor_type": TENSOR_TYPE, "tensors": [blob]}
    reply = answer_question(attacker._question("answer", words, **content))
    assert not reply.ok
    told = capsys.readouterr().err
    trace = told[told.index("  Traceback") :]
    assert all(line.startswith("  ") for line in trace.split("\n") if line)
    assert printable(trace, keep="\n") == trace
    assert "epsilon spent" not in reply.text or FORGED in changes


@pytest.mark.parametrize("changes", [{"round": -1}, {"own": {"round": -1, "exchange": "train", "attempt": 0}}], ids=str)
def test_a_round_is_not_negative(changes: dict[str, Any], tmp_path: Path) -> None:
    """The attack: files of negative rounds were kept for ever."""
    settings = toy_settings("fedbn", tmp_path)
    header = {**header_of(request_to(settings)), **changes}
    with pytest.raises(PayloadError, match="round"):
        read_header(Request, header)
    assert read_header(Request, {**header, **{key: header_of(request_to(settings))[key] for key in changes}})


ERRORS = [
    *(kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.GoldfinchError)),
    *(ValueError, KeyError, OSError, MemoryError, RuntimeError, torch.cuda.OutOfMemoryError),
]


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_has_one_of_few_reasons(kind: type[Exception]) -> None:
    reason = reason_for(kind("patient_0417_positive.png"))
    assert reason in REASONS.values()
    assert reason == REASONS.get(kind, reason)


@pytest.mark.parametrize(
    ("run_config", "configuration", "private"),
    [
        ({"overrides": "method=fpl"}, {"domain": "clinic"}, False),
        ({"overrides": "method=fpl privacy=gaussian"}, {"domain": "clinic"}, True),
        ({"configuration": '{"privacy": {"_target_": "common.privacy.GaussianPrivacy"}}'}, {}, True),
        ({}, {"privacy-max-releases": 3}, True),
    ],
    ids=["open", "overrides", "composed", "the device's own budget"],
)
def test_a_private_run_is_known_before_its_settings_are_read(
    run_config: dict[str, Any], configuration: dict[str, Any], private: bool
) -> None:
    """Also if they cannot be read: the folders of a device would be named in that error."""
    assert says_private(run_config, configuration) is private
    question = Question("register", 1, {**run_config, "resume": "wrong"}, {**configuration, "wrong-key": 1})
    assert (answer_question(question).text in REASONS.values()) is private
    assert answer_question(question, simulated=True).text not in REASONS.values(), "in a simulation nothing leaves"


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1e-10", "1e10"])
@pytest.mark.parametrize("key", ["noise_multiplier", "update_noise_multiplier", "clip", "update_clip"])
def test_noise_and_norms_have_a_range(key: str, value: str) -> None:
    """A multiplier of 1e-300 ended in ZeroDivisionError, and one of 1e300 in OverflowError."""
    with pytest.raises(ConfigError, match=rf"privacy\.{key}.*: must be "):
        load_settings(chosen(*NOISED, f"privacy.{key}={value}"))
