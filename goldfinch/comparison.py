"""Compare methods as ``goldfinch compare`` does, and show runs as ``goldfinch table`` does, as DataFrames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from common.errors import ConfigError
from common.metrics import RULES
from goldfinch.frames import library
from goldfinch.overrides import overrides_of
from goldfinch.runs import Run

if TYPE_CHECKING:
    import pandas as pd

    from server.results.seeds import Value
    from server.study.ranking import RankedMethod

Values = Literal["text", "mean", "std"]


def compare(
    methods: Sequence[str],
    *overrides: str,
    settings: Mapping[str, Any] | None = None,
    trials: int = 8,
    studies: int = 3,
    runs: int = 2,
    scores: Sequence[str] = ("in_domain",),
    weighting: str = "",
    output: Path | str | None = None,
    jobs: int = 1,
    **keywords: Any,
) -> pd.DataFrame:
    """Tune methods alike on validation samples, rank them on fresh seeds, and return the table.

    It does what ``goldfinch compare`` does, in the same folder. With one method it tunes this method. A study's setting
    is in ``METHOD/CASE/study-N/best.yaml`` below the folder, which ``gf.run(tuned=FILE)`` takes.

    Example::

        gf.compare(["fedavg", "fpl"], data="glyphs", rounds=10, settings={"protocol.samples": 100})

    Args:
        methods: names of conf/method/.
        overrides: settings of all runs, such as ``"data.image_size=32"``.
        settings: the same by key.
        trials: trials of a study for each searched setting.
        studies: independent tuning studies of each method; an interval needs two.
        runs: final runs of each study.
        scores: ``in_domain``, ``leave_one_out`` or both.
        weighting: ``uniform`` or ``samples`` for all methods; empty leaves each method's own.
        output: the folder; ``None`` takes one that is named after the settings.
        jobs: studies at the same time.
        keywords: as in :func:`goldfinch.run`, without ``method``, ``seed`` and ``output``.

    Returns:
        A row for each method, the first rank first: ``rank``, ``accuracy`` with its ``half_width``, ``worst`` (in per
        cent), the ``difference`` from FedAvg (or from the first method) with ``low`` and ``high``, ``p`` after Holm's
        correction, ``verdict``, ``trials``, ``hours`` and ``megabytes``. With both kinds of score the first level of
        the index names the kind. ``.attrs`` has ``notes`` and ``folder``.

    Raises:
        ConfigError: a setting is not valid, the folder holds another comparison, or no method has a result.
    """
    from server.commands.sweep import default_output
    from server.study import compare as study
    from server.study.rules import Rules

    given = (*overrides_of(settings, keywords), *overrides)
    rules = Rules(studies, trials, runs, tuple(scores), weighting)
    words = [f"methods={','.join(methods)}", *given, *rules.options]
    folder = Path(output or default_output("compare", words))
    done = study.compare(study.CompareRequest(tuple(methods), given, folder, rules), jobs)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for ranking in done.tables:
        for row in ranking.rows:
            rows[(ranking.title, row.method)] = _numbers(row)
    found = library().DataFrame.from_dict(rows, orient="index")
    found.index.names = ["scores", "method"]
    if len(done.tables) == 1:
        found = found.droplevel("scores")
    found.attrs["notes"] = done.all_notes
    found.attrs["folder"] = str(folder)
    return found


def _numbers(row: RankedMethod) -> dict[str, Any]:
    """Return the numbers of a row; ``None`` is what it lacks."""
    found: dict[str, Any] = {"rank": row.rank, "accuracy": None, "half_width": None, "worst": row.worst}
    found |= {"difference": None, "low": None, "high": None, "p": row.p, "verdict": row.verdict}
    if row.accuracy is not None:
        found |= {"accuracy": row.accuracy.mean, "half_width": row.accuracy.half_width}
    if row.difference is not None:
        found |= {"difference": row.difference.mean, "low": row.difference.low, "high": row.difference.high}
    return found | {"trials": row.trials, "hours": row.hours, "megabytes": row.megabytes}


def table(
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
        raise ConfigError("none of these runs was scored on test images, so there is nothing to show")
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
    found = library().DataFrame.from_dict(rows, orient="index")
    found.index.names = ["table", "method"]
    if len(boards) == 1:
        found = found.droplevel("table")
    found.attrs["notes"] = notes
    found.attrs["rule"] = rule
    return found


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
