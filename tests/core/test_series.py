"""The one store of numbered tensors: names, order, what is kept, damage, and who may read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from common.errors import CheckpointError, EngineError
from common.prototypes import PrototypeSet
from common.storage import Series
from server.run.checkpoint import Checkpoints
from server.run.conduct import storage_errors
from server.run.prototype_log import PrototypeLog, read_pages


def filled(folder: Path, *numbers: int) -> Series:
    series = Series(folder / "deep")
    for number in numbers:
        series.write(number, {"w": torch.tensor(float(number))}, {"of": number})
    return series


def test_numbers_ascend_beyond_six_digits(tmp_path: Path) -> None:
    series = filled(tmp_path, 1_000_000, 3, 999_999)
    assert series.numbers() == [3, 999_999, 1_000_000]
    assert series.newest(lambda entry: entry.facts) == {"of": 1_000_000}
    assert series.newest(lambda entry: entry.number, before=999_999) == 3
    assert series.newest(lambda entry: entry.number, before=3) is None


def test_a_file_that_took_another_s_place_is_damaged(tmp_path: Path) -> None:
    series = filled(tmp_path, 1, 2)
    series.path(1).replace(series.path(2))
    with pytest.raises(ValueError, match=r"round-000002\.safetensors: its content does not match its hash"):
        series.newest(lambda entry: entry)


def test_what_is_no_file_is_damaged_and_the_one_before_is_used(tmp_path: Path) -> None:
    """A resumed run would end with an OSError each time, and say nothing of the file before."""
    series = filled(tmp_path, 1, 2, 3, 4)
    for number in (2, 3, 4):
        series.path(number).unlink()
    series.path(2).mkdir()
    os.mkfifo(series.path(3))
    series.path(4).symlink_to("absent")
    assert series.newest(lambda entry: entry.number) == 1
    with pytest.raises(CheckpointError, match=r"round-000002\.safetensors is damaged: it is a folder, a pipe"):
        Checkpoints(series.folder).at(2)
    step = "Is a directory; move that folder away, then go on with resume=true"
    with pytest.raises(EngineError, match=step), storage_errors(tmp_path):
        series.write(2, {"w": torch.ones(1)})
    series.write(3, {"w": torch.ones(1)})
    assert series.newest(lambda entry: entry.number) == 3


def test_only_what_is_to_be_kept_stays(tmp_path: Path) -> None:
    series = filled(tmp_path, *range(1, 8))
    (series.folder / "round-7.txt").write_text("mine")
    series.prune_except({2, 5, 99})
    assert sorted(path.name for path in series.folder.iterdir()) == [
        "round-000002.safetensors", "round-000005.safetensors", "round-7.txt",
    ]  # fmt: skip


def test_what_a_killed_process_left_half_written_is_removed_by_the_next_that_writes(tmp_path: Path) -> None:
    series = Series(tmp_path, "state-1", private=True)
    for name in (
        ".state-1-000003.safetensors.0a1b2c3d",
        ".state-0-000007.safetensors.0a1b2c3d",
        ".round-000001.x",
        "x",
    ):
        (tmp_path / name).write_bytes(b"half")
    series.write(4, {"w": torch.ones(2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".round-000001.x", "state-1-000004.safetensors", "x"]


def test_a_page_of_prototypes_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    log = PrototypeLog(tmp_path)
    for number in (1, 2, 3):
        log.add(number, PrototypeSet(torch.ones(1, 2), torch.zeros(1, dtype=torch.int64), torch.ones(1)), [])
    page = log.series.read(2)
    log.series.write(2, page.tensors, {"clients": 5})
    log.series.path(3).unlink()
    os.mkfifo(log.series.path(3))
    assert [each.round for each in read_pages(tmp_path)] == [1]
