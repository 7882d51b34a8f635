"""A client's own state between rounds: versions, going back, and damage."""

from __future__ import annotations

from pathlib import Path

import torch

from common.storage import KEPT_VERSIONS, ClientStore


def value(store: ClientStore, position: int) -> float | None:
    found = store.load(position)
    return float(found["w"]) if found else None


def save(store: ClientStore, position: int) -> None:
    store.save(position, {"w": torch.tensor(float(position))})


def test_a_round_reads_what_came_before_it(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    assert store.load(1) == {}
    for position in (1, 2, 5):
        save(store, position)
    assert [value(store, position) for position in (1, 2, 3, 5, 6, 99)] == [None, 1, 2, 2, 5, 5]


def test_going_back_undoes_the_future(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    for position in (1, 2, 3):
        save(store, position)
    store.save(2, {"w": torch.tensor(-2.0)})
    assert value(store, 99) == -2
    assert value(store, 2) == 1


def test_only_the_last_versions_are_kept(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    for position in range(1, 9):
        save(store, position)
    held = [position for position in range(1, 10) if value(store, position) is not None]
    assert held == list(range(8 - KEPT_VERSIONS + 2, 10))
    assert len(list(tmp_path.iterdir())) == KEPT_VERSIONS


def test_a_method_with_more_exchanges_keeps_as_many_rounds(tmp_path: Path) -> None:
    store = ClientStore(tmp_path, per_round=3)
    for position in range(1, 30):
        save(store, position)
    assert len(list(tmp_path.iterdir())) == 3 * KEPT_VERSIONS


def test_what_is_kept_is_a_copy(tmp_path: Path) -> None:
    store = ClientStore(tmp_path)
    tensor = torch.ones(2, requires_grad=True)
    store.save(1, {"w": tensor, "same": tensor, "none": torch.zeros(0, 3)})
    with torch.no_grad():
        tensor.zero_()
    found = store.load(2)
    assert found["w"].tolist() == found["same"].tolist() == [1, 1]
    assert not found["w"].requires_grad
    assert found["none"].shape == (0, 3)
