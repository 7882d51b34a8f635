"""``goldfinch table --format``: the same rows as files for papers and scripts."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from support.scored import scored_run

import goldfinch as gf
from goldfinch.cli import main
from goldfinch.record import RunRecord, find_runs
from goldfinch.results.frames import BEST, NO_BEST, score_frame, wide_table
from goldfinch.results.groups import ScoreTable, group_runs, rename
from goldfinch.results.table import scored_tables, table_text
from tests.support.records import rewrite


def entry(average: float, seed: int = 0, method: str = "fpl", missing: tuple[str, ...] = ()) -> RunRecord:
    return scored_run(average, seed=seed, method=method, domains=("a_1", "b"), missing=missing)


def seeds_of(method: str, *averages: float) -> list[RunRecord]:
    return [entry(average, seed, method) for seed, average in enumerate(averages)]


@pytest.fixture
def board() -> ScoreTable:
    """FPL with three seeds, and FedAvg with three under a name that a spreadsheet would compute."""
    runs = seeds_of("fpl", 50.0, 54.0, 52.0) + seeds_of("=fedavg", 60.0, 64.2, 62.1)
    (found,) = group_runs(runs)
    return found


def test_latex_escapes_and_has_the_best_in_bold(board: ScoreTable) -> None:
    text = table_text([board], "final", "latex")
    assert r"method & a\_1 & b & average & worst & spread & rounds & seeds & MB \\" in text
    assert r"fpl & 51.00 $\pm$ 2.00 & 53.00 $\pm$ 2.00 & 52.00 $\pm$ 2.00 &" in text
    assert r"\textbf{62.10 $\pm$ 2.10}" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    assert text.count("{") == text.count("}")


def test_csv_holds_no_formula(board: ScoreTable) -> None:
    rows = list(csv.DictReader(io.StringIO(table_text([board], "final", "csv"))))
    assert {row["method"] for row in rows} == {"fpl", "'=fedavg"}
    assert len(rows) == 2 * 5


def test_partial_values_are_marked_in_every_format() -> None:
    boards = group_runs([entry(50.0, missing=("b",)), entry(60.0, method="fedavg")])
    assert r"$^\dagger$" in table_text(boards, "final", "latex")
    (table,) = json.loads(table_text(boards, "final", "json"))["tables"]
    row = next(row for row in table["rows"] if row["method"].startswith("fpl"))
    assert row["scores"]["average"]["partial"]
    assert not row["scores"]["average"]["best"]
    assert row["scores"]["b"]["mean"] is None
    assert any("without b" in note for note in table["notes"])


@pytest.mark.parametrize("form", ["md", "latex", "csv", "json"])
def test_every_format_has_the_cells_of_the_frame(form: str, board: ScoreTable) -> None:
    """One frame: no format has a number of its own."""
    text = table_text([board], "final", form)
    for cell in score_frame(board, "final").to_dict("records"):
        if cell["column"] == "spread" and form == "md":
            continue
        shown = cell["text"].replace("±", r"$\pm$") if form == "latex" else cell["text"]
        if form in ("csv", "json"):
            shown = str(cell["mean"])
        assert shown in text


@pytest.fixture(scope="module")
def folder(finished_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run."""
    place = tmp_path_factory.mktemp("runs")
    shutil.copytree(finished_runs / "fedavg-0", place / "run")
    return place


