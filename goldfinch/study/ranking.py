"""The runs of a comparison as lines of a CSV file, and the table that ranks the methods by them."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from goldfinch.results.rows import KnownRun, ScoreRow, notes_on
from goldfinch.results.sheets import number_text
from goldfinch.results.statistics import holm, ranks
from goldfinch.study.options import IN_DOMAIN, LEAVE_ONE_OUT, Rules
from goldfinch.study.rules import BASE, LEFT_OUT

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
        at_chance: ``yes`` if a final run is not clearly better than one class for every image.
        validation_images: the validation samples of all clients of a final run.
        images: the hashes of which training samples the clients of a final run have, and of their pixels.
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
    at_chance: str = ""
    validation_images: int = 0
    images: str = ""


def runs_csv(runs: Sequence[StudyRun]) -> str:
    """Return the runs as a CSV file. Mappings are ``name=number`` with spaces between them.

    A column that is empty in every run is left out, such as that of bounds.
    """
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = [each.name for each in fields(StudyRun)]
    for name in ("bound", "processor", "at_chance", "validation_images", "images"):
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


@dataclass(frozen=True)
class Ranking:
    """One table: the methods by one kind of score, in the order of their ranks; rows without a rank come last.

    A mean, its deviation and the interval of a difference are over studies, since the final runs of a study share what
    it chose. Of one study they are over its final runs, and nothing is tested.

    Args:
        kind: ``in_domain`` or ``leave_one_out``.
        base: the method that the others are compared with.
        rows: the methods. :attr:`~goldfinch.results.rows.ScoreRow.absent` has the final runs that other rows have.
        trials: the trials of all studies, by method.
        hours: the wall hours of trials and final runs, by method.
    """

    kind: str
    base: str
    rows: list[ScoreRow[KnownRun]]
    trials: dict[str, int]
    hours: dict[str, float]

    @property
    def title(self) -> str:
        """The kind of score."""
        return TITLES[self.kind]


def is_ranked(row: ScoreRow[KnownRun]) -> bool:
    """Return whether a row of a comparison is complete, scored with one shared model, and no bound."""
    return bool(row.runs) and not row.personal and not row.bound and not row.absent


def marked_name(row: ScoreRow[KnownRun]) -> str:
    """Return the method's name with its marks."""
    name = row.label
    if row.bound:
        name += f" ({row.bound} bound)"
    if row.chance:
        name += f" ({row.chance})"
    if row.personal:
        name += " *"
    if row.absent:
        name += " †"
    return name


def rank_methods(runs: Sequence[StudyRun], rules: Rules | None = None) -> list[Ranking]:
    """Return the tables of one comparison. The tests of all its tables are corrected together.

    Args:
        runs: the runs of one board.
        rules: the studies and final runs that each method was to have; ``None``: the most that one of them has.
    """
    rankings: list[Ranking] = []
    for kind in TITLES:
        chosen = [run for run in runs if (run.case == IN_DOMAIN) == (kind == IN_DOMAIN)]
        if chosen:
            rankings.append(_ranking(kind, chosen, rules))
    rows: list[ScoreRow[KnownRun]] = []
    for ranking in rankings:
        rows += ranking.rows
    correct_together(rows)
    return rankings


def correct_together(rows: Sequence[ScoreRow[KnownRun]]) -> None:
    """Set the p-values of the rows that were tested, corrected by Holm's procedure over all of them."""
    tested: list[ScoreRow[KnownRun]] = []
    p_values: list[float] = []
    for row in rows:
        if row.difference is not None and row.difference.p is not None:
            tested.append(row)
            p_values.append(row.difference.p)
    for row, p in zip(tested, holm(p_values), strict=True):
        row.p = p


