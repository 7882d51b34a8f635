"""Pages against the runs that their numbers are read from (docs/results/runs.csv); the cheapest of them run again."""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.scripts import ROOT

from bench.measure import LAST_STATE_CHANGE
from bench.page_runs import RESULTS
from bench.rows import read_all
from common.versions import package_versions, processor, processor_name
from goldfinch.cli import main
from goldfinch.record import RunRecord
from goldfinch.results.statistics import paired_difference

ROWS = read_all(RESULTS)
README = " ".join((ROOT / "README.md").read_text().partition("\n## Run\n")[0].split())


def recorded(page: str, method: str, column: str = "average") -> list[float]:
    """The recorded scores of a method, in the order of their seeds."""
    rows = [row for row in ROWS if (row["page"], row["method"]) == (page, method)]
    return [float(row[column]) for row in sorted(rows, key=lambda row: int(row["seed"]))]


def scores(row: dict[str, str]) -> dict[str, float]:
    """The recorded accuracy of each domain."""
    pairs = (item.partition("=") for item in row["accuracy"].split())
    return {domain: float(value) for domain, _, value in pairs}


def cell(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


# ---- README ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fpl"])
def test_the_readme_s_table_is_the_recorded_run_of_seed_0(method: str) -> None:
    (row,) = [row for row in ROWS if (row["page"], row["method"], row["seed"]) == ("README.md", method, "0")]
    numbers = [*scores(row).values(), float(row["average"]), float(row["worst"])]
    assert f" {method} {' '.join(f'{number:.2f}' for number in numbers)} " in README
    assert f"({row['rounds']} rounds, one seed, 0;" in README


def test_the_readme_s_sentences_are_the_recorded_runs() -> None:
    fedavg, fpl = recorded("README.md", "fedavg"), recorded("README.md", "fpl")
    assert len(fedavg) == len(fpl) == 3
    found = paired_difference(fpl, fedavg)
    interval = f"[{found.low:+.1f}, {found.high:+.1f}]"
    ahead = f"{found.mean:.1f} points ahead of FedAvg, 95 %"
    assert f"Over three seeds FPL is {ahead} confidence interval {interval}" in README
    assert f"three seeds: FPL {ahead} interval {interval}" in README
    assert f"FedAvg {cell(fedavg)}, FPL {cell(fpl)}" in README


def moved(pairs: list[tuple[dict[str, str], dict[str, str]]]) -> list[str]:
    """How far two runs are apart: the median and the largest over averages, then over domains."""
    averages = [abs(float(one["average"]) - float(other["average"])) for one, other in pairs]
    domains = []
    for one, other in pairs:
        theirs = scores(other)
        domains += [abs(value - theirs[domain]) for domain, value in scores(one).items()]
    return [f"{found:.1f}" for each in (averages, domains) for found in (statistics.median(each), max(each))]


def test_the_questions_state_how_far_processor_partition_and_seed_move_scores() -> None:
    usual: dict[tuple[str, str], list[dict[str, str]]] = {}
    changed: dict[str, list[dict[str, str]]] = {"processor": [], "partition": []}
    for row in ROWS:
        if row["page"] != "docs/faq.md":
            continue
        if "SSE41" in row["processor"]:
            changed["processor"].append(row)
        elif "protocol.partition_seed=1" in row["command"]:
            changed["partition"].append(row)
        else:
            usual.setdefault((row["data"], row["method"]), []).append(row)
    assert [len(rows) for rows in usual.values()] == [5] * 6
    pairs: dict[str, list[tuple[dict[str, str], dict[str, str]]]] = {"seed": []}
    for name, rows in changed.items():
        same = [next(one for one in usual[row["data"], row["method"]] if one["seed"] == row["seed"]) for row in rows]
        pairs[name] = list(zip(same, rows, strict=True))
    for rows in usual.values():
        pairs["seed"] += itertools.combinations(rows, 2)
    assert [len(found) for found in pairs.values()] == [60, 30, 30]
    page = (ROOT / "docs" / "faq.md").read_text()
    for name in ("processor", "partition", "seed"):
        without = ": without AVX" if name == "processor" else ""
        assert f"| the {name}{without} | {' | '.join(moved(pairs[name]))} |" in page


def test_the_readme_names_the_processor_of_its_runs() -> None:
    (found,) = {row["processor"] for row in ROWS if row["page"] == "README.md"}
    assert found.replace(", ", " with ") in README


# ---- the records -----------------------------------------------------------------------------------------------------


def test_no_recorded_run_is_older_than_the_last_change_of_states() -> None:
    assert [row["page"] for row in ROWS if row["when"] < LAST_STATE_CHANGE[1]] == []


def chosen() -> list[dict[str, str]]:
    """The README's runs of seed 0, and the cheapest run of each other page."""
    found = [row for row in ROWS if row["page"] == "README.md" and row["seed"] == "0"]
    for page in sorted({row["page"] for row in ROWS} - {"README.md"}):
        mine = [row for row in ROWS if row["page"] == page]
        found.append(min(mine, key=lambda row: float(row["seconds"])))
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("row", chosen(), ids=lambda row: f"{Path(row['page']).stem}-{row['method']}-{row['seed']}")
def test_a_recorded_run_gives_the_same_state_and_scores_again(row: dict[str, str], tmp_path: Path) -> None:
    here = processor_name(processor()), package_versions()["torch"]
    if here != (row["processor"], row["torch"]):
        pytest.skip(f"recorded on {row['processor']}, torch {row['torch']}; this is {here[0]}, torch {here[1]}")
    assert main([*shlex.split(row["command"])[1:], f"output={tmp_path / 'run'}", "--quiet"]) == 0
    run = RunRecord.open(tmp_path / "run")
    found = run.summary["scores"][row["rule"]]["accuracy"]
    assert {domain: round(value, 4) for domain, value in found.items()} == scores(row)
    assert run.state_sha256 == row["state"]


def test_the_page_on_label_skew_is_the_recorded_runs() -> None:
    runs = [row for row in ROWS if row["page"] == "docs/results/skew.md"]
    cells: list[str] = []
    for even in (True, False):  # uneven labels are the protocol's default, which commands leave out
        for count in (8, 2):
            found: dict[str, list[float]] = {}
            for row in sorted(runs, key=lambda row: int(row["seed"])):
                settings = row["command"].split()
                if f"protocol.client_count={count}" in settings and ("protocol.skew=none" in settings) == even:
                    found.setdefault(row["method"], []).append(float(row["average"]))
            for method in ("fedproto", "fpl"):
                difference = paired_difference(found[method], found["fedavg"])
                cells.append(f"{difference.mean:+.1f} [{difference.low:+.1f}, {difference.high:+.1f}]")
            cells += [cell(values, 1) for values in found.values()]
    page = (ROOT / "docs" / "results" / "skew.md").read_text()
    assert len(cells) == 20
    assert all(f"| {each} |" in page for each in cells)
