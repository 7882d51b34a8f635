"""A client's own state between rounds: versions by name, what did not count, going back, loss and damage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.exchanges import device_of, request_to
from support.own_states import own_state, versions
from support.toy import toy_settings

from client.device import kept_versions
from common.client_state import ClientStore, Version
from common.errors import DataError, PayloadError
from common.wire.messages import OwnVersion


def value(store: ClientStore, version: Version) -> float:
    return float(store.load(version).tensors["w"])


def save(store: ClientStore, position: int, past: int | None = None, attempt: int = 0, before: int = 0) -> Version:
    """Save a version whose value is its position, from ``past`` of the attempt ``before``."""
    version = Version(attempt, position)
    from_version = None if past is None else Version(before, past)
    store.save(version, {"w": torch.tensor(float(position))}, from_version)
    return version


def positions(store: ClientStore) -> list[tuple[int, int]]:
    return [tuple(version) for version in store.versions()]


# ---- the files -------------------------------------------------------------------------------------------------------


def test_only_the_version_that_is_named_is_read(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    assert store.load(None) == ({}, False)
    first = save(store, 1)
    second = save(store, 2, past=1)
    assert (value(store, first), value(store, second)) == (1, 2)
    assert store.load(None) == ({}, False), "none of its replies has counted"


def test_what_did_not_count_is_dropped_and_what_did_stays(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    save(store, 1)
    for position in range(2, 9):  # each is lost after it was saved
        save(store, position, past=1)
        assert positions(store) == [(0, 1), (0, position)]
    save(store, 9, past=8)
    assert positions(store) == [(0, 1), (0, 8), (0, 9)]


def test_a_first_reply_that_did_not_count_is_dropped(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    save(store, 1)
    save(store, 2)
    assert positions(store) == [(0, 2)]


def test_a_repeated_request_replaces_its_own_version(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    save(store, 1)
    save(store, 2, past=1)
    store.save(Version(0, 2), {"w": torch.tensor(-2.0)}, Version(0, 1))
    assert value(store, Version(0, 2)) == -2
    assert positions(store) == [(0, 1), (0, 2)]


def test_a_resumed_run_goes_back_and_the_discarded_attempt_is_dropped(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    for position in (1, 2, 3):
        save(store, position, past=position - 1 or None)
    save(store, 2, past=1, attempt=7)
    assert positions(store) == [(0, 1), (7, 2)]
    save(store, 3, past=2, attempt=8, before=7)
    assert positions(store) == [(0, 1), (7, 2), (8, 3)]


@pytest.mark.parametrize("late", [Version(0, 3), Version(0, 1), Version(7, 1)], ids=str)
def test_a_delayed_request_is_refused_and_changes_nothing(late: Version, tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    save(store, 1)
    save(store, 2, past=1, attempt=7)
    before = positions(store)
    with pytest.raises(PayloadError, match=r"answered a later request \(state-7-000002.safetensors\)"):
        store.save(late, {"w": torch.zeros(())}, Version(0, 1))
    assert positions(store) == before


@pytest.mark.parametrize("kept", [2, 3, 6])
def test_only_the_last_versions_are_kept(kept: int, tmp_path: Path) -> None:
    store = ClientStore(tmp_path, kept)
    for position in range(1, 20):
        save(store, position, past=position - 1 or None)
    assert positions(store) == [(0, position) for position in range(20 - kept, 20)]


@pytest.mark.parametrize(("method", "checkpoints", "expected"), [("moon", 2, 3), ("moon", 5, 6), ("rucr", 2, 6)])
def test_as_many_are_kept_as_checkpoints_can_name(method: str, checkpoints: int, expected: int, tmp_path: Path) -> None:
    assert kept_versions(toy_settings(method, tmp_path, rounds={"checkpoints": checkpoints})) == expected


def test_what_is_kept_is_a_copy(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    tensor = torch.ones(2, requires_grad=True)
    store.save(Version(0, 1), {"w": tensor, "same": tensor, "none": torch.zeros(0, 3)})
    with torch.no_grad():
        tensor.zero_()
    found = store.load(Version(0, 1)).tensors
    assert found["w"].tolist() == found["same"].tolist() == [1, 1]
    assert not found["w"].requires_grad
    assert found["none"].shape == (0, 3)


# ---- loss and damage -------------------------------------------------------------------------------------------------


def test_a_version_that_is_missing_among_others_is_an_error(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    save(store, 1)
    with pytest.raises(DataError, match=r"counted last is not there: .*state-0-000005.*or delete"):
        store.load(Version(0, 5))


def test_a_damaged_version_is_an_error(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    path = store.path(save(store, 1))
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


def test_who_only_scores_keeps_nothing_and_may_be_behind(tmp_path: Path) -> None:
    settings = toy_settings("moon", tmp_path)
    device, message = device_of(settings), _initial(settings)
    device.answer(request_to(settings, round=3), message)
    assert device.answer(request_to(settings, round=2, train=False), message).header["kept"] is False
    with pytest.raises(PayloadError, match="answered a later request"):
        device.answer(request_to(settings, round=2), message)
    assert versions(tmp_path / "device") == [Version(0, 3)]


def test_a_method_without_a_state_keeps_no_file_and_says_so(tmp_path: Path) -> None:
    for method, kept in (("fedavg", False), ("moon", True)):
        settings = toy_settings(method, tmp_path / method)
        message = _initial(settings)
        header = device_of(settings).answer(request_to(settings, attempt=5), message).header
        assert (header["kept"], header["lost"], header["attempt"]) == (kept, False, 5)
        assert bool(versions(tmp_path / method / "device")) == kept


def test_a_device_that_never_had_the_version_starts_without_and_says_so(tmp_path: Path) -> None:
    settings = toy_settings("fedrep", tmp_path)
    past = OwnVersion(round=1, exchange="train", attempt=0)
    header = device_of(settings).answer(request_to(settings, round=2, own=past), _initial(settings)).header
    assert (header["kept"], header["lost"]) == (True, True)
    assert own_state(tmp_path / "device", before=2) == {}


def _initial(settings: object) -> object:
    from strategies.core.federation import Federation

    federation = Federation(settings)  # type: ignore[arg-type]  # a test's settings
    federation.begin(1, "train")
    return federation.message(federation.initial_state())
