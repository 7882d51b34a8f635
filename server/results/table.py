"""Runs side by side: accuracy per domain, average and worst, mean and standard deviation over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from server.results.overrides import export_command
from server.results.run import Run, find_runs, labels

RULES = {"final": "last round", "last_n": "mean of the last rounds", "best_round": "best round by test score"}
RULES |= {"validated": "best round by validation score"}
SUMMARIES = ("average", "worst", "validation")
OWN_MODELS = "* scored with each client's own model, on its own domain; not ranked with rows of one shared model"

MOST_SETTINGS = 4
"""Settings that a row's label names at most."""


@dataclass
class Row:
    """The runs of one method under one configuration, by seed.

    Args:
        label: the method's name, with the settings that tell rows of one method apart.
        summaries: the runs' ``summary.json``.
        runs: the runs.
    """

    label: str
    summaries: list[dict[str, Any]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    @property
    def rounds(self) -> str:
        """Rounds of the run, and how many of them were skipped: a mean over seeds where it differs."""
        skipped = statistics.fmean(summary["rounds_skipped"] for summary in self.summaries)
        rounds = str(self.summaries[0]["rounds"])
        return f"{rounds} ({skipped:g} skipped)" if skipped else rounds

    @property
    def personal(self) -> bool:
        """Whether clients were scored each with its own model, not all with one."""
        return bool(self.summaries[0]["scored"] == "own model")

    def values(self, column: str, rule: str) -> list[float]:
        """The column's value in each run that has one: a domain's accuracy, or one of :data:`SUMMARIES`."""
        scores = [summary["scores"][rule] for summary in self.summaries if rule in summary["scores"]]
        if column in SUMMARIES:
            return [float(score[column]) for score in scores if column in score]
        return [float(score["accuracy"][column]) for score in scores if column in score["accuracy"]]

    def mean(self, column: str, rule: str) -> float | None:
        """Mean over seeds; ``None`` where no run has the column."""
        values = self.values(column, rule)
        return statistics.fmean(values) if values else None


def group_rows(runs: Sequence[Run]) -> list[Row]:
    """One row per method and settings, named by the settings in which it differs from its namesakes, seeds together."""
    rows: dict[str, Row] = {}
    first: dict[str, Run] = {}
    for run in runs:
        summary = run.summary
        key = " ".join(str(summary[part]) for part in ("method", "data", "protocol", "configuration", "rounds"))
        row = rows.setdefault(key, Row(str(summary["method"])))
        first.setdefault(key, run)
        twin = any(
            other["seed"] == summary["seed"] and other["state_sha256"] == summary["state_sha256"]
            for other in row.summaries
        )
        if not twin:  # the same run again, on another engine say, is not a further sample
            row.summaries.append(dict(summary))
            row.runs.append(run)
    for row, label in zip(rows.values(), labels(list(first.values()), MOST_SETTINGS), strict=True):
        row.label = label
    ordered = list(rows.values())
    for label in {row.label for row in ordered}:
        namesakes = [row for row in ordered if row.label == label]
        for row in namesakes if len(namesakes) > 1 else ():
            row.label = f"{label} ({row.summaries[0]['configuration'][:6]}, {row.summaries[0]['rounds']} rounds)"
    return ordered


def render(rows: Sequence[Row], rule: str) -> Table:
    """A rich table; the best value of each column is bold when there is more than one row, see :func:`_best`."""
    first = rows[0].summaries[0]
    columns = _columns(rows, rule)
    best = _best(rows, columns, rule)
    title = f"{first['data']}, {first['protocol']}, {first['model']}: accuracy in %, {RULES[rule]}"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    if any(row.personal for row in rows):
        table.caption, table.caption_justify = OWN_MODELS, "left"
    table.add_column("method", no_wrap=True)
    for column in [*columns, "rounds", "seeds", "MB"]:
        table.add_column(escape(column), justify="right", no_wrap=True)
    for row in rows:
        cells = [_cell(row, column, rule, best.get(column) if row in _rivals(rows) else None) for column in columns]
        megabytes = statistics.fmean(
            (summary["bytes"]["up"] + summary["bytes"]["down"]) / 1e6 for summary in row.summaries
        )
        seeds = ",".join(str(summary["seed"]) for summary in sorted(row.summaries, key=lambda item: item["seed"]))
        table.add_row(escape(row.label) + " *" * row.personal, *cells, row.rounds, seeds, f"{megabytes:.1f}")
    return table


def markdown(rows: Sequence[Row], rule: str) -> str:
    """The same table in Markdown, with what a reader needs to judge it above."""
    first = rows[0].summaries[0]
    columns = _columns(rows, rule)
    best = _best(rows, columns, rule)
    lines = [
        f"{first['data']}, protocol {first['protocol']}, model {first['model']}: accuracy in %, {RULES[rule]}; "
        "mean ± standard deviation over seeds.",
        "",
        "| " + " | ".join(["method", "scored", *columns, "rounds", "seeds"]) + " |",
        "|---|---|" + "---:|" * (len(columns) + 2),
    ]
    for row in rows:
        cells = []
        for column in columns:
            text = _cell(row, column, rule, best.get(column) if row in _rivals(rows) else None)
            cells.append(text.replace("[bold]", "**").replace("[/bold]", "**"))
        seeds = ",".join(str(summary["seed"]) for summary in sorted(row.summaries, key=lambda item: item["seed"]))
        lines.append("| " + " | ".join([row.label, row.summaries[0]["scored"], *cells, row.rounds, seeds]) + " |")
    if any(row.personal for row in rows):
        lines += ["", "own model: " + OWN_MODELS.removeprefix("* ") + "."]
    return "\n".join(lines)


def _columns(rows: Sequence[Row], rule: str) -> list[str]:
    """Domains in the order they appear, then average and worst, and what the same rounds had on validation samples."""
    scores = [summary["scores"].get(rule, {}) for row in rows for summary in row.summaries]
    domains = dict.fromkeys(name for score in scores for name in score.get("accuracy", {}))
    return [*domains, *(name for name in SUMMARIES if name != "validation" or any(name in each for each in scores))]


def _rivals(rows: Sequence[Row]) -> list[Row]:
    """Rows that are ranked with each other: those scored with one model of all clients, or all if there are none."""
    return [row for row in rows if not row.personal] or list(rows)


def _best(rows: Sequence[Row], columns: Sequence[str], rule: str) -> dict[str, float]:
    """The highest mean of each column among rivals; empty for a single row, which is not the best of anything."""
    rivals = _rivals(rows)
    means = {column: [mean for row in rivals if (mean := row.mean(column, rule)) is not None] for column in columns}
    return {column: max(values) for column, values in means.items() if values and len(rivals) > 1}


def _cell(row: Row, column: str, rule: str, best: float | None) -> str:
    values = row.values(column, rule)
    if not values:
        return "-"
    mean = statistics.fmean(values)
    text = f"{mean:.2f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.2f}"
    return f"[bold]{text}[/bold]" if best is not None and mean >= best - 1e-9 else text


def boards(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that can stand in one table: the same data set and protocol."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.summary["data"], run.summary["protocol"]), []).append(run)
    return list(groups.values())


def print_table(folders: Sequence[str], rule: str = "final") -> None:
    """Print the runs in and below ``folders`` side by side, one table per data set and protocol.

    Raises:
        ConfigError: there is nothing to show.
    """
    for members in boards(find_runs(folders)):
        rows = group_rows(members)
        print_whole(render(rows, rule))
        if best := winner(rows, rule):
            print(f"the best model leaves with: {export_command(best)}\n")


def winner(rows: Sequence[Row], rule: str = "final") -> Run | None:
    """The run of the lowest seed in the row of the best average among rivals; ``None`` if none was scored."""
    scored = [(mean, row) for row in _rivals(rows) if (mean := row.mean("average", rule)) is not None]
    best = max(scored, key=lambda pair: pair[0])[1] if scored else None
    return min(best.runs, key=lambda run: int(run.summary["seed"])) if best else None


def print_whole(table: Table) -> None:
    """Print a table at its full width: one cut short is worse than one that wraps."""
    needed = Console(width=1000).measure(table).maximum
    Console(width=max(Console().width, needed)).print(table)
