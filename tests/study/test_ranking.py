"""The table of a comparison: ranks, intervals over studies, one correction, marks; and the recorded board."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import pytest
from support.boards import BOARD, board_tables, read_runs
from support.recorded_pages import RESULTS, rows_of, section

from goldfinch.results.statistics import holm, mean_interval, paired_difference
from goldfinch.study.options import IN_DOMAIN
from goldfinch.study.ranking import OWN_MODELS, Ranking, StudyRun, rank_methods, ranked_table, runs_csv


def final(method: str, study: int, seed: int, score: float, case: str = IN_DOMAIN) -> StudyRun:
    return StudyRun(
        "board", method, case, study, "final", seed, "complete", score, 2, 3600.0, {"train.learning_rate": 0.1},
        {"a": score, "b": score - 10}, 2_000_000, "0" * 64, "c0de",
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
    assert (moon.method, moon.rank, fedavg.rank) == ("moon", 1, 2)
    assert moon.studies == {0: 61, 1: 55, 2: 55}
    assert moon.accuracy == mean_interval([61, 55, 55])
    assert moon.difference == paired_difference([61, 55, 55], [52, 40, 46])
    assert moon.worst == pytest.approx(statistics.fmean([50, 52, 45, 40, 50]))
    assert fedavg.difference is None
    assert (moon.hours, moon.megabytes) == (5.0, 2.0)


def test_all_tests_of_the_page_are_corrected_together() -> None:
    scores = {"fedavg": [[50], [52], [51]], "moon": [[60], [61], [65]], "fpl": [[50.5], [53], [51.2]]}
    found = rank_methods([*runs_of(scores), *runs_of(scores, "leave_out:a")])
    rows = [row for each in found for row in each.rows if row.difference is not None]
    assert len(rows) == 4
    expected = holm([row.difference.p or 0.0 for row in rows if row.difference is not None])
    assert [row.p for row in rows] == expected
    assert max(p for p in expected if p < 1) > 2 * min(row.difference.p or 1.0 for row in rows if row.difference)


def test_equal_methods_share_a_rank_and_are_not_called_level() -> None:
    found = table({"fedavg": [[50], [60]], "fpl": [[50], [60]], "moon": [[49], [60]]})
    assert [(row.method, row.rank) for row in found.rows] == [("fedavg", 1), ("fpl", 1), ("moon", 3)]
    text = ranked_table(found)
    assert "- Not distinguished from fedavg: fpl, moon." in text
    assert "level" not in text
    assert "best" not in text


def test_a_single_study_has_no_interval_and_no_test() -> None:
    found = table({"fedavg": [[50, 52]], "fpl": [[70, 72]]})
    assert found.rows[0].accuracy == mean_interval([71])
    assert found.rows[0].verdict == "not tested"
    assert "an interval needs two studies" in ranked_table(found)


def test_rows_that_are_not_whole_and_rows_of_own_models_are_marked_and_have_no_rank() -> None:
    runs = runs_of({"fedavg": [[50], [52]], "fedbn": [[90], [90]], "fpl": [[99], []], "moon": [[51], [53]]})
    runs = [dataclasses.replace(run, scored=OWN_MODELS) if run.method == "fedbn" else run for run in runs]
    (found,) = rank_methods(runs)
    assert [(row.name, row.rank) for row in found.rows] == [
        ("moon", 1), ("fedavg", 2), ("fpl †", None), ("fedbn *", None),
    ]  # fmt: skip
    text = ranked_table(found)
    assert "† fpl is incomplete and has no rank: in_domain, study 1" in text
    assert "* each client is scored with a model of its own" in text
    assert all(row.difference is None and row.p is None for row in found.rows[2:])


def test_the_first_method_is_the_base_without_fedavg() -> None:
    found = table({"moon": [[50], [52]], "fpl": [[40], [41]]})
    assert found.base == "moon"
    assert [row.method for row in found.rows if row.difference is not None] == ["fpl"]


def test_a_left_out_domain_that_was_not_run_leaves_the_row_without_a_rank() -> None:
    runs = runs_of({"fedavg": [[10], [20]], "fpl": [[10], [20]]}, "leave_out:a")
    (found,) = rank_methods([*runs, *runs_of({"fedavg": [[50], [50]]}, "leave_out:b")])
    assert (found.kind, found.rows[0].method, found.rows[0].studies) == ("leave_one_out", "fedavg", {0: 30, 1: 35})
    assert [row.rank for row in found.rows] == [1, None]
    assert found.rows[0].worst == 15


def test_other_code_is_named() -> None:
    runs = runs_of({"fedavg": [[50], [52]], "fpl": [[50], [51]]})
    runs[-1] = dataclasses.replace(runs[-1], code="feedface")
    assert "different code: c0de, feedface" in ranked_table(rank_methods(runs)[0])


def test_other_processors_are_named() -> None:
    runs = runs_of({"fedavg": [[50], [52]], "fpl": [[50], [51]]})
    assert "processors" not in ranked_table(rank_methods(runs)[0])
    runs[-1] = dataclasses.replace(runs[-1], processor="AMD EPYC, AVX2")
    assert "different processors" in (found := ranked_table(rank_methods(runs)[0]))
    assert "AMD EPYC, AVX2; not recorded" in found


# ---- the recorded board ----------------------------------------------------------------------------------------------


def test_the_board_s_file_is_written_as_a_comparison_writes_it() -> None:
    assert runs_csv(read_runs(BOARD)) == BOARD.read_text()


@pytest.mark.parametrize(
    ("title", "table"),
    [
        ("In-domain, without views", "none, in-domain"),
        ("One domain left out, without views", "none, leave-one-domain-out"),
        ("In-domain, with RandConv views", "randconv, in-domain"),
        ("One domain left out, with RandConv views", "randconv, leave-one-domain-out"),
    ],
)
def test_the_tables_of_the_board_follow_from_its_runs(title: str, table: str) -> None:
    stated = rows_of(section((RESULTS / "board.md").read_text(), title))
    assert stated == [[cell.strip("*") for cell in cells] for cells in board_tables()[table][1:]]


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
