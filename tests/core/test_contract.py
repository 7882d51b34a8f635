"""The contract of a device: what its owner pins, what the first run decides, and what no server may choose."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attacks import EPSILON, NOISED, Attacker, write_folder, write_noise
from support.toy import Toy, method_at_defaults, toy_settings

import client.node
from bench import census
from client.contract import KEPT, KeptTerms, asked_terms, pinned_terms, undecided_terms
from client.reasons import REASONS
from common.choices import choices_of
from common.contract import METHODS, UNITS, Contract
from common.data.office_caltech import OfficeCaltech
from common.data.table import Table
from common.errors import ConfigError, ContractError, DataError
from common.settings import load_settings, with_method
from common.wire.messages import Request
from strategies.core.codec import read_registrations
from strategies.rucr import RUCR

NOT_ALLOWED = REASONS[ContractError]

# ---- every setting that reaches a device -----------------------------------------------------------------------------

COVERED = {
    "data-*": ("data.path", "data.image", "data.label", "data.domain", "data.split", "data.group", "data.classes"),
    "data-range and data-page, under privacy": ("data.range", "data.page"),
    "data-dir": ("data.root",),
    "domain": ("data.domains",),
    "max-epochs": ("train.epochs", "method.head_epochs", "method.adversarial_epochs"),
    "public-images": tuple(f"method.public.{key}" for key in ("domain", "source.domains", "source.root")),
    "privacy-unit": ("privacy.unit",),
    "privacy-randomness": ("privacy.randomness", "seed"),
    "privacy-max-epsilon, by the multipliers in the ledger": (
        *("privacy.noise_multiplier", "privacy.update_noise_multiplier", "privacy.clip", "privacy.update_clip"),
    ),
    "privacy-scores": ("rounds.test", "protocol.validation"),
    "device, on which the owner's own comes first": ("train.device",),
    "model, of which the owner's own comes first": ("model.networks", "model.others"),
}
"""Settings by the key of ``--node-config`` that covers them."""

HARMLESS = {
    "the border keeps each image on its side": (
        *("data.train_fraction", "data.duplicates", "data.broken", "protocol.unseen"),
    ),
    "which images of a class are drawn; labels and counts are no secret, and noise is by the count": (
        *(f"protocol.{key}" for key in ("alpha", "classes_each", "client_count", "counts", "domain", "fraction")),
        *(f"protocol.{key}" for key in ("ensure_every_class", "fractions", "least", "leave_out", "order", "samples")),
        *(f"protocol.{key}" for key in ("partition_seed", "score", "skew")),
    ),
    "how an image looks, and neither which nor what it is": (
        *("data.image_size", "data.resize", "method.public.source.image_size"),
        *(f"data.augmentation.{key}" for key in ("crop_padding", "erasing", "flip", "mean", "normalisation", "std")),
        *("data.augmentation.rotation", "data.augmentation.transform"),
    ),
    "test images are not protected": ("rounds.test_samples", "rounds.scores", "rounds.evaluate_every"),
    "a limit of the run's; the device's own comes first": (
        *("privacy.max_epsilon", "privacy.max_releases", "privacy.delta"),
    ),
    "how an update is computed: its bound holds for any computation, and without noise nothing is claimed": (
        *(f"train.{key}" for key in ("batch_size", "class_weights", "clip_norm", "label_smoothing", "last_batch")),
        *(f"train.{key}" for key in ("learning_rate", "momentum", "optimizer", "precision", "schedule", "rounds")),
        *(f"train.{key}" for key in ("step_factor", "step_rounds", "weight_decay", "channels_last", "deterministic")),
        *("train.capture", "model.dropout"),
        *(f"views.{key}" for key in ("count", "identity_probability", "mix", "random_repeats", "repeats")),
    ),
    "it can only shorten local training": ("train.local_steps",),
    "the received model is the model: the device refuses a message that lacks a part of it": (
        *(f"model.{key}" for key in ("depth", "features", "freeze", "head", "name", "norm", "width")),
        *("model.pretrained", "model.pretrained_file", "model.weights"),
    ),
    "noise and the device's own processor; a wrong number of threads is slow": ("train.threads",),
    "the server's own: no device reads it": (
        *("output", "overwrite", "resume", "train.patience"),
        *(f"engine.{key}" for key in ("actors", "address", "connection", "device", "gpus", "name", "wire", "workers")),
        *(f"tracker.{key}" for key in ("experiment", "folder", "mode", "project", "tracking_uri")),
        *(f"rounds.{key}" for key in ("deadline", "failures", "key", "largest_client", "largest_share", "last_rounds")),
        *(f"rounds.{key}" for key in ("max_samples", "memory", "metric", "outlier_factor", "outliers", "oversample")),
        *(f"rounds.{key}" for key in ("participation", "quorum", "registration")),
    ),
    "rounding after the noise": ("rounds.transport",),
    "how many versions of the client's own state stay on the device": ("rounds.checkpoints",),
    "no device attacks: a deployed one refuses the run": ("attack.clients", "attack.strength"),
}
"""Settings that the contract does not name, by the reason."""

OF_METHODS = "method."
"""All other settings of methods. What a method sends, scores and keeps is checked as a whole: by its name
(``methods``), by ``check_protects`` on the received model, and tensor by tensor before an answer leaves."""

ASKED = {
    "whose request": ("run", "identity", "method", "client", "code", "attempt"),
    "privacy-scores and the border": ("score", "validate"),
    "the ledger": ("train",),
    "check_request": ("round", "exchange", "client_count", "client_index"),
    "the client's own state, which stays": ("keep", "own"),
}


def test_every_setting_that_reaches_a_device_is_covered_or_harmless() -> None:
    named = [key for keys in (*COVERED.values(), *HARMLESS.values()) for key in keys]
    assert len(named) == len(set(named))
    every = census.settings()
    unknown = {key for key in every if not key.startswith(OF_METHODS)} - set(named)
    assert unknown == set(), "say what covers it, or why it cannot matter"
    assert set(named) <= every, "no such setting"


def test_every_field_of_a_request_is_covered() -> None:
    assert {field.name for field in fields(Request)} == {name for names in ASKED.values() for name in names}


def test_a_new_setting_of_a_data_set_is_a_term() -> None:
    """A class of somebody else's has settings that nobody here knows."""
    terms = asked_terms(toy_settings("fedavg", Path("unused")), "bright", None, ["bright"])
    assert terms["data-missing-class"] == "true"
    assert terms["data"] == "support.toy.Toy"
    known = {key.removeprefix("data.") for key in census.settings() if key.startswith("data.")}
    free = {f"data.{name}" for name in known & Table.not_read_as}
    assert free <= {key for keys in HARMLESS.values() for key in keys} | {"data.domains", "data.root"}


