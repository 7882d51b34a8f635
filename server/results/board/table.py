"""Tables of boards: scores, ranks, differences to FedAvg, what is not whole, and ranks over data sets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.metrics import PARTIAL
from server.results.board.record import IN_DOMAIN, LEFT_OUT, BoardRecord, Case, FinalRun, Row
from server.results.board.statistics import (
    Difference,
    Friedman,
    average_ranks,
    critical_difference,
    friedman,
    holm,
    indistinct_groups,
    paired_difference,
    performance_profile,
)
from server.results.seeds import Value

BASE = "fedavg"
UNSEEN = "leave_one_out"
KINDS = {IN_DOMAIN: "in-domain", UNSEEN: "leave-one-domain-out"}
"""The kinds of scores and their names."""

OWN = "*"
"""Mark of a row if its clients are scored with models of their own."""

NO_RUN = "none"
"""What a cell shows without a run."""

DISTANCES = tuple(range(21))
"""Points from the best method, at which a profile is drawn."""


@dataclass
class BoardRow:
    """One row of a table.

    Attributes:
        row: its record.
        scores: the score of each final run, by seed, in per cent.
        worst: the lowest accuracy of a domain of each final run, by seed.
        lacks: what the row lacks; empty if it is whole.
        marks: differences from most rows besides the method: code, processor, source.
        rank: its rank among the whole rows with a shared model; ``None`` without one.
        difference: the paired difference to FedAvg; ``None`` for FedAvg itself and for rows without a rank.
        p: the p-value of the difference after Holm's correction over the rows with a rank.
        tuning_rounds: completed rounds of the studies.
        trials: trials of the studies.
        hours: wall hours of studies and final runs.
        megabytes: megabytes of a final run, both ways, all clients; ``None`` without a run.
    """

    row: Row
    scores: dict[int, float]
    worst: dict[int, float]
    lacks: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    rank: int | None = None
    difference: Difference | None = None
    p: float | None = None
    tuning_rounds: int = 0
    trials: int = 0
    hours: float = 0.0
    megabytes: float | None = None

    @property
    def name(self) -> str:
        """The method's name with its marks."""
        name = self.row.method
        if self.row.personal:
            name += f" {OWN}"
        if self.lacks:
            name += f" {PARTIAL}"
        return name

    @property
    def value(self) -> Value | None:
        """Mean and deviation over the final runs; ``None`` without a run."""
        return Value.of(list(self.scores.values()), partial=bool(self.lacks))

    @property
    def ranked(self) -> bool:
        """Whether the row is whole and scored with one shared model."""
        return not self.lacks and not self.row.personal


@dataclass
class BoardTable:
    """One table of a board: the rows of one kind of score, the best first; rows without a rank come last."""

    record: BoardRecord
    kind: str
    rows: list[BoardRow]

    @property
    def title(self) -> str:
        """The kind of score."""
        return KINDS[self.kind]

    @property
    def ranked(self) -> list[BoardRow]:
        """The rows with a rank."""
        return [row for row in self.rows if row.rank is not None]


def tables_of(record: BoardRecord) -> list[BoardTable]:
    """Return the tables of a board: in-domain, and leave-one-domain-out, each if any row has it."""
    found: list[BoardTable] = []
    for kind in KINDS:
        rows: list[BoardRow] = []
        for row in record.rows.values():
            made = _board_row(record, row, kind)
            if made is not None:
                rows.append(made)
        if rows:
            _rank(rows)
            _mark(rows, cases_of(record, kind))
            found.append(BoardTable(record, kind, sorted(rows, key=_order)))
    return found


def cases_of(record: BoardRecord, kind: str) -> list[str]:
    """Return the names of the cases that a score of ``kind`` averages."""
    if kind == IN_DOMAIN:
        return [IN_DOMAIN]
    return [f"{LEFT_OUT}{domain}" for domain in record.shared.get("data.domains") or []]


def _board_row(record: BoardRecord, row: Row, kind: str) -> BoardRow | None:
    """Return a method's row; ``None`` if no study of this kind was begun."""
    names = cases_of(record, kind)
    cases: dict[str, Case] = {}
    begun = False
    for name in names:
        if name in row.cases:
            cases[name] = row.cases[name]
            begun = begun or bool(cases[name].studies or cases[name].refused)
    if not begun:
        return None
    lacks: list[str] = []
    for name in names:
        lacks += _lacking(record, name, cases.get(name))
    runs = _runs_by_seed(list(cases.values()))
    scores: dict[int, float] = {}
    worst: dict[int, float] = {}
    for seed, found in runs.items():
        averages = [run.average for run in found]
        scores[seed] = statistics.fmean(averages)
        worst[seed] = min(averages)
        if kind == IN_DOMAIN:
            worst[seed] = found[0].worst
    made = BoardRow(row, scores, worst, lacks)
    _add_costs(made, list(cases.values()))
    return made


