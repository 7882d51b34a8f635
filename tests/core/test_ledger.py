"""What a device keeps of its releases: a ledger that no server cuts, a budget, and a secret."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exchanges import request_to
from support.runs import Recorded, TouchedEngine, run
from support.toy import CLASSES, Toy, toy_settings

import client.node
from client.app import in_simulation
from client.border import BORDER, SCORED, Border, Images, trained_on
from client.contract import KEPT, KeptTerms
from client.device import Device
from client.ledger import LEDGER, Budget, Ledger
from client.node import NODE_KEYS, Node, answer_question
from client.private_folder import SECRET, PrivateFolder
from client.resident.messages import Question
from client.trainer import LocalExchange
from common.accounting import composed, epsilon
from common.client_state import ClientStore, Version
from common.config import checked
from common.contract import Contract
from common.data.batches import Split
from common.data.protocols import ClientSpec
from common.data.protocols import test_hash as hash_of_test
from common.data.splits import content_hash, split_hash
from common.errors import DISK_ADVICE, ConfigError, DataError, EngineError, PayloadError, PrivacyError
from common.settings import RunSettings, with_method
from server.run.engine import Failure
from server.run.stopping import check_errors_differ
from strategies.core.federation import Federation
from strategies.fedavg import FedAvg

COVERED = ("privacy=gaussian", "privacy.update_clip=0.25")
SYSTEM = "privacy.randomness=system"
SPENT = re.compile(r"the privacy budget is spent: .*; nothing was sent")
NOISE = {"prototypes": 1.0, "weights": 1.0}
BRIGHT = ClientSpec("bright", 0)
NO_FILE = pytest.mark.parametrize(
    "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("absent")], ids=["folder", "pipe", "link to nothing"]
)


def private(output: Path, *overrides: str, **more: Any) -> RunSettings:
    return toy_settings("fpl", output, overrides=(*COVERED, *overrides), **more)


def device_of(settings: RunSettings, folder: Path, budget: Budget | None = None, **more: Any) -> Device:
    """A SuperNode's device, with its state in ``folder``."""
    ledger = Ledger(folder / "ledger", budget)
    return Device(
        settings, BRIGHT, lambda name: ClientStore(folder / name), scores=Toy().domains, ledger=ledger, **more
    )


def asked(settings: RunSettings, **changes: Any) -> Recorded:
    """A run's first request to ``bright-0``, with ``changes`` to it."""
    federation = Federation(settings)
    federation.begin(1, "train")
    return Recorded(request_to(settings, **changes), federation.message(federation.initial_state()), None)


# ---- the ledger ------------------------------------------------------------------------------------------------------


def test_releases_are_counted_by_run_and_client_for_good(tmp_path: Path) -> None:
    spent = [Ledger(tmp_path).spend(name, "a-0", NOISE, []) for name in ("one", "one", "two", "one")]
    assert spent == [1, 2, 1, 3]
    assert Ledger(tmp_path).spend("one", "a-1", NOISE, []) == 1
    assert Ledger(tmp_path).spend("one", "a-0", {"weights": 2.0}, []) == 4
    path = tmp_path / LEDGER
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sum(entry["count"] for entry in json.loads(path.read_text())["releases"]) == 6


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "[]",
        '{"releases": [{}]}',
        "many",
        "\udcff",
        '{"releases": [{"run": "", "client": "", "multipliers": {}, "count": -1}]}',
    ],
    ids=["empty", "list", "entry", "word", "no text", "fewer than none"],
)
def test_a_damaged_ledger_sends_nothing(damage: str, tmp_path: Path) -> None:
    Ledger(tmp_path).spend("one", "a-0", NOISE, [])
    written = damage.encode(errors="surrogateescape")
    (tmp_path / LEDGER).write_bytes(written)
    with pytest.raises(DataError, match="restore it"):
        Ledger(tmp_path).spend("one", "a-0", NOISE, [])
    assert (tmp_path / LEDGER).read_bytes() == written


def test_releases_at_the_same_time_are_all_counted(tmp_path: Path) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(Ledger(tmp_path).spend("one", "a-0", NOISE, [])))
        for _ in range(12)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(1, 13))


def test_a_device_that_dies_before_it_sends_has_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = private(tmp_path / "run")
    item = asked(settings)
    device = device_of(settings, tmp_path / "own")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("client.device.cast_down", dies)
        with pytest.raises(KeyboardInterrupt):
            device.answer(item.request, item.message)
    again = device_of(settings, tmp_path / "own")
    assert again.answer(item.request, item.message).header["releases"] == 2


