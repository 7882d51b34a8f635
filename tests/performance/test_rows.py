"""The cells of benchmark tables: mean and spread, and marks of numbers over other seeds than their neighbours'."""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path

import pytest

from bench import poisoning
from bench.rows import mean_and_spread
from goldfinch.results.statistics import paired_difference


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

    def rounded(federation: str, *kinds: str) -> str:
        return re.sub(r"\d+\.\d", lambda number: f"{float(number[0]):.0f}", span(federation, *kinds))

    security = " ".join((Path(poisoning.__file__).parent.parent / "SECURITY.md").read_text().split())
    assert f"one of four leaves {rounded('1 of 4', *both)} of {rounded('1 of 4', *none)} %" in security
    ten = f"{rounded('1 of 10', both[0])} (guarded) or {rounded('1 of 10', both[1])} (median)"
    assert f"one of ten leaves {ten} of {rounded('2 of 10', *none)}" in security


def test_the_differences_of_the_poisoning_page_are_those_of_its_runs() -> None:
    page = (Path(poisoning.__file__).parent.parent / "docs" / "results" / "poisoning.md").read_text()
    words = " ".join(page.split())
    runs = {poisoning.key_of(outcome): outcome for outcome in poisoning.load(poisoning.RESULTS)}

    def scores(federation: str, method: str, case: str, rule: str, what: str = "average") -> list[float]:
        found = (runs[federation, method, case, rule, seed] for seed in poisoning.SEEDS)
        return [getattr(outcome, what) for outcome in found]

    def against_the_mean(federation: str, method: str, case: str, rule: str, what: str) -> str:
        sides = [scores(federation, method, case, each, what) for each in (rule, "mean")]
        return paired_difference(*sides).text(1)

    own = {}
    for method in ("fedavg", "fpl"):
        for case in ("80/10/10", "rare domain"):
            for rule in ("guarded", "geometric median"):
                own[case, rule, method] = against_the_mean(case, method, case, rule, "own")
    large, most = own["80/10/10", "geometric median", "fedavg"], own["80/10/10", "geometric median", "fpl"]
    assert f"loses on its own domain: {large} (FedAvg) and {most} (FPL);" in words
    assert f"guarded: {own['80/10/10', 'guarded', 'fedavg']} and {own['80/10/10', 'guarded', 'fpl']}." in words
    rare = f"{own['rare domain', 'guarded', 'fedavg']} and {own['rare domain', 'guarded', 'fpl']}"
    assert f"which on its own images is {rare}." in words
    gaps = []
    for federation, method, case, rule, seed in runs:
        if (rule, seed) == ("guarded", 0) and case not in ("none", *poisoning.UNLIKE):
            sides = [scores(federation, method, case, each) for each in ("geometric median", "guarded")]
            gaps.append(statistics.mean(sides[0]) - statistics.mean(sides[1]))
    assert f"has {statistics.mean(gaps):.1f} points more than `rounds=guarded` in the mean of the {len(gaps)}" in words
    left = [statistics.mean(scores("1 of 10", method, "sign flip of 3", "mean")) for method in ("fedavg", "fpl")]
    assert f"by one of ten it leaves {left[0]:.1f} and {left[1]:.1f}." in words
    commits = {outcome.commit for outcome in runs.values()}
    assert f"Code {commits.pop()}, " in words
    assert not commits


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