@pytest.mark.parametrize(
    ("name", "begin"), [("t.tex", r"\begin{table}"), ("t.json", '{\n  "rule"')], ids=["tex", "json"]
)
def test_the_suffix_is_the_format(name: str, begin: str, folder: Path, tmp_path: Path) -> None:
    assert main(["table", str(folder), "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text().startswith(begin)


def test_a_format_is_printed_without_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(folder), "--format", "json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["rows"][0]["state_sha256"] == [RunRecord(folder / "run").state_sha256]


def test_a_validation_score_has_its_own_metric() -> None:
    """The column is by ``rounds.metric``, also in a table of another metric."""
    runs = [entry(50.0), entry(60.0, method="fedavg")]
    for run in runs:
        run.rules["final"]["validation"] = 40.0
        vars(run)["config"] = {**run.config, "rounds": {"metric": "macro_f1"}}
    boards = group_runs(runs)
    assert "validation (macro F1)" in table_text(boards, "final", "md").splitlines()[2]
    assert "validation (macro F1)" in wide_table(boards, "final").columns
    for row in csv.DictReader(io.StringIO(table_text(boards, "final", "csv"))):
        assert row["metric"] == ("macro_f1" if row["column"] == "validation" else "accuracy")
    (table,) = json.loads(table_text(boards, "final", "json"))["tables"]
    scores = table["rows"][0]["scores"]
    assert (scores["validation"]["metric"], scores["average"]["metric"]) == ("macro_f1", "accuracy")
    for run in runs:
        vars(run)["config"] = {**run.config, "rounds": {}}
    assert "| validation |" in table_text(group_runs(runs), "final", "md")


def test_a_row_that_begins_like_an_option_of_latex_is_in_braces(board: ScoreTable) -> None:
    rename([board.rows], ["fpl=[Ours] <a> | b", "=fedavg=*avg"])
    text = table_text([board], "final", "latex")
    assert r"{[Ours] \textless{}a\textgreater{} \textbar{} b} & " in text
    assert "\n{*avg} & " in text


def test_latex_tables_of_two_metrics_have_two_labels(folder: Path) -> None:
    (table,) = scored_tables([str(folder)])
    other = table.by_metric("macro_f1")
    assert other is not None
    labels = [re.findall(r"\\label{(.*)}", table_text([each], "final", "latex"))[0] for each in (table, other)]
    assert labels[0].endswith("accuracy-in-last-round")
    assert labels[1].endswith("macro-f1-in-last-round")


def test_rows_with_other_seeds_are_said_to_be_the_reason_why_nothing_is_bold(board: ScoreTable) -> None:
    (uneven,) = group_runs([*seeds_of("fpl", 50.0, 54.0, 52.0), *seeds_of("fedavg", 60.0, 64.2, 62.1, 61.0)])
    assert NO_BEST in table_text([uneven], "final", "md")
    assert NO_BEST not in table_text([board], "final", "md")
    few = group_runs([*seeds_of("fpl", 50.0, 54.0), *seeds_of("fedavg", 60.0)])
    assert NO_BEST not in table_text(few, "final", "md")


def test_a_data_frame_has_no_note_on_bold_figures(board: ScoreTable) -> None:
    assert BEST in table_text([board], "final", "md")
    assert BEST not in wide_table([board], "final").attrs["notes"]


# ---- chosen columns --------------------------------------------------------------------------------------------------


def test_columns_are_shown_in_the_order_they_are_named_and_the_best_stays_in_bold() -> None:
    runs = seeds_of("fpl", 50.0, 54.0, 52.0) + seeds_of("fedavg", 60.0, 64.2, 62.1)
    text = table_text(group_runs(runs), "final", "latex", ["MB", "average"])
    assert "method & MB & average" in text
    assert r"fedavg & 0.0 & \textbf{62.10 $\pm$ 2.10} \\" in text


def test_a_domain_that_is_called_as_a_summary_is_found() -> None:
    runs = [scored_run(50.0, domains=("average", "b"))]
    assert "| fpl | 49.00 |" in table_text(group_runs(runs), "final", "md", ["average"])


def test_a_table_without_a_column_of_another_is_shown_without_it() -> None:
    runs = [entry(50.0), scored_run(60.0, data="other", domains=("c", "d"))]
    text = table_text(group_runs(runs), "final", "md", ["c", "average"])
    assert "\n| method | average |\n" in text
    assert "\n| method | c | average |\n" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "xls"], "--format xls: choices: csv, json, latex"),
        (["--output", "no_such_place/t.xls"], "t.xls: its format xls: choices: csv, json, latex"),
        (["--columns", "avarage"], "did you mean 'average'"),
        (["--columns", "worst,worst"], "worst is there twice"),
        (["--columns", "worst", "--format", "csv"], "csv holds all columns"),
        (["--columns", "worst", "--format", "json"], "json holds all columns"),
        (["--columns", "worst", "--classes"], "choose one of the two"),
    ],
)
def test_a_wrong_choice_of_format_or_columns_is_refused(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(folder), *words]) == 1
    assert message in capsys.readouterr().err


def test_a_suffix_in_capitals_is_the_same_format(folder: Path, tmp_path: Path) -> None:
    assert main(["table", str(folder), "--output", str(tmp_path / "T.CSV")]) == 0
    assert main(["table", str(folder), "--output", str(tmp_path / "t.csv")]) == 0
    assert (tmp_path / "T.CSV").read_text() == (tmp_path / "t.csv").read_text()
    assert main(["report", str(folder), "--output", str(tmp_path / "R.HTML")]) == 0
    assert (tmp_path / "R.HTML").read_text().startswith("<!doctype html>")


def test_the_terminal_shows_chosen_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(folder), "--columns", "worst", "--columns", "average"]) == 0
    head = next(line for line in capsys.readouterr().out.splitlines() if "method" in line)
    assert head.split() == ["method", "worst", "average"]


