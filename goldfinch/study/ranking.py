"""The runs of a comparison as lines of a CSV file, and the table that ranks the methods by them."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from goldfinch.results.statistics import Difference, holm, mean_interval, paired_difference, ranks, verdict_on
from goldfinch.study.options import IN_DOMAIN, LEAVE_ONE_OUT
from goldfinch.study.rules import BASE

BOUNDS = "bounds, never ranked or tested"
TITLES = {IN_DOMAIN: "in-domain", LEAVE_ONE_OUT: "leave-one-domain-out"}
OWN_MODELS = "own model"
"""The value of ``scored`` of a run in which each client is scored with a model of its own."""


@dataclass(frozen=True)
class StudyRun:
    """A trial, or a final run: one line of ``runs.csv``.

    Args:
        board: what the comparison is of: data set, net, views and weighting.
        method: the method's name in conf/method/.
        case: ``in_domain``, or ``leave_out:`` with the domain that has no client.
        study: the number of the tuning study, from 0.
        kind: ``trial`` (scored on validation samples) or ``final`` (scored on test images).
        number: the trial's number, or the final run's seed.
        state: ``complete``, ``pruned`` (ended early) or ``failed`` (no score).
        score: in per cent: the average over domains after the last round, of the domain alone that was left out.
        rounds: completed rounds.
        seconds: wall seconds.
        values: the searched settings.
        accuracy: test accuracy of each domain in per cent; of a trial none.
        bytes: bytes to and from all clients; of a trial 0.
        state_sha256: the hash of a final run's last state.
        code: the hash of the Goldfinch that ran, without packages of the user's own.
        scored: ``global model``, or ``own model`` of each client.
        bound: ``lower`` or ``upper`` if the method is that bound of the table; empty otherwise.
        processor: the kind of processor of a final run.
    """

    board: str
    method: str
    case: str
    study: int
    kind: Literal["trial", "final"]
    number: int
    state: str
    score: float
    rounds: int
    seconds: float
    values: dict[str, float]
    accuracy: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    state_sha256: str = ""
    code: str = ""
    scored: str = "global model"
    bound: str = ""
    processor: str = ""


def runs_csv(runs: Sequence[StudyRun]) -> str:
    """Return the runs as a CSV file. Mappings are ``name=number`` with spaces between them.

    Without a bound among the methods, or a processor among the runs, there is no such column, as in older files.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = [each.name for each in fields(StudyRun)]
    for name in ("bound", "processor"):
        if not any(getattr(run, name) for run in runs):
            names.remove(name)
    writer.writerow(names)
    for run in runs:
        cells: list[str] = []
        for name in names:
            value = getattr(run, name)
            if isinstance(value, dict):
                value = " ".join(f"{key}={number!r}" for key, number in value.items())
            cells.append(str(value))
        writer.writerow(cells)
    return stream.getvalue()


# ---- the ranking -----------------------------------------------------------------------------------------------------


@dataclass
class RankedMethod:
    """One row of a table.

    Attributes:
        method: the method.
        studies: the mean score of each study's final runs, by the study's number.
        accuracy: their mean and its interval; ``None`` without a final run.
        worst: the mean of the lowest accuracy of a domain.
        own_models: whether each client is scored with a model of its own. Such a row has no rank.
        bound: ``lower`` or ``upper`` for a bound of the table. Such a row has no rank, difference or test.
        missing: final runs that the other rows have and this one has not; empty for a complete row.
        codes: the codes that its final runs ran.
        processors: the kinds of processors that they were computed on.
        rank: its rank by the mean; ``None`` without one.
        difference: the paired difference from the base, study by study; ``None`` for the base and without a rank.
        p: its p-value after Holm's correction over all tests of the page; ``None`` without a test.
        trials: trials of all studies.
        hours: wall hours of trials and final runs.
        megabytes: megabytes of a final run, both ways, all clients.
    """

    method: str
    studies: dict[int, float]
    accuracy: Difference | None
    worst: float
    own_models: bool
    bound: str
    missing: list[str]
    codes: set[str]
    processors: set[str]
    rank: int | None = None
    difference: Difference | None = None
    p: float | None = None
    trials: int = 0
    hours: float = 0.0
    megabytes: float = 0.0

    @property
    def ranked(self) -> bool:
        """Whether the row is complete, scored with one shared model, and no bound."""
        return not self.own_models and not self.bound and not self.missing

    @property
    def name(self) -> str:
        """The method's name with its marks."""
        name = self.method
        if self.bound:
            name += f" ({self.bound} bound)"
        if self.own_models:
            name += " *"
        if self.missing:
            name += " †"
        return name

    @property
    def verdict(self) -> str:
        """The verdict on the difference from the base; empty without one."""
        if self.difference is None:
            return ""
        return verdict_on(self.difference, self.p)