def test_the_count_survives_what_a_resumed_run_undoes(tmp_path: Path) -> None:
    """The server falls back to the first round, and asks for the second again: three releases, not two."""
    settings = private(tmp_path / "run")
    counts: list[int] = []
    for number in (1, 2, 2):
        item = asked(settings, round=number)
        answer = device_of(settings, tmp_path / "own").answer(item.request, item.message)
        counts.append(answer.header["releases"])
    assert counts == [1, 2, 3]


# ---- the budget ------------------------------------------------------------------------------------------------------


def answered(device: Device, item: Recorded, times: int) -> int:
    """How many of the same requests a device answers before it reports that its budget is spent."""
    for count in range(times):
        try:
            device.answer(item.request, item.message)
        except PrivacyError as error:
            return count if SPENT.search(str(error)) else -1
    return times


@pytest.mark.parametrize("own", [True, False], ids=["the device's own", "the run's"])
def test_a_device_answers_as_often_as_its_budget_allows(own: bool, tmp_path: Path) -> None:
    """Without one it answered 300 requests for one round."""
    settings = private(tmp_path / "run", *([] if own else ["privacy.max_releases=4"]))
    item = asked(settings)
    device = device_of(settings, tmp_path / "own", Budget(4) if own else None)
    assert answered(device, item, 30) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalExchange, "run", lambda local: pytest.fail("it trained, and could not send the update"))
        assert answered(device, item, 1) == 0


def test_a_run_s_own_epsilon_is_at_its_own_delta(tmp_path: Path) -> None:
    limit = epsilon([1.0, 1.0], 3, 1e-9) + 0.01
    settings = private(tmp_path / "run", "privacy.delta=1e-9", f"privacy.max_epsilon={limit}")
    assert answered(device_of(settings, tmp_path / "own"), asked(settings), 9) == 3


def test_the_stricter_budget_counts_and_a_new_run_begins_with_what_is_left(tmp_path: Path) -> None:
    settings = private(tmp_path / "run", "privacy.max_releases=5")
    item = asked(settings)
    assert answered(device_of(settings, tmp_path / "own", Budget(3)), item, 9) == 3
    other = private(tmp_path / "other", "privacy.max_releases=5", seed=7)
    later = asked(other, run="other")
    assert answered(device_of(other, tmp_path / "own", Budget(3)), later, 9) == 0
    assert answered(device_of(other, tmp_path / "own"), later, 9) == 2


def test_epsilon_is_counted_over_runs_of_different_noise(tmp_path: Path) -> None:
    limit = composed([([1.0, 1.0], 2), ([4.0], 3)], 1e-5)
    for above, expected in ((1e-6, 3), (-1e-6, 2)):
        ledger, budgets = Ledger(tmp_path / str(expected)), [Budget(None, limit + above)]
        for _ in range(2):
            ledger.spend("one", "a-0", NOISE, budgets)
        for _ in range(expected):
            ledger.spend("two", "a-0", {"weights": 4.0}, budgets)
        with pytest.raises(PrivacyError, match=r"with this update epsilon would be \d"):
            ledger.spend("two", "a-0", {"weights": 4.0}, budgets)


def test_epsilon_is_counted_over_releases_of_different_noise_in_one_run(tmp_path: Path) -> None:
    """The attack: the server chooses the run's name, and asks for one release with much noise before all others."""
    limit = 8.0
    fit = 0
    while composed([([20.0], 1), ([1.0], fit + 1)], 1e-5) <= limit:
        fit += 1
    ledger, budgets = Ledger(tmp_path), [Budget(None, limit)]
    ledger.spend("one", "a-0", {"weights": 20.0}, budgets)
    for _ in range(fit):
        ledger.spend("one", "a-0", {"weights": 1.0}, budgets)
    with pytest.raises(PrivacyError, match=r"with this update epsilon would be \d"):
        ledger.spend("one", "a-0", {"weights": 1.0}, budgets)
    entries = json.loads((tmp_path / LEDGER).read_text())["releases"]
    assert [(entry["multipliers"], entry["count"]) for entry in entries] == [
        ({"weights": 20.0}, 1),
        ({"weights": 1.0}, fit),
    ]


