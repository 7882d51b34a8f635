"""Compare runs in one DataFrame, by the same rules as ``goldfinch table``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from common.errors import ConfigError
from common.metrics import RULES
from goldfinch.frames import library
from goldfinch.runs import Run

if TYPE_CHECKING:
    import pandas as pd

    from server.results.seeds import Value

Values = Literal["text", "mean", "std"]


def compare(
    runs: Sequence[Run], *, rule: str = "final", values: Values = "text", metric: str = "accuracy"
) -> pd.DataFrame:
    """Return scores in the metric's unit: a row per method or setting, a column per domain, averaged over seeds.

    Runs that were scored on different images or with different networks do not share a table; the first level of the
    index then names the table. ``.attrs["notes"]`` is a list of sentences about missing domains, different code and
    other differences. A partial number is marked with a dagger in ``text``, and is NaN in ``mean`` and ``std``.

    Args:
        runs: finished runs.
        rule: ``final``, ``last_n``, ``best_round`` or ``validated``, as in docs/protocols.md.
        metric: ``accuracy``, ``balanced_accuracy``, ``macro_f1``, ``worst_class``, or another that all runs have.
        values: ``text`` gives ``mean ± standard deviation``; ``mean`` and ``std`` give one of the two as numbers.

    Raises:
        ConfigError: no run was scored, or the rule is unknown.
    """
    from server.results.columns import domain_columns, mark_notes, score_columns
    from server.results.groups import group_runs
    from server.results.table import OWN_MODELS, check_metric

    if rule not in RULES:
        raise ConfigError(f"rule={rule!r}: choose one of {', '.join(RULES)}")
    scored = [replace(run.records, metric=metric) for run in runs if run.records.scored]
    if not scored:
        raise ConfigError("none of these runs was scored on test images, so there is nothing to compare")
    check_metric(metric, scored, "metric")
    boards = group_runs(scored)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    notes: list[str] = []
    for board in boards:
        columns = score_columns(board.groups, domain_columns(board.groups, rule))
        own_models: list[str] = []
        for group in board.groups:
            row: dict[str, Any] = {}
            for column, head in columns.items():
                row[head] = _cell(group.value(column, rule), values)
            row["rounds"] = group.rounds
            row["seeds"] = ", ".join(map(str, sorted(group.seeds)))
            rows[(board.title, group.label)] = row
            if group.personal:
                own_models.append(group.label)
        board_notes = [*mark_notes(board.groups, rule), *board.notes()]
        if own_models:
            board_notes.append(f"{', '.join(own_models)}: {OWN_MODELS.removeprefix('* ')}")
        for note in board_notes:
            if note not in notes:
                notes.append(note)
    table = library().DataFrame.from_dict(rows, orient="index")
    table.index.names = ["table", "method"]
    if len(boards) == 1:
        table = table.droplevel("table")
    table.attrs["notes"] = notes
    table.attrs["rule"] = rule
    return table


def _cell(value: Value | None, values: Values) -> str | float:
    """Return one cell of the table; ``value`` is ``None`` without a score."""
    if values == "text":
        return str(value or "-")
    if value is None or value.partial:
        return float("nan")
    if values == "mean":
        return value.mean
    if value.deviation is None:
        return float("nan")
    return value.deviation
