"""Numbers in the text of docs/results against the tables and records that they are about."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from support.boards import BOARD, read_runs
from support.recorded_pages import PAGES, RESULTS, rows_of, section

from bench.rows import read_all
from goldfinch.reproduction.comparison import agreement
from goldfinch.reproduction.effects import Effect, percent
from goldfinch.reproduction.published import published_table
from goldfinch.results.statistics import Difference, holm, paired_difference
from goldfinch.study.ranking import StudyRun, rank_methods, ranked_table


def words(path: Path) -> str:
    return " ".join(path.read_text().split())


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_printed_average_stands_as_printed(path: Path) -> None:
    """FPL's averages are truncated: FedOPT's cells give 56.32, and 56.31 was printed."""
    text = section(path.read_text(), "Published")
    printed: dict[str, str] = {}
    if text:
        heads = [head.strip() for head in text[text.index("| row ") :].partition("\n")[0].strip("| ").split(" | ")]
        printed = {cells[0]: cells[heads.index("average")] for cells in rows_of(text)}
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
            assert not row["average"] or 1 < float(row["average"]) < 100
            found.setdefault(row["row"], []).append(row["seed"])
    rows = [cells for cells in rows_of(section(path.read_text(), "Ours")) if cells[1] != "not run"]
    stated = {cells[0].removesuffix(" (own models)"): cells[-1] for cells in rows}
    assert {label: ",".join(seeds) for label, seeds in found.items()} == stated


def test_the_page_on_weighting_has_the_printed_averages() -> None:
    rows = {row.label: row for row in published_table("fpl_office").rows}
    found = [cells for cells in rows_of((RESULTS / "weighting.md").read_text()) if cells[0] in rows and len(cells) == 4]
    assert [cells[0] for cells in found] == ["FedAvg", "FedOPT", "FedProto", "FPL"]
    assert all(cells[3] == f"{rows[cells[0]].average:.2f}" for cells in found)


def recorded_averages() -> dict[tuple[str, str], list[float]]:
    """The averages of single seeds that reproduced.csv has, by page and row."""
    averages: dict[tuple[str, str], list[float]] = {}
    for row in read_all(RESULTS / "reproduced.csv"):
        if row["average"]:
            averages.setdefault((row["page"], row["row"]), []).append(float(row["average"]))
    return averages


def test_the_page_on_weighting_has_the_recorded_runs() -> None:
    averages = recorded_averages()
    text = (RESULTS / "weighting.md").read_text()
    for label in ("FedAvg", "FedOPT", "FedProto", "FPL"):
        default = averages["docs/results/small/fpl_office.md", label]
        samples, uniform = default, averages["docs/results/weighting.md", label]
        if label == "FedOPT":  # its own default weighs clients alike
            samples, uniform = uniform, default
        line = next(line for line in text.splitlines() if line.startswith(f"| {label} | {spread(samples)} | "))
        assert f" | {spread(uniform)} | " in line
        assert f"| {label} | {paired_difference(uniform, samples).text(1)} |" in text.splitlines()


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


Curves = dict[tuple[str, str, str, str], dict[int, dict[str, float]]]
COLUMNS = ("Caltech", "Amazon", "Webcam", "DSLR", "average")
LAST = (96, 100)


ON_A_CPU = "bfloat16 on a CPU"
"""The precision of runs in curves.csv that no card computed."""


@cache
def papers_curves() -> Curves:
    """Accuracy in % of each round and column, of the runs in curves.csv: table, row, precision and seed."""
    found: Curves = {}
    for row in read_all(RESULTS / "paper" / "curves.csv"):
        scores = {}
        for name, text in row.items():
            domain, of, images = name.partition(" of ")
            if of:
                scores[domain] = 100 * int(text) / int(images)
        scores["average"] = statistics.mean(scores.values())
        key = (row["table"], row["row"], row["precision"], row["seed"])
        found.setdefault(key, {})[int(row["round"])] = scores
    return found


def mean_of(curve: dict[int, dict[str, float]], rounds: tuple[int, int], column: str = "average") -> float:
    first, last = rounds
    return statistics.mean(curve[number][column.lower()] for number in range(first, last + 1))


def printed_cells(table: str) -> dict[str, dict[str, float]]:
    """What a paper prints, by row and column."""
    published = published_table(table)
    found = {}
    for row in published.rows:
        if row.cells and row.average is not None:
            values = [cell for cell in row.cells if cell is not None]
            found[row.label] = dict(zip([*published.domains.values(), "average"], [*values, row.average], strict=True))
    return found


IMAGES = {"Caltech": 178, "Amazon": 144, "Webcam": 46, "DSLR": 24}
"""Test images of each domain, as the columns of curves.csv say."""

TABLES = ("fpl_office", "fedplcc_office", "fedapc_office")
CLIENTS = {"fpl_office": "ten clients", "fedplcc_office": "four clients", "fedapc_office": "eight clients"}


def scored_rounds(table: str) -> tuple[int, int]:
    """The rounds that the table's command scores."""
    return (100, 100) if published_table(table).rule == "final" else LAST