def test_a_device_stops_at_its_epsilon_for_any_delta_that_the_server_sends(tmp_path: Path) -> None:
    limit = epsilon([1.0, 1.0], 3, 1e-5) + 0.01
    settings = private(tmp_path / "run", "privacy.delta=0.5", "privacy.max_epsilon=1000")
    item = asked(settings)
    assert answered(device_of(settings, tmp_path / "own", Budget(None, limit)), item, 9) == 3


BARE = {
    "no privacy": ("privacy=none",),
    "weights without noise": ("privacy=gaussian",),
    "prototypes without noise": (*COVERED, "privacy.noise_multiplier=0"),
    "keyed noise": (*COVERED, "privacy.randomness=keyed"),
}


@pytest.mark.parametrize("case", BARE)
def test_a_device_with_an_epsilon_takes_part_in_nothing_without_noise(case: str, tmp_path: Path) -> None:
    """The settings are the server's: one that wants the images would send others."""
    settings = toy_settings("fpl", tmp_path / "run", overrides=BARE[case])
    item = asked(settings)
    device = device_of(settings, tmp_path / "own", Budget(None, 8.0), contract=Contract(allows_keyed=True))
    for call in (device.register, lambda: device.answer(item.request, item.message)):
        with pytest.raises(PrivacyError, match=r"privacy\.max_epsilon=8 allows no update without noise"):
            call()


@checked
class Evaluation(FedAvg):
    """Trains nothing, as an exported model's evaluation."""

    trains = False


def test_a_device_with_an_epsilon_scores_in_an_evaluation_and_trains_in_none(tmp_path: Path) -> None:
    settings = with_method(toy_settings("fedavg", tmp_path / "run"), Evaluation())
    device = device_of(settings, tmp_path / "own", Budget(None, 8.0))
    assert device.register().client == "bright-0"
    item = asked(settings, train=False, round=0)
    (score,) = device.answer(item.request, item.message).header["scores"]
    assert score["domain"] == "bright"
    lie = asked(settings)
    with pytest.raises(PrivacyError, match="would carry no noise"):
        device.answer(lie.request, lie.message)


def test_a_run_with_an_epsilon_begins_with_nothing_without_noise(tmp_path: Path) -> None:
    with pytest.raises(PrivacyError, match=r"max_epsilon=8 allows no update without noise, .*would have: weights"):
        run(toy_settings("fpl", tmp_path, overrides=("privacy=gaussian", "privacy.max_epsilon=8")))


def test_updates_without_noise_count_where_the_device_limits_updates(tmp_path: Path) -> None:
    settings = toy_settings("fpl", tmp_path / "run")
    item = asked(settings)
    device = device_of(settings, tmp_path / "own", Budget(2))
    assert device.answer(item.request, item.message).header["releases"] == 0
    assert answered(device, item, 9) == 1
    with pytest.raises(PrivacyError, match="updates without noise were released"):
        Ledger(tmp_path / "own" / "ledger").check(NOISE, [Budget(None, 8.0)])


def test_a_budget_in_epsilon_is_refused_without_the_accountant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = private(tmp_path / "run", SYSTEM)
    item = asked(settings)
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    device = device_of(settings, tmp_path / "own", Budget(None, 8.0))
    for call in (device.register, lambda: device.answer(item.request, item.message)):
        with pytest.raises(ConfigError, match=r"max_epsilon needs .*\[privacy\]"):
            call()
    assert answered(device_of(settings, tmp_path / "own", Budget(1)), item, 9) == 1


def test_devices_with_a_spent_budget_are_named(tmp_path: Path) -> None:
    settings = private(tmp_path, "privacy.max_releases=2", train={"rounds": 3})
    with pytest.raises(
        EngineError, match=r"the privacy budget is spent: .* data: 2, and privacy\.max_releases=2"
    ) as told:
        run(settings)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["event"] == "client failed"]
    assert {line["round"] for line in failed} == {3}
    assert all("the privacy budget is spent" in line["reason"] for line in failed)
    kept = Ledger(tmp_path / "clients" / ".privacy" / "bright-0")
    with pytest.raises(PrivacyError, match="data: 2, and"):
        kept.check(NOISE, [Budget(2)])
    assert "No further round can be held. The state of round 2 is kept: resume=true train.rounds=2" in str(told.value)
    again = run(private(tmp_path, "privacy.max_releases=2", train={"rounds": 2}, resume=True))
    assert again.summary["rounds"] == 2
    assert again.summary["average"] is not None