@pytest.mark.parametrize("method", sorted(choices_of("method")))
def test_a_device_serves_the_methods_that_its_owner_names(method: str, tmp_path: Path) -> None:
    settings = with_method(toy_settings("fedavg", tmp_path), method_at_defaults(method))
    terms = asked_terms(settings, "bright", None, ["bright"])
    assert terms[METHODS] == settings.method.name
    Contract(pinned={METHODS: f"moon, {settings.method.name}"}).check_terms(terms)
    others = {name for name in choices_of("method") if method_at_defaults(name).name != settings.method.name}
    with pytest.raises(ContractError, match=f"asks for methods={settings.method.name}"):
        Contract(pinned={METHODS: ",".join(sorted(others))}).check_terms(terms)


def test_epochs_are_those_of_all_phases(tmp_path: Path) -> None:
    settings = toy_settings("fedrep", tmp_path, train={"epochs": 3}, hyper={"head_epochs": 4})
    terms = asked_terms(settings, "bright", None, ["bright"])
    Contract(pinned={"max-epochs": "5"}).check_terms(terms)
    with pytest.raises(ContractError, match="serves max-epochs=4 alone, and the run asks for max-epochs=5"):
        Contract(pinned={"max-epochs": "4"}).check_terms(terms)


def test_epochs_are_those_of_all_exchanges() -> None:
    """RUCR trains a second time, in ``rebalance``."""
    assert [RUCR(rebalance_epochs=count).local_epochs(3) for count in (None, 0, 200)] == [6, 3, 203]


