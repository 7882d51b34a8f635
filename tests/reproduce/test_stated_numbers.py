"""Numbers in the text of docs/results against the tables and records that they are about."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.boards import BOARD, read_runs
from support.recorded_pages import PAGES, RESULTS, rows_of, section

from bench.rows import read_all
from server.reproduction.comparison import Comparison, Line
from server.reproduction.pages import _order
from server.reproduction.published import published_table
from server.results.statistics import paired_difference
from server.study.ranking import StudyRun, study_scores

NET = [path for path in PAGES if path.parent.name == "paper_net"]


def words(path: Path) -> str:
    return " ".join(path.read_text().split())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_printed_average_stands_as_printed(path: Path) -> None:
    """FPL's averages are truncated: FedOPT's cells give 56.32, and 56.31 was printed."""
    place = len(published_table(path.stem).domains) + 1
    printed = {cells[0]: cells[place] for cells in rows_of(section(path.read_text(), "Published"))}
    for row in published_table(path.stem).rows:
        if row.label in printed and row.average is not None and not row.misprint:
            assert printed[row.label].partition(" ")[0] == f"{row.average:.2f}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_runs_of_a_page_are_recorded_with_their_states(path: Path) -> None:
    page = path.relative_to(RESULTS.parents[1]).as_posix()
    found: dict[str, list[str]] = {}
    for row in read_all(RESULTS / "reproduced.csv"):
        if row["page"] == page:
            assert len(row["state"]) == 16
            found.setdefault(row["row"], []).append(row["seed"])
    stated = {cells[0].removesuffix(" (own models)"): cells[-1] for cells in rows_of(section(path.read_text(), "Ours"))}
    assert {label: ",".join(seeds) for label, seeds in found.items()} == stated


def test_the_page_on_weighting_has_the_printed_averages() -> None:
    rows = {row.label: row for row in published_table("fpl_office").rows}
    found = [cells for cells in rows_of((RESULTS / "weighting.md").read_text()) if cells[0] in rows and len(cells) == 6]
    assert [cells[0] for cells in found] == ["FedAvg", "FedOPT", "FedProto", "FPL"]
    assert all(cells[5] == f"{rows[cells[0]].average:.2f}" for cells in found)


@pytest.mark.parametrize("path", NET, ids=lambda path: path.stem)
def test_the_order_on_the_paper_s_net_is_that_of_the_kept_records_with_ties_on_counts(path: Path) -> None:
    table, text = published_table(path.stem), path.read_text()
    runs: dict[str, dict[int, Path]] = {}
    for row in read_all(RESULTS / "reproduced.csv"):
        kept = path.with_suffix("") / row["folder"] / f"seed-{row['seed']}"
        if row["page"].endswith(f"/paper_net/{path.name}") and (kept / "summary.json").exists():
            runs.setdefault(row["row"], {})[int(row["seed"])] = kept
    rows = {row.label: row for row in table.rows}
    lines = []
    for label, folders in runs.items():
        summaries = {seed: json.loads((kept / "summary.json").read_text()) for seed, kept in folders.items()}
        lines.append(Line(rows[label], folders, summaries))
    found = Comparison(table, "paper_net", tuple(lines), (0,))
    assert found.tolerance(found.columns) > 1e-3  # there is a history to count in
    assert [tuple(cells) for cells in rows_of(section(text, "Order"))] == _order(found).rows


def averages(rows: list[dict[str, str]]) -> dict[int, float]:
    """The mean of the domains in each round, of the rows of one run in curves.csv."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(int(row["round"]), []).append(100 * int(row["correct"]) / int(row["images"]))
    return {round_: statistics.mean(values) for round_, values in found.items()}


def averages_from(curve: dict[int, float]) -> dict[int, float]:
    """The means of five rounds of a whole curve, by the first of them."""
    return {first: statistics.mean(curve[first + offset] for offset in range(5)) for first in (26, 76, 85, 96)}


def test_the_page_of_runs_at_the_papers_length_agrees_with_their_curves() -> None:
    runs: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in read_all(RESULTS / "paper" / "curves.csv"):
        runs.setdefault((row["table"], row["row"], row["seed"]), []).append(row)
    curves = {key: averages(rows) for key, rows in runs.items()}
    table, stated = "", {}
    for cells in rows_of((RESULTS / "paper" / "README.md").read_text()):
        table = cells[0].strip("[").partition("]")[0] or table
        stated[table, cells[1], cells[2]] = cells[3:7]
    assert stated.keys() == curves.keys()
    for key, cells in stated.items():
        for cell, first in zip(cells, (26, 76, 85, 96), strict=True):
            if cell == "-":
                assert max(curves[key]) < first + 4
            else:
                assert cell == f"{statistics.mean(curves[key][first + offset] for offset in range(5)):.1f}"
    early = {key: statistics.mean(curve[round_] for round_ in range(26, 31)) for key, curve in curves.items()}
    lead = difference(
        [early["fpl_office", "FPL", seed] for seed in "01"], [early["fpl_office", "FedAvg", seed] for seed in "01"]
    )
    for page in ("README.md", "paper/README.md", "net_size.md", "weighting.md", "small/README.md"):
        assert lead in words(RESULTS / page), page
    late = statistics.mean(
        curves["fpl_office", "FPL", "0"][number] - curves["fpl_office", "FedAvg", "0"][number]
        for number in range(85, 90)
    )
    four = {key: averages_from(curves["fedplcc_office", key, "0"]) for key in ("FedAvg", "FedPLCC")}
    page = words(RESULTS / "paper" / "README.md")
    assert f"{late:.1f} in rounds 85 to 89 (one seed)" in page
    assert f"{four['FedPLCC'][96] - four['FedAvg'][96]:.1f} over FedAvg at the end" in page
    assert f"{four['FedPLCC'][26] - four['FedAvg'][26]:.1f} in rounds 26 to 30" in page


