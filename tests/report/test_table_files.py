"""``goldfinch table --format``: the same rows as files for papers and scripts."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from support.runs import run
from support.scored import scored_run
from support.toy import toy_settings

from server.cli import main
from server.results.groups import Board, group_runs
from server.results.run import Run
from server.results.table_files import latex, records, rendered_table


def entry(average: float, seed: int = 0, method: str = "fpl", missing: tuple[str, ...] = ()) -> Run:
    return scored_run(average, seed=seed, method=method, domains=("a_1", "b"), missing=missing)


@pytest.fixture
def board() -> Board:
    """FPL with two seeds, FedAvg with two."""
    (found,) = group_runs(
        [entry(50.0), entry(54.0, 1), entry(60.0, method="=fedavg"), entry(60.0, 1, method="=fedavg")]
    )
    return found


def test_latex_escapes_and_has_the_best_in_bold(board: Board) -> None:
    text = latex(board, "final")
    assert r"method & a\_1 & b & average & worst & spread & rounds & seeds \\" in text
    assert r"fpl & 51.00 $\pm$ 2.83 & 53.00 $\pm$ 2.83 & 52.00 $\pm$ 2.83 &" in text
    assert r"\textbf{60.00 $\pm$ 0.00}" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 1
    assert text.count("{") == text.count("}")


def test_records_have_numbers_and_how_many_seeds(board: Board) -> None:
    rows = {(row["method"], row["column"]): row for row in records([board], "final")}
    average = rows["fpl", "average"]
    assert (average["mean"], average["seeds"], average["partial"], average["best"]) == (52.0, 2, False, False)
    assert average["std"] == pytest.approx(8**0.5)
    assert rows["=fedavg", "average"]["best"]
    assert rows["fpl", "spread"]["mean"] == 1.0


def test_csv_holds_no_formula(board: Board) -> None:
    rows = list(csv.DictReader(io.StringIO(rendered_table([board], "final", "csv"))))
    assert {row["method"] for row in rows} == {"fpl", "'=fedavg"}
    assert len(rows) == 2 * 5


def test_partial_values_are_marked_in_every_format() -> None:
    (board,) = group_runs([entry(50.0, missing=("b",)), entry(60.0, method="fedavg")])
    assert r"$^\dagger$" in latex(board, "final")
    assert "without b" in latex(board, "final")
    partial = {row["column"]: row["partial"] for row in records([board], "final") if row["method"].startswith("fpl")}
    assert partial["average"]
    content = json.loads(rendered_table([board], "final", "json"))
    (table,) = content["tables"]
    row = next(row for row in table["rows"] if row["method"].startswith("fpl"))
    assert row["scores"]["average"]["partial"]
    assert not row["scores"]["average"]["best"]
    assert any("without b" in note for note in table["notes"])


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
    assert table["rows"][0]["state_sha256"] == [Run(folder / "run").state_sha256]


@pytest.mark.parametrize("words", [["--format", "xls"], ["--output", "t.xls"]], ids=["format", "suffix"])
def test_an_unknown_format_names_the_known_ones(
    words: list[str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / word) if "." in word else word for word in words]
    assert main(["table", str(folder), *words]) == 1
    assert "--format xls: choices: csv, json, latex" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