def noise_of(scores: dict[str, float], printed: dict[str, float], column: str) -> float:
    """Half of the 95 % interval that the choice of test images alone gives a gap to print, in points."""
    domains = [column] if column in IMAGES else list(IMAGES)
    variance = 0.0
    for domain in domains:
        for score in (scores[domain], printed[domain]):
            variance += score * (100 - score) / IMAGES[domain]
    return 1.96 * math.sqrt(variance) / len(domains)


SEEDS = "012"
Curve = dict[int, dict[str, float]]


def rows_run(table: str) -> dict[str, dict[str, Curve]]:
    """The rows of a table that were run with three seeds, in bfloat16 on a card or else a CPU: their curves by seed."""
    curves = papers_curves()
    found: dict[str, dict[str, Curve]] = {}
    for precision in ("bfloat16", ON_A_CPU):
        for of, name, _, _ in curves:
            keys = [(table, name, precision, seed) for seed in SEEDS]
            if of == table and name not in found and all(key in curves for key in keys):
                found[name] = {key[3]: curves[key] for key in keys}
    return found


def rows_at_the_papers_length() -> list[str]:
    """The page's table of scores: of each row that was printed or run, ours ± its deviation, then gap and noise."""
    curves, rows = papers_curves(), []
    for table in TABLES:
        run = rows_run(table)
        labels = [row.label for row in published_table(table).rows]
        first = f"{table}, {CLIENTS[table]}"
        for label in [*labels, *sorted(run.keys() - set(labels))]:
            if label not in run:
                rows.append(f"| {first} | {label} | {part_of(table, label)} |".replace("|  |", "| |"))
                first = ""
                continue
            of_seeds = list(run[label].values())
            values = {name: [mean_of(curve, scored_rounds(table), name) for curve in of_seeds] for name in COLUMNS}
            means = {name: statistics.mean(found) for name, found in values.items()}
            printed = printed_cells(table).get(label, {})
            cells = []
            for name in COLUMNS:
                text = f"{means[name]:.1f} ± {statistics.stdev(values[name]):.1f}"
                if printed:
                    text += f" ({means[name] - printed[name]:+.1f}; {noise_of(means, printed, name):.1f})"
                cells.append(text)
            on_a_cpu = (table, label, "bfloat16", "0") not in curves
            said = f"{label}, on a CPU" if on_a_cpu else label
            rows.append(f"| {first} | {said} | {' | '.join(cells)} |".replace("|  |", "| |"))
            first = ""
    return rows


def part_of(table: str, label: str) -> str:
    """What the page's table says of a row without three seeds."""
    averages = []
    for seed in SEEDS:
        curve = papers_curves().get((table, label, ON_A_CPU, seed))
        if curve is not None:
            averages.append(f"{mean_of(curve, scored_rounds(table)):.1f} (seed {seed})")
    if not averages:
        return "not run"
    return f"in part, on a CPU; average {', '.join(averages)}"


def effects_at_the_papers_length() -> list[str]:
    """The page's table of differences: from FedAvg of each row that was run, and the paper's own from the others."""
    rows = []
    for table in TABLES:
        own = published_table(table).own
        run = [name for name in rows_run(table) if name != "FedAvg"]
        pairs = [(name, "FedAvg") for name in run]
        pairs += [(own, name) for name in run if name != own and name in printed_cells(table)]
        for name, base in pairs:
            ours = lead_of(table, name, base, scored_rounds(table))
            cells = printed_cells(table)
            text, lies = "-", "-"
            if name in cells and base in cells:
                printed = cells[name]["average"] - cells[base]["average"]
                text, lies = f"{printed:+.1f}", Effect(base, ours.mean, ours.low, ours.high, printed).lies
            rows.append(f"| {table} | {name} minus {base} | {ours.text(1)} | {text} | {lies} |")
    return rows


def lead_of(table: str, row: str, base: str, rounds: tuple[int, int]) -> Difference:
    run = rows_run(table)
    both = ([mean_of(run[name][seed], rounds) for seed in SEEDS] for name in (row, base))
    return paired_difference(*both)


def growth(table: str, row: str) -> Difference:
    """By how much a row's lead over FedAvg grows from rounds 26 to 30 to the last five."""
    leads: list[list[float]] = []
    for rounds in (LAST, (26, 30)):
        curves = rows_run(table)
        leads.append([mean_of(curves[row][seed], rounds) - mean_of(curves["FedAvg"][seed], rounds) for seed in SEEDS])
    return paired_difference(*leads)


def test_the_tables_of_runs_at_the_papers_length_agree_with_their_curves() -> None:
    lines = (RESULTS / "paper" / "README.md").read_text().splitlines()
    for rows in (rows_at_the_papers_length(), effects_at_the_papers_length()):
        place = lines.index(rows[0])
        assert lines[place : place + len(rows)] == rows
        assert not lines[place + len(rows)].startswith("|")
    p_values: dict[tuple[str, str], float] = {}
    for table in TABLES:
        for name in rows_run(table):
            if name != "FedAvg":
                found = lead_of(table, name, "FedAvg", scored_rounds(table)).p
                assert found is not None
                p_values[table, name] = found
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    below = [f"{name} on {table}" for (table, name), value in corrected.items() if value < 0.05]
    assert f"Holm's correction over the {len(p_values)} leaves {' and '.join(below) or 'none'}" in words(
        RESULTS / "paper" / "README.md"
    )


