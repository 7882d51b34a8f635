"""The table of a comparison: ranks, intervals over studies, one correction, marks; and the recorded board."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import pytest
from support.boards import BOARD, board_tables, read_runs
from support.recorded_pages import RESULTS, rows_of, section

from goldfinch.results.statistics import holm, paired_difference
from goldfinch.study.options import IN_DOMAIN
from goldfinch.study.ranking import OWN_MODELS, Ranking, StudyRun, marked_name, rank_methods, ranked_table, runs_csv


def final(method: str, study: int, seed: int, score: float, case: str = IN_DOMAIN) -> StudyRun:
    return StudyRun(
        "board", method, case, study, "final", seed, "complete", score, 2, 3600.0, {"train.learning_rate": 0.1},
        {"a": score, "b": score - 10}, 2_000_000, f"{method} {case} {score}", "c0de",
    )  # fmt: skip


def runs_of(scores: Mapping[str, Sequence[Sequence[float]]], case: str = IN_DOMAIN) -> list[StudyRun]:
    """Final runs: for each method, for each study, the scores of its runs."""
    found: list[StudyRun] = []
    for method, studies in scores.items():
        seed = 0
        for study, values in enumerate(studies):
            for value in values:
                found.append(final(method, study, seed, value, case))
                seed += 1
    return found


def table(scores: Mapping[str, Sequence[Sequence[float]]]) -> Ranking:
    return rank_methods(runs_of(scores))[0]


def test_differences_and_intervals_are_over_the_means_of_studies() -> None:
    found = table({"fedavg": [[50, 54], [40], [45, 47]], "moon": [[60, 62], [55], [50, 60]]})
    moon, fedavg = found.rows
    assert (moon.label, moon.rank, fedavg.rank) == ("moon", 1, 2)
    assert moon.scores() == {0: 61, 1: 55, 2: 55}
    assert str(moon.value()) == f"57.00 ± {statistics.stdev([61, 55, 55]):.2f}", "the deviation is over studies"
    assert moon.difference == paired_difference([61, 55, 55], [52, 40, 46])
    assert moon.scores("worst") == {0: 51, 1: 45, 2: 45}
    assert fedavg.difference is None
    assert (found.hours["moon"], found.trials["moon"], moon.megabytes) == (5.0, 0, 2.0)
    assert "| 57.00 ± 3.46   |" in ranked_table(found)


def test_all_tests_of_the_page_are_corrected_together() -> None:
    scores = {"fedavg": [[50], [52], [51]], "moon": [[60], [61], [65]], "fpl": [[50.5], [53], [51.2]]}
    found = rank_methods([*runs_of(scores), *runs_of(scores, "leave_out:a")])
    rows = [row for each in found for row in each.rows if row.difference is not None]
    assert len(rows) == 4
    expected = holm([row.difference.p or 0.0 for row in rows if row.difference is not None])
    assert [row.p for row in rows] == expected
    assert max(p for p in expected if p < 1) > 2 * min(row.difference.p or 1.0 for row in rows if row.difference)


def test_equal_methods_share_a_rank_and_are_not_called_level() -> None:
    found = table({"fedavg": [[50], [60], [55]], "fpl": [[50], [60], [55]], "moon": [[49], [60], [55]]})
    assert [(row.label, row.rank) for row in found.rows] == [("fedavg", 1), ("fpl", 1), ("moon", 3)]
    text = ranked_table(found)
    assert "- Not distinguished from fedavg: moon.\n- Not tested: a test needs three studies that differ." in text
    assert "level" not in text
    assert "best" not in text


def test_a_single_study_has_intervals_over_its_final_runs_and_no_test() -> None:
    (found,) = rank_methods(runs_of({"fedavg": [[50, 52, 60]]}) + runs_of({"fpl": [[70, 75, 72]]}))  # seeds 0, 1, 2
    fpl, _ = found.rows
    assert fpl.scores() == {0: 70, 1: 75, 2: 72}
    assert fpl.verdict == "not tested"
    expected = paired_difference([70, 75, 72], [50, 52, 60])
    assert fpl.difference is not None
    assert (fpl.difference.low, fpl.difference.high) == (expected.low, expected.high)
    assert (fpl.difference.p, fpl.p) == (None, None)
    assert "the final runs of one study share what it chose" in ranked_table(found)


def test_rows_that_are_not_whole_and_rows_of_own_models_are_marked_and_have_no_rank() -> None:
    runs = runs_of({"fedavg": [[50], [52]], "fedbn": [[90], [90]], "fpl": [[99], []], "moon": [[51], [53]]})
    runs = [dataclasses.replace(run, scored=OWN_MODELS) if run.method == "fedbn" else run for run in runs]
    (found,) = rank_methods(runs)
    assert [(marked_name(row), row.rank) for row in found.rows] == [
        ("moon", 1), ("fedavg", 2), ("fpl †", None), ("fedbn *", None),
    ]  # fmt: skip
    text = ranked_table(found)
    assert "† fpl is incomplete and has no rank: in_domain, study 1" in text
    assert "* each client is scored with a model of its own" in text
    assert all(row.difference is None and row.p is None for row in found.rows[2:])


@pytest.mark.parametrize("order", [("fedavg", "moon", "fpl"), ("fpl", "moon", "fedavg")])
@pytest.mark.parametrize("short", ["fpl", "fedavg"])
def test_a_method_that_lacks_one_of_the_final_runs_of_a_study_has_no_rank(short: str, order: Sequence[str]) -> None:
    """Wherever it stands in the file; and if it is FedAvg, nothing is compared with the fewer runs."""
    whole = {"fedavg": [[50, 51], [52, 53]], "fpl": [[60, 61], [62, 63]], "moon": [[55, 56], [57, 58]]}
    scores = {name: [whole[name][0], whole[name][1][: 1 if name == short else 2]] for name in order}
    found = table(scores)
    (incomplete,) = [row for row in found.rows if row.rank is None]
    assert (incomplete.label, incomplete.absent) == (short, {"in_domain, study 1": "1 of 2 final runs"})
    compared = {row.label for row in found.rows if row.difference is not None}
    assert compared == ({"moon"} if short == "fpl" else set())
    said = "No differences: fedavg, which the others are compared with, has no rank." in ranked_table(found)
    assert said == (short == "fedavg")


def test_a_study_is_at_chance_if_all_of_its_final_runs_are() -> None:
    runs = runs_of({"fedavg": [[50, 51], [52, 53]]})
    at_chance = [dataclasses.replace(run, at_chance="yes" if run.number != 3 else "") for run in runs]
    (row,) = rank_methods(at_chance)[0].rows
    assert [run.at_chance for run in row.runs] == [True, False]


def test_the_bytes_of_a_study_are_the_mean_of_its_final_runs() -> None:
    runs = runs_of({"fedavg": [[50, 51], [52, 53]]})
    (row,) = rank_methods([dataclasses.replace(run, bytes=run.number * 1_000_000) for run in runs])[0].rows
    assert [run.traffic for run in row.runs] == [500_000, 2_500_000]


def test_the_first_method_is_the_base_without_fedavg() -> None:
    found = table({"moon": [[50], [52]], "fpl": [[40], [41]]})
    assert found.base == "moon"
    assert [row.label for row in found.rows if row.difference is not None] == ["fpl"]
    bounded = [dataclasses.replace(run, bound="lower") for run in runs_of({"single_set": [[30], [31]]})]
    (beside,) = rank_methods([*bounded, *runs_of({"moon": [[50], [52]], "fpl": [[40], [41]]})])
    assert beside.base == "moon", "a bound is compared with nothing"
    personal = [dataclasses.replace(run, scored=OWN_MODELS) for run in runs_of({"fedbn": [[90], [90]]})]
    (among,) = rank_methods([*personal, *runs_of({"moon": [[50], [52]], "fpl": [[40], [41]]})])
    assert among.base == "moon", "own models are compared with nothing"
    (alone,) = rank_methods(personal)
    assert "No differences" not in ranked_table(alone)
    assert [(row.label, row.rank) for row in beside.rows] == [("moon", 1), ("fpl", 2), ("single_set", None)]


def test_a_left_out_domain_that_was_not_run_leaves_the_row_without_a_rank() -> None:
    runs = runs_of({"fedavg": [[10], [20]], "fpl": [[10], [20]]}, "leave_out:a")
    (found,) = rank_methods([*runs, *runs_of({"fedavg": [[50], [50]]}, "leave_out:b")])
    assert (found.kind, found.rows[0].label, found.rows[0].scores()) == ("leave_one_out", "fedavg", {0: 30, 1: 35})
    assert [row.rank for row in found.rows] == [1, None]
    assert found.rows[0].scores("worst") == {0: 10, 1: 20}


def test_runs_that_ended_in_another_order_are_identical_and_those_of_unknown_states_are_not() -> None:
    scores = [[50, 51], [52, 53]]
    ordered, other = runs_of({"fedavg": scores}), runs_of({"fedprox": scores})
    runs = [dataclasses.replace(run, state_sha256=f"{run.number}") for run in [*ordered, *reversed(other)]]
    assert rank_methods(runs)[0].rows[1].verdict == "identical"
    unknown = [dataclasses.replace(run, state_sha256="") for run in runs]
    assert rank_methods(unknown)[0].rows[1].verdict == "not tested"


def test_other_code_is_named() -> None:
    runs = runs_of({"fedavg": [[50], [52]], "fpl": [[50], [51]]})
    runs[-1] = dataclasses.replace(runs[-1], code="feedface")
    assert "different code: c0de: fedavg, fpl; feedface: fpl" in ranked_table(rank_methods(runs)[0])


def test_other_processors_are_named() -> None:
    runs = runs_of({"fedavg": [[50], [52]], "fpl": [[50], [51]]})
    assert "processors" not in ranked_table(rank_methods(runs)[0])
    runs[-1] = dataclasses.replace(runs[-1], processor="AMD EPYC, AVX2")
    assert "different processors" in (found := ranked_table(rank_methods(runs)[0]))
    assert "not recorded: fedavg, fpl; AMD EPYC, AVX2: fpl" in found


def test_images_that_changed_between_final_runs_are_named() -> None:
    """Of the same partition; another partition has other images."""
    runs = runs_of({"fedavg": [[50, 51], [52, 53]], "fpl": [[50, 51], [51, 52]]})
    whole = [dataclasses.replace(run, images=f"samples-{run.number} before") for run in runs]
    assert "Images changed" not in ranked_table(rank_methods(whole)[0])
    assert runs_csv(whole).splitlines()[0].endswith(",images")
    changed = [*whole[:-1], dataclasses.replace(whole[-1], images="samples-3 after")]
    note = "the same samples of a client have other pixels in fedavg study 1; fpl study 1."
    assert note in ranked_table(rank_methods(changed)[0])


def test_identical_rows_differ_by_0_and_are_no_test() -> None:
    runs = runs_of({"fedavg": [[50], [53]], "fedprox": [[50], [53]], "moon": [[51], [55]]})
    same = [dataclasses.replace(run, state_sha256=f"{run.number}") for run in runs if run.method != "moon"]
    (found,) = rank_methods([*same, *[run for run in runs if run.method == "moon"]])
    moon, fedavg, fedprox = found.rows
    assert fedprox.difference is not None
    assert (fedprox.difference.mean, fedprox.verdict, fedprox.p) == (0, "identical", None)
    assert moon.difference is not None
    assert moon.p == moon.difference.p, "the only test of the page"
    text = ranked_table(found)
    assert "| 0 (identical)" in text
    assert "- Identical to fedavg: fedprox." in text
    assert "Identical: fedavg, fedprox ended in the same state with every seed" in text
    other = [dataclasses.replace(run, state_sha256="other") if run is same[-1] else run for run in same]
    assert "dentical" not in ranked_table(rank_methods(other)[0]), "one state of four differs"
    assert fedavg.rank == fedprox.rank == 2


def test_a_row_at_chance_is_marked_and_keeps_its_rank() -> None:
    runs = runs_of({"fedavg": [[10], [12]], "fpl": [[50], [51]], "moon": [[11], [40]]})
    lost = [dataclasses.replace(run, at_chance="yes" if run.score < 20 else "") for run in runs]
    (found,) = rank_methods(lost)
    assert [(marked_name(row), row.rank) for row in found.rows] == [
        ("fpl", 1), ("moon (at chance: study 0)", 2), ("fedavg (at chance)", 3),
    ]  # fmt: skip
    assert "At chance, where one class for every image may score as much: moon: study 0; fedavg." in ranked_table(found)
    assert "at_chance" in runs_csv(lost).splitlines()[0]
    assert "at_chance" not in runs_csv(runs).splitlines()[0]


# ---- the recorded board ----------------------------------------------------------------------------------------------


def test_the_board_s_file_is_written_as_a_comparison_writes_it() -> None:
    assert runs_csv(read_runs(BOARD)) == BOARD.read_text()


def test_the_table_of_the_board_follows_from_its_runs() -> None:
    stated = rows_of(section((RESULTS / "board.md").read_text(), "In-domain, without views"))
    assert stated == [[cell.strip("*") for cell in cells] for cells in board_tables()["none, in-domain"][1:]]


def test_what_the_board_says_of_left_out_domains_follows_from_its_runs() -> None:
    heads, *rows = board_tables()["none, leave-one-domain-out"]
    means: dict[str, list[float]] = {}
    intervals = 0
    clear: list[str] = []
    for name, *cells in rows:
        for board, cell in zip(heads[1:], cells, strict=True):
            mean, _, difference = cell.partition("; ")
            if mean:
                means.setdefault(name, []).append(float(mean))
            if difference:
                intervals += 1
                low, _, high = difference.partition("[")[2].strip("]").partition(", ")
                if float(low) * float(high) > 0:
                    clear.append(f"{name} {difference} on {board}")
    text = " ".join((RESULTS / "board.md").read_text().split())
    every = [mean for found in means.values() for mean in found]
    own = means["fedavg"]
    assert f"{min(every)} to {max(every)} % of ten classes (PACS: seven), FedAvg {min(own)} to {max(own)}." in text
    assert sorted(clear) == ["feddap -4.5 [-8.9, -0.1] on pacs", "fedplvm +3.6 [+1.2, +6.1] on glyphs"]
    named = "FedPLVM +3.6 [+1.2, +6.1] on glyphs, FedDAP -4.5 [-8.9, -0.1] on PACS"
    assert f"Two of {intervals} intervals leave out zero by themselves: {named}." in text


def test_no_difference_of_the_board_is_distinguished() -> None:
    boards: dict[str, list[StudyRun]] = {}
    for run in read_runs(BOARD):
        boards.setdefault(run.board, []).append(run)
    p_values: list[float] = []
    alone = 0
    for name, runs in boards.items():
        for ranking in rank_methods(runs):
            for row in ranking.rows:
                if row.difference is not None and "fpl_office" not in name:
                    assert row.difference.half_width is not None
                    alone += abs(row.difference.mean) > row.difference.half_width
                    p_values.append(row.difference.p or 0.0)
    text = " ".join((RESULTS / "board.md").read_text().split())
    assert f"All {len(p_values)} differences were tested together" in text
    assert f"the smallest corrected p is {min(holm(p_values)):.3f}" in text
    assert alone == 7
    assert "Seven of the 100 intervals leave out zero by themselves" in text
    assert len(text.split()) <= 1500
