"""Recall by class and domain: in the terminal, in files, in the report, in Python."""

from __future__ import annotations

import csv
import io
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import recall_score
from support.partial import without_domain
from support.toy import CLASSES, DOMAINS, Toy

import goldfinch as gf
from goldfinch.cli import main
from goldfinch.record import find_runs
from goldfinch.results.classes import LOWEST, ClassTable, class_tables
from goldfinch.results.groups import group_runs
from goldfinch.results.report import results
from goldfinch.results.report.page import render
from tests.support.records import Line, rewrite, without_counts

NAMES = list(Toy().class_names)


@pytest.fixture(scope="module")
def folder(finished_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg with two seeds, and FPL with one."""
    folder = tmp_path_factory.mktemp("classes")
    for name in ("fedavg-0", "fedavg-1"):
        shutil.copytree(finished_runs / name, folder / name)
    shutil.copytree(finished_runs / "fpl-0", folder / "fpl")
    return folder


def recalls(record: gf.Run, domain: str) -> list[float]:
    """The recall of each class by scikit-learn, from the images of the last round one by one."""
    counts = record.confusion(domain).to_numpy()
    true, predicted = np.indices(counts.shape)
    images = true.repeat(counts.ravel()), predicted.repeat(counts.ravel())
    return list(100 * recall_score(*images, labels=range(CLASSES), average=None, zero_division=0))


def tables_of(folder: Path) -> list[ClassTable]:
    """The tables of recall of all runs in a folder."""
    (board,) = group_runs(find_runs([str(folder)]))
    return class_tables(board, "final")


def rows_of(text: str) -> dict[tuple[str, str, str], dict[str, str]]:
    """The records of a CSV by method, class and column."""
    return {(row["method"], row["class"], row["column"]): row for row in csv.DictReader(io.StringIO(text))}


def test_the_recalls_are_scikit_learn_s_over_seeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(folder), "--classes", "--format", "csv"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert len(rows) == 2 * CLASSES * (len(DOMAINS) + 2)
    for method, seeds in (("fedavg", ["fedavg-0", "fedavg-1"]), ("fpl", ["fpl"])):
        expected = np.array([[recalls(gf.load_run(folder / seed), domain) for domain in DOMAINS] for seed in seeds])
        label = next(name for name, _, _ in rows if name.startswith(method))
        for number, name in enumerate(NAMES):
            for place, domain in enumerate(DOMAINS):
                row = rows[label, name, domain]
                assert float(row["mean"]) == pytest.approx(expected[:, place, number].mean())
                if len(seeds) > 1:
                    assert float(row["std"]) == pytest.approx(expected[:, place, number].std(ddof=1))
            assert float(rows[label, name, "average"]["mean"]) == pytest.approx(expected[:, :, number].mean())
            assert float(rows[label, name, "worst"]["mean"]) == pytest.approx(expected.min(1)[:, number].mean())
            assert rows[label, name, "average"]["images"] == str(16 // CLASSES * len(DOMAINS))
        for column in (*DOMAINS, "average", "worst"):
            values = [float(rows[label, name, column]["mean"]) for name in NAMES]
            marked = [rows[label, name, column]["lowest"] == "True" for name in NAMES]
            differ = min(values) < max(values)
            assert marked == [differ and value == min(values) for value in values]


def test_the_terminal_marks_the_lowest_and_says_what_the_mark_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(folder / "fpl"), "--classes"]) == 0
    shown = capsys.readouterr().out
    assert f"{LOWEST} is the lowest of a column" in " ".join(shown.split())
    (table,) = tables_of(folder / "fpl")
    for number, row in enumerate(table.classes):
        (line,) = [line for line in shown.splitlines() if line.strip().startswith(row.label)]
        cells = [*table.texts(number), str(table.images[number])]
        assert line.split()[len(row.label.split()) :] == " ".join(cells).split()


@pytest.mark.parametrize(
    ("form", "lowest"),
    [("md", f"{LOWEST}**"), ("latex", r"$\downarrow$}"), ("json", '"lowest": true')],
    ids=["md", "latex", "json"],
)
def test_every_format_has_every_class_and_marks_the_lowest(
    form: str, lowest: str, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "classes.txt"
    assert main(["table", str(folder), "--classes", "--format", form, "--output", str(path)]) == 0
    text = path.read_text()
    for name in NAMES:
        assert text.count(name) >= 2
    assert lowest in text


def test_the_rule_chooses_the_round(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(folder / "fpl"), "--classes", "--rule", "best_round", "--format", "csv"]) == 0
    rows = rows_of(capsys.readouterr().out)
    record = gf.load_run(folder / "fpl")
    best = record.records.rules["best_round"]["round"]
    frame = record.recall(best)
    for (_, name, column), row in rows.items():
        if column in DOMAINS:
            assert float(row["mean"]) == pytest.approx(frame.loc[name, column])


def test_python_has_the_recalls_too(folder: Path) -> None:
    record = gf.load_run(folder / "fedavg-0")
    frame = record.recall()
    assert list(frame.index) == NAMES
    for domain in DOMAINS:
        assert list(frame[domain]) == pytest.approx(recalls(record, domain))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--rule", "last_n"], "choose --rule final, best_round, validated"),
        (["--metric", "macro_f1"], "choose one of the two"),
        (["--rule", "validated"], "has no confusion counts"),
    ],
    ids=["a mean of rounds", "another metric", "no such round"],
)
def test_what_has_no_recalls_says_so(
    words: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["table", str(folder), "--classes", *words]) == 1
    assert told in capsys.readouterr().err


def test_a_run_without_counts_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "fpl", tmp_path / "run")
    without_counts(tmp_path / "run")
    assert main(["table", str(tmp_path), "--classes"]) == 1
    assert f"{tmp_path / 'run'} has no confusion counts" in capsys.readouterr().err


def test_a_missing_domain_makes_the_values_over_domains_partial(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "fpl", tmp_path / "run")
    without_domain(tmp_path / "run", "dark", 4)
    assert main(["table", str(tmp_path), "--classes"]) == 0
    assert "without dark (last scored in round 3)" in " ".join(capsys.readouterr().out.split())
    (table,) = tables_of(tmp_path)
    place = table.heads.index("dark")
    for number in range(CLASSES):
        assert table.texts(number)[place] == "-"
        assert table.texts(number)[-1].endswith("†")
        assert table.texts(number)[-2].endswith("†")
        assert table.lowest[number][-2:] == [False, False]


def test_a_class_without_test_images_has_no_recall(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "fpl", tmp_path / "run")

    def relabelled(line: Line) -> Line:
        line["confusion"]["true"] = [max(label, 1) for label in line["confusion"]["true"]]
        return line

    rewrite(tmp_path / "run/scores.jsonl", relabelled)
    (table,) = tables_of(tmp_path)
    assert table.texts(0) == ["-"] * (len(DOMAINS) + 2)
    assert table.images[:2] == [0, 2 * 4 * len(DOMAINS)]
    assert gf.load_run(tmp_path / "run").recall().iloc[0].isna().all()


@pytest.mark.usefixtures("undrawn")
def test_the_report_has_a_table_for_each_row_and_marks_the_lowest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = group_runs(find_runs([str(folder)]))
    page = render(boards)
    assert page.count("Recall by class: ") == 2
    for table in class_tables(boards[0], "final"):
        for number in range(CLASSES):
            for text, lowest in zip(table.texts(number), table.lowest[number], strict=True):
                assert (f'<td class="bad">{text}</td>' if lowest else f"<td>{text}</td>") in page
    monkeypatch.setattr(results, "MAX_CLASSES_SHOWN", 2)
    (first, _) = results.recalls(boards)
    averages = [statistics.fmean(row.scores("average").values()) for row in first.class_table.classes]
    assert [averages[number] for number in first.shown] == sorted(averages)[:2]
    assert "2 classes with the lowest average of 4" in first.notes[-1]
