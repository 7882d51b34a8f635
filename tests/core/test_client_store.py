"""A client's own state between rounds: versions by name, what did not count, going back, loss and damage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.exchanges import device_of, request_to
from support.own_states import own_state, versions
from support.runs import run
from support.toy import toy_settings

from client.device import kept_versions
from common.client_state import ClientStore, Version
from common.config import checked
from common.errors import DataError, PayloadError
from common.settings import with_method
from common.wire.messages import OwnVersion
from strategies.core.federation import Federation
from strategies.core.method import ClientContext, Trained, Upload
from strategies.fedavg import FedAvg


def value(store: ClientStore, version: Version) -> float:
    return float(store.load(version).tensors["w"])


def save(store: ClientStore, position: int, past: int | None = None, attempt: int = 0, before: int = 0) -> Version:
    """Save a version whose value is its position, from ``past`` of the attempt ``before``."""
    version = Version(attempt, position)
    from_version = None if past is None else Version(before, past)
    store.save(version, {"w": torch.tensor(float(position))}, from_version)
    return version


# ---- the files -------------------------------------------------------------------------------------------------------


def test_only_the_version_that_is_named_is_read(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    assert store.load(None) == ({}, False)
    first = save(store, 1)
    second = save(store, 2, past=1)
    assert (value(store, first), value(store, second)) == (1, 2)
    assert store.load(None) == ({}, False), "none of its replies has counted"


SAVES: dict[str, tuple[list[dict[str, int]], list[tuple[int, int]]]] = {
    "lost after they were saved": (
        [{"position": 1}, {"position": 2, "past": 1}, {"position": 3, "past": 1}, {"position": 4, "past": 1}],
        [(0, 1), (0, 4)],
    ),
    "the first reply was lost": ([{"position": 1}, {"position": 2}], [(0, 2)]),
    "a resumed run goes back": (
        [
            *({"position": 1}, {"position": 2, "past": 1}, {"position": 3, "past": 2}),
            *({"position": 2, "past": 1, "attempt": 7}, {"position": 3, "past": 2, "attempt": 8, "before": 7}),
        ],
        [(0, 1), (7, 2), (8, 3)],
    ),
}
"""What is saved one after the other, and the versions that remain."""


@pytest.mark.parametrize("case", SAVES)
def test_what_did_not_count_is_dropped_and_what_did_stays(case: str, tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    saves, remaining = SAVES[case]
    for fields in saves:
        save(store, **fields)
    assert store.versions() == remaining


def test_a_repeated_request_replaces_its_own_version(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    save(store, 1)
    save(store, 2, past=1)
    store.save(Version(0, 2), {"w": torch.tensor(-2.0)}, Version(0, 1))
    assert value(store, Version(0, 2)) == -2
    assert store.versions() == [(0, 1), (0, 2)]


@pytest.mark.parametrize("late", [Version(0, 3), Version(0, 1), Version(7, 1)], ids=str)
def test_a_delayed_request_is_refused_and_changes_nothing(late: Version, tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    save(store, 1)
    save(store, 2, past=1, attempt=7)
    before = store.versions()
    with pytest.raises(PayloadError, match=r"answered a later request \(state-7-000002.safetensors\)"):
        store.save(late, {"w": torch.zeros(())}, Version(0, 1))
    with pytest.raises(PayloadError, match="answered a later request"):
        store.load(Version(0, 1), before=late)  # before anything is trained
    assert store.versions() == before


@pytest.mark.parametrize("kept", [2, 6])
def test_only_the_last_versions_are_kept(kept: int, tmp_path: Path) -> None:
    store = ClientStore(tmp_path, kept)
    for position in range(1, 20):
        save(store, position, past=position - 1 or None)
    assert store.versions() == [(0, position) for position in range(20 - kept, 20)]


def test_the_best_round_s_version_is_kept_besides_the_last_ones(tmp_path: Path) -> None:
    """The last before that position, not the one at it, which belongs to the round after the best."""
    store = ClientStore(tmp_path, 2)
    for position in range(1, 9):
        past = Version(0, position - 1) if position > 1 else None
        store.save(Version(0, position), {"w": torch.ones(())}, past, best_before=3)
    assert store.versions() == [(0, 2), (0, 7), (0, 8)]


@pytest.mark.parametrize(("method", "checkpoints", "expected"), [("moon", 2, 3), ("moon", 5, 6), ("rucr", 2, 6)])
def test_as_many_are_kept_as_checkpoints_can_name(method: str, checkpoints: int, expected: int, tmp_path: Path) -> None:
    assert kept_versions(toy_settings(method, tmp_path, rounds={"checkpoints": checkpoints})) == expected


# ---- loss and damage -------------------------------------------------------------------------------------------------


def test_a_version_that_is_missing_among_others_or_damaged_is_an_error(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    path = store.path(save(store, 1))
    with pytest.raises(DataError, match=r"counted last is not there: .*state-0-000005.*or delete"):
        store.load(Version(0, 5))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(DataError, match="counted last is damaged"):
        store.load(Version(0, 1))


def test_a_lost_disk_is_told_until_a_reply_counts(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    assert store.load(Version(0, 5)) == ({}, True)
    save(store, 6, past=5)
    assert store.load(Version(0, 5)) == ({}, True), "the reply was lost"
    save(store, 7, past=5)
    assert store.load(Version(0, 7)).lost is False, "this one counted"
    assert value(store, Version(0, 7)) == 7


# ---- the device ------------------------------------------------------------------------------------------------------


def test_a_message_names_exchanges_by_their_names() -> None:
    named = OwnVersion(round=2, exchange="second", attempt=3)
    assert Version.of(named, ("train", "second")) == Version(3, 5)
    with pytest.raises(PayloadError, match=r"no exchange 'second'; the method has train$"):
        Version.of(named, ("train",))


@checked
class OneMoreEachRound(FedAvg):
    """Keeps a tensor under a name of its own in each round."""

    @property
    def keeps_step(self) -> bool:
        return False

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        return replace(super().upload(local, trained), local={f"round_{local.round}": torch.ones(1)})


def test_what_a_method_does_not_name_again_stays(tmp_path: Path) -> None:
    run(with_method(toy_settings("fedavg", tmp_path, train={"rounds": 3}), OneMoreEachRound()))
    (folder,) = (tmp_path / "clients").glob("*")
    assert set(own_state(folder / "dark-0")) == {"local/round_1", "local/round_2", "local/round_3"}


def test_who_only_scores_keeps_nothing_and_may_be_behind(tmp_path: Path) -> None:
    settings = toy_settings("moon", tmp_path)
    federation = Federation(settings)
    federation.begin(1, "train")
    device, message = device_of(settings), federation.message(federation.initial_state())
    device.answer(request_to(settings, round=3), message)
    assert device.answer(request_to(settings, round=2, train=False), message).header["kept"] is False
    with pytest.raises(PayloadError, match="answered a later request"):
        device.answer(request_to(settings, round=2), message)
    assert versions(tmp_path / "device") == [Version(0, 3)]
