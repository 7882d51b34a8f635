"""Rows of the benchmarks are what they claim."""

from __future__ import annotations

import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
from support.scripts import ROOT

from bench import ratios
from bench.ratios import Ratio, append, compare, quantity, read
from bench.rows import read_all


def row(ratio: float, shape: str = "s") -> Ratio:
    return compare("subject", shape, "s", {"ours": [1.0, 1.0, 1.0], "theirs": [ratio] * 3}, "theirs", {"ours": 2.0})[0]


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


def test_the_committed_rows_can_be_read() -> None:
    rows = read(ratios.RESULTS)
    assert rows
    for found in rows:
        assert set(found) == set(asdict(row(1.0)))
        assert float(found["low"]) <= float(found["middle"]) <= float(found["high"])


STATED = {
    ("released FPL", "goldfinch", "round cpu"): "x",
    ("efficiency ray", "goldfinch", "small fedavg"): "",
    ("efficiency inline", "goldfinch", "one_step fedavg clients=4 cpu"): "",
    ("efficiency cluster", "cluster", "machines=1"): "",
    ("efficiency cluster", "cluster", "machines=2"): "",
    ("round beside fluke", "goldfinch", "small fedavg"): "x",
    ("round beside fluke", "goldfinch", "small fedproto"): "x",
    ("round beside blazefl", "goldfinch", "clients=4 cpu"): "x",
    ("round beside blazefl", "goldfinch", "workers=2"): "x",
}
"""Subject, variant and a part of the shape of ratios that the pages state with their quartiles, and the unit there."""


@pytest.mark.parametrize(("measured", "unit"), STATED.items(), ids=[" ".join(key) for key in STATED])
def test_the_pages_state_the_quartiles_of_the_last_row(measured: tuple[str, str, str], unit: str) -> None:
    subject, variant, part = measured
    rows = [row for row in read(ratios.RESULTS) if (row["subject"], row["variant"]) == (subject, variant)]
    last = [row for row in rows if part in row["shape"]][-1]
    ratio, low, high = (f"{float(last[name]):.2f}" for name in ("ratio", "ratio_low", "ratio_high"))
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("performance.md", "scale.md"))
    assert f"{ratio}{unit} ({low} to {high})" in pages


def test_every_row_names_a_commit_of_the_history() -> None:
    """The code that was measured can be looked up; rows of a branch name the commit that brought them."""
    history = subprocess.run(["git", "log", "--format=%H"], cwd=ROOT, capture_output=True, text=True, check=False)
    shallow = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if history.returncode or shallow.stdout.strip() != "false":
        pytest.skip("no whole history here")
    known = history.stdout.split()
    for path in sorted((ROOT / "bench" / "results").glob("*.csv")):
        named = {row["commit"].rstrip("+") for row in read_all(path) if "commit" in row}
        lost = [name for name in named if not any(commit.startswith(name) for commit in known)]
        assert not lost, path.name


def test_a_script_that_measures_by_the_wall_clock_waits_for_a_quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = [4.0, 1.6, 1.2, 3.0]
    monkeypatch.setattr(ratios.os, "getloadavg", lambda: (loads.pop(0), 0.0, 0.0))
    monkeypatch.setattr(ratios.time, "sleep", lambda _: None)
    monkeypatch.setattr(ratios, "_load_before", [])
    ratios.wait_until_quiet()
    assert row(1.0).load == 1.2  # not 3.0, to which the measurement itself may add
    monkeypatch.setattr(ratios.os, "getloadavg", lambda: (2.0, 0.0, 0.0))
    with pytest.raises(SystemExit, match=r"load 2\.0 after 0 s, at most 1\.5 wanted"):
        ratios.wait_until_quiet(0.0)