# ---- text that LaTeX does not take as it is --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "packages"),
    [
        ("方法 ω", r"\usepackage{xeCJK}\setCJKmainfont{Noto Serif CJK SC}, or another font that has ω方法"),
        ("метод", r"\usepackage{fontspec}\setmainfont{DejaVu Serif}, or another font that has демот"),
    ],
)
def test_latex_says_what_text_beyond_latin_needs(
    label: str, packages: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.tex"
    assert main(["table", str(folder), "--label", f"fedavg={label}", "--output", str(path)]) == 0
    comment, begin, *_ = path.read_text().splitlines()
    assert packages in comment
    assert begin == r"\begin{table}"
    assert f"\n{label} & " in path.read_text()


def test_latin_text_needs_nothing() -> None:
    text = table_text(group_runs([entry(50.0, method="Müller, Łódź… 50 %_±")]), "final", "latex")
    assert text.startswith(r"\begin{table}")
    assert r"\centering" in text
    assert r"\label{tab:" in text


def copied(folder: Path, target: Path, seed: int, **protocol: int) -> Path:
    """A copy of the run under another seed, which is another sample of its row."""
    shutil.copytree(folder / "run", target)
    config = yaml.safe_load((target / "config.yaml").read_text())
    config = {**config, "seed": seed, "protocol": config["protocol"] | protocol}
    (target / "config.yaml").write_text(yaml.safe_dump(config))
    return target


def test_a_partition_for_each_seed_is_told_once_and_a_caption_s_sentences_end_with_one_stop(
    folder: Path, tmp_path: Path
) -> None:
    for number in (0, 1):
        copied(folder, tmp_path / str(number), number, partition_seed=number)
    (board,) = group_runs(find_runs([str(tmp_path)]))
    assert "Every seed has a partition of its own." in board.notes()
    text = table_text([board], "final", "latex")
    assert "deviation over seeds. Every seed has a partition of its own. " in text
    assert ".." not in text


def test_a_run_whose_scoring_changed_on_resume_is_marked_and_joined_with_none(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path / "fresh", 0)
    place = copied(folder, tmp_path / "resumed", 1)
    rewrite(place / "scores.jsonl", lambda line: line | ({"count": 50} if line["round"] == 4 else {}))
    (board,) = group_runs(find_runs([str(tmp_path)]))
    assert len(board.rows) == 1, "without a resume, it is how the data are"
    events = (place / "events.jsonl").read_text().splitlines()
    started = next(line for line in events if '"start"' in line)
    resumed_at = {**json.loads(started), "event": "resume", "round": 0}
    (place / "events.jsonl").write_text("\n".join([started, json.dumps(resumed_at), *events[1:]]) + "\n")
    (board,) = group_runs(find_runs([str(tmp_path)]))
    fresh, resumed = board.rows
    assert "and 50 images" in resumed.label
    assert "scored on" not in fresh.label
    assert any("50 test images" in note for note in board.notes())


def test_runs_of_a_row_with_other_numbers_of_test_images_are_marked(folder: Path, tmp_path: Path) -> None:
    """Their settings are the same: images were added between two runs."""
    copied(folder, tmp_path / "first", 0)
    place = copied(folder, tmp_path / "second", 1)
    (board,) = group_runs(find_runs([str(tmp_path)]))
    (group,) = board.rows
    assert "scored on" not in group.label
    domain = RunRecord(place).domains[0]
    rewrite(place / "scores.jsonl", lambda line: {**line, "count": 50} if line["domain"] == domain else line)
    (board,) = group_runs(find_runs([str(tmp_path)]))
    (group,) = board.rows
    assert "and 50 images" in group.label
    assert any("not of the same images" in note for note in board.notes())


# ---- runs that are in no row -----------------------------------------------------------------------------------------


def test_a_run_that_has_not_ended_is_named_in_every_format(
    folder: Path, finished_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    killed = tmp_path / "killed"
    shutil.copytree(finished_runs / "fpl-0", killed)
    rewrite(killed / "events.jsonl", lambda line: None if line["event"] == "finish" else line)
    (killed / "summary.json").unlink()
    note = f"fpl with seed 0 ({killed}), unfinished after round"
    for words in ([], ["--format", "md"], ["--format", "json"], ["--format", "latex"]):
        assert main(["table", str(tmp_path), *words]) == 0
        shown = "".join(capsys.readouterr().out.replace("\\_", "_").split())  # the terminal breaks long paths
        assert "".join(note.split()) in shown, words
    assert main(["table", str(tmp_path), "--format", "csv"]) == 0
    output = capsys.readouterr()
    assert note in output.err
    assert note not in output.out
    table = gf.table(gf.load_runs(tmp_path))
    assert any(note in each for each in table.attrs["notes"])
    assert len(table) == 1