def test_no_server_trains_more_epochs_than_the_owner_allows(clinic: Path) -> None:
    attacker = device(clinic, data="folder", max_epochs=2)
    asked = ("train.epochs=1", "method=rucr", "method.rebalance_epochs=200")
    assert "the run asks for max-epochs=201; its owner changes that" in attacker.register(*asked).text


@pytest.mark.parametrize("pinned", UNITS)
@pytest.mark.parametrize("asked", UNITS)
def test_a_unit_may_be_larger_than_the_pinned_one(pinned: str, asked: str) -> None:
    contract = Contract(pinned={"privacy-unit": pinned})
    if UNITS.index(asked) >= UNITS.index(pinned):
        contract.check_terms({"privacy-unit": asked})
        return
    with pytest.raises(ContractError):
        contract.check_terms({"privacy-unit": asked})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max-epochs", 0),
        ("max-epochs", "5"),
        ("privacy-unit", "all"),
        ("privacy-mechanism", "laplace"),
        ("data", ""),
    ],
)
def test_a_pin_is_read_strictly(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"--node-config: {key} must be"):
        pinned_terms({key: value})


# ---- a table whose columns say more than its classes -----------------------------------------------------------------

STATUS, AGES, PATIENTS = ("ill", "well"), ("30s", "40s", "50s"), ("p1", "p2", "p3", "p4")


def write_clinic(folder: Path) -> Path:
    """Twenty images, and a list with columns that nobody wants to train on."""
    folder.mkdir(parents=True)
    draws = np.random.default_rng(0)
    lines = ["path,label,status,age,patient,split"]
    for number in range(20):
        write_noise(folder / f"{number}.png", draws)
        cells = (("negative", "positive")[number % 2], STATUS[number % 7 > 2], AGES[number % 3], PATIENTS[number % 4])
        lines.append(",".join([f"{number}.png", *cells, "test" if number > 14 else "train"]))
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    return folder


def words(label: str, classes: Sequence[str], *more: str) -> list[str]:
    table = ["data=table", "data.path=list.csv", "data.domain=none", "data.split=split", f"data.label={label}"]
    return [*table, f"data.classes=[{','.join(classes)}]", *more]


HONEST = words("label", ("negative", "positive"))
OTHERS = {"status": STATUS, "age": AGES, "patient": PATIENTS}
PINS = {"data": "table", "data_path": "list.csv", "data_label": "label", "data_split": "split", "data_domain": ""}


@pytest.fixture
def clinic(tmp_path: Path) -> Path:
    return write_clinic(tmp_path / "clinic")


def device(folder: Path, **configuration: Any) -> Attacker:
    return Attacker(folder, folder.parent / "state", **{"domain": "clinic", **configuration})


def class_counts(reply: Any) -> list[int]:
    (registration,) = read_registrations(reply.text)
    return list(registration.class_counts)


