"""``goldfinch table``: which runs stand in one row, what the row is called, and what is bold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.scored import scored_run

from common.errors import ConfigError
from server.results.groups import all_groups, best_run, group_runs
from server.results.overrides import export_command
from server.results.run import Run, find_runs
from server.results.table import markdown, render, smaller_tables


def entry(average: float, seed: int = 0, method: str = "fpl", data: str = "toy", **settings: Any) -> Run:
    return scored_run(average, seed=seed, method=method, data=data, settings=settings)


def test_seeds_share_a_row_with_their_sample_deviation() -> None:
    (board,) = group_runs([entry(50.0), entry(54.0, 1), entry(60.0, method="fedavg")])
    assert [(row.label, len(row.runs)) for row in board.groups] == [("fpl", 2), ("fedavg (seed 0)", 1)]
    text = markdown(board, "final")
    assert "| fpl | global model | 51.00 ± 2.83 | 53.00 ± 2.83 | 52.00 ± 2.83 | 51.00 ± 2.83 | 2 | 0,1 |" in text
    assert "| fedavg (seed 0) | global model | **59.00** | **61.00** | **60.00** | **59.00** | 2 | 0 |" in text


def test_rows_scored_on_own_models_are_marked_and_not_ranked_with_shared_ones() -> None:
    own = entry(90.0, method="fedbn")
    own.summary["scored"] = "own model"  # type: ignore[index]  # a plain dict here
    (board,) = group_runs([entry(50.0), entry(60.0, method="fedavg"), own])
    text = markdown(board, "final")
    assert "| fedbn | own model | 89.00 | 91.00 | 90.00 | 89.00 |" in text
    assert "| fedavg | global model | **59.00** |" in text
    assert "not ranked with rows of one shared model" in text
    table = render(board, "final")
    assert list(table.columns[0].cells) == ["fpl", "fedavg", "fedbn *"]
    assert "[bold]" not in list(table.columns[1].cells)[2]
    assert str(table.caption).startswith("* scored with each client's own model")
    board.groups.pop()
    assert render(board, "final").caption is None


def test_the_best_row_s_first_seed_leaves() -> None:
    own = entry(90.0, method="fedbn")
    own.summary["scored"] = "own model"  # type: ignore[index]  # a plain dict here
    runs = [entry(52.0), entry(58.0, 1, "fedavg"), entry(60.0, 0, "fedavg"), own]
    best = best_run(all_groups(runs))
    assert best is runs[2]
    assert export_command(best) == "goldfinch export fedavg-0 --to models/fedavg"
    assert best_run(all_groups([own])) is own  # where there is nothing else
    unscored = entry(1.0)
    unscored.summary["scores"] = {}  # type: ignore[index]
    assert best_run(all_groups([unscored])) is None


def test_the_command_names_a_client_where_each_has_its_own(tmp_path: Path) -> None:
    own = Run(tmp_path / "a run")
    registered = [{"event": "registered", "client": name} for name in ("b-0", "a-0")]
    vars(own).update(summary={"method": "fedbn", "scored": "own model"}, events=registered)
    assert export_command(own) == f"goldfinch export '{own.folder}' --to models/fedbn"  # clients' state is on devices
    (own.folder / "clients").mkdir(parents=True)
    assert export_command(own) == f"goldfinch export '{own.folder}' --to models/fedbn --client a-0"


def test_rows_of_one_method_are_called_by_what_differs_between_them() -> None:
    settings = [{"method.temperature": tau, "train.epochs": epochs} for tau in (0.02, 0.5) for epochs in (1, 5)]
    rows = all_groups([entry(50.0 + place, seed, **one) for place, one in enumerate(settings) for seed in (0, 1)])
    assert [row.label for row in rows] == [
        "fpl, temperature=0.02, epochs=1",
        "fpl, temperature=0.02, epochs=5",
        "fpl, temperature=0.5, epochs=1",
        "fpl, temperature=0.5, epochs=5",
    ]


def test_a_class_that_differs_is_called_by_its_group_and_name() -> None:
    targets = ("strategies.core.aggregation.Mean", "ownlib.robust.Median")
    rows = all_groups([entry(50.0 + place, **{"aggregation._target_": one}) for place, one in enumerate(targets)])
    assert [row.label for row in rows] == ["fpl, aggregation=Mean", "fpl, aggregation=Median"]


def test_labels_of_rows_with_many_differences_are_different() -> None:
    keys = [f"method.option_{number}" for number in range(6)]
    rows = all_groups([entry(50.0, **dict.fromkeys(keys, 1)), entry(51.0, **{**dict.fromkeys(keys, 1), keys[0]: 2})])
    assert len({row.label for row in rows}) == 2
    other = {**dict.fromkeys(keys, 1), keys[5]: 3}
    many = all_groups(
        [entry(50.0, **dict.fromkeys(keys, 1)), entry(51.0, **dict.fromkeys(keys, 2)), entry(52.0, **other)]
    )
    assert len({row.label for row in many}) == 3


def test_the_same_run_on_another_engine_is_no_further_sample() -> None:
    (row,) = all_groups([entry(50.0), entry(50.0)])
    assert (len(row.runs), len(row.duplicates), row.contradictions) == (1, 1, [])


def test_data_sets_do_not_share_a_table() -> None:
    found = group_runs([entry(50.0), entry(51.0, data="other"), entry(52.0, 1)])
    assert [len(board.runs) for board in found] == [2, 1]


def test_what_holds_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        find_runs([str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match=r"no config\.yaml with summary\.json"):
        find_runs([str(tmp_path)])


def test_rows_of_one_method_stand_together() -> None:
    runs = [entry(50.0, method="fpl"), entry(51.0, method="fedavg"), entry(52.0, **{"method.temperature": 0.5})]
    (board,) = group_runs(runs)
    assert [row.runs[0].method_name for row in board.groups] == ["fpl", "fpl", "fedavg"]


def test_notes_of_long_tables_count_the_rows_of_common_values() -> None:
    rates = [0.01] * 7 + [0.05]
    runs = []
    for place, rate in enumerate(rates):
        runs.append(entry(50.0 + place, method=f"method{place}", **{"train.learning_rate": rate}))
    (board,) = group_runs(runs)
    (difference,) = board.differences()
    assert difference == "train.learning_rate 0.01 (7 rows), 0.05 (method7)"
    board.groups = board.groups[5:]
    assert board.differences() == ["train.learning_rate 0.01 (method5, method6), 0.05 (method7)"]


def test_a_table_of_many_folders_names_those_that_hold_several_runs(tmp_path: Path) -> None:
    runs = [entry(50.0, seed, "fedavg") for seed in (0, 1)] + [entry(60.0)]
    for run, place in zip(runs, ("sweep one/a", "sweep one/b", "first"), strict=True):
        vars(run)["folder"] = tmp_path / place
    boards = group_runs(runs)
    text = smaller_tables(tmp_path, boards)
    assert text.splitlines()[0].endswith("holds runs of 2 folders. A table of one of them:")
    assert text.splitlines()[1:] == [f"  goldfinch table '{tmp_path / 'sweep one'}'   # 2 runs"]
    assert smaller_tables(tmp_path / "sweep one", boards) == "", "each of its folders holds one run"
