"""The comparison behind `make bench-check`, and that rows are what they say."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from bench import ratios
from bench.check import committed, judge
from bench.ratios import Ratio, append, compare, machine_class, quantity, read


def row(ratio: float, shape: str = "s") -> Ratio:
    return compare("subject", shape, "s", {"ours": [1.0, 1.0, 1.0], "theirs": [ratio] * 3}, "theirs", {"ours": 2.0})[0]


def text(made: Ratio, **changes: str) -> dict[str, str]:
    return {name: "" if value is None else str(value) for name, value in asdict(made).items()} | changes


def test_a_ratio_is_the_median_over_repeats_of_the_opponents_time_over_ours() -> None:
    values = {"ours": [1.0, 2.0, 4.0], "theirs": [3.0, 4.0, 4.0]}
    ours, theirs = compare("subject", "s", "s", values, "theirs", {"ours": 2.5})
    assert (ours.ratio, ours.middle, ours.repeats, ours.met) == (2.0, 2.0, 3, False)
    assert (ours.ratio_low, ours.ratio_high) == (1.5, 2.5)
    assert theirs.ratio == 1.0
    assert quantity("subject", "ours", "s", "MiB", [3.0], 4.0).met is True


def test_rows_survive_the_file(tmp_path: Path) -> None:
    append([row(3.0)], tmp_path / "r.csv")
    append([row(5.0)], tmp_path / "r.csv")
    assert [found["ratio"] for found in read(tmp_path / "r.csv")] == ["3.0", "5.0"]
    assert read(tmp_path / "none.csv") == []


@pytest.mark.parametrize(("now", "fell"), [(10.0, 0), (8.1, 0), (7.9, 1), (20.0, 0)])
def test_a_fall_of_more_than_a_fifth_is_told(now: float, fell: int) -> None:
    known = committed([text(row(9.0)), text(row(10.0)), text(row(11.0))], machine_class())
    lines, compared = judge([row(now), row(1.0, shape="another")], known, 0.2)
    assert (len(lines), compared) == (fell, 1)
    if fell:
        assert "fell from 10.000 to 7.900, by 21 %" in lines[0]


@pytest.mark.parametrize("key", ["cpu", "cores", "threads", "torch"])
def test_other_machines_say_nothing(key: str) -> None:
    assert committed([text(row(9.0), **{key: "another"})], machine_class()) == {}


def test_the_committed_rows_can_be_read() -> None:
    rows = read(ratios.RESULTS)
    assert rows
    for found in rows:
        assert set(found) == set(asdict(row(1.0)))
        assert float(found["low"]) <= float(found["middle"]) <= float(found["high"])
