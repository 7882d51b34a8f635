"""The cells of benchmark tables: mean and spread, and marks of numbers over other seeds than their neighbours'."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from bench import poisoning
from bench.rows import mean_and_spread


@pytest.mark.parametrize(
    ("values", "cell"),
    [
        pytest.param([], "-", id="none"),
        pytest.param([61.25], "61.2 (1 of 3 seeds)", id="one"),
        pytest.param([60.0, 61.0, 62.0], "61.0 ± 1.0", id="all"),
        pytest.param([60.0, 61.0, 62.0, 62.0], "61.2 ± 1.0 (4 of 3 seeds)", id="one-too-many"),
    ],
)
def test_other_seeds_than_the_tables_are_marked(values: list[float], cell: str) -> None:
    assert mean_and_spread(values, 3) == cell


def test_a_run_that_is_recorded_twice_counts_once(tmp_path: Path) -> None:
    lines = poisoning.RESULTS.read_text().splitlines(keepends=True)
    twice = tmp_path / "twice.csv"
    twice.write_text("".join([*lines, lines[1]]))
    assert len(poisoning.load(twice)) == len(poisoning.load(poisoning.RESULTS)) == len(lines) - 1


def test_the_poisoning_page_has_the_tables_of_the_recorded_runs() -> None:
    """A cell that lacks a seed names how many it has."""
    page = (Path(poisoning.__file__).parent.parent / "docs" / "results" / "poisoning.md").read_text()
    outcomes = poisoning.load(poisoning.RESULTS)
    for unlike in (False, True):
        assert f"\n{poisoning.table(outcomes, unlike=unlike)}\n" in page


def test_the_ranges_of_the_poisoning_page_are_those_of_its_tables() -> None:
    page = (Path(poisoning.__file__).parent.parent / "docs" / "results" / "poisoning.md").read_text()
    words = " ".join(page.split())
    found: dict[str, dict[str, list[float]]] = {}
    federation = ""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 8 or " ± " not in line or not re.fullmatch(r"(\d of \d+)?", cells[0]):
            continue
        federation = cells[0] or federation
        means = [float(cell.partition(" ±")[0]) for cell in (cells[3], cells[6], cells[4], cells[7])]
        kind = "none" if cells[1] == "none" else "attacked"
        for rule, values in (("guarded", means[:2]), ("median", means[2:])):
            found.setdefault(federation, {}).setdefault(f"{rule}, {kind}", []).extend(values)

    def span(federation: str, *kinds: str) -> str:
        values = [value for kind in kinds for value in found[federation][kind]]
        return f"{min(values)} to {max(values)}"

    both, none = ("guarded, attacked", "median, attacked"), ("guarded, none", "median, none")
    assert f"One hostile of four leaves {span('1 of 4', *both)} of {span('1 of 4', *none)} %" in words
    assert f"of five, {span('1 of 5', *both)} of {span('1 of 5', *none)}." in words
    ten = f"{span('1 of 10', both[0])} (guarded) and {span('1 of 10', both[1])} (geometric median)"
    assert f"**One of ten** leaves {ten}; without it, " in words
    assert f"; without it, {span('2 of 10', none[0])} and {span('2 of 10', none[1])}" in words
    assert f"Two of ten leave {span('2 of 10', both[0])} and {span('2 of 10', both[1])}." in words


def test_the_plan_of_the_poisoning_bench_has_each_run_once() -> None:
    everything = argparse.Namespace(
        seeds=list(poisoning.SEEDS),
        methods=list(poisoning.METHODS),
        federations=list(poisoning.FEDERATIONS),
        cases=[*poisoning.ATTACKS, *poisoning.UNLIKE],
        defences=list(poisoning.DEFENCES),
    )
    runs = list(poisoning.plan(everything))
    assert len(runs) == len(set(runs))
    assert {poisoning.key_of(outcome) for outcome in poisoning.load(poisoning.RESULTS)} <= set(runs)
    for federation, _, case, _, _ in runs:
        assert case in poisoning.FEDERATIONS[federation][2]