@dataclass(frozen=True)
class Ranking:
    """One table: the methods by one kind of score, in the order of their ranks; rows without a rank come last.

    Args:
        kind: ``in_domain`` or ``leave_one_out``.
        base: the method that the others are compared with.
        rows: the methods.
    """

    kind: str
    base: str
    rows: list[RankedMethod]

    @property
    def title(self) -> str:
        """The kind of score."""
        return TITLES[self.kind]


def rank_methods(runs: Sequence[StudyRun]) -> list[Ranking]:
    """Return the tables of one comparison. The tests of all its tables are corrected together.

    Args:
        runs: the runs of one board.
    """
    found: list[Ranking] = []
    for kind in TITLES:
        chosen = [run for run in runs if (run.case == IN_DOMAIN) == (kind == IN_DOMAIN)]
        if chosen:
            found.append(_ranking(kind, chosen))
    correct_together([row for table in found for row in table.rows])
    return found


def correct_together(rows: Sequence[RankedMethod]) -> None:
    """Set the p-values of the rows that were tested, corrected by Holm's procedure over all of them."""
    tested: list[RankedMethod] = []
    p_values: list[float] = []
    for row in rows:
        if row.difference is not None and row.difference.p is not None:
            tested.append(row)
            p_values.append(row.difference.p)
    for row, p in zip(tested, holm(p_values), strict=True):
        row.p = p


