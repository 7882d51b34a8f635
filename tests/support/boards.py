"""The runs of the recorded boards (docs/results/board.csv), and the arguments of tiny comparisons."""

from __future__ import annotations

import csv
from pathlib import Path

from support.scripts import ROOT

from goldfinch.results.rows import KnownRun, ScoreRow
from goldfinch.study.ranking import StudyRun, marked_name, rank_methods

BOARD = ROOT / "docs" / "results" / "board.csv"
EARLIER_READING = {"fdse", "fedpall"}
"""Methods whose plain runs have another reading than when the board was made."""

TINY = [
    *("data=glyphs", "data.domains=[handwritten,printed]", "model=small", "train.rounds=2"),
    *("train.local_steps=2", "train.batch_size=8", "protocol.samples=24", "protocol.validation=0.25"),
    *("rounds.test_samples=12", "train.device=cpu"),
]


def compare_command(folder: Path, methods: str, *more: str, studies: int = 2, trials: int = 2) -> list[str]:
    """The arguments of a tiny comparison: studies of so many trials for each field, and a final run of each."""
    numbers = ["--studies", str(studies), "--trials", str(trials), "--runs", "1"]
    return ["compare", "--methods", methods, *TINY, *numbers, "--output", str(folder), *more]


def read_runs(path: Path) -> list[StudyRun]:
    """The runs in a CSV file that a comparison wrote."""
    with path.open(newline="") as file:
        return [_run_of(line) for line in csv.DictReader(file)]


def _run_of(line: dict[str, str]) -> StudyRun:
    return StudyRun(
        board=line["board"],
        method=line["method"],
        case=line["case"],
        study=int(line["study"]),
        kind="final" if line["kind"] == "final" else "trial",
        number=int(line["number"]),
        state=line["state"],
        score=float(line["score"]),
        rounds=int(line["rounds"]),
        seconds=float(line["seconds"]),
        values=_numbers(line["values"]),
        accuracy=_numbers(line["accuracy"]),
        bytes=int(line["bytes"]),
        state_sha256=line["state_sha256"],
        code=line["code"],
        scored=line["scored"],
        bound=line.get("bound", ""),
        processor=line.get("processor", ""),
        at_chance=line.get("at_chance", ""),
        validation_images=int(line.get("validation_images", 0)),
        images=line.get("images", ""),
    )


def _numbers(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for item in text.split():
        name, _, number = item.partition("=")
        found[name] = float(number)
    return found


def board_tables(path: Path = BOARD) -> dict[str, list[list[str]]]:
    """The tables of docs/results/board.md as they follow from the runs: cells by views and kind of score."""
    boards: dict[str, list[StudyRun]] = {}
    for run in read_runs(path):
        if "fpl_office" not in run.board:
            boards.setdefault(run.board, []).append(run)
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, runs in boards.items():
        data, _, views = name.removesuffix("-uniform").partition("-small-views_")
        for ranking in rank_methods(runs):
            rows = found.setdefault(f"{views}, {ranking.title}", {})
            for row in ranking.rows:
                mark = "‡" if row.label in EARLIER_READING else ""
                rows.setdefault(marked_name(row) + mark, {})[data] = board_cell(row)
    tables: dict[str, list[list[str]]] = {}
    for title, rows in found.items():
        columns = sorted({data for cells in rows.values() for data in cells})
        lines = [["method", *columns]]
        for name in sorted(rows, key=lambda name: (name != "fedavg", name)):
            lines.append([name, *[rows[name].get(data, "") for data in columns]])
        tables[title] = lines
    return tables


def board_cell(row: ScoreRow[KnownRun]) -> str:
    """The accuracy, and the difference from FedAvg with its interval, in per cent."""
    value = row.value()
    assert value is not None
    text = f"{value.mean:.1f}"
    if row.difference is not None:
        text += f"; {row.difference.text(1)}"
    return text