def squared_gaps(curve: dict[int, dict[str, float]], rounds: tuple[int, int] = (11, 15)) -> str:
    """The sum of the squared gaps of FedAvg's domains to its printed row in FedPLCC's Office table."""
    return squared_gaps_of({domain: mean_of(curve, rounds, domain) for domain in IMAGES})


def average_of(curve: dict[int, dict[str, float]], rounds: tuple[int, int]) -> float:
    """The mean over domains of some rounds."""
    return statistics.mean(mean_of(curve, rounds, domain) for domain in IMAGES)


def squared_gaps_of(means: dict[str, float]) -> str:
    printed = printed_cells("fedplcc_office")["FedAvg"]
    return f"{sum((mean - printed[domain]) ** 2 for domain, mean in means.items()):.0f}"


def table_ends(rounds: tuple[int, int], seeds: str) -> dict[str, float]:
    """FedAvg's domains in the table at the papers' length, mean of some rounds and seeds."""
    curves = papers_curves()
    found = {}
    for domain in IMAGES:
        each = (mean_of(curves["fedplcc_office", "FedAvg", "bfloat16", seed], rounds, domain) for seed in seeds)
        found[domain] = statistics.mean(each)
    return found


def test_the_search_for_a_setting_agrees_with_its_counts() -> None:
    curves: dict[tuple[str, ...], dict[int, dict[str, float]]] = {}
    others: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for row in read_all(RESULTS / "paper" / "fedplcc_settings.csv"):
        key = (row["model"], row["image_size"], row["samples"], row["augmentation"], row["seed"])
        scores = {}
        for name, text in row.items():
            domain, of, images = name.partition(" of ")
            if of:
                scores[domain] = 100 * int(text) / int(images)
        if row["method"] == "fedavg":
            curves.setdefault(key, {})[int(row["round"])] = scores
        else:
            others.setdefault((row["method"], row["seed"]), {})[int(row["round"])] = scores
    plain, crop = "none", "crop and flip"
    first = squared_gaps(papers_curves()["fedplcc_office", "FedAvg", "bfloat16", "0"])
    cropped = squared_gaps(curves["resnet10", "32", "300", crop, "0"])
    small = {samples: squared_gaps(curves["resnet10_plvm", "32", samples, crop, "0"]) for samples in ("300", "all")}
    found = {}
    for samples in ("300", "all"):
        for augmentation in (plain, crop):
            found[samples, augmentation] = squared_gaps(curves["resnet10_plvm", "64", samples, augmentation, "0"])
    fitting = curves["resnet10_plvm", "64", "all", crop, "0"]
    best = ", ".join(f"{mean_of(fitting, (11, 15), domain):.1f}" for domain in IMAGES)
    assert (
        f"sum to {first} as above, {cropped} with crop and flip; with FedPLVM's network at 64x64 to "
        f"{found['300', plain]}, with all images to {found['all', plain]}, with crop and flip too to "
        f"{found['all', crop]}: {best}."
    ) in words(RESULTS / "paper" / "README.md")
    end = (96, 100)
    ends, seeds = {}, "012"
    for domain in IMAGES:
        all_seeds = (curves["resnet10_plvm", "64", "all", crop, seed] for seed in seeds)
        ends[domain] = statistics.mean(mean_of(curve, end, domain) for curve in all_seeds)
    last = ", ".join(f"{mean:.1f}" for mean in ends.values())
    first_last = squared_gaps_of(table_ends(end, seeds))
    assert (
        f"At full length (rounds 96 to 100, mean of three seeds) the last is {last}, average "
        f"{statistics.mean(ends.values()):.1f}: {squared_gaps_of(ends)}, where the table's is {first_last}."
    ) in words(RESULTS / "paper" / "README.md")
    ours = {"FedAvg": {seed: curves["resnet10_plvm", "64", "all", crop, seed] for seed in seeds}}
    for label, method in (("FPL", "fpl"), ("FedPLCC", "fedplcc")):
        ours[label] = {seed: others[method, seed] for seed in seeds}
    printed = printed_cells("fedplcc_office")
    stated, gains = [], {}
    for row, base in (("FPL", "FedAvg"), ("FedPLCC", "FedAvg"), ("FedPLCC", "FPL")):
        shown = printed[row]["average"] - printed[base]["average"]
        texts = []
        for rounds in ((100, 100), end):  # the first is the table's rule
            of_row, of_base = ([average_of(ours[name][seed], rounds) for seed in seeds] for name in (row, base))
            found_lead = paired_difference(of_row, of_base)
            texts.append(
                f"{found_lead.text(1)} {Effect(base, found_lead.mean, found_lead.low, found_lead.high, shown).lies}"
            )
        gains[row, base] = texts[0].rpartition(" ")[0]
        stated.append(f"{row} minus {base} {shown:+.1f}, {texts[0]}, {texts[1]}")
    gain = gains["FedPLCC", "FedAvg"]
    assert f"(print, then ours): {'; '.join(stated)}." in words(RESULTS / "paper" / "README.md")
    assert f"but {gain} where FedAvg is not below print" in words(RESULTS / "recommendation.md")
    of_base = statistics.mean(average_of(ours["FedAvg"][seed], (100, 100)) for seed in seeds)
    above = of_base - printed["FedAvg"]["average"]
    stated_above = f"With FedPLVM's network at 64x64, where FedAvg is {above:.0f} above, it is {gain} ("
    assert stated_above in words(RESULTS.parents[1] / "README.md")
    comment = words(RESULTS.parent.parent / "conf" / "experiment" / "fedplcc_office.yaml").replace("# ", "")
    assert f"300 images: {first}; with crop and flip {cropped}" in comment
    assert f"32x32, crop and flip: 300 images {small['300']}, all {small['all']}" in comment
    assert not [key for key in curves if key[:2] == ("resnet10_plvm", "32") and key[3] == plain]
    assert (
        f"300 images: {found['300', plain]}, all {found['all', plain]}; with crop and flip {found['300', crop]}, all "
        f"{found['all', crop]} (rounds 21 to 25: {squared_gaps(fitting, (21, 25))}, 96 to 100 of three seeds: "
        f"{squared_gaps_of(ends)}, where the first has {first_last})"
    ) in comment
    assert f"FPL gains {gains['FPL', 'FedAvg'].removeprefix('+')} and FedPLCC" in comment
    assert f"{gain.removeprefix('+')} in round 100" in comment