@pytest.mark.parametrize("budget", [{"privacy_max_epsilon": EPSILON}, {"privacy_max_releases": 5}, {}], ids=str)
@pytest.mark.parametrize("column", OTHERS)
def test_no_server_chooses_the_label_of_a_private_table(
    column: str, budget: dict[str, Any], clinic: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: the class counts of a registration are exact, so they were those of any column."""
    noised = NOISED if "privacy_max_releases" not in budget else ()
    asked = words(column, OTHERS[column], *noised)
    for pins in ({}, PINS):
        attacker = device(clinic, **pins, **budget)
        for reply in (attacker.register(*asked), attacker.ask(*asked, train=True)):
            assert not reply.ok
            assert reply.text == NOT_ALLOWED
            assert reply.traceback == ""
    assert not any((clinic.parent / "state").rglob(KEPT)), "what is refused decides nothing"
    assert device(clinic, **PINS, **budget).register(*HONEST, *noised).ok
    monkeypatch.setattr(Contract, "check_terms", lambda *rest: None)
    assert sum(class_counts(device(clinic, **budget).register(*asked))) == 15


def test_the_refusal_names_what_the_owner_adds(clinic: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attacker = device(clinic, privacy_max_epsilon=EPSILON)
    assert attacker.register(*HONEST, *NOISED).text == NOT_ALLOWED
    told = capsys.readouterr().err
    pins = re.search(r"add to --node-config: (.*)", told)
    assert pins is not None, told
    attacker.configuration |= dict(re.findall(r'(\S+)="([^"]*)"', pins[1]))
    assert class_counts(attacker.register(*HONEST, *NOISED)) == [8, 7]


def test_columns_that_the_table_decides_need_no_pin(tmp_path: Path) -> None:
    folder = write_clinic(tmp_path / "clinic")
    text = (folder / "list.csv").read_text().splitlines()
    plain = [",".join([line.split(",")[0], line.split(",")[1], line.split(",")[5]]) for line in text]
    (folder / "list.csv").write_text("\n".join(plain) + "\n")
    attacker = device(folder, data="table", data_path="list.csv", privacy_max_epsilon=EPSILON)
    assert attacker.register(*HONEST, *NOISED).ok
    kept = json.loads(next((tmp_path / "state").rglob(KEPT)).read_text())["clinic"]
    assert (kept["data-label"], kept["data-split"]) == ("label", "split")


def test_no_server_chooses_what_a_folder_of_a_private_device_is(tmp_path: Path) -> None:
    """The attack: with another path, the folders of patients are the classes."""
    folder = tmp_path / "clinic"
    draws = np.random.default_rng(0)
    for number in range(24):
        place = folder / ("negative", "positive")[number % 2] / f"p{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        write_noise(place / f"{number}.png", draws)
    attacker = device(folder, privacy_max_epsilon=EPSILON)
    asked = ["data.path=any/class", "data.classes=[p0,p1,p2]", *NOISED]
    assert attacker.register(*asked).text == NOT_ALLOWED
    assert device(folder).register("data.path=any/class", "data.classes=[p0,p1,p2]").ok


def test_no_server_chooses_the_range_of_private_images(tmp_path: Path) -> None:
    """The attack: eight registrations told the brightest value of all images, as black ones alone are refused."""
    folder = write_folder(tmp_path / "clinic")
    private = Attacker(folder, tmp_path / "private", domain="clinic", privacy_max_epsilon=EPSILON)
    for words in (["data.range=[255,256]"], ["data.range=[0,9]"], ["data.page=2"]):
        reply = private.register(*NOISED, *words)
        assert (reply.ok, reply.text) == (False, NOT_ALLOWED)
    assert private.register(*NOISED).ok
    private.configuration["data-range"] = "0.0,200.0"
    assert private.register(*NOISED, "data.range=[0,200]").ok
    plain = Attacker(folder, tmp_path / "plain", domain="clinic")
    for words in ([], ["data.range=[0,200]"], []):
        assert plain.register(*words).ok, "without privacy each run decides"


def test_a_data_set_of_somebody_else_is_the_owner_s_choice(clinic: Path) -> None:
    """Its code decides which files are read as images."""

    class Elsewhere(OfficeCaltech):
        pass

    kinds = (OfficeCaltech, Elsewhere)
    ours, theirs = (undecided_terms(kind(), "webcam", str(clinic), {}) for kind in kinds)
    assert (ours["data"], "data" in theirs) == ("office_caltech", False)


# ---- what is read before it is allowed, and what errors tell --------------------------------------------------------

SECRET = "hunter2"
NOTES = f"Dear colleague; the password of the archive is {SECRET}\nsecond line\n"
PROBES = (
    ("data.path=notes.csv", "data.domain=none"),
    ("data.path=notes.csv", "data.label=finding", "data.domain=none"),
    ("data.path=staff.csv", "data.label=surname", "data.domain=secret"),
    ("data.path=staff.csv", "data.label=surname", "data.split=secret:none"),
    ("data.path=staff.csv", "data.label=surname", "data.domain=secret", "data.domains=[]"),
    ("data.path=staff.csv", "data.label=surname", "data.domain=secret", "data.domains=[]", "protocol.leave_out=[x]"),
)
"""Requests by which a server reads tables that hold no images of this run."""


@pytest.fixture
def staff(clinic: Path) -> Path:
    """The clinic's folder, with two files that are nobody's data set."""
    (clinic / "notes.csv").write_text(NOTES)
    rows = [f"{number}.png,{('Smith', 'Jones')[number % 2]},{(SECRET, 's3cret')[number % 2]}" for number in range(10)]
    (clinic / "staff.csv").write_text("\n".join(["image,surname,secret", *rows]) + "\n")
    return clinic


def probed(attacker: Attacker, folder: Path, probe: Sequence[str]) -> str:
    """All that a device tells of a request to read another table."""
    more = ["protocol=leave_one_out"] if "protocol.leave_out=[x]" in probe else []
    asked = ["data=table", f"data.root={folder}", *more, *probe]
    reply = attacker.register(*asked)
    assert not reply.ok
    return reply.text + reply.traceback


@pytest.mark.parametrize("probe", PROBES, ids=str)
@pytest.mark.parametrize(
    "pins",
    [{}, {"data": "folder", "data_path": "", "methods": "fedavg"}, PINS, {"data": "table"}],
    ids=["nothing pinned", "a folder", "another table", "tables"],
)
def test_no_server_reads_cells_out_of_an_error(probe: Sequence[str], pins: dict[str, Any], staff: Path) -> None:
    """The attack: a request to train on any table below the folder was answered with its cells."""
    told = probed(device(staff, **pins), staff, probe)
    for text in (SECRET, "s3cret", "Smith", "colleague", "surname', "):
        assert text not in told


@pytest.mark.parametrize("probe", PROBES[:4], ids=str)
def test_a_table_that_is_not_allowed_is_not_opened(
    probe: Sequence[str], staff: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = device(staff)
    assert first.register(*HONEST).ok
    monkeypatch.setattr(Table, "_open", lambda *rest, **more: pytest.fail("the table was opened"))
    for attacker in (first, device(staff, **PINS)):
        told = probed(attacker, staff, probe)
        assert "ContractError: this device " in told
        assert probe[0].replace(".", "-", 1) in told


def test_the_text_of_an_error_leaves_once_what_is_read_is_decided(
    clinic: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, its own log has the text; a pin of all that is read, or a first run, lets it go."""
    attacker = device(clinic)
    good = (clinic / "0.png").read_bytes()
    (clinic / "0.png").write_bytes(b"no image")
    reply = attacker.register(*HONEST)
    assert (reply.text, reply.traceback) == (REASONS[DataError], "")
    assert "0.png cannot be decoded" in capsys.readouterr().err
    pins = {**PINS, "data_classes": "negative,positive", "data_image": "path", "data_group": ""}
    assert "0.png cannot be decoded" in device(clinic, **pins).register(*HONEST).text
    (clinic / "0.png").write_bytes(good)
    assert attacker.register(*HONEST).ok
    (clinic / "0.png").write_bytes(b"no image, again")
    assert "0.png cannot be decoded" in attacker.register(*HONEST).text


# ---- what the first run decides --------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", OTHERS)
def test_the_first_run_decides_the_columns(column: str, clinic: Path) -> None:
    attacker = device(clinic)
    assert attacker.register(*HONEST).ok
    later = words(column, OTHERS[column])
    reply = attacker.register(*later)
    expected = rf"served .*data-label=label.* since its first run, .* data-label={column}\b.*adds (.*) to --node"
    told = re.search(expected, reply.text)
    assert not reply.ok
    assert told is not None, reply.text
    assert not attacker.ask(*later, train=True).ok
    assert attacker.ask(*HONEST, train=True).ok
    pins = dict(re.findall(r'(\S+)="([^"]*)"', told[1]))
    assert device(clinic, **{key.replace("-", "_"): value for key, value in pins.items()}).register(*later).ok
    next((clinic.parent / "state").rglob(KEPT)).unlink()
    assert attacker.register(*later).ok


def test_the_first_run_decides_the_classes_and_their_order(clinic: Path) -> None:
    attacker = device(clinic)
    assert attacker.register(*HONEST).ok
    reply = attacker.register(*words("label", ("positive", "negative")))
    assert "data-classes=negative,positive since its first run" in reply.text


def test_the_first_run_decides_the_root(clinic: Path) -> None:
    """A device without data-dir reads where the server says, once, and with privacy nowhere."""
    other = write_clinic(clinic.parent / "other")
    attacker = device(clinic)
    del attacker.configuration["data-dir"]
    assert attacker.register(*HONEST, *NOISED, f"data.root={clinic}").text == NOT_ALLOWED
    assert attacker.register(*HONEST, f"data.root={clinic}").ok
    reply = attacker.register(*HONEST, f"data.root={other}")
    assert f"data-dir={clinic} since its first run, and the run asks for data-dir={other}" in reply.text


def test_the_first_private_run_decides_the_domains_of_a_node_that_names_none(tmp_path: Path) -> None:
    for name in ("clinic", "ward", "attic"):
        write_clinic(tmp_path / "sites" / name)
    attacker = Attacker(tmp_path / "sites", tmp_path / "state", partition_id=0, num_partitions=1, **PINS)
    assert attacker.register(*HONEST, *NOISED, "data.domains=[clinic,ward]").ok
    assert attacker.register(*HONEST, *NOISED, "data.domains=[ward]").ok
    assert attacker.register(*HONEST, *NOISED, "data.domains=[ward,attic]").text == NOT_ALLOWED
    unseen = ("data.domains=[ward,attic]", "protocol=leave_one_out", "protocol.leave_out=[attic]")
    assert attacker.register(*HONEST, *NOISED, *unseen).text == NOT_ALLOWED, "nor is another domain scored"


def test_public_images_are_those_of_the_first_run(tmp_path: Path) -> None:
    """Their hash leaves the device, so another source would be read out image by image."""
    settings = toy_settings("fccl_plus", tmp_path)
    first = asked_terms(settings, "bright", None, ["bright"])
    kept = Contract().to_keep(first)
    public = replace(settings.method.public, source=Toy(), domain="dark")
    other = asked_terms(with_method(settings, replace(settings.method, public=public)), "bright", None, ["bright"])
    with pytest.raises(ContractError, match=r"served public-images=data=textures .* asks for public-images=.*Toy"):
        Contract(kept=kept).check_terms(other)


def test_generated_images_decide_nothing_of_files(clinic: Path) -> None:
    kept = {"data": "table", "data-label": "label", "data-dir": str(clinic)}
    terms = asked_terms(load_settings(["data=glyphs", "method=fedavg"]), "printed", str(clinic), ["printed"])
    Contract(pinned={"data-dir": str(clinic)}, kept=kept).check_terms(terms, {"data": "glyphs"})
    assert Contract().to_keep(terms) == {}
    with pytest.raises(ContractError, match="serves data=table alone"):
        Contract(pinned={"data": "table"}).check_terms(terms)


def test_a_pin_of_no_setting_is_an_error(clinic: Path) -> None:
    reply = device(clinic, data_lable="label").register(*HONEST)
    assert "data-lable is no setting of data=table; did you mean 'data-label'?" in reply.text


def test_damaged_terms_send_nothing(clinic: Path) -> None:
    attacker = device(clinic)
    assert attacker.register(*HONEST).ok
    path = next((clinic.parent / "state").rglob(KEPT))
    for damage in ("", "[]", '{"clinic": 3}'):
        path.write_text(damage)
        client.node._DEVICES.clear()
        assert "restore it; deleting it lets the next run decide" in attacker.register(*HONEST).text


def test_two_runs_that_begin_together_decide_one_thing(tmp_path: Path) -> None:
    kept = KeptTerms(tmp_path)
    kept.keep("clinic", {"data-label": "label"})
    kept.keep("clinic", {"data-label": "label", "data-path": "a.csv"})
    with pytest.raises(ContractError, match="another run has just begun with another data-label"):
        kept.keep("clinic", {"data-label": "age"})
    assert kept.of("clinic") == {"data-label": "label", "data-path": "a.csv"}
    assert kept.of("ward") == {}


def test_what_is_served_is_said(clinic: Path, caplog: pytest.LogCaptureFixture) -> None:
    from common.text import warn_once

    warn_once.cache_clear()
    device(clinic, data="table").register(*HONEST)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "clinic-0 serves data=table (pinned), " in said
    assert "data-label=label (from now on)" in said
    client.node._DEVICES.clear()
    device(clinic, data="table").register(*HONEST)
    assert "data-label=label (since its first run)" in "\n".join(record.getMessage() for record in caplog.records)
