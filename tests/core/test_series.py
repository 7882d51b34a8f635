"""The one store of numbered tensors: names, order, what is kept, damage, and who may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from common.storage.files import Series, write_text


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


def test_only_what_is_to_be_kept_stays(tmp_path: Path) -> None:
    series = filled(tmp_path, *range(1, 8))
    (series.folder / "round-7.txt").write_text("mine")
    series.keep({2, 5, 99})
    assert sorted(path.name for path in series.folder.iterdir()) == [
        "round-000002.safetensors", "round-000005.safetensors", "round-7.txt",
    ]  # fmt: skip


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_have_the_umask_s_mode_and_private_ones_are_their_owner_s(mask: int, tmp_path: Path) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "summary.json", "{}")
        write_text(tmp_path / "key", "secret", private=True)
        Series(tmp_path, "state", private=True).write(1, {})
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"summary.json": 0o666 & ~mask, "key": 0o600, "state-000001.safetensors": 0o600}
