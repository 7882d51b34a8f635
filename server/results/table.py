"""Runs side by side: accuracy per domain, average and worst, mean and standard deviation over seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.errors import ConfigError
from common.metrics import METRICS, Metric
from server.results.columns import domain_columns, domain_heads, mark_notes, summary_columns, unseen_mark
from server.results.groups import Board, Group, best_run, cells, group_runs
from server.results.overrides import export_command
from server.results.run import find_runs


class Rule(NamedTuple):
    """A rule by which a run is scored: its name above tables, and what a reader of a page should know of it."""

    name: str
    note: str


RULES = {
    "final": Rule("last round", "after the last scored round"),
    "last_n": Rule("mean of the last rounds", "mean over the last scored rounds, the rule of FPL and FedAPC"),
    "best_round": Rule(
        "best round by test score",
        "of the round with the best test average, which flatters: it picks by the test set",
    ),
    "validated": Rule(
        "best round by validation score",
        "of the round that is best on clients' validation samples, which no client trains on",
    ),
}
"""The rules that ``--rule`` takes."""

OWN_MODELS = "* scored with each client's own model, on its own domain; not ranked with rows of one shared model"


def measure(board: Board) -> str:
    """Return the name of what the table's scores are."""
    return METRICS[board.groups[0].runs[0].metric]


def render(board: Board, rule: str) -> Table:
    """A rich table; the best value of each column is bold when there is more than one row, see :func:`table_cells`."""
    rows = board.groups
    title = f"{board.title}: {measure(board)} in %, {RULES[rule].name}"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    caption = [OWN_MODELS] if any(row.personal for row in rows) else []
    caption += [*mark_notes(rows, rule), *board.notes()]
    if caption:
        table.caption, table.caption_justify = escape("\n".join(caption)), "left"
    head, texts = table_cells(rows, rule, "[bold]{}[/bold]")
    table.add_column("method", no_wrap=True)
    for column in [*head, "MB"]:
        table.add_column(escape(column), justify="right", no_wrap=True)
    for row, scores in zip(rows, texts, strict=True):
        sizes = [run.summary["bytes"] for run in row.runs]
        megabytes = statistics.fmean((size["up"] + size["down"]) / 1e6 for size in sizes)
        table.add_row(escape(row.label) + " *" * row.personal, *scores, f"{megabytes:.1f}")
    return table


def markdown(board: Board, rule: str) -> str:
    """The same table in Markdown, with what a reader needs to judge it above."""
    rows = board.groups
    head, texts = table_cells(rows, rule, "**{}**")
    lines = [
        f"{board.title}: {measure(board)} in %, {RULES[rule].name}; mean ± standard deviation over seeds.",
        "",
        "| " + " | ".join(["method", "scored", *head]) + " |",
        "|---|---|" + "---:|" * len(head),
    ]
    for row, scores in zip(rows, texts, strict=True):
        lines.append("| " + " | ".join([row.label, row.runs[0].summary["scored"], *scores]) + " |")
    if any(row.personal for row in rows):
        lines += ["", "own model: " + OWN_MODELS.removeprefix("* ") + "."]
    marks = [f"{note}." for note in mark_notes(rows, rule)]
    for note in [*marks, f"Code: {', '.join(board.codes)}.", *board.notes()]:
        lines += ["", note]
    return "\n".join(lines)


def table_cells(
    rows: Sequence[Group], rule: str, bold: str, *, spread: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Return the heads of a table's columns from the second on, and each row's texts below them.

    The columns are the domains in the order they appear, missing ones last; average, worst, spread if asked for;
    averages over domains that clients trained on and over others; the score of the same rounds on validation samples;
    rounds and seeds.

    Args:
        rows: the table's rows.
        rule: how runs are scored.
        bold: a format for the best value of a column, such as ``**{}**``.
        spread: whether the standard deviation between domains is a column.
    """
    domains = domain_columns(rows, rule)
    known = summary_columns(rows, spread=spread)
    shown = cells(rows, [*(f"domain:{name}" for name in domains), *known], rule)
    texts = []
    for row, values in zip(rows, shown, strict=True):
        line = ["-" if value is None else bold.format(value) if best else str(value) for value, best in values]
        for place, name in enumerate(domains):
            mark = unseen_mark(rows, row, name)
            line[place] += f" {mark}" if mark else ""
        texts.append(line)
    for row, line in zip(rows, texts, strict=True):
        skipped = statistics.fmean(run.summary["rounds_skipped"] for run in row.runs)  # which differs over seeds
        rounds = str(row.runs[0].summary["rounds"]) + (f" ({skipped:g} skipped)" if skipped else "")
        line += [rounds, ",".join(map(str, sorted(row.seeds)))]
    return [*domain_heads(rows, domains), *known.values(), "rounds", "seeds"], texts


def scored_boards(folders: Sequence[str], metric: Metric = "accuracy") -> list[Board]:
    """Return the tables of the scored runs in and below ``folders``.

    Args:
        folders: run folders, or folders with runs below them.
        metric: what the scores are.

    Raises:
        ConfigError: no run was scored, or a run has no confusion counts that the metric needs.
    """
    runs = [replace(run, metric=metric) for run in find_runs(folders) if run.scored]
    if not runs:
        raise ConfigError(f"no run in {', '.join(folders)} was scored on test images, so there is nothing to show")
    return group_runs(runs)


def print_table(folders: Sequence[str], rule: str = "final", metric: Metric = "accuracy") -> None:
    """Print the runs in and below ``folders`` side by side, one table per data set and protocol.

    Raises:
        ConfigError: there is nothing to show.
    """
    for board in scored_boards(folders, metric):
        print_whole(render(board, rule))
        if best := best_run(board.groups, rule):
            print(f"the best model leaves with: {export_command(best)}\n")


def print_whole(table: Table) -> None:
    """Print a table at its full width: one cut short is worse than one that wraps."""
    needed = Console(width=1000).measure(table).maximum
    Console(width=max(Console().width, needed)).print(table)