def _lacking(record: BoardRecord, name: str, case: Case | None) -> list[str]:
    """Return the text for what a case lacks; empty if it is whole."""
    if case is None:
        return [f"{name} was not run"]
    if case.refused:
        return [f"{name}: {case.refused}"]
    found: list[str] = []
    done = 0
    for study in case.studies:
        done += study.done
    if done < record.rules.studies:
        found.append(f"{name}: {done} of {record.rules.studies} studies")
    if len(case.runs) < record.rules.runs:
        found.append(f"{name}: {len(case.runs)} of {record.rules.runs} final runs")
    return found


def _runs_by_seed(cases: Sequence[Case]) -> dict[int, list[FinalRun]]:
    """Return the final runs by seed, ascending; a seed that a case lacks is left out."""
    found: dict[int, list[FinalRun]] = {}
    for case in cases:
        for run in case.runs:
            found.setdefault(run.seed, []).append(run)
    return {seed: found[seed] for seed in sorted(found) if len(found[seed]) == len(cases)}


def _add_costs(made: BoardRow, cases: Sequence[Case]) -> None:
    sizes: list[float] = []
    seconds = 0.0
    for case in cases:
        for study in case.studies:
            made.tuning_rounds += study.rounds
            made.trials += len(study.trials)
            for trial in study.trials:
                seconds += trial.seconds
        for run in case.runs:
            seconds += run.seconds
            sizes.append((run.bytes.get("down", 0) + run.bytes.get("up", 0)) / 1e6)
    made.hours = seconds / 3600
    if sizes:
        made.megabytes = statistics.fmean(sizes)


def _rank(rows: Sequence[BoardRow]) -> None:
    """Give the whole rows with a shared model their rank, difference and corrected p-value."""
    ranked = sorted([row for row in rows if row.ranked], key=_order)
    base: BoardRow | None = None
    for number, row in enumerate(ranked, 1):
        row.rank = number
        if row.row.method == BASE:
            base = row
    if base is None:
        return
    tested: list[BoardRow] = []
    p_values: list[float] = []
    for row in ranked:
        if row is base:
            continue
        own_scores: list[float] = []
        base_scores: list[float] = []
        for seed in sorted(base.scores.keys() & row.scores.keys()):
            own_scores.append(row.scores[seed])
            base_scores.append(base.scores[seed])
        row.difference = paired_difference(own_scores, base_scores)
        if row.difference.p is not None:
            tested.append(row)
            p_values.append(row.difference.p)
    for row, corrected in zip(tested, holm(p_values), strict=True):
        row.p = corrected


def _order(row: BoardRow) -> tuple[bool, float]:
    mean = -1.0
    if row.scores:
        mean = statistics.fmean(row.scores.values())
    return not row.ranked, -mean


def _mark(rows: Sequence[BoardRow], names: Sequence[str]) -> None:
    """Mark rows that were run by other code or on another processor than FedAvg in these cases, and submitted rows."""
    base: tuple[set[str], set[str]] = (set(), set())
    for row in rows:
        if row.row.method == BASE:
            base = _circumstances(row.row, names)
    for row in rows:
        codes, processors = _circumstances(row.row, names)
        if codes and base[0] and codes != base[0]:
            row.marks.append(f"code {', '.join(sorted(codes))}, FedAvg {', '.join(sorted(base[0]))}")
        if processors and base[1] and processors != base[1]:
            row.marks.append(f"processor {', '.join(sorted(processors))}")
        if row.row.source != "board":
            row.marks.append(f"submitted by {row.row.source}")


