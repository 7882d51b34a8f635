"""Compare methods as ``goldfinch compare`` does, and show runs as ``goldfinch table`` does, as DataFrames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from common.errors import ConfigError
from goldfinch.folders import named_folder
from goldfinch.overrides import SharedKeywords, check_jobs, check_reachable, dotted_name, overrides_of, with_signature
from goldfinch.runs import Run, Runs
from goldfinch.study.options import Rules
from server.run.signals import terminable

if TYPE_CHECKING:
    import pandas as pd

    from goldfinch.results.frames import Values
    from goldfinch.results.rows import KnownRun, ScoreRow
    from goldfinch.study.ranking import Ranking


@with_signature(SharedKeywords)
def compare(
    methods: str | type | Sequence[str | type],
    *overrides: str,
    settings: Mapping[str, Any] | None = None,
    output: Path | str | None = None,
    storage: str = "",
    jobs: int = 1,
    studies: int = Rules.studies,
    trials: int = Rules.trials,
    runs: int = Rules.runs,
    scores: Sequence[str] = Rules.scores,
    weighting: str = Rules.weighting,
    batch: int = Rules.batch,
    **keywords: Unpack[SharedKeywords],
) -> pd.DataFrame:
    """Tune methods alike on validation samples, rank them on fresh seeds, and return the table.

    The function does what ``goldfinch compare`` does, in the same folder. With one method it tunes this method. A
    study's setting is in ``METHOD/CASE/study-N/best.yaml`` below the folder, which ``gf.run(tuned=FILE)`` takes.

    Example::

        gf.compare(["fedavg", "fpl"], data="glyphs", rounds=10, settings={"protocol.samples": 100})

    Args:
        methods: names of conf/method/ and classes of one's own, or one of them.
        overrides: settings of all runs, such as ``"data.image_size=32"``.
        settings: the same by key.
        output: the folder; ``None`` takes one that is named after the settings.
        storage: the URL of a database that keeps the studies; empty keeps them in the folder.
        jobs: processes at the same time.
        studies: independent tuning studies of each method; an interval needs two, a test three.
        trials: trials of a study for each searched setting.
        runs: final runs of each study.
        scores: ``in_domain``, ``leave_one_out`` or both.
        weighting: ``uniform`` or ``samples`` for all methods; empty leaves each method's own.
        batch: trials of a study that are drawn without each other's scores.
        keywords: settings as in :func:`goldfinch.run`, without ``method``, ``seed`` and ``output``. ``overwrite=True``
            replaces a comparison of other settings or other code, which is kept otherwise.

    Returns:
        A row for each method, the first rank first: ``bound`` (``lower``, ``upper`` or none; such a row has no rank),
        ``rank``, ``chance`` (``at chance``, or the seeds that are), ``accuracy`` with its ``std``, the standard
        deviation over studies (of one study: over its final runs), ``worst`` (in per cent), the ``difference`` from
        FedAvg (or from the first method) with its 95 % interval from ``low`` to ``high``, ``p`` after Holm's
        correction, ``verdict``, ``trials``, ``hours`` and ``megabytes``. With both kinds of score the first level of
        the index names the kind. ``.attrs`` has ``notes`` and ``folder``.

    Raises:
        ConfigError: a setting is not valid, the folder holds another comparison, or no method has a result.
    """
    from common.extras import libraries_of
    from goldfinch.commands.sweep import default_output
    from goldfinch.kept import split_overwrite
    from goldfinch.results.sheets import pandas_library

    with libraries_of("tune", "goldfinch compare"):
        from goldfinch.study import compare as study

    if isinstance(methods, str | type):
        methods = [methods]
    names: list[str] = []
    for method in methods:
        if isinstance(method, type):
            names.append(dotted_name(method))
        else:
            names.append(method)
    check_reachable({"method": str(names)}, "a comparison")  # each run has a process of its own
    rules = Rules(studies, trials, runs, scores, weighting, batch)
    check_jobs(jobs)
    given, overwrite = split_overwrite(overrides_of(settings, keywords, overrides))
    words = [f"methods={','.join(names)}", *given, *rules.options]
    folder = default_output("compare", sorted(words)) if output is None else named_folder(output)
    request = study.CompareRequest(tuple(names), tuple(given), folder, rules, storage, overwrite)
    with terminable():
        done = study.compare(request, jobs)
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for ranking in done.tables:
        for row in ranking.rows:
            rows[(ranking.title, row.label)] = _numbers(ranking, row)
    table = pandas_library().DataFrame.from_dict(rows, orient="index")
    table.index.names = ["scores", "method"]
    if len(done.tables) == 1:
        table = table.droplevel("scores")
    table.attrs["notes"] = done.all_notes
    table.attrs["folder"] = str(folder)
    return table


def _numbers(ranking: Ranking, row: ScoreRow[KnownRun]) -> dict[str, Any]:
    """Return the numbers of a row; ``None`` is what it lacks."""
    numbers: dict[str, Any] = {"bound": row.bound, "rank": row.rank, "chance": row.chance or None}
    numbers |= {"accuracy": None, "std": None, "worst": None}
    numbers |= {"difference": None, "low": None, "high": None, "p": row.p, "verdict": row.verdict}
    value, worst = row.value(), row.value("worst")
    if value is not None and worst is not None:
        numbers |= {"accuracy": value.mean, "std": value.deviation, "worst": worst.mean}
    if row.difference is not None:
        numbers |= {"difference": row.difference.mean, "low": row.difference.low, "high": row.difference.high}
    return numbers | {
        "trials": ranking.trials[row.label],
        "hours": ranking.hours[row.label],
        "megabytes": row.megabytes,
    }


def table(
    runs: Run | Iterable[Run],
    *,
    rule: str = "final",
    values: Values = "text",
    metric: str = "accuracy",
    labels: str | Sequence[str] | Mapping[str, str] = (),
) -> pd.DataFrame:
    """Return the table of a run, or of any runs; see :meth:`goldfinch.runs.Runs.table`."""
    if isinstance(runs, Run):
        runs = [runs]
    if isinstance(runs, str) or not isinstance(runs, Iterable):
        raise ConfigError(f"gf.table takes runs, such as gf.load_runs(FOLDER) returns, not {runs!r}")
    if not isinstance(runs, Runs):
        runs = Runs(runs)
    for run in runs:
        if not isinstance(run, Run):
            raise ConfigError(f"gf.table takes runs, such as gf.load_runs(FOLDER) returns, not {run!r}")
    return runs.table(rule=rule, values=values, metric=metric, labels=labels)