def test_the_text_on_fedbn_on_glyphs_agrees_with_its_numbers() -> None:
    rows = [row for row in read_all(RESULTS / "real.csv") if row["data"] == "glyphs"]
    mean = {(row["method"], row["column"]): float(row["mean"]) for row in rows}
    handwritten, sketch = (mean["fedbn", name] - mean["fedavg", name] for name in ("handwritten", "sketch"))
    text = words(RESULTS / "real.md")
    assert f"on sketch (240 images) it is {sketch:.0f} points over FedAvg" in text
    assert f"on handwritten, a large domain, {-handwritten:.0f} below it" in text


def test_the_table_of_all_methods_agrees_with_its_numbers() -> None:
    text = (RESULTS / "real.md").read_text()
    found: dict[str, list[str]] = {}
    for row in read_all(RESULTS / "real.csv"):
        if row["column"] in ("average", "worst"):
            found.setdefault(row["method"], []).append(f"{row['mean']} ± {row['deviation']}")
            starred = f"\n| {row['method']} * |" in text
            assert starred == (row["scored"] == "own model")
    assert {cells[0].strip(): cells[1:] for cells in rows_of(text)} == found


def test_fedapc_s_three_readings_were_made_without_the_guard() -> None:
    assert "rounds.outliers" not in (RESULTS / "small" / "fedapc_office_readings.md").read_text()


def test_the_sensitivity_s_title_has_the_shape_of_its_grids() -> None:
    table = published_table("fedplcc_office_sensitivity")
    shapes = [[len(values) for values in sweep.axes.values()] for sweep in table.sweeps]
    assert shapes == [[5], [4, 3], [3, 3]]
    assert len(table.rows) == sum(math.prod(shape) for shape in shapes) == 26
    for text in (table.title, words(RESULTS.parent / "protocols.md")):
        assert "4 and 5 are of Digit-5" in text
        assert "alpha x phi, 4 x 3; lambda_1 x lambda_2, 3 x 3" in text


# ---- tables over records ---------------------------------------------------------------------------------------------


def difference(scores: Sequence[float], base: Sequence[float]) -> str:
    return paired_difference(scores, base).text(1)


def cell(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


def final_runs(weighting: str) -> dict[str, list[StudyRun]]:
    """The final runs of the board by weighting, by method."""
    found: dict[str, list[StudyRun]] = {}
    for run in read_runs(BOARD):
        if run.board == f"office_caltech-small-views_none-{weighting}-fpl_office" and run.kind == "final":
            found.setdefault(run.method, []).append(run)
    return found


def worst_of_studies(runs: Sequence[StudyRun]) -> list[float]:
    """The mean over a study's runs of the lowest accuracy of a domain, by study."""
    values: dict[int, list[float]] = {}
    for run in runs:
        values.setdefault(run.study, []).append(min(run.accuracy.values()))
    return [statistics.fmean(values[study]) for study in sorted(values)]


def test_the_table_of_both_weightings_agrees_with_the_records() -> None:
    uniform, samples = final_runs("uniform"), final_runs("samples")
    text = section((RESULTS / "weighting.md").read_text(), "Under the strict rules")
    stated = {cells[0].lower(): cells[1:] for cells in rows_of(text.partition("\n\nPoints,")[0])}
    assert sorted(stated) == sorted(uniform) == sorted(samples)
    for method, cells in stated.items():
        ours, base = uniform[method], samples[method]
        assert [run.number for run in ours] == [run.number for run in base] == [0, 1, 2, 3, 4]
        assert cells == [
            difference(list(study_scores(ours).values()), list(study_scores(base).values())),
            difference(worst_of_studies(ours), worst_of_studies(base)),
        ]


def test_the_table_of_feddg_ga_agrees_with_its_runs() -> None:
    accuracy: dict[tuple[str, str, int], float] = {}
    with (RESULTS / "feddg_ga.csv").open() as file:
        for row in csv.DictReader(file):
            accuracy[row["row"], row["left_out"], int(row["seed"])] = float(row["accuracy"])
    domains, seeds = ("photo", "art_painting", "cartoon", "sketch"), (0, 1, 2)
    assert len(accuracy) == 3 * len(domains) * len(seeds)
    stated = rows_of((RESULTS / "feddg_ga.md").read_text())
    means: dict[str, list[float]] = {}
    for name, *cells in stated:
        means[name] = [statistics.mean(accuracy[name, domain, seed] for domain in domains) for seed in seeds]
        ours = [[accuracy[name, domain, seed] for seed in seeds] for domain in domains]
        assert cells[:5] == [cell(values) for values in [*ours, means[name]]]
    base = means["FedAvg, by samples"]
    assert stated[1][6] == difference(means["FedAvg, clients alike"], base)
    assert stated[2][6] == difference(means["FedDG-GA"], base)
    last = difference(means["FedDG-GA"], means["FedAvg, clients alike"])
    assert f"FedDG-GA minus that row is {last} points" in words(RESULTS / "feddg_ga.md")