def test_the_page_says_how_likely_its_orders_are() -> None:
    page = words(RESULTS / "paper" / "README.md")
    for table in TABLES:
        printed = printed_cells(table)
        pairs = []
        for name, of_seeds in rows_run(table).items():
            if name in printed:
                means = [mean_of(curve, scored_rounds(table)) for curve in of_seeds.values()]
                pairs.append((statistics.mean(means), printed[name]["average"]))
        order = agreement(pairs)
        assert f"{table}: {order.kept} of {order.pairs} pairs ({percent(order.chance)} of orders)" in page


def test_what_pages_say_of_runs_at_the_papers_length_agrees_with_their_curves() -> None:
    curves = papers_curves()
    page = words(RESULTS / "paper" / "README.md")

    def lead(table: str, row: str, base: str, rounds: tuple[int, int] = (0, 0)) -> str:
        return lead_of(table, row, base, rounds if rounds[1] else scored_rounds(table)).text(1)

    grown = {}
    for table in TABLES:
        for row in rows_run(table):
            found = growth(table, row)
            if row != "FedAvg" and (found.low > 0 or found.high < 0):
                grown[table, row] = found.text(1)
    early = lead("fpl_office", "FedPLCC", "FedAvg", (26, 30))
    (more,) = grown.values()
    assert grown.keys() == {("fpl_office", "FedPLCC")}
    assert f"FedPLCC minus FedAvg is {early} in rounds 26 to 30 and gains {more} until" in page
    assert f"FPL's is {lead('fpl_office', 'FPL', 'FedAvg', (26, 30))}" in page
    assert f"FPL minus FedOPT {lead('fpl_office', 'FPL', 'FedOPT')} |" in words(RESULTS / "small" / "README.md")
    below = lead("fedapc_office", "FedAPC", "FedProto")
    assert f"FedAPC minus FedProto {below}, printed" in words(RESULTS / "README.md")
    assert f"and {below} |" in words(RESULTS / "small" / "README.md")
    stated = {
        ("fpl_office", "FedOPT"): ("README.md",),
        ("fpl_office", "FPL"): ("README.md", "small/README.md"),
        ("fpl_office", "FedPLCC"): ("small/README.md", "recommendation.md"),
        ("fpl_office", "FedProto"): ("README.md",),
        ("fpl_office", "FedDyn"): ("recommendation.md",),
        ("fedplcc_office", "FedPLCC"): ("README.md", "recommendation.md"),
        ("fedapc_office", "FedAPC"): ("README.md", "small/README.md"),
    }
    for (table, row), names in stated.items():
        for name in names:
            assert lead(table, row, "FedAvg") in words(RESULTS / name), (table, row, name)
    readme = words(RESULTS.parents[1] / "README.md")
    assert f"FedPLCC leads by {lead('fedplcc_office', 'FedPLCC', 'FedAvg').removeprefix('+')}" in readme
    pairs = []
    for (table, row, precision, seed), curve in curves.items():
        if precision == "float32" and max(curve) >= 80:
            pairs.append((mean_of(curves[table, row, "bfloat16", seed], (76, 80)), mean_of(curve, (76, 80))))
    assert f"is {difference(*zip(*pairs, strict=True))} over eight pairs" in page
    apart = [abs(lower - full) for lower, full in pairs]
    assert f"A pair differs by {statistics.median(apart):.1f} (median; largest {max(apart):.1f})" in page


def test_fedapc_s_three_readings_are_beside_fedavg_on_the_same_images() -> None:
    averages = recorded_averages()
    leads = []
    for reading, base in (
        ("FedAPC, prototypes", "FedAvg, augmented"),
        ("FedAPC, raw training", "FedAvg, images as they are"),
        ("FedAPC, views", "FedAvg, two views"),
    ):
        of_reading, of_base = (averages["docs/results/small/README.md", label] for label in (reading, base))
        leads.append(paired_difference(of_reading, of_base).text(1))
    assert f"each minus FedAvg on the same images | {', '.join(leads)} |" in words(RESULTS / "small" / "README.md")


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