def test_a_run_that_held_no_round_is_not_told_to_score_one(tmp_path: Path) -> None:
    """Its clients spent their budgets on replies that came too late."""
    settings = private(tmp_path, "privacy.max_releases=1", train={"rounds": 3})
    with pytest.raises(EngineError, match=r"in round 2 every client .*\n.*No further round can be held") as told:
        run(settings, TouchedEngine(settings, lost=lambda request: request.round == 1))
    assert not list((tmp_path / "checkpoint").glob("*"))
    assert "resume=true" not in str(told.value)


def test_a_run_goes_on_while_a_client_may_have_budget_left(tmp_path: Path) -> None:
    """Only the clients that were asked have said that theirs is spent, or raised another error."""
    settings = private(tmp_path)
    spent = [Failure(client, "failed", "the privacy budget is spent; nothing was sent") for client in ("a", "b", "c")]
    check_errors_differ(spent[:2], 3, settings, trained=True)
    with pytest.raises(EngineError, match="No further round can be held"):
        check_errors_differ(spent, 3, settings, trained=True)
    scheduled = private(tmp_path, train={"schedule": "cosine"})
    with pytest.raises(EngineError, match="No further round can be held") as told:
        check_errors_differ(spent, 3, scheduled, trained=True)
    assert "resume=true" not in str(told.value), "a schedule cannot be shortened"
    broken = [Failure(client, "failed", "KeyError: 'ce'") for client in ("a", "b", "c")]
    check_errors_differ(broken[:2], 3, settings, trained=True)
    with pytest.raises(EngineError, match="Fix the cause; resume=true continues"):
        check_errors_differ(broken, 3, settings, trained=True)


# ---- registration ----------------------------------------------------------------------------------------------------


def guesses(domain: torch.Tensor, position: int, count: int) -> list[torch.Tensor]:
    """What somebody tries who knows all images but one: images of one colour, the right one among them."""
    found = []
    for shade in range(count):
        images = domain.clone()
        images[position] = shade
        found.append(images)
    return found


@pytest.mark.parametrize("settings_are", ["private", "open"])
def test_an_unknown_image_cannot_be_found_by_its_hash(settings_are: str, tmp_path: Path) -> None:
    """The attack: try candidates for one image against the hash that a registration holds."""
    overrides = COVERED if settings_are == "private" else ()
    settings = toy_settings("fpl", tmp_path / "run", overrides=overrides, train={"rounds": 1})
    device = device_of(settings, tmp_path / "own")
    train, validation = device._own_data()
    secret = guesses(train.images, 3, 256)[77]
    device._own = replace(train, images=secret), validation
    registered = device.register()
    held_out = content_hash(validation, str(validation.labels.tolist())), hash_of_test(Toy().load("bright"))
    hashes = [content_hash(Split(images, train.labels), *held_out) for images in guesses(train.images, 3, 256)]
    hits = [shade for shade, value in enumerate(hashes) if value == registered.content]
    assert hits == ([] if settings_are == "private" else [77])
    indices = torch.arange(len(train))
    openly = split_hash("toy", BRIGHT.id, indices, train.labels)
    assert (registered.split == openly) == (settings_are == "open")


def test_a_private_registration_does_not_depend_on_the_order_of_labels(tmp_path: Path) -> None:
    """Class counts are public; which sample has which label, and which samples a client holds, are not."""
    settings = private(tmp_path / "run")
    first, second = (device_of(settings, tmp_path / name) for name in ("a", "b"))
    train, validation = second._own_data()
    second._own, second._split_sha256 = (train.subset(torch.arange(len(train)).flip(0)), validation), "another"
    ours, theirs = first.register(), second.register()
    assert ours.split == theirs.split
    assert ours.class_counts == theirs.class_counts
    assert len(ours.class_counts) == CLASSES
    third = device_of(private(tmp_path / "run"), tmp_path / "c")
    third._own = replace(train, labels=train.labels.flip(0)), validation
    assert third.register().content != ours.content


def test_a_resumed_private_run_knows_changed_data(tmp_path: Path) -> None:
    run(private(tmp_path, train={"rounds": 2}), stop_after=1)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    registered = {line["client"]: line["content"] for line in lines if line["event"] == "registered"}
    again = TouchedEngine(private(tmp_path, train={"rounds": 2}, resume=True))
    assert {name: device.register().content for name, device in again.inner.devices.items()} == registered
    device = again.inner.devices[BRIGHT.id]
    train, validation = device._own_data()
    images = train.images.clone()  # the loaded domain is shared by every run of this process
    images[0] = 255 - images[0]
    device._own = replace(train, images=images), validation
    assert device.register().content != registered[BRIGHT.id]


