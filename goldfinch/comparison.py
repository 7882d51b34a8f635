"""Runs side by side in one DataFrame, by the same rules as ``goldfinch table``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from common.errors import ConfigError
from common.metrics import METRICS, Metric
from goldfinch.frames import library
from goldfinch.runs import Run

if TYPE_CHECKING:
    import pandas as pd

    from server.results.groups import Board

Values = Literal["text", "mean", "std"]


def compare(
    runs: Sequence[Run], *, rule: str = "final", values: Values = "text", metric: Metric = "accuracy"
) -> pd.DataFrame:
    """Return scores in per cent: a row per method or setting, a column per domain, averaged over seeds.

    Runs that were trained or scored under different conditions do not share a table: the index then has a first level
    that names the table. What else a reader must know, such as missing domains or different code, is in
    ``.attrs["notes"]``, a list of sentences. A partial number is marked with a dagger in ``text``, and is NaN in
    ``mean`` and ``std``.

    Args:
        runs: finished runs.
        rule: ``final``, ``last_n``, ``best_round`` or ``validated``, as in docs/protocols.md.
        metric: ``accuracy``, ``balanced_accuracy``, ``macro_f1`` or ``worst_class``.
        values: ``text`` gives ``mean ± standard deviation``; ``mean`` and ``std`` give one of the two as numbers.

    Raises:
        ConfigError: no run was scored, or the rule is unknown.
    """
    from server.results.columns import domain_columns, domain_heads, mark_notes, summary_columns
    from server.results.groups import group_runs
    from server.results.table import OWN_MODELS, RULES

    if rule not in RULES:
        raise ConfigError(f"rule={rule!r}: choose one of {', '.join(RULES)}")
    if metric not in METRICS:
        raise ConfigError(f"metric={metric!r}: choose one of {', '.join(METRICS)}")
    scored = [replace(run.records, metric=metric) for run in runs if run.records.scored]
    if not scored:
        raise ConfigError("none of these runs was scored on test images, so there is nothing to compare")
    boards = group_runs(scored)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    notes: list[str] = []
    for board in boards:
        domains = domain_columns(board.groups, rule)
        known = summary_columns(board.groups)
        heads = [*domain_heads(board.groups, domains), *known.values()]
        columns = [*(f"domain:{name}" for name in domains), *known]
        for group in board.groups:
            cells = [_cell(group.value(column, rule), values) for column in columns]
            row = dict(zip(heads, cells, strict=True))
            row["rounds"] = group.rounds
            row["seeds"] = ", ".join(map(str, sorted(group.seeds)))
            rows[(board.title, group.label)] = row
        board_notes = [*mark_notes(board.groups, rule), *board.notes()]
        if any(group.personal for group in board.groups):
            board_notes.append(f"{_own_models(board)}: {OWN_MODELS.removeprefix('* ')}")
        notes += [note for note in board_notes if note not in notes]
    table = library().DataFrame.from_dict(rows, orient="index")
    table.index.names = ["table", "method"]
    if len(boards) == 1:
        table = table.droplevel("table")
    table.attrs["notes"] = notes
    table.attrs["rule"] = rule
    return table


def _cell(value: Any, values: Values) -> Any:
    """One cell of the table; ``value`` is a :class:`server.results.groups.Value`, or ``None`` without a score."""
    if values == "text":
        return "-" if value is None else str(value)
    if value is None or value.partial:
        return float("nan")
    if values == "mean":
        return value.mean
    return float("nan") if value.deviation is None else value.deviation


def _own_models(board: Board) -> str:
    return ", ".join(group.label for group in board.groups if group.personal)
