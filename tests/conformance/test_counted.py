"""Devices and server agree on what counted: a reply that was trained and not counted leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crashes import CrashError, crash_in
from support.own_states import KEEPING
from support.runs import Run, TouchedEngine, run
from support.toy import method_at_defaults, toy_settings
from torch import Tensor

from common.client_state import ClientStore, Version
from common.errors import CheckpointError
from common.storage import tensors_sha256
from common.wire.messages import Request
from common.wire.payload import Payload
from server.run.checkpoint import Checkpoint, Checkpoints

ROUNDS = 5
LOST_ROUNDS = (1, 3, 4)
CLIENT = "dark-0"

Place = tuple[int, str]
"""A round and the name of an exchange."""


def settings_of(method: str, folder: Path, rounds: int = ROUNDS, **more: Any) -> Any:
    return toy_settings(method, folder, train={"rounds": rounds, "local_steps": 2}, **more)


def at(places: Collection[Place]) -> Callable[[Request], bool]:
    """Whether a request asks the client to take part at one of ``places``."""

    def asks(request: Request) -> bool:
        return request.train and request.client == CLIENT and (request.round, request.exchange) in places

    return asks


def checkpoint(folder: Path) -> Checkpoint:
    found = Checkpoints(folder / "checkpoint").load()
    assert found is not None
    assert found.counted is not None
    return found


def own_states(folder: Path, exchanges: tuple[str, ...]) -> dict[str, dict[str, Tensor]]:
    """The state of each client that belongs to the last checkpoint, as it is on the client's disk."""
    last = checkpoint(folder)
    states = {}
    for client, named in (last.counted or {}).items():
        store = ClientStore(folder / "clients" / last.run / client)
        states[client] = store.load(Version.of(named, exchanges)).tensors
    return states


def outcome(done: Run, method: str) -> dict[str, str]:
    """SHA-256 of the global state and of each client's own."""
    states = own_states(done.folder, method_at_defaults(method).exchanges)
    return {"server": done.sha256} | {client: tensors_sha256(state) for client, state in states.items()}


Reference = Callable[[str, Collection[Place]], dict[str, str]]


