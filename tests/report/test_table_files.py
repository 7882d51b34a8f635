"""``goldfinch table --format``: the same rows as files for papers and scripts."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import yaml
from support.runs import run
from support.scored import scored_run
from support.toy import toy_settings

from server.cli import main
from server.results.frames import score_frame
from server.results.groups import Board, group_runs
from server.results.run import RunFolder, find_runs
from server.results.table import table_text
from tests.support.records import rewrite


def entry(average: float, seed: int = 0, method: str = "fpl", missing: tuple[str, ...] = ()) -> RunFolder:
    return scored_run(average, seed=seed, method=method, domains=("a_1", "b"), missing=missing)


@pytest.fixture
def board() -> Board:
    """FPL with two seeds, FedAvg with two."""
    (found,) = group_runs(
        [entry(50.0), entry(54.0, 1), entry(60.0, method="=fedavg"), entry(60.0, 1, method="=fedavg")]
    )
    return found


def test_latex_escapes_and_has_the_best_in_bold() -> None:
    runs = [entry(50.0), entry(54.0, 1), entry(60.0, method="=fedavg"), entry(64.2, 1, method="=fedavg")]
    text = table_text(group_runs(runs), "final", "latex")
    assert r"method & a\_1 & b & average & worst & spread & rounds & seeds & MB \\" in text
    assert r"fpl & 51.00 $\pm$ 2.83 & 53.00 $\pm$ 2.83 & 52.00 $\pm$ 2.83 &" in text
    assert r"\textbf{62.10 $\pm$ 2.97}" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    assert text.count("{") == text.count("}")


def test_the_frame_has_numbers_and_how_many_seeds(board: Board) -> None:
    rows = score_frame(board, "final").set_index(["method", "column"])
    average = rows.loc[("fpl", "average")]
    assert (average["mean"], average["seeds"], average["partial"], average["best"]) == (52.0, 2, False, False)
    assert average["std"] == pytest.approx(8**0.5)
    assert rows.loc[("fpl", "spread"), "mean"] == 1.0


def test_csv_holds_no_formula(board: Board) -> None:
    rows = list(csv.DictReader(io.StringIO(table_text([board], "final", "csv"))))
    assert {row["method"] for row in rows} == {"fpl", "'=fedavg"}
    assert len(rows) == 2 * 5


def test_partial_values_are_marked_in_every_format() -> None:
    boards = group_runs([entry(50.0, missing=("b",)), entry(60.0, method="fedavg")])
    text = table_text(boards, "final", "latex")
    assert r"$^\dagger$" in text
    assert "without b" in text
    (table,) = json.loads(table_text(boards, "final", "json"))["tables"]
    row = next(row for row in table["rows"] if row["method"].startswith("fpl"))
    assert row["scores"]["average"]["partial"]
    assert not row["scores"]["average"]["best"]
    assert row["scores"]["b"]["mean"] is None
    assert any("without b" in note for note in table["notes"])


@pytest.mark.parametrize("form", ["md", "latex", "csv", "json"])
def test_every_format_has_the_cells_of_the_frame(form: str, board: Board) -> None:
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run."""
    place = tmp_path_factory.mktemp("runs")
    run(toy_settings("fedavg", place / "run", train={"rounds": 1}))
    return place


@pytest.mark.parametrize(
    ("name", "begin"),
    [("t.md", "toy"), ("t.tex", r"\begin{table}"), ("t.csv", "table,method,column,metric"), ("t.json", '{\n  "rule"')],
    ids=["md", "tex", "csv", "json"],
)
def test_the_suffix_is_the_format(name: str, begin: str, folder: Path, tmp_path: Path) -> None:
    assert main(["table", str(folder), "--output", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text().startswith(begin)


def test_a_format_is_printed_without_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(folder), "--format", "json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["rows"][0]["state_sha256"] == [RunFolder(folder / "run").state_sha256]


@pytest.mark.parametrize("words", [["--format", "xls"], ["--output", "t.xls"]], ids=["format", "suffix"])
def test_an_unknown_format_names_the_known_ones(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / word) if "." in word else word for word in words]
    assert main(["table", str(folder), *words]) == 1
    assert "--format xls: choices: csv, json, latex" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_row_has_the_name_that_the_user_gives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(folder), "--label", "fedavg=FedAvg (ours)", "--format", "latex"]) == 0
    assert "FedAvg (ours) &" in capsys.readouterr().out


def test_a_run_whose_scoring_changed_on_resume_is_marked_and_joined_with_none(folder: Path, tmp_path: Path) -> None:
    for name in ("fresh", "resumed"):
        shutil.copytree(folder / "run", tmp_path / name)
    place = tmp_path / "resumed"
    config = yaml.safe_load((place / "config.yaml").read_text())
    (place / "config.yaml").write_text(yaml.safe_dump({**config, "seed": 1}))
    rewrite(place / "scores.jsonl", lambda line: line | ({"count": 50} if line["round"] == 1 else {}))
    (board,) = group_runs(find_runs([str(tmp_path)]))
    assert len(board.groups) == 1, "without a resume, it is how the data are"
    events = (place / "events.jsonl").read_text().splitlines()
    started = next(line for line in events if '"start"' in line)
    resumed_at = {**json.loads(started), "event": "resume", "round": 0}
    (place / "events.jsonl").write_text("\n".join([started, json.dumps(resumed_at), *events[1:]]) + "\n")
    (board,) = group_runs(find_runs([str(tmp_path)]))
    fresh, resumed = board.groups
    assert "and 50 images" in resumed.label
    assert "scored on" not in fresh.label
    assert any("50 test images" in note for note in board.notes())


def test_runs_of_a_row_with_other_numbers_of_test_images_are_marked(folder: Path, tmp_path: Path) -> None:
    """Their settings are the same: images were added between two runs."""
    for number, name in enumerate(("first", "second")):
        shutil.copytree(folder / "run", tmp_path / name)
        place = tmp_path / name
        config = yaml.safe_load((place / "config.yaml").read_text())
        (place / "config.yaml").write_text(yaml.safe_dump({**config, "seed": number}))
    (board,) = group_runs(find_runs([str(tmp_path)]))
    (group,) = board.groups
    assert "scored on" not in group.label
    summary = json.loads((place / "summary.json").read_text())
    lines = RunFolder(place).all_scores
    assert summary["images"] == {line["domain"]: line["count"] for line in lines}
    domain = next(iter(summary["images"]))
    summary["images"][domain] = 50
    (place / "summary.json").write_text(json.dumps(summary))
    (board,) = group_runs(find_runs([str(tmp_path)]))
    (group,) = board.groups
    assert "and 50 images" in group.label
    assert any("not of the same images" in note for note in board.notes())