def _circumstances(row: Row, names: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the codes and the processors of a row's final runs in these cases."""
    codes: set[str] = set()
    processors: set[str] = set()
    for name, case in row.cases.items():
        if name not in names:
            continue
        for run in case.runs:
            codes.add(run.code)
            processors.add(run.processor)
    return codes, processors


# ---- over data sets --------------------------------------------------------------------------------------------------


@dataclass
class Overall:
    """Ranks over data sets, for boards that differ in the data alone.

    Attributes:
        title: views, weighting, net and kind of score.
        data: the data sets.
        ranks: the average rank of each method that has a rank on every data set, the best first.
        left_out: methods that lack a rank on a data set, with these data sets.
        difference: Nemenyi's critical difference at 0.05; ``None`` with one data set or one method.
        test: Friedman's test; ``None`` likewise.
        groups: methods that the critical difference does not tell apart.
        profile: for each method and each of :data:`DISTANCES`, the share of data sets on which it is within
            that many points of the best.
    """

    title: str
    data: list[str]
    ranks: dict[str, float]
    left_out: dict[str, list[str]]
    difference: float | None
    test: Friedman | None
    groups: list[list[str]]
    profile: dict[str, list[float]]


def overall(records: Sequence[BoardRecord]) -> list[Overall]:
    """Return the ranks over data sets for each net, views, weighting and kind of score."""
    by_kind: dict[str, dict[str, BoardTable]] = {}
    for record in records:
        for table in tables_of(record):
            title = f"{record.model} net, views {record.views}, weighting {record.weighting}, {table.title}"
            by_kind.setdefault(title, {})[record.data] = table
    found: list[Overall] = []
    for title, tables in by_kind.items():
        made = _overall(title, tables)
        if made is not None:
            found.append(made)
    return found


def _overall(title: str, tables: Mapping[str, BoardTable]) -> Overall | None:
    """Return the ranks over the data sets of ``tables``; ``None`` if no two methods are ranked on all of them."""
    methods: dict[str, list[str]] = {}
    for data, table in tables.items():
        for row in table.ranked:
            methods.setdefault(row.row.method, []).append(data)
    common: list[str] = []
    left_out: dict[str, list[str]] = {}
    for name, ranked_on in methods.items():
        if len(ranked_on) == len(tables):
            common.append(name)
        else:
            left_out[name] = [data for data in tables if data not in ranked_on]
    if len(common) < 2:
        return None
    scores: list[dict[str, float]] = []
    for table in tables.values():
        means: dict[str, float] = {}
        for row in table.ranked:
            if row.row.method in common:
                means[row.row.method] = statistics.fmean(row.scores.values())
        scores.append(means)
    mean_ranks = average_ranks(scores)
    ordered = dict(sorted(mean_ranks.items(), key=lambda item: item[1]))
    difference: float | None = None
    test: Friedman | None = None
    groups: list[list[str]] = []
    if len(tables) > 1:
        difference = critical_difference(len(common), len(tables))
        test = friedman(scores)
        groups = indistinct_groups(ordered, difference)
    profile = performance_profile(scores, DISTANCES)
    return Overall(title, list(tables), ordered, left_out, difference, test, groups, profile)


# ---- Markdown --------------------------------------------------------------------------------------------------------


HEADS = (
    *("rank", "method", "accuracy", "worst domain", "minus FedAvg, 95 % interval", "p (Holm)"),
    *("tuning rounds", "trials", "hours", "MB a run"),
)


def row_cells(row: BoardRow) -> list[str]:
    """Return the texts of a row, one for each of :data:`HEADS`."""
    rank, difference, p, size = "", "", "", ""
    if row.rank is not None:
        rank = str(row.rank)
    if row.difference is not None:
        difference = str(row.difference)
    if row.p is not None:
        p = f"{row.p:.3f}"
    if row.megabytes is not None:
        size = f"{row.megabytes:.1f}"
    worst = Value.of(list(row.worst.values()), partial=bool(row.lacks))
    hours = f"{row.hours:.2f}"
    return [
        *(rank, row.name, str(row.value or NO_RUN), str(worst or NO_RUN), difference, p),
        *(str(row.tuning_rounds), str(row.trials), hours, size),
    ]


def description(record: BoardRecord) -> str:
    """Return a sentence with what all rows of a board have in common."""
    shared, rules = record.shared, record.rules
    domains = ", ".join(map(str, shared.get("data.domains") or []))
    return (
        f"{record.data} ({domains}), {record.model} net, views {record.views}, weighting "
        f"{record.weighting}, {rules.rounds} rounds of {shared.get('train.epochs')} epochs, batches of "
        f"{shared.get('train.batch_size')}, {_images(record)}, of which a share of "
        f"{shared.get('protocol.validation')} is held out. Each method has {rules.studies} studies of {rules.trials} "
        f"trials ({rules.budget} rounds each) and {rules.runs} final runs with fresh seeds and partitions. "
        "Accuracy in %, mean over domains after the last round, mean ± sample deviation over the final runs."
    )


def _images(record: BoardRecord) -> str:
    """Return the text for how many images the clients of a board have."""
    shared = record.shared
    protocol = "one_per_domain"
    for override in record.overrides:
        if override.startswith("protocol="):
            protocol = override.removeprefix("protocol=")
    if protocol != "one_per_domain":
        counts: list[str] = []
        for name, count in shared.items():
            if name.startswith("protocol.counts."):
                counts.append(f"{name.removeprefix('protocol.counts.')} {count}")
        if counts:
            return f"images of the clients of protocol={protocol} ({', '.join(counts)})"
        return f"images of the clients of protocol={protocol}"
    if shared.get("protocol.samples"):
        return f"at most {shared['protocol.samples']} training images a client"
    if shared.get("protocol.fraction", 1.0) != 1.0:
        return f"a share of {shared['protocol.fraction']} of the training images a client"
    return "all training images a client"


def notes(table: BoardTable) -> list[str]:
    """Return the notes below a table, one sentence each."""
    found: list[str] = []
    shown: list[str] = []
    personal = False
    for row in table.rows:
        shown.append(row.row.method)
        personal = personal or row.row.personal
    if personal:
        found.append(f"{OWN} each client is scored with a model of its own; these rows have no rank.")
    for row in table.rows:
        if row.lacks:
            found.append(f"{PARTIAL} {row.row.method} is not whole and has no rank: {'; '.join(row.lacks)}.")
        if row.marks:
            found.append(f"{row.row.method}: {'; '.join(row.marks)}.")
        if row.row.weighting == "none":
            found.append(f"{row.row.method} averages no models, so the weighting does not apply.")
    absent = [name for name in table.record.rows if name not in shown]
    if absent:
        found.append(f"Planned and not begun: {', '.join(absent)}.")
    for name, reason in table.record.left_out.items():
        found.append(f"{name} is not on this board: {reason}.")
    return found


def board_markdown(records: Sequence[BoardRecord]) -> str:
    """Return all boards as Markdown, without a title."""
    lines: list[str] = []
    for record in records:
        lines += [f"## {record.name}", "", description(record), "", "```bash", record.command, "```", ""]
        for table in tables_of(record):
            lines += _table_lines(table)
    for ranking in overall(records):
        lines += _overall_lines(ranking)
    return "\n".join(lines).rstrip() + "\n"


def _table_lines(table: BoardTable) -> list[str]:
    lines = [f"### {table.title}", "", f"| {' | '.join(HEADS)} |", _rule()]
    for row in table.rows:
        lines.append(f"| {' | '.join(row_cells(row))} |")
    lines.append("")
    for note in notes(table):
        lines.append(f"- {note}")
    return [*lines, ""]


def _rule() -> str:
    columns = ["---:"] * len(HEADS)
    columns[1] = "---"
    return f"|{'|'.join(columns)}|"


def overall_note(each: Overall) -> str:
    """Return sentences that describe the ranks over data sets."""
    parts = [f"Data sets: {', '.join(each.data)}."]
    if each.difference is None or each.test is None:
        parts.append("One data set: there is neither a critical difference nor a test.")
    else:
        parts.append(
            f"Friedman's chi-square {each.test.chi_square:.2f} (p {each.test.p:.3f}), Iman and Davenport's F "
            f"{each.test.f:.2f} (p {each.test.f_p:.3f}); Nemenyi's critical difference at 0.05: {each.difference:.2f}."
        )
    for name, data in each.left_out.items():
        parts.append(f"{name} has no rank on {', '.join(data)} and is left out.")
    return " ".join(parts)


def _overall_lines(each: Overall) -> list[str]:
    shown = (0, 2, 5, 10)
    heads = [f"within {points} points" for points in shown]
    lines = [f"## Over data sets: {each.title}", "", overall_note(each), ""]
    if each.difference is None:
        return lines
    lines += [f"| method | average rank | {' | '.join(heads)} |", f"|---|---:|{'---:|' * len(shown)}"]
    for name, rank in each.ranks.items():
        shares = [f"{100 * each.profile[name][DISTANCES.index(points)]:.0f} %" for points in shown]
        lines.append(f"| {name} | {rank:.2f} | {' | '.join(shares)} |")
    return [*lines, ""]