def _ranking(kind: str, runs: Sequence[StudyRun], rules: Rules | None) -> Ranking:
    by_method: dict[str, list[StudyRun]] = {}
    for run in runs:
        by_method.setdefault(run.method, []).append(run)
    expected: dict[tuple[str, int], int] = {}
    if rules is not None:
        for run in runs:
            for study in range(rules.studies):
                expected[run.case, study] = rules.runs
    for method_runs in by_method.values():
        for key, count in _final_runs(method_runs).items():
            expected[key] = max(count, expected.get(key, 0))
    rows: list[ScoreRow[KnownRun]] = []
    trials: dict[str, int] = {}
    hours: dict[str, float] = {}
    for method, method_runs in by_method.items():
        rows.append(_row(method, method_runs, expected))
        trials[method] = sum(run.kind == "trial" for run in method_runs)
        hours[method] = sum(run.seconds for run in method_runs) / 3600
    ranked = [row for row in rows if is_ranked(row)]
    means = [statistics.fmean(row.scores().values()) for row in ranked]
    for row, rank in zip(ranked, ranks(means), strict=True):
        row.rank = rank
    base = _base(rows)
    for row in ranked:
        if base in ranked and row is not base:
            row.difference = row.minus(base)
        if row.difference is not None and row.unit == "seed":
            row.difference = replace(row.difference, p=None)
    return Ranking(kind, base.label, sorted(rows, key=_order), trials, hours)


def _base(rows: Sequence[ScoreRow[KnownRun]]) -> ScoreRow[KnownRun]:
    """Return the row that the others are compared with: FedAvg, else the first with a rank, else the first."""
    for row in rows:
        if row.label == BASE:
            return row
    for row in rows:
        if is_ranked(row):
            return row
    return rows[0]


def _final_runs(runs: Sequence[StudyRun]) -> dict[tuple[str, int], int]:
    """Return the number of final runs of each case and study."""
    counts: dict[tuple[str, int], int] = {}
    for run in runs:
        if run.kind == "final":
            counts[run.case, run.study] = counts.get((run.case, run.study), 0) + 1
    return counts


def _row(method: str, runs: Sequence[StudyRun], expected: dict[tuple[str, int], int]) -> ScoreRow[KnownRun]:
    """Return a method's row without its rank."""
    has = _final_runs(runs)
    absent: dict[str, str] = {}
    for (case, study), count in expected.items():
        if has.get((case, study), 0) < count:
            absent[f"{case}, study {study}"] = f"{has.get((case, study), 0)} of {count} final runs"
    unit: Literal["seed", "study"] = "study"
    if len({study for _, study in expected}) == 1:
        unit = "seed"
    values: dict[int, list[StudyRun]] = {}
    for run in runs:
        if run.kind == "final" and unit == "study":
            values.setdefault(run.study, []).append(run)
        elif run.kind == "final":
            values.setdefault(run.number, []).append(run)
    known = [_as_one(number, values[number]) for number in sorted(values)]
    return ScoreRow(method, known, bound=runs[0].bound or None, unit=unit, absent=absent)


def _as_one(number: int, runs: Sequence[StudyRun]) -> KnownRun:
    """Return what a study, or a seed of a single study, came to as one run.

    The score is the mean over the final runs, and then over the domains that were left out in turn. The lowest
    accuracy of a domain is taken for each seed, and then the mean over seeds. A study is at chance if all of its final
    runs are.

    Args:
        number: the study's number, or the seed.
        runs: the final runs.
    """
    by_case: dict[str, list[float]] = {}
    by_domain: dict[str, list[float]] = {}
    by_seed: dict[int, list[float]] = {}
    for run in runs:
        by_case.setdefault(run.case, []).append(run.score)
        accuracy = run.accuracy
        if run.case != IN_DOMAIN:
            accuracy = {run.case.removeprefix(LEFT_OUT): run.score}
        for domain, value in accuracy.items():
            by_domain.setdefault(domain, []).append(value)
        by_seed.setdefault(run.number, []).extend(accuracy.values())
    score = {
        "accuracy": {domain: statistics.fmean(values) for domain, values in by_domain.items()},
        "average": statistics.fmean([statistics.fmean(scores) for scores in by_case.values()]),
        "worst": statistics.fmean([min(values) for values in by_seed.values()]),
        "missing": {},
    }
    pixels_of: dict[str, set[str]] = {}
    for run in runs:
        samples, _, pixels = run.images.partition(" ")
        pixels_of.setdefault(samples, set()).add(pixels)
    states = [run.state_sha256 for run in sorted(runs, key=lambda run: (run.case, run.number))]
    return KnownRun(
        number,
        {"final": score},
        personal=any(run.scored == OWN_MODELS for run in runs),
        code=" and ".join(dict.fromkeys(run.code for run in runs)),
        processor=" and ".join(dict.fromkeys(run.processor for run in runs)),
        state_sha256=" ".join(states) if all(states) else None,
        at_chance=all(run.at_chance for run in runs),
        rounds_done=runs[0].rounds,
        client_images={("", samples): " ".join(sorted(found)) for samples, found in pixels_of.items()},
        traffic=round(statistics.fmean([run.bytes for run in runs])),
    )


