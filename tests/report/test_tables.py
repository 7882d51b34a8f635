"""``goldfinch table``: which runs stand in one row, what the row is called, and what is bold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scored import all_groups, restate, scored_run

from common.errors import ConfigError
from goldfinch.record import RunRecord, setting_text
from goldfinch.results.frames import OWN_MODELS, score_frame, score_sheet
from goldfinch.results.groups import exported_run, group_runs, rename
from goldfinch.results.overrides import export_command
from goldfinch.results.rows import best_row, differences_note, notes_on, setting_differences
from goldfinch.results.sheets import UNSEEN
from goldfinch.results.statistics import paired_difference
from goldfinch.results.table import check_metric, smaller_tables, table_text
from server.run.files import OWN


def entry(average: float, seed: int = 0, method: str = "fpl", data: str = "toy", **settings: Any) -> RunRecord:
    return scored_run(average, seed=seed, method=method, data=data, settings=settings)


def seeds_of(method: str, *averages: float, **settings: Any) -> list[RunRecord]:
    """A run for each average, with seeds 0, 1, ..."""
    return [entry(average, seed, method, **settings) for seed, average in enumerate(averages)]


def test_seeds_share_a_row_with_their_sample_deviation() -> None:
    (board,) = group_runs([entry(50.0), entry(60.0, method="fedavg"), entry(54.0, 1)])
    assert [(row.label, len(row.runs)) for row in board.rows] == [("fpl", 2), ("fedavg (seed 0)", 1)]
    text = table_text([board], "final", "md")
    assert "| fpl | 51.00 ± 2.83 | 53.00 ± 2.83 | 52.00 ± 2.83 | 51.00 ± 2.83 | 2 | 0,1 | 0.0 |" in text
    assert "| fedavg (seed 0) | 59.00 | 61.00 | 60.00 | 59.00 | 2 | 0 | 0.0 |" in text, "other seeds have no best"


def test_rows_scored_on_own_models_are_marked_and_not_ranked_with_shared_ones() -> None:
    own = entry(90.0, method="fedbn")
    restate(own, scored=OWN)
    (board,) = group_runs([*seeds_of("fpl", 50.0, 51.0, 50.5), *seeds_of("fedavg", 60.0, 61.2, 60.6), own])
    sheet = score_sheet(board, "final")
    assert [row[0] for row in sheet.rows] == ["fpl", "fedavg", "fedbn (seed 0) *"]
    assert {number for number, _ in sheet.strong} == {1}
    assert sheet.notes[0] == OWN_MODELS
    board.rows.pop()
    assert OWN_MODELS not in score_sheet(board, "final").notes


@pytest.mark.parametrize(
    ("others", "found"),
    [
        (seeds_of("fedavg", 50.0, 52.0, 51.5), "fpl"),
        (seeds_of("fedavg", 59.0, 63.0, 59.0), None),
        (seeds_of("fedavg", 50.0, 52.0), None),
        ([*seeds_of("fedavg", 50.0, 52.0, 51.5), *seeds_of("moon", 59.0, 63.0, 59.0)], None),
    ],
    ids=["beyond the interval", "within the interval", "other seeds", "one of two within the interval"],
)
def test_a_row_within_the_interval_of_another_is_not_the_best(others: list[RunRecord], found: str | None) -> None:
    groups = all_groups([*seeds_of("fpl", 60.0, 62.0, 61.0), *others])
    best = best_row(groups)
    assert (best.label if best else None) == found
    assert exported_run(groups) is (best.runs[0] if best else None)


@pytest.mark.parametrize(("key", "value"), [("code", "other"), ("rounds", 3)])
def test_a_row_of_other_code_or_rounds_has_no_best_beside_it(key: str, value: Any) -> None:
    others = seeds_of("fedavg", 50.0, 52.0, 51.5)
    for run in others:
        restate(run, **{key: value})
    assert best_row(all_groups([*seeds_of("fpl", 60.0, 62.0, 61.0), *others])) is None


def test_runs_on_images_that_changed_between_them_are_named_and_have_no_best() -> None:
    """The same samples of a client, by their numbers, and other pixels: somebody changed the files."""
    runs = [*seeds_of("fpl", 60.0, 62.0, 61.0), *seeds_of("fedavg", 50.0, 52.0, 51.5)]
    for run in runs:
        restate(run, registrations={"a-0": {"split": "s", "content": "before"}}, taking_part=["a-0"])
    groups = all_groups(runs)
    assert best_row(groups) is groups[0]
    assert not [note for note in notes_on(groups) if note.startswith("Images")]
    restate(runs[-1], registrations={"a-0": {"split": "s", "content": "after"}})
    assert best_row(groups) is None
    notes = [note for note in notes_on(groups) if note.startswith("Images changed between runs")]
    assert notes
    assert notes[0].endswith("fedavg seed 0, fedavg seed 1; fedavg seed 2.")
    vars(runs[-1])["config"] = {**runs[-1].config, "privacy": {"_target_": "common.privacy.GaussianPrivacy"}}
    assert best_row(groups) is groups[0], "a private run's hash has a secret, and says nothing"


def test_a_run_without_a_client_that_other_runs_had_is_named_and_is_not_the_best() -> None:
    """A device that did not register in one night: its seed is a mean over less data."""
    runs = [*seeds_of("fpl", 60.0, 62.0, 61.0), *seeds_of("fedavg", 50.0, 52.0, 51.5)]
    for run in runs:
        restate(run, registrations={"a-0": {}, "b-0": {}}, taking_part=["a-0", "b-0"])
    groups = all_groups(runs)
    assert best_row(groups) is groups[0]
    restate(runs[1], taking_part=["a-0"])
    assert best_row(groups) is None
    assert "Runs without clients that other runs had: fpl seed 1 (without b-0)." in notes_on(groups)
    restate(runs[1], taking_part=["a-0", "b-0"])
    for run in runs[3:]:
        vars(run)["options"] = {**run.options, "protocol.clients": 1}
        restate(run, taking_part=["a-0"])
    assert not [note for note in notes_on(groups) if note.startswith("Runs without")], "their settings ask for fewer"


def test_a_test_score_does_not_choose_the_seed_that_is_exported() -> None:
    runs = seeds_of("fpl", 52.0, 58.0)
    assert exported_run(all_groups(runs)) is runs[0]
    assert export_command(runs[0]) == "goldfinch export fpl-0 --to models/fpl"
    validated = seeds_of("fpl", 58.0, 52.0)
    for run, validation in zip(validated, (40.0, 41.0), strict=True):
        run.rules["final"]["validation"] = validation
    assert exported_run(all_groups(validated)) is validated[1]


def test_a_row_or_a_method_is_called_as_the_user_says() -> None:
    groups = all_groups([*seeds_of("fpl", 50.0, 51.0), entry(1.0, **{"method.temperature": 2}), entry(2.0, 0, "moon")])
    rename([groups], ["fpl=FPL (ours)", "moon=MOON"])
    labels = [group.label for group in groups]
    assert labels[0].startswith("FPL (ours)")
    assert labels[1].startswith("FPL (ours), temperature=2")
    with pytest.raises(
        ConfigError, match=r"no row is called 'MOOM'; rows: 'FPL \(ours\) .*', 'FPL \(ours\), temperature=2', 'MOON'"
    ):
        rename([groups], ["MOOM=x"])


def test_a_method_s_name_finds_rows_with_titles_of_their_own() -> None:
    groups = all_groups([entry(1.0, 0, "moon"), entry(2.0, 0, "fedavg")])
    groups[0].label = "MOON as released; Table 2"
    rename([groups], ["moon=Moon"])
    assert [group.label for group in groups] == ["Moon; Table 2", "fedavg"]
    groups[1].label = "moon"
    rename([groups], ["moon=X"])
    assert [group.label for group in groups] == ["Moon; Table 2", "X"], "a row of that name comes first"


def test_a_score_that_runs_cannot_have_says_what_it_needs() -> None:
    groups = all_groups(seeds_of("fpl", 50.0))
    assert groups[0].missing("validated") == [
        "seed 0: no score on validation samples, which protocol.validation=0.1 takes"
    ]
    with pytest.raises(ConfigError, match=r"--metric auroc: .*; runs with rounds.scores=true have"):
        check_metric("auroc", groups[0].runs, "--metric")


def test_rows_exchange_their_labels_and_never_share_one() -> None:
    groups = all_groups([entry(1.0, 0, "moon"), entry(2.0, 0, "fedavg")])
    rename([groups], ["moon=fedavg", "fedavg=moon"])
    assert [group.label for group in groups] == ["fedavg", "moon"]
    with pytest.raises(ConfigError, match="2 rows would be called 'X'"):
        rename([groups], ["moon=X", "fedavg=X"])
    assert [group.label for group in groups] == ["fedavg", "moon"], "nothing was renamed"
    rename([[group] for group in groups], ["moon=X", "fedavg=X"])  # rows of two tables


def test_the_command_names_a_client_where_each_has_its_own(tmp_path: Path) -> None:
    own = scored_run(50.0, method="fedbn")
    own.folder = tmp_path / "a run"
    restate(own, scored=OWN, registrations={"a-0": {}, "b-0": {}})
    assert export_command(own) == f"goldfinch export '{own.folder}' --to models/fedbn"  # clients' state is on devices
    (own.folder / "clients").mkdir(parents=True)
    assert export_command(own) == f"goldfinch export '{own.folder}' --to models/fedbn --client a-0"


def test_rows_of_one_method_are_called_by_what_differs_between_them() -> None:
    settings = [(0.02, "strategies.core.aggregation.Mean"), (0.5, "ownlib.robust.Median")]
    rows = [{"method.temperature": tau, "aggregation._target_": target} for tau, target in settings]
    found = all_groups([entry(50.0 + place, **one) for place, one in enumerate(rows)])
    assert [row.label for row in found] == [
        "fpl, aggregation=Mean, temperature=0.02",
        "fpl, aggregation=Median, temperature=0.5",
    ]


def test_a_class_says_that_others_lack_its_settings() -> None:
    plain = {"privacy._target_": "common.privacy.NoPrivacy"}
    private = {"privacy._target_": "common.privacy.GaussianPrivacy", "privacy.clip": 1.0}
    other = {**private, "privacy.clip": 2.0}
    two = all_groups([entry(50.0, **plain), entry(51.0, **private)])
    assert [row.label for row in two] == ["fpl, privacy=NoPrivacy", "fpl, privacy=GaussianPrivacy"]
    three = all_groups([entry(50.0, **plain), entry(51.0, **private), entry(52.0, **other)])
    assert [row.label for row in three] == [
        "fpl, privacy=NoPrivacy",
        "fpl, privacy=GaussianPrivacy, clip=1",
        "fpl, privacy=GaussianPrivacy, clip=2",
    ]
    assert "privacy.clip 1 (fpl, privacy=GaussianPrivacy, clip=1), 2 (" in differences_note(
        setting_differences({row.label: row.runs[0].options for row in three})
    )


def test_labels_of_rows_with_many_differences_are_different() -> None:
    ones = dict.fromkeys([f"method.option_{number}" for number in range(6)], 1)
    rows = [ones, dict.fromkeys(ones, 2), {**ones, "method.option_5": 3}, {**ones, "rounds.outliers": "clip"}]
    found = all_groups([entry(50.0 + place, **settings) for place, settings in enumerate(rows)])
    assert len({row.label for row in found}) == len(rows)


def test_notes_of_long_tables_count_the_rows_of_common_values() -> None:
    rates = [0.01] * 7 + [0.05]
    runs = []
    for place, rate in enumerate(rates):
        runs.append(
            entry(50.0 + place, method=f"method{place}", **{"train.learning_rate": rate, "method.own": f"{place}"})
        )
    (board,) = group_runs(runs)
    assert any("0.01 (7 rows), 0.05 (method7)" in note for note in score_sheet(board, "final").notes)
    board.rows = board.rows[5:]
    rates = "train.learning_rate 0.01 (method5, method6), 0.05 (method7)"
    own = "method.own 5 (method5), 6 (method6), 7 (method7)"
    assert board.notes()[0] == f"Rows differ in more than the method: {rates}; {own}."


def test_a_setting_that_two_methods_have_is_noted_and_one_of_a_single_method_is_in_its_label() -> None:
    shared = {"method.weighting": "samples"}
    runs = [
        entry(50.0, method="fedavg", **shared),
        entry(51.0, method="fpl", **shared, **{"method.temperature": 0.02}),
        entry(52.0, method="fpl", **shared, **{"method.temperature": 0.5}),
    ]
    (board,) = group_runs(runs)
    assert not any("more than the method" in note for note in board.notes())
    (board,) = group_runs([*runs, entry(53.0, method="feddyn", **{"method.weighting": "uniform", "method.alpha": 1})])
    labels = "fedavg, fpl, temperature=0.02, fpl, temperature=0.5"
    note = f"Rows differ in more than the method: method.weighting samples ({labels}), uniform (feddyn)."
    assert note in score_sheet(board, "final").notes
    assert note in table_text([board], "final", "json")


def test_a_value_that_a_search_drew_has_three_digits_unless_rows_differ_in_later_ones() -> None:
    assert setting_text("method.mu", 0.009156083) == "mu=0.00916"
    assert setting_text("train.learning_rate", 0.0012345) == "learning_rate=0.0012345", "somebody may have written it"
    options = {
        "x": {"method._target_": "x", "train.rate": 0.009156083, "train.decay": 0.0123456789},
        "y": {"method._target_": "y", "train.rate": 0.009161111, "train.decay": 0.5},
    }
    found = setting_differences(options)
    assert found["train.rate"] == {"0.009156083": ["x"], "0.009161111": ["y"]}
    assert found["train.decay"] == {"0.0123": ["x"], "0.5": ["y"]}


SETTINGS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1))


@given(SETTINGS, SETTINGS)
def test_every_setting_that_two_methods_have_and_that_differs_is_found(
    one: dict[str, int], other: dict[str, int]
) -> None:
    options: dict[str, dict[str, Any]] = {}
    for method, settings in (("x", one), ("y", other)):
        options[method] = {"method._target_": method}
        options[method] |= {f"method.{key}": value for key, value in settings.items()}
    found = setting_differences(options)
    assert set(found) == {f"method.{key}" for key in one.keys() & other.keys() if one[key] != other[key]}


def test_rows_that_ended_in_the_same_states_are_called_identical() -> None:
    runs = [*seeds_of("fedavg", 50.0, 52.0), *seeds_of("fedprox", 50.0, 52.0), *seeds_of("fpl", 60.0, 62.5)]
    for run, twin in zip(runs[2:4], runs[:2], strict=True):
        assert twin.facts.end is not None
        restate(run, end=twin.facts.end)
    (board,) = group_runs(runs)
    note = "Identical: fedavg, fedprox ended in the same state with every seed; they differ by 0."
    assert note in score_sheet(board, "final").notes
    fedavg, fedprox, fpl = board.rows
    assert str(fedprox.minus(fedavg)) == "0 (identical)"
    assert fpl.minus(fedavg) == paired_difference([60.0, 62.5], [50.0, 52.0])
    assert fpl.minus(all_groups([entry(1.0)])[0]) is None, "it has other seeds"


def test_a_row_at_chance_is_named() -> None:
    runs = [*seeds_of("fedavg", 10.0, 52.0), *seeds_of("fpl", 60.0, 62.5)]
    vars(runs[0])["events"] = [{"event": "at chance", "round": 2}]
    vars(runs[2])["events"] = [{"event": "at chance", "round": 1}]  # before it went on
    (board,) = group_runs(runs)
    note = "At chance, where one class for every image may score as much: fedavg: seed 0."
    assert [each for each in board.notes() if "chance" in each] == [note]


def test_a_table_of_many_folders_names_those_that_hold_several_runs(tmp_path: Path) -> None:
    runs = [entry(50.0, seed, "fedavg") for seed in (0, 1)] + [entry(60.0)]
    for run, place in zip(runs, ("sweep one/a", "sweep one/b", "first"), strict=True):
        vars(run)["folder"] = tmp_path / place
    boards = group_runs(runs)
    text = smaller_tables(tmp_path, boards)
    assert text.splitlines()[0].endswith("holds runs of 2 folders. A table of one of them:")
    assert text.splitlines()[1:] == [f"  goldfinch table '{tmp_path / 'sweep one'}'   # 2 runs"]
    assert smaller_tables(tmp_path / "sweep one", boards) == "", "each of its folders holds one run"


# ---- what is not one quantity is not shown as one --------------------------------------------------------------------


def test_a_row_of_runs_that_stopped_after_different_rounds_says_so() -> None:
    runs = seeds_of("fpl", 50.0, 51.0)
    for run, rounds in zip(runs, (5, 4), strict=True):
        restate(run, rounds=rounds, planned=5, early_stop={"event": "stopped early"})
    (board,) = group_runs(runs)
    assert set(score_frame(board, "final")["rounds"]) == {"4-5"}


@pytest.mark.parametrize(("missing", "marked"), [((), True), (("b",), False)], ids=["scored", "not scored"])
def test_the_legend_explains_only_marks_that_a_cell_has(missing: tuple[str, ...], marked: bool) -> None:
    unseen = scored_run(50.0, missing=missing)
    restate(unseen, unseen=("b",))
    (board,) = group_runs([unseen, entry(60.0, method="fedavg")])
    sheet = score_sheet(board, "final")
    assert any(UNSEEN in cell for cell in sheet.rows[0]) == marked
    assert any(note.startswith(UNSEEN) for note in sheet.notes) == marked


def test_a_method_of_one_s_own_is_no_other_code_than_the_methods_beside_it() -> None:
    ours = {"goldfinch": "a"}
    mine = {**ours, "mymethod": "b"}
    runs = [entry(50.0), entry(60.0, method="mymethod"), entry(60.0, method="other")]
    for run, packages in zip(runs, (ours, mine, {"goldfinch": "c"}), strict=True):
        vars(run)["code_by_package"] = packages
        restate(run, code=str(packages))
    (board,) = group_runs(runs[:2])
    assert [group.label for group in board.rows] == ["fpl", "mymethod"]
    assert not any("code" in note for note in board.notes())
    (board,) = group_runs(runs)
    assert "code" in board.rows[2].label
    assert any("different code" in note for note in board.notes())
