"""Tables of runs: accuracy per domain, average and worst, mean and standard deviation over seeds."""

import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.errors import ConfigError, nearest
from common.metrics import METRICS, RULES
from server.results.columns import domain_columns, mark_notes, score_columns, unseen_mark
from server.results.groups import MANY_ROWS, Board, Group, best_run, cells, group_runs
from server.results.overrides import export_command
from server.results.run import Run, find_runs

OWN_MODELS = "* scored with each client's own model, on its own domain; not ranked with rows of one shared model"


def measure(board: Board) -> str:
    """Return the name and the unit of the table's metric, such as ``macro F1 in %``."""
    return board.groups[0].runs[0].measure.title


def render(board: Board, rule: str) -> Table:
    """Return the table for the terminal; the best value of each column is bold, see :func:`table_cells`."""
    title = f"{board.title}: {measure(board)}, {RULES[rule].name}"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    notes = [*mark_notes(board.groups, rule), *board.notes()]
    if has_own_models(board):
        notes.insert(0, OWN_MODELS)
    if notes:
        table.caption, table.caption_justify = escape("\n".join(notes)), "left"
    heads, texts = table_cells(board.groups, rule, "[bold]{}[/bold]")
    table.add_column("method", no_wrap=True)
    for head in [*heads, "MB"]:
        table.add_column(escape(head), justify="right", no_wrap=True)
    for group, row in zip(board.groups, texts, strict=True):
        megabytes: list[float] = []
        for run in group.runs:
            sent = run.summary["bytes"]
            megabytes.append((sent["up"] + sent["down"]) / 1e6)
        table.add_row(escape(starred_label(group)), *row, f"{statistics.fmean(megabytes):.1f}")
    return table


def has_own_models(board: Board) -> bool:
    """Return whether a row of the table is scored with clients' own models."""
    return any(group.personal for group in board.groups)


def starred_label(group: Group) -> str:
    """Return a group's label; with a star if it is scored with clients' own models."""
    return group.label + " *" * group.personal


def markdown(board: Board, rule: str) -> str:
    """Return the table in Markdown, with its metric and rule above and its notes below."""
    heads, texts = table_cells(board.groups, rule, "**{}**")
    lines = [
        f"{board.title}: {measure(board)}, {RULES[rule].name}; mean ± standard deviation over seeds.",
        "",
        "| " + " | ".join(["method", "scored", *heads]) + " |",
        "|---|---|" + "---:|" * len(heads),
    ]
    for group, row in zip(board.groups, texts, strict=True):
        lines.append("| " + " | ".join([group.label, group.runs[0].summary["scored"], *row]) + " |")
    if has_own_models(board):
        lines += ["", "own model: " + OWN_MODELS.removeprefix("* ") + "."]
    for note in mark_notes(board.groups, rule):
        lines += ["", f"{note}."]
    for note in [f"Code: {', '.join(board.codes)}.", *board.notes()]:
        lines += ["", note]
    return "\n".join(lines)


def table_cells(
    rows: Sequence[Group], rule: str, bold: str, *, spread: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Return the heads of a table's columns after the first, and the texts of each row below them.

    The columns are those of :func:`server.results.columns.score_columns`, rounds, and seeds.

    Args:
        rows: the table's rows.
        rule: how runs are scored.
        bold: a format for the best value of a column, such as ``**{}**``.
        spread: whether the standard deviation between domains is a column.
    """
    columns = score_columns(rows, domain_columns(rows, rule), spread=spread)
    values = cells(rows, list(columns), rule)
    texts: list[list[str]] = []
    for group, row in zip(rows, values, strict=True):
        line: list[str] = []
        for column, (value, best) in zip(columns, row, strict=True):
            text = "-"
            if best:
                text = bold.format(value)
            elif value is not None:
                text = str(value)
            mark = unseen_mark(rows, group, column.removeprefix("domain:"))
            if mark:
                text += f" {mark}"
            line.append(text)
        rounds = str(group.runs[0].summary["rounds"])
        skipped = statistics.fmean(run.summary["rounds_skipped"] for run in group.runs)  # which differs over seeds
        if skipped:
            rounds += f" ({skipped:g} skipped)"
        texts.append([*line, rounds, ",".join(map(str, sorted(group.seeds)))])
    return [*columns.values(), "rounds", "seeds"], texts


def scored_boards(folders: Sequence[str], metric: str = "accuracy") -> list[Board]:
    """Return the tables of the scored runs in and below ``folders``.

    Args:
        folders: run folders, or folders with runs below them.
        metric: the metric of the scores.

    Raises:
        ConfigError: no run was scored, or a run does not have the metric.
    """
    runs = [replace(run, metric=metric) for run in find_runs(folders) if run.scored]
    if not runs:
        raise ConfigError(f"no run in {', '.join(folders)} was scored on test images, so there is nothing to show")
    check_metric(metric, runs, "--metric")
    return group_runs(runs)


def check_metric(metric: str, runs: Sequence[Run], option: str) -> None:
    """Check that every run has a metric.

    Args:
        metric: the metric's name.
        runs: the runs.
        option: how the user named it, for messages.

    Raises:
        ConfigError: no run knows the metric, or one of them lacks it.
    """
    known = dict(METRICS)
    for run in runs:
        known |= dict.fromkeys(run.measures, "")
    if metric not in known:
        raise ConfigError(f"{option} {metric}: {nearest(metric, known)}")
    for run in runs:
        _ = run.measure  # raises if the run lacks it


def print_table(folders: Sequence[str], rule: str = "final", metric: str = "accuracy") -> None:
    """Print the tables of the runs in and below ``folders``, one per data set, protocol and model.

    Raises:
        ConfigError: there is nothing to show.
    """
    boards = scored_boards(folders, metric)
    for board in boards:
        print_whole(render(board, rule))
        best = best_run(board.groups, rule)
        if best is not None:
            print(f"export the best model: {export_command(best)}\n")
    if sum(len(board.groups) for board in boards) > MANY_ROWS:
        for folder in folders:
            print(smaller_tables(Path(folder), boards), end="")


def smaller_tables(folder: Path, boards: Sequence[Board]) -> str:
    """Return a text that names the folders directly in ``folder`` which hold several of the runs; else an empty one.

    Args:
        folder: a folder with runs below it.
        boards: the tables that were shown.
    """
    place = folder.resolve()
    counts: Counter[str] = Counter()
    for board in boards:
        for run in board.runs:
            below = run.folder.resolve()
            if place in below.parents:
                counts[below.relative_to(place).parts[0]] += 1
    several = [(name, count) for name, count in counts.items() if count > 1]
    if len(counts) < 2 or not several:
        return ""
    lines = [f"{folder} holds runs of {len(counts)} folders. A table of one of them:\n"]
    for name, count in several:
        lines.append(f"  {shlex.join(['goldfinch', 'table', str(folder / name)])}   # {count} runs\n")
    return "".join(lines)


def print_whole(table: Table) -> None:
    """Print a table at its full width, so that no cell is cut; the terminal may wrap its lines."""
    needed = Console(width=1000).measure(table).maximum
    Console(width=max(Console().width, needed)).print(table)