@pytest.fixture(scope="module")
def unasked(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What comes of a run in which the client is not asked at some places."""
    known: dict[tuple[str, frozenset[Place]], dict[str, str]] = {}

    def of(method: str, places: Collection[Place]) -> dict[str, str]:
        key = method, frozenset(places)
        if key not in known:
            settings = settings_of(method, tmp_path_factory.mktemp(method))
            known[key] = outcome(run(settings, TouchedEngine(settings, unasked=at(places))), method)
        return known[key]

    return of


def exchanges_of(methods: Collection[str]) -> list[tuple[str, str]]:
    return [(method, exchange) for method in methods for exchange in method_at_defaults(method).exchanges]


@pytest.mark.parametrize(("method", "exchange"), exchanges_of(KEEPING))
@pytest.mark.long
def test_a_reply_that_is_lost_in_any_exchange_leaves_nothing(
    method: str, exchange: str, unasked: Reference, tmp_path: Path
) -> None:
    """In the first round too, when the client has no state yet; then in two rounds in a row."""
    places = [(number, exchange) for number in LOST_ROUNDS]
    settings = settings_of(method, tmp_path)
    done = run(settings, TouchedEngine(settings, lost=at(places)))
    assert outcome(done, method) == unasked(method, places)


@pytest.mark.parametrize("method", KEEPING)
@pytest.mark.long
def test_a_reply_that_is_lost_after_a_resume_does_not_bring_the_discarded_attempt_back(
    method: str, unasked: Reference, tmp_path: Path
) -> None:
    """Replies are lost before. The server dies twice in round 4; the client's reply is lost in the last attempt."""
    exchanges = method_at_defaults(method).exchanges
    before = [(number, exchanges[0]) for number in LOST_ROUNDS[:-1]]
    repeated = (LOST_ROUNDS[-1], exchanges[-1])
    for resume in (False, True):
        settings = settings_of(method, tmp_path, resume=resume)
        with pytest.raises(CrashError):
            run(settings, TouchedEngine(settings, lost=at(before), edit=crash_in(repeated)))
    settings = settings_of(method, tmp_path, resume=True)
    done = run(settings, TouchedEngine(settings, lost=at([repeated])))
    assert outcome(done, method) == unasked(method, [*before, repeated])


@pytest.mark.parametrize(("method", "exchange"), [("scaffold", "train"), ("rucr", "rebalance"), ("fccl_plus", "train")])
@pytest.mark.long
def test_a_reply_that_is_refused_leaves_nothing(method: str, exchange: str, unasked: Reference, tmp_path: Path) -> None:
    places = [(2, exchange), (3, exchange)]
    spoils = at(places)

    def edit(request: Request, payload: Payload) -> Payload:
        if not spoils(request):
            return payload
        return replace(payload, header={**payload.header, "samples": 1})

    settings = settings_of(method, tmp_path)
    done = run(settings, TouchedEngine(settings, edit=edit))
    assert [row["round"] for row in done.replies() if row["status"] == "refused"] == ["2", "3"]
    assert outcome(done, method) == unasked(method, places)


@pytest.mark.parametrize(("method", "exchange"), [("fedrep", "train"), ("rucr", "rebalance"), ("fedpall", "mix")])
@pytest.mark.long
def test_a_round_without_a_quorum_leaves_nothing_on_any_device(method: str, exchange: str, tmp_path: Path) -> None:
    """All replies to one exchange are lost, and with them what the round's earlier exchanges had made."""

    def lost(request: Request) -> bool:
        return request.train and (request.round, request.exchange) == (2, exchange)

    def unasked(request: Request) -> bool:
        return request.train and request.round == 2

    found = {}
    for name, hands in (("lost", {"lost": lost}), ("unasked", {"unasked": unasked})):
        settings = settings_of(method, tmp_path / name)
        done = run(settings, TouchedEngine(settings, **hands))
        assert [entry["round"] for event, entry in done.events if event == "round skipped"] == [2]
        found[name] = outcome(done, method)
    assert found["lost"] == found["unasked"]


def test_the_best_round_s_own_state_is_the_one_that_counted(tmp_path: Path) -> None:
    """The reply to round 2 is lost, and round 2 is the best: its model of the client is that of round 1."""

    def flattering(request: Request, payload: Payload) -> Payload:
        validation = payload.header["validation"]
        correct = validation["count"] if request.round == 3 else 0
        return replace(payload, header={**payload.header, "validation": {**validation, "correct": correct}})

    validating = ("protocol.validation=0.2",)
    settings = settings_of("fedrep", tmp_path, rounds=8, overrides=validating)
    done = run(settings, TouchedEngine(settings, edit=flattering, lost=at([(2, "train")])))
    assert done.summary["validation"]["round"] == 2
    best = Checkpoints(tmp_path / "checkpoint", kind="best").load()
    assert best is not None
    assert best.counted is not None
    counted = {client: named["round"] for client, named in best.counted.items()}
    assert counted == {"bright-0": 2, CLIENT: 1, "noisy-0": 2}
    for client, named in best.counted.items():
        folder = tmp_path / "clients" / best.run / client
        assert ClientStore(folder).load(Version.of(named, ("train",))).tensors


def test_a_late_reply_leaves_nothing(tmp_path: Path) -> None:
    """With oversampling, devices train that the server no longer waits for."""
    more = {"participation": 0.5, "oversample": 2.0, "evaluate_every": 8}  # who scores is waited for
    settings = toy_settings("scaffold", tmp_path, train={"rounds": 8, "local_steps": 2}, rounds=more)
    done = run(settings, TouchedEngine(settings))
    assert any(row["status"] == "late" for row in done.replies())
    assert drift(tmp_path, "extra/control/", "local/control/") <= 1e-6


# ---- invariants ------------------------------------------------------------------------------------------------------


def drift(folder: Path, servers: str, clients: str) -> float:
    """|s - mean_k s_k| / |s| of a server's tensors and its clients' own; who never counted has zeros."""
    state = checkpoint(folder).state.tensors()
    states = own_states(folder, ("train",))
    difference, length = 0.0, 0.0
    for key, tensor in state.items():
        if not key.startswith(servers):
            continue
        total = torch.zeros_like(tensor, dtype=torch.float64)
        for own in states.values():
            total += own[clients + key.removeprefix(servers)].double()
        difference += float((tensor.double() - total / 3).square().sum())
        length += float(tensor.double().square().sum())
    assert length > 0
    return (difference / length) ** 0.5


@pytest.mark.parametrize(
    ("method", "servers", "clients"),
    [("scaffold", "extra/control/", "local/control/"), ("feddyn", "extra/h/", "local/lambda/")],
)
@pytest.mark.parametrize("lost", [(), (1, 3, 4, 6)], ids=["nothing", "four times"])
@pytest.mark.long
def test_the_server_s_mean_is_the_mean_of_the_clients(
    method: str, servers: str, clients: str, lost: tuple[int, ...], tmp_path: Path
) -> None:
    """SCAFFOLD: c is the mean of all c_k. FedDyn: h is the mean of all lambda_k."""
    settings = settings_of(method, tmp_path, rounds=6)
    run(settings, TouchedEngine(settings, lost=at([(number, "train") for number in lost])))
    assert drift(tmp_path, servers, clients) <= 1e-6


# ---- what a device has lost ------------------------------------------------------------------------------------------


def stopped_after(method: str, folder: Path, rounds: int) -> Mapping[str, Path]:
    """A run that was stopped; the folder of each client."""
    run(settings_of(method, folder), stop_after=rounds)
    (of_run,) = [path for path in (folder / "clients").iterdir() if not path.name.startswith(".")]
    return {path.name: path for path in of_run.iterdir()}


def test_a_device_without_the_version_that_counted_says_so(tmp_path: Path) -> None:
    folders = stopped_after("fedrep", tmp_path, 2)
    store = ClientStore(folders[CLIENT])
    store.path(store.versions()[-1]).unlink()
    done = run(settings_of("fedrep", tmp_path, resume=True))
    mine = [row for row in done.replies() if row["client"] == CLIENT and int(row["round"]) > 2]
    assert {row["status"] for row in mine} == {"failed"}
    assert all("that the server counted last is not there" in row["reason"] for row in mine)


def test_a_device_that_lost_its_disk_starts_without_a_state_and_the_record_says_so(tmp_path: Path) -> None:
    folders = stopped_after("fedrep", tmp_path, 2)
    for path in folders[CLIENT].iterdir():
        path.unlink()
    settings = settings_of("fedrep", tmp_path, resume=True)
    done = run(settings, TouchedEngine(settings, lost=at([(3, "train")])))
    mine = [row["status"] for row in done.replies() if row["client"] == CLIENT]
    assert mine == ["trained", "trained", "lost", "trained", "trained", "scored"]
    told = [entry for name, entry in done.events if name == "client state lost"]
    assert [(entry["client"], entry["round"]) for entry in told] == [(CLIENT, 4)]
    assert "own state of round 2" in told[0]["reason"]


def test_a_checkpoint_that_does_not_say_what_counted_is_not_resumed(tmp_path: Path) -> None:
    run(settings_of("fedrep", tmp_path), stop_after=2)
    kept = Checkpoints(tmp_path / "checkpoint")
    kept.replace(replace(checkpoint(tmp_path), counted=None))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is good"):
        run(settings_of("fedrep", tmp_path, resume=True))