def _order(row: ScoreRow[KnownRun]) -> tuple[bool, str, float, str]:
    mean = -1.0
    value = row.value()
    if value is not None:
        mean = value.mean
    return row.rank is None, row.bound or "", -round(mean, 2), row.label


HEADS = (
    "rank",
    "method",
    "accuracy ± std",
    "worst",
    "minus BASE, 95 %",
    "verdict (Holm)",
    "trials",
    "hours",
    "MB a run",
)
VERDICTS = {
    "ahead": "Ahead of",
    "behind": "Behind",
    "not distinguished": "Not distinguished from",
    "identical": "Identical to",
}


def ranked_table(ranking: Ranking) -> str:
    """Return a table in Markdown with its notes. Aligned columns let a reader read the table in a terminal."""
    lines = [[head.replace("BASE", ranking.base) for head in HEADS]]
    for row in ranking.rows:
        lines.append(_cells(ranking, row))
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


def _cells(ranking: Ranking, row: ScoreRow[KnownRun]) -> list[str]:
    rank, worst, difference = "", "-", ""
    if row.rank is not None:
        rank = str(row.rank)
    if row.difference is not None:
        difference = str(row.difference)
    if row.runs:
        worst = number_text(statistics.fmean(row.scores("worst").values()))
    scores = [str(row.value() or "none"), worst, difference, row.verdict]
    costs = [str(ranking.trials[row.label]), f"{ranking.hours[row.label]:.2f}", number_text(row.megabytes, 1)]
    return [rank, marked_name(row), *scores, *costs]


def notes(ranking: Ranking) -> list[str]:
    """Return the notes below a table, one sentence each."""
    sentences: list[str] = []
    by_verdict: dict[str, list[str]] = {}
    for row in ranking.rows:
        by_verdict.setdefault(row.verdict.partition(" (")[0], []).append(row.label)
    for verdict, text in VERDICTS.items():
        if verdict in by_verdict:
            sentences.append(f"{text} {ranking.base}: {', '.join(by_verdict[verdict])}.")
    ranked = [row.label for row in ranking.rows if row.rank is not None]
    if ranked and ranking.base not in ranked:
        sentences.append(f"No differences: {ranking.base}, which the others are compared with, has no rank.")
    if "not tested" in by_verdict and all(row.unit == "seed" for row in ranking.rows):
        sentences.append("Not tested: the final runs of one study share what it chose; three studies test methods.")
    elif "not tested" in by_verdict:
        sentences.append("Not tested: a test needs three studies that differ.")
    bounds = [row.label for row in ranking.rows if row.bound]
    if bounds:
        sentences.append(f"{', '.join(bounds)}: {BOUNDS}.")
    if any(row.personal for row in ranking.rows):
        sentences.append("* each client is scored with a model of its own; these rows have no rank.")
    for row in ranking.rows:
        if row.absent:
            lacks = "; ".join(f"{what}: {reason}" for what, reason in row.absent.items())
            sentences.append(f"† {row.label} is incomplete and has no rank: {lacks}.")
    return [*sentences, *notes_on(ranking.rows)]