def _ranking(kind: str, runs: Sequence[StudyRun]) -> Ranking:
    by_method: dict[str, list[StudyRun]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    expected: dict[tuple[str, int], int] = {}
    for found in by_method.values():
        for key, count in _final_runs(found).items():
            expected[key] = max(count, expected.get(key, 0))
    rows = [_row(method, found, expected) for method, found in by_method.items()]
    base = next(iter(by_method))
    if BASE in by_method:
        base = BASE
    elif any(not row.bound for row in rows):
        base = next(row.method for row in rows if not row.bound)
    ranked = [row for row in rows if row.ranked]
    means = [statistics.fmean(row.studies.values()) for row in ranked]
    for row, rank in zip(ranked, ranks(means), strict=True):
        row.rank = rank
    _compare_with_base(ranked, base)
    return Ranking(kind, base, sorted(rows, key=_order))


def _compare_with_base(ranked: Sequence[RankedMethod], base: str) -> None:
    """Set the differences of the rows from the base, if the base has a rank."""
    base_row = next((row for row in ranked if row.method == base), None)
    if base_row is None:
        return
    numbers = sorted(base_row.studies)
    base_scores = [base_row.studies[number] for number in numbers]
    for row in ranked:
        if row is not base_row:
            scores = [row.studies[number] for number in numbers]
            row.difference = paired_difference(scores, base_scores)


def _final_runs(runs: Sequence[StudyRun]) -> dict[tuple[str, int], int]:
    """Return the number of final runs of each case and study."""
    found: dict[tuple[str, int], int] = {}
    for run in runs:
        if run.kind == "final":
            found[run.case, run.study] = found.get((run.case, run.study), 0) + 1
    return found


def _row(method: str, runs: Sequence[StudyRun], expected: dict[tuple[str, int], int]) -> RankedMethod:
    """Return a method's row without its rank."""
    has = _final_runs(runs)
    missing: list[str] = []
    for (case, study), count in expected.items():
        if has.get((case, study), 0) < count:
            missing.append(f"{case}, study {study}: {has.get((case, study), 0)} of {count} final runs")
    finals = [run for run in runs if run.kind == "final"]
    scores = study_scores(finals)
    accuracy = None
    worst = 0.0
    if scores:
        accuracy = mean_interval(list(scores.values()))
        worst = statistics.fmean(worst_scores(finals).values())
    row = RankedMethod(
        method,
        scores,
        accuracy,
        worst,
        own_models=any(run.scored == OWN_MODELS for run in runs),
        bound=runs[0].bound,
        missing=missing,
        codes={run.code for run in finals},
        processors={run.processor for run in finals},
        trials=len(runs) - len(finals),
        hours=sum(run.seconds for run in runs) / 3600,
    )
    if finals:
        row.megabytes = statistics.fmean(run.bytes for run in finals) / 1e6
    return row


def study_scores(finals: Sequence[StudyRun]) -> dict[int, float]:
    """Return the score of each study, by its number: the mean over its final runs, then over domains left out."""
    by_case: dict[int, dict[str, list[float]]] = {}
    for run in finals:
        by_case.setdefault(run.study, {}).setdefault(run.case, []).append(run.score)
    found: dict[int, float] = {}
    for study in sorted(by_case):
        found[study] = statistics.fmean([statistics.fmean(scores) for scores in by_case[study].values()])
    return found


def worst_scores(finals: Sequence[StudyRun]) -> dict[int, float]:
    """Return the lowest accuracy of a domain by seed; with domains left out, the lowest of theirs."""
    by_seed: dict[int, list[float]] = {}
    for run in finals:
        values = [run.score]
        if run.case == IN_DOMAIN:
            values = list(run.accuracy.values())
        by_seed.setdefault(run.number, []).extend(values)
    return {seed: min(by_seed[seed]) for seed in sorted(by_seed)}


def _order(row: RankedMethod) -> tuple[bool, str, float, str]:
    mean = -1.0
    if row.accuracy is not None:
        mean = row.accuracy.mean
    return row.rank is None, row.bound, -round(mean, 2), row.method


HEADS = (
    "rank",
    "method",
    "accuracy, 95 %",
    "worst",
    "minus BASE, 95 %",
    "verdict (Holm)",
    "trials",
    "hours",
    "MB a run",
)
VERDICTS = {"ahead": "Ahead of", "behind": "Behind", "not distinguished": "Not distinguished from"}


def ranked_table(ranking: Ranking) -> str:
    """Return a table in Markdown with its notes. Its columns are aligned, so that it can be read in a terminal."""
    lines = [[head.replace("BASE", ranking.base) for head in HEADS]]
    for row in ranking.rows:
        lines.append(_cells(row))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts: list[str] = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        texts.append(f"| {' | '.join(cells)} |")
    texts.insert(1, f"|{'|'.join('---:'.rjust(width + 2, '-') for width in widths)}|")
    texts.append("")
    for note in notes(ranking):
        texts.append(f"- {note}")
    return "\n".join(texts).rstrip()


def _cells(row: RankedMethod) -> list[str]:
    rank, accuracy, difference = "", "none", ""
    if row.rank is not None:
        rank = str(row.rank)
    if row.accuracy is not None:
        accuracy = f"{row.accuracy.mean:.2f}"
        if row.accuracy.half_width is not None:
            accuracy += f" ± {row.accuracy.half_width:.2f}"
    if row.difference is not None:
        difference = str(row.difference)
    costs = [str(row.trials), f"{row.hours:.2f}", f"{row.megabytes:.1f}"]
    return [rank, row.name, accuracy, f"{row.worst:.2f}", difference, row.verdict, *costs]


def notes(ranking: Ranking) -> list[str]:
    """Return the notes below a table, one sentence each."""
    found: list[str] = []
    by_verdict: dict[str, list[str]] = {}
    for row in ranking.rows:
        by_verdict.setdefault(row.verdict.partition(" (")[0], []).append(row.method)
    for verdict, text in VERDICTS.items():
        if verdict in by_verdict:
            found.append(f"{text} {ranking.base}: {', '.join(by_verdict[verdict])}.")
    if "not tested" in by_verdict:
        found.append("Not tested: an interval needs two studies or more (--studies) that differ.")
    bounds = [row.method for row in ranking.rows if row.bound]
    if bounds:
        found.append(f"{', '.join(bounds)}: {BOUNDS}.")
    if any(row.own_models for row in ranking.rows):
        found.append("* each client is scored with a model of its own; these rows have no rank.")
    codes: set[str] = set()
    processors: set[str] = set()
    for row in ranking.rows:
        codes |= row.codes
        processors |= row.processors
        if row.missing:
            found.append(f"† {row.method} is incomplete and has no rank: {'; '.join(row.missing)}.")
    if len(codes) > 1:
        found.append(f"The rows were run by different code: {', '.join(sorted(codes))}.")
    if len(processors) > 1:
        kinds = "; ".join(sorted(processor or "not recorded" for processor in processors))
        found.append(f"The rows were computed on different processors, which moves scores (docs/faq.md): {kinds}.")
    return found