def test_only_the_user_can_read_the_secret_and_hashes_depend_on_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "a" / "b")
    found = ledger.keyed_hash("content", "x")
    assert found == Ledger(tmp_path / "a" / "b").keyed_hash("content", "x")
    assert found != ledger.keyed_hash("content", "y")
    assert found != Ledger(tmp_path / "c").keyed_hash("content", "x")
    assert found != hashlib.sha256(b"x").hexdigest()
    path = tmp_path / "a" / "b" / SECRET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.write_text("00")
    with pytest.raises(DataError, match="has 1 bytes, not 32"):
        ledger.keyed_hash("content", "x")


def test_nothing_of_the_secret_is_in_what_the_server_writes(tmp_path: Path) -> None:
    run(private(tmp_path, train={"rounds": 1}))
    secrets = [path.read_text().strip() for path in (tmp_path / "clients" / ".privacy").glob(f"*/{SECRET}")]
    assert len(secrets) == len(Toy().domains)
    for path in tmp_path.rglob("*"):
        if path.is_file() and "clients" not in path.relative_to(tmp_path).parts:
            content = path.read_bytes()
            assert not any(secret.encode() in content for secret in secrets), path


def test_a_private_device_needs_a_ledger(tmp_path: Path) -> None:
    device = Device(private(tmp_path), BRIGHT, lambda name: ClientStore(tmp_path / name))
    with pytest.raises(ConfigError, match="no place for its ledger"):
        device.register()


@pytest.mark.parametrize("name", ["../x", ".privacy", ""], ids=["up", "ledger", "none"])
def test_a_run_cannot_be_named_like_a_path(name: str, tmp_path: Path) -> None:
    settings = private(tmp_path / "run")
    item = asked(settings, run=name)
    with pytest.raises(PayloadError, match=r"run.s id"):
        device_of(settings, tmp_path / "own").answer(item.request, item.message)


# ---- a SuperNode -----------------------------------------------------------------------------------------------------

OVERRIDES = "method=fpl data=glyphs data.domains=[printed,sketch] protocol.samples=24 train.device=cpu privacy=gaussian"


def node(tmp_path: Path, *overrides: str, **configuration: Any) -> Node:
    place = {"state-dir": str(tmp_path / "state")} | {
        key.replace("_", "-"): configuration[key] for key in configuration
    }
    text = " ".join([OVERRIDES, f"output={tmp_path / 'out'}", *overrides])
    return Node(Question("register", 1, {"overrides": text}, place))


def made(asked_node: Node) -> Device:
    settings = asked_node._settings()
    return asked_node._new_device(settings, asked_node._hosted(settings)[0])[0]


def test_a_supernode_with_a_partition_is_no_simulation(tmp_path: Path) -> None:
    """Flower's examples give every SuperNode a partition; its noise was one that the server could subtract."""
    device = made(node(tmp_path, partition_id=0, num_partitions=2))
    assert not device.contract.simulated
    assert device.ledger is not None
    assert device.ledger.folder == tmp_path / "state" / ".privacy" / "printed"
    assert device._store("one").folder == tmp_path / "state" / "one" / "printed-0"
    assert device.scores == ("printed", "sketch")


def test_only_the_engine_decides_whether_it_simulates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(client.node, "Node", lambda question, simulated: seen.append(simulated))
    question = Question("register", 1, {"overrides": OVERRIDES}, {"partition-id": 0, "num-partitions": 2})
    answer_question(question)
    answer_question(question, simulated=True)
    assert seen == [False, True]
    assert not in_simulation()

    class Ray:
        def __init__(self, actor: str | None, *, started: bool = True) -> None:
            self.actor, self.started = actor, started

        def is_initialized(self) -> bool:
            return self.started

        def get_runtime_context(self) -> Ray:
            return self

        def get_actor_id(self) -> str | None:
            return self.actor

    for ray, expected in ((Ray("1"), True), (Ray(None), False), (Ray("1", started=False), False)):
        monkeypatch.setitem(sys.modules, "ray", ray)
        assert in_simulation() is expected