def study_scores(runs: Sequence[StudyRun]) -> list[float]:
    """The mean score of a study's runs, by study."""
    values: dict[int, list[float]] = {}
    for run in runs:
        values.setdefault(run.study, []).append(run.score)
    return [statistics.fmean(values[study]) for study in sorted(values)]


def worst_of_studies(runs: Sequence[StudyRun]) -> list[float]:
    """The mean over a study's runs of the lowest accuracy of a domain, by study."""
    values: dict[int, list[float]] = {}
    for run in runs:
        values.setdefault(run.study, []).append(min(run.accuracy.values()))
    return [statistics.fmean(values[study]) for study in sorted(values)]


def test_the_table_of_both_weightings_agrees_with_the_records() -> None:
    uniform, samples = final_runs("uniform"), final_runs("samples")
    text = section((RESULTS / "weighting.md").read_text(), "Under earlier rules")
    stated = {cells[0].lower(): cells[1:] for cells in rows_of(text.partition("\n\nPoints,")[0])}
    assert sorted(stated) == sorted(uniform) == sorted(samples)
    for method, cells in stated.items():
        ours, base = uniform[method], samples[method]
        assert [run.number for run in ours] == [run.number for run in base] == [0, 1, 2, 3, 4]
        assert cells == [
            difference(study_scores(ours), study_scores(base)),
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


def test_the_one_row_of_fedgca_s_digits_at_the_paper_s_length_is_that_of_its_rounds() -> None:
    rounds = read_all(RESULTS / "paper" / "fedgca_digits.csv")
    assert [int(row["round"]) for row in rounds] == list(range(101))
    printed = printed_cells("fedgca_digits")["FedAVG"]
    stated = []
    for name, domain in (("SVHN", "svhn"), ("USPS", "usps"), ("MNIST-M", "mnist_m")):
        (column,) = [key for key in rounds[-1] if key.startswith(f"{domain} of ")]
        images = int(column.rpartition(" ")[2])
        ours, theirs = 100 * int(rounds[-1][column]) / images, printed[name]
        noise = 1.96 * math.sqrt((ours * (100 - ours) + theirs * (100 - theirs)) / images)
        stated.append(f"{name} {ours:.1f} ({ours - theirs:+.1f}; {noise:.1f})")
    assert f"{', '.join(stated)};" in words(RESULTS / "paper" / "README.md")


def averages_by(table: str, group: Sequence[str], compared: str) -> dict[tuple[str, ...], dict[str, dict[str, float]]]:
    """The averages of a table of bench/: by the columns of ``group``, then by that which is compared, then by seed."""
    found: dict[tuple[str, ...], dict[str, dict[str, float]]] = {}
    for row in read_all(RESULTS.parents[1] / "bench" / "results" / table):
        key = tuple(row[name] for name in group)
        found.setdefault(key, {}).setdefault(row[compared], {})[row["seed"]] = float(row["average"])
    return found


def minus(of: Mapping[str, float], base: Mapping[str, float]) -> Difference:
    assert of.keys() == base.keys()
    return paired_difference([of[seed] for seed in base], list(base.values()))


def test_what_rules_of_aggregation_cost_without_an_attack_is_that_of_all_runs() -> None:
    leaving_out_zero = []
    differences = 0
    for key, by_rule in averages_by("poisoning.csv", ("federation", "method", "case"), "defence").items():
        if " of " not in key[0] or key[2] != "none":
            continue
        for rule in by_rule.keys() - {"mean"}:
            found = minus(by_rule[rule], by_rule["mean"])
            differences += 1
            if found.low > 0 or found.high < 0:
                leaving_out_zero.append((*key[:2], rule, found.text(1)))
    assert differences == 12
    ((federation, method, rule, text),) = leaving_out_zero
    assert (federation, method, rule) == ("1 of 5", "fpl", "geometric median")
    said = "one of twelve differences from the mean leaves out zero: FPL under the geometric median, 1 of 5,"
    assert f"{said} {text}." in words(RESULTS / "poisoning.md")


def test_what_normalisation_changes_is_told_of_every_setting() -> None:
    page = words(RESULTS / "normalisation.md")
    leaving_out_zero, holding_zero = [], []
    for key, by_layer in averages_by("normalisation.csv", ("data", "learning_rate"), "normalisation").items():
        of_groups = minus(by_layer["group"], by_layer["batch"])
        if of_groups.low <= 0 <= of_groups.high:
            holding_zero.append(key)
        else:
            leaving_out_zero.append(of_groups.text(1))
        of_refreshed = minus(by_layer["FedBN, refreshed"], by_layer["FedBN"])
        if key[1] == "0.05":
            assert of_refreshed.text(1) in page
        else:
            assert of_refreshed.low <= 0, "at 0.01 all three hold zero"
    assert len(holding_zero) == len(leaving_out_zero) == 3
    for text in leaving_out_zero:
        assert text in page


def test_the_comparison_that_is_trained_to_the_end_has_the_table_of_its_runs() -> None:
    runs = read_runs(RESULTS / "trained.csv")
    (ranking,) = rank_methods(runs)
    page = (RESULTS / "trained.md").read_text()
    assert ranked_table(ranking).partition("\n\n")[0] in page
    rows = {row.label: row for row in ranking.rows}
    assert f"FPL minus FedAvg is {rows['fpl'].difference}" in words(RESULTS.parents[1] / "README.md")
    assert f"FedDyn minus FedAvg {rows['feddyn'].difference}" in words(RESULTS / "README.md")
    scores = final_scores(runs)
    gain = difference(scores["fedpall"], scores["fedavg"])
    over_fedbn = difference(scores["fedpall"], scores["fedbn"])
    assert f"FedPall minus FedAvg {gain}, minus FedBN {over_fedbn}." in words(RESULTS / "trained.md")
    assert f"{gain} in 60 tuned rounds" in words(RESULTS / "recommendation.md")
    only_models = [statistics.mean(found) for method, found in scores.items() if method != "fedpall"]
    assert statistics.mean(scores["fedbn"]) == max(only_models), "the recommendation says so"
    means = validation_gains("samples", 60)
    assert means.keys() == rows.keys()
    assert f"validation gains {statistics.mean(means.values()):.1f} points" in words(RESULTS / "trained.md")
    assert f"by method {min(means.values()):.1f} to {max(means.values()):.1f}" in words(RESULTS / "trained.md")


def test_what_pages_say_of_digits_agrees_with_its_runs() -> None:
    runs = read_runs(RESULTS / "trained_digits.csv")
    scores = final_scores(runs)
    lead = difference(scores["feddyn"], scores["fedavg"])
    (ranking,) = rank_methods(runs)
    smallest = min(row.p for row in ranking.rows if row.p is not None)
    text = words(RESULTS / "trained.md")
    assert f"FedDyn minus FedAvg {lead} (p {smallest:.2f} after Holm, the smallest)" in text
    assert f"on Digits {lead}" in words(RESULTS / "README.md")
    assert f"(Digits {lead})" in words(RESULTS / "recommendation.md")
    smallest_later: list[float] = []
    by_weighting = {weighting: long_runs("digits", weighting) for weighting in ("samples", "uniform")}
    for weighting, later in by_weighting.items():
        (ranking,) = rank_methods([run for found in later.values() for run in found])
        smallest_later.append(min(row.p for row in ranking.rows if row.p is not None))
        on_svhn = [domain_mean(later[method], "svhn") for method in ("fedavg", "feddyn", "fedbn")]
        assert f"{', '.join(on_svhn)} % {weighting}" in text
        gain = statistics.mean(validation_gains(weighting, 200, "digits").values())
        assert f"{gain:.1f} points {weighting}" in text
    assert f"(smallest p after Holm {smallest_later[0]:.2f} by samples, {smallest_later[1]:.2f} uniform)" in text
    uniform, samples = by_weighting["uniform"], by_weighting["samples"]
    changes = {
        method: paired_difference(study_scores(uniform[method]), study_scores(samples[method])) for method in uniform
    }
    assert len(changes) == 8
    assert max(holm([change.p or 0.0 for change in changes.values()])) < 0.05
    assert all(change.low is not None and change.low > 0 for change in changes.values())
    for page in ("README.md", "recommendation.md"):
        assert changes["fedavg"].text(1) in words(RESULTS / page)
    found = {
        domain: difference(of_domain(uniform["fedavg"], domain), of_domain(samples["fedavg"], domain))
        for domain in ("usps", "mnist_m", "svhn", "mnist")
    }
    gains = [change.partition(" ")[0] for change in found.values()]
    assert f"FedAvg USPS {gains[0]}, MNIST-M {gains[1]}, SVHN {gains[2]}, MNIST {found['mnist']}; " in text
    images = {"mnist": 8000, "mnist_m": 3000, "svhn": 2999, "usps": 1500}
    assert f"by images {by_images(uniform['fedavg'], samples['fedavg'], images)}." in text


def final_scores(runs: Sequence[StudyRun]) -> dict[str, list[float]]:
    """The mean score of each study's final runs, by method."""
    finals: dict[str, list[StudyRun]] = {}
    for run in runs:
        if run.kind == "final":
            finals.setdefault(run.method, []).append(run)
    assert {len(found) for found in finals.values()} == {6}
    return {method: study_scores(found) for method, found in finals.items()}


def of_domain(runs: Sequence[StudyRun], name: str) -> list[float]:
    """The mean accuracy on a domain of a study's runs, by study."""
    return study_scores([replace(run, score=run.accuracy[name]) for run in runs])


def domain_mean(runs: Sequence[StudyRun], domain: str) -> str:
    return f"{statistics.mean(run.accuracy[domain] for run in runs):.1f}"


def validation_gains(weighting: str, rounds: int, data: str = "office_caltech") -> dict[str, float]:
    """What validation gains in the last rounds of the runs of so many rounds, by method."""
    gains: dict[str, list[float]] = {}
    for row in read_all(RESULTS / "trained_validation.csv"):
        if (row["data"], row["weighting"], row["rounds"]) == (data, weighting, str(rounds)):
            gains.setdefault(row["method"], []).append(float(row["last"]) - float(row["earlier"]))
    assert {len(found) for found in gains.values()} == {6}
    return {method: statistics.mean(found) for method, found in gains.items()}


LONG = {
    "office_caltech": ("trained.csv", "trained_200.csv", "Two hundred rounds, both weightings"),
    "digits": ("trained_digits.csv", "trained_digits_200.csv", "Digits"),
}
"""By data set: the record of sixty rounds, that of two hundred, and the part of the page that has their table."""


def long_runs(data: str, weighting: str) -> dict[str, list[StudyRun]]:
    """The runs of two hundred rounds, by method."""
    found: dict[str, list[StudyRun]] = {}
    for run in read_runs(RESULTS / LONG[data][1]):
        if run.board == f"{data}-small-views_none-{weighting}":
            found.setdefault(run.method, []).append(run)
    return found


@pytest.mark.parametrize("data", LONG)
def test_the_runs_of_two_hundred_rounds_have_the_settings_of_those_of_sixty_and_the_table_has_their_scores(
    data: str,
) -> None:
    searched: dict[tuple[str, int], dict[str, float]] = {}
    for run in read_runs(RESULTS / LONG[data][0]):
        if run.kind == "final":
            searched[run.method, run.number] = run.values
    page = RESULTS / "trained.md"
    section_of_them = section(page.read_text(), LONG[data][2])
    stated = {cells[0].strip(): cells[1:] for cells in rows_of(section_of_them)}
    scores: dict[tuple[str, str], list[float]] = {}
    for weighting in ("samples", "uniform"):
        by_method = long_runs(data, weighting)
        expected = {method for method, _ in searched}
        if weighting == "uniform":
            expected -= {"fedpall"}  # it has no weights of clients
        assert by_method.keys() == expected
        for method, runs in by_method.items():
            assert {(method, run.number): run.values for run in runs} == {
                key: values for key, values in searched.items() if key[0] == method
            }
            assert {run.rounds for run in runs} == {200}
            scores[weighting, method] = study_scores(runs)
    for method, cells in stated.items():
        minus: list[str] = []
        for weighting in ("samples", "uniform"):
            text = ""
            if method not in ("fedavg", "fedbn"):
                text = difference(scores[weighting, method], scores[weighting, "fedavg"])
            minus.append(text)
        ours = [cell(scores["samples", method]), minus[0], cell(scores["uniform", method]), minus[1]]
        assert cells == [*ours, difference(scores["uniform", method], scores["samples", method])]
    assert stated.keys() == by_method.keys()


def test_what_pages_say_of_two_hundred_rounds_agrees_with_the_runs() -> None:
    text = words(RESULTS / "trained.md")
    by_weighting = {weighting: long_runs("office_caltech", weighting) for weighting in ("samples", "uniform")}
    smallest: list[float] = []
    for by_method in by_weighting.values():
        base = study_scores(by_method["fedavg"])
        shared = [runs for method, runs in by_method.items() if method not in ("fedavg", "fedbn", "fedpall")]
        smallest.append(min(holm([paired_difference(study_scores(runs), base).p or 0.0 for runs in shared])))
    assert f"smallest p after Holm {min(smallest):.2f}" in text
    uniform, samples = by_weighting["uniform"], by_weighting["samples"]
    of_fedpall = study_scores(samples["fedpall"])
    assert f"FedPall has no weights of clients; after 200 rounds {cell(of_fedpall)}" in text
    of_fedbn = statistics.mean(study_scores(samples["fedbn"]))
    stated = f"in 200 FedBN has {of_fedbn:.1f}, FedPall {statistics.mean(of_fedpall):.1f}, on Digits"
    assert stated in words(RESULTS / "recommendation.md")
    changes = {
        method: paired_difference(study_scores(uniform[method]), study_scores(samples[method])) for method in uniform
    }
    corrected = dict(zip(changes, holm([change.p or 0.0 for change in changes.values()]), strict=True))
    assert f"FedAvg {changes['fedavg'].text(1)} (p {corrected['fedavg']:.3f} after Holm over the eight; " in text
    assert f"FedProx's {corrected['fedprox']:.3f})" in text
    shared = {(by, name): study_scores(of[name]) for by, of in by_weighting.items() for name in of}
    ranked = sorted(shared, key=lambda key: -statistics.mean(shared[key]))
    first = next(key for key in ranked if key[1] not in ("fedbn", "fedpall"))
    assert first == ("uniform", "fedavg")
    ahead = difference(shared[first], shared["samples", "feddyn"])
    assert f"the highest mean of one shared model (minus FedDyn by samples {ahead})" in text
    assert {method for method, p in corrected.items() if p < 0.05} == {"fedavg", "fedprox"}
    for page in ("README.md", "recommendation.md"):
        assert changes["fedavg"].text(1) in words(RESULTS / page)
    images = {"amazon": 144, "caltech": 178, "dslr": 24, "webcam": 46}
    assert f"by images {by_images(uniform['fedavg'], samples['fedavg'], images)}" in text

    found = {
        name: difference(of_domain(uniform["fedavg"], name), of_domain(samples["fedavg"], name)) for name in images
    }
    assert {found["dslr"].partition(" ")[0], found["webcam"].partition(" ")[0]} == {"+16.7"}
    assert f"DSLR and Webcam +16.7 each, Amazon {found['amazon']}" in text
    gains = [statistics.mean(validation_gains(weighting, 200).values()) for weighting in ("samples", "uniform")]
    assert f"{gains[0]:.1f} points in the last 20 rounds by samples, {gains[1]:.1f} with uniform weights" in text


def by_images(runs: Sequence[StudyRun], base: Sequence[StudyRun], images: Mapping[str, int]) -> str:
    """The difference in the share of all test images that are right."""
    scores: list[list[float]] = []
    for found in (runs, base):
        scores.append(study_scores([replace(run, score=image_weighted(run.accuracy, images)) for run in found]))
    return difference(scores[0], scores[1])


def image_weighted(accuracy: Mapping[str, float], images: Mapping[str, int]) -> float:
    """The share of all test images that are right, in per cent."""
    right = sum(accuracy[name] * count for name, count in images.items())
    return right / sum(images.values())


# ---- with views ------------------------------------------------------------------------------------------------------

VIEWS = (("samples", 60), ("samples", 200), ("uniform", 200))
"""The weighting and the rounds of each pair of columns of the table."""


def runs_with_views(weighting: str, rounds: int) -> dict[str, list[StudyRun]]:
    """The final runs on random-convolution views, by method."""
    found: dict[str, list[StudyRun]] = {}
    for run in read_runs(RESULTS / "trained_views.csv"):
        wanted = f"office_caltech-small-views_randconv-{weighting}"
        if (run.board, run.kind, run.rounds) == (wanted, "final", rounds):
            found.setdefault(run.method, []).append(run)
    return found


def test_the_table_with_views_has_the_scores_of_its_runs() -> None:
    stated = {cells[0]: cells[1:] for cells in rows_of(section((RESULTS / "trained.md").read_text(), "With views"))}
    searched = runs_with_views(*VIEWS[0])
    expected: dict[str, list[str]] = {method: [] for method in searched}
    for weighting, rounds in VIEWS:
        found = runs_with_views(weighting, rounds)
        assert found.keys() == searched.keys()
        base = study_scores(found["fedavg"])
        for method, runs in found.items():
            assert {run.number: run.values for run in runs} == {run.number: run.values for run in searched[method]}
            minus = "" if method == "fedavg" else difference(study_scores(runs), base)
            expected[method] += [cell(study_scores(runs)), minus]
    assert stated == expected


def test_what_pages_say_of_views_agrees_with_the_runs() -> None:
    text = words(RESULTS / "trained.md")
    scores: dict[tuple[str, int, str], list[float]] = {}
    p_values: list[str] = []
    for weighting, rounds in VIEWS:
        found = runs_with_views(weighting, rounds)
        for method, runs in found.items():
            scores[weighting, rounds, method] = study_scores(runs)
        (ranking,) = rank_methods([run for runs in found.values() for run in runs])
        corrected = {row.label: row.p for row in ranking.rows}
        p_values.append(f"{corrected['fedgca']:.3f} and {corrected['feddyn']:.3f}")
    assert f"p {p_values[0]} after Holm; later {p_values[1]}, uniform {p_values[2]}" in text
    terms = [difference(scores[*each, "fedgca"], scores[*each, "feddyn"]) for each in VIEWS]
    assert f"FedGCA minus FedDyn, which is FedGCA without its two terms: {terms[0]}, {terms[1]}, {terms[2]}" in text
    plain = {(weighting, 200): long_runs("office_caltech", weighting) for weighting in ("samples", "uniform")}
    plain["samples", 60] = {}
    for run in read_runs(RESULTS / "trained.csv"):
        if run.kind == "final":
            plain["samples", 60].setdefault(run.method, []).append(run)
    uniform = study_scores(plain["uniform", 200]["fedavg"])
    best = difference(scores["uniform", 200, "feddyn"], uniform)
    assert f"minus FedAvg by uniform weights without views: {best}" in text
    means = {key: statistics.mean(found) for key, found in scores.items()}
    for each, by_method in plain.items():
        for method in by_method.keys() - {"fedbn", "fedpall"}:
            means[*each, f"{method} without views"] = statistics.mean(study_scores(by_method[method]))
    assert max(means, key=means.__getitem__) == ("uniform", 200, "feddyn"), "the page says so"
    assert f"and FedDyn with views {best} more" in words(RESULTS / "recommendation.md")
    small = runs_with_views(*VIEWS[0])
    shares = [domain_mean(small[method], name) for method in ("fedgca", "fedavg") for name in ("dslr", "webcam")]
    assert f"FedGCA has {shares[0]} and {shares[1]} %, FedAvg {shares[2]} and {shares[3]} %" in text
    later = [validation_gains(weighting, 200, "office_caltech with views") for weighting in ("samples", "uniform")]
    ends = [statistics.mean(found.values()) for found in later]
    assert f"**Length**: validation gains {ends[0]:.1f} points by samples, {ends[1]:.1f} uniform" in text


def test_what_pages_say_of_fedpall_on_digits_agrees_with_its_runs() -> None:
    runs = read_runs(RESULTS / "trained_digits.csv")
    short = [run for run in runs if (run.kind, run.method) == ("final", "fedpall")]
    later = long_runs("digits", "samples")
    minus = difference(study_scores(later["fedpall"]), study_scores(later["fedbn"]))
    text = words(RESULTS / "trained.md")
    sixty, last = cell(study_scores(short)), cell(study_scores(later["fedpall"]))
    assert f"in sixty rounds {sixty}, in 200 FedPall {last} (minus FedBN {minus}; " in text
    assert f"on Digits {minus} |" in words(RESULTS / "recommendation.md")