def test_a_server_cannot_make_a_deployed_device_draw_keyed_noise(tmp_path: Path) -> None:
    keyed = "privacy.randomness=keyed"
    for configuration in ({"domain": "printed"}, {"partition_id": 0, "num_partitions": 2}):
        with pytest.raises(PrivacyError, match="could subtract this device's noise"):
            made(node(tmp_path, keyed, **configuration)).register()
        made(node(tmp_path, keyed, privacy_randomness="keyed", **configuration)).register()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("privacy_max_epsilon", 0),
        ("privacy_max_epsilon", "8"),
        ("privacy_delta", 1.0),
        ("privacy_max_releases", 2.5),
        ("privacy_randomness", "seed"),
        ("privacy_scores", "all"),
    ],
)
def test_a_nodes_own_budget_is_read_strictly(key: str, value: object, tmp_path: Path) -> None:
    assert key.replace("_", "-") in NODE_KEYS
    with pytest.raises(ConfigError, match=f"--node-config: {key.replace('_', '-')} must be"):
        made(node(tmp_path, domain="printed", **{key: value}))


def test_a_nodes_own_budget_is_its_devices(tmp_path: Path) -> None:
    device = made(node(tmp_path, domain="sketch", privacy_max_epsilon=8, privacy_max_releases=30, privacy_delta=1e-6))
    assert device.ledger is not None
    own = device.ledger.budget
    assert (own.max_epsilon, own.max_releases, own.delta) == (8.0, 30, 1e-6)
    with pytest.raises(PrivacyError, match=r"--node-config privacy-max-epsilon=8 allows .*have: weights"):
        device.register()


def test_a_full_disk_is_no_reason_for_an_empty_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new state folder the budget would be spent twice."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("client.private_folder.write_text", full)
    monkeypatch.setattr("common.client_state.Series.write", full)
    moved = r"No space left on device; free space on that disk, or .*move .*whole state folder \(with \.privacy"
    with pytest.raises(DataError, match=moved):
        Ledger(tmp_path / "ledger", None).keyed_hash("a text")
    with pytest.raises(DataError, match=moved):
        ClientStore(tmp_path / "client").save(Version(0, 1), {"a": torch.ones(1)})


@pytest.mark.parametrize("number", DISK_ADVICE)
def test_a_disk_that_cannot_be_written_names_its_own_next_step(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right to write helps no full disk, and space no read-only one."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    expected = rf"{re.escape(os.strerror(number))}; {re.escape(DISK_ADVICE[number])}, or .*state-dir"
    for place in ("common.client_state.Series.write", "client.private_folder.write_text"):
        monkeypatch.setattr(place, refused)
    with pytest.raises(DataError, match=expected):
        ClientStore(tmp_path / "client").save(Version(0, 1), {"a": torch.ones(1)})
    with pytest.raises(DataError, match=expected):
        Ledger(tmp_path / "ledger").keyed_hash("a text")
    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(DataError, match=expected):
        Ledger(tmp_path / "ledger").keyed_hash("a text")


@NO_FILE
@pytest.mark.parametrize(("kind", "name"), [(Ledger, LEDGER), (Border, BORDER), (KeptTerms, KEPT)])
def test_a_file_that_this_user_may_not_read_names_the_next_step(
    kind: type[PrivateFolder], name: str, make: Callable[[Path], object], tmp_path: Path
) -> None:
    """A pipe would be waited for, and a link to a disk that is absent would be an empty ledger."""
    make(tmp_path / name)
    folder: Any = kind(tmp_path)
    with pytest.raises(DataError, match=rf"{name}, .* cannot be read: .*; let the node's user read .*in state-dir"):
        folder._read()


@NO_FILE
def test_a_secret_that_is_no_file_is_not_made_anew(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path / SECRET)
    with pytest.raises(DataError, match=r"this device's secret, cannot be read: .*; delete it"):
        Ledger(tmp_path).keyed_hash("a text")
    assert not (tmp_path / SECRET).is_file()


def test_a_border_without_its_secret_is_not_begun_anew(tmp_path: Path) -> None:
    """With another secret, no image that was trained on would be known."""
    images = Images("clinic", ("a.png",), "files")
    Border(tmp_path).keep(trained_on("clinic"), images)
    (tmp_path / SECRET).unlink()
    with pytest.raises(DataError, match=f"secret, is missing: restore it, because .*{BORDER} says nothing without it"):
        Border(tmp_path).check(SCORED, images)
    assert not (tmp_path / SECRET).exists()


def test_a_folder_without_writing_or_locks_names_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = r"cannot be written or locked, so nothing is sent: .*; let the node's user .*whole state folder"
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=step):
        Ledger(tmp_path / "file").keyed_hash("a text")

    def without(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without)
    with pytest.raises(DataError, match=f"No locks available.*{step[-20:]}"):
        Ledger(tmp_path / "ledger").keyed_hash("a text")
