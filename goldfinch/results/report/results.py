"""The numbers and texts of the report page: scores, clients, cost, events, settings, versions. No HTML here."""

import datetime
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from common.metrics import COUNTED, RULES, ScoreRule
from common.text import duration, listing, size
from common.wire.messages import COUNTED_STATUSES, UNUSED_STATUSES, update_was_used
from goldfinch.record import RunRecord
from goldfinch.results.classes import ClassTable, class_tables
from goldfinch.results.contributions import contributions, is_deployed
from goldfinch.results.frames import OVER_SEEDS, score_frame, table_notes
from goldfinch.results.groups import ScoreTable
from goldfinch.results.rows import KnownRun, ScoreRow, best_row
from goldfinch.run_model import RunModel
from server.run.accounting import largest_epsilon
from server.run.events import describe

ORDINARY = ("round", "round done", "score", "validation", "registered")
STATES = {
    "finished": "finished",
    "stopped": "was stopped and can go on with resume=true",
    "unfinished": "has not finished",
}
MAX_METHODS_IN_TITLE = 4
MAX_CLASSES_SHOWN = 100
"""Classes in a table of recall."""


def title(tables: Sequence[ScoreTable]) -> str:
    """Return the page's title."""
    methods: dict[str, None] = {}
    data: dict[str, None] = {}
    for table in tables:
        data[table.data] = None
        for row in table.rows:
            methods[row.runs[0].title] = None
    shown = f"{len(methods)} methods"
    if len(methods) <= MAX_METHODS_IN_TITLE:
        shown = listing(list(methods))
    attacks: dict[str, None] = {}
    for table in tables:
        attacks |= dict.fromkeys(run.attack for run in table.runs if run.attack)
    under = f", under attack: {'; '.join(attacks)}" if attacks else ""
    return f"{shown} on {listing(list(data))}{under}"


def worst_domain(row: ScoreRow[RunRecord], domains: Sequence[str]) -> str:
    """Return the domain with the lowest mean accuracy, or all that tie."""
    means: list[tuple[float, str]] = []
    for name in domains:
        value = row.value(f"domain:{name}")
        if value is not None:
            means.append((value.mean, name))
    lowest = min(means)[0]
    return listing([name for mean, name in means if mean == lowest])


def key_figures(tables: Sequence[ScoreTable]) -> list[tuple[str, str, str]]:
    """Return the main numbers of the page: number, name, note."""
    figures = _best_figures(tables)
    seconds: list[float] = []
    traffic: list[float] = []
    requests = 0
    statuses: Counter[str] = Counter()
    for table in tables:
        for run in table.runs:
            seconds.append(_wall_seconds(run))
            traffic.append(total_bytes(run))
            requests += len(run.replies)
            for row in run.replies:
                statuses[str(row["status"])] += 1
    figures.append((duration(statistics.fmean(seconds)), "wall time", "mean of a run"))
    figures.append((size(statistics.fmean(traffic)), "traffic", "both ways, mean of a run"))
    counts = [f"{statuses[status]} {status}" for status in UNUSED_STATUSES if statuses[status]]
    unused = sum(statuses[status] for status in UNUSED_STATUSES)
    figures.append((str(unused), "replies not used", ", ".join([*counts, f"of {requests} requests"])))
    return figures


def _best_figures(tables: Sequence[ScoreTable]) -> list[tuple[str, str, str]]:
    """Return the best average and the best worst domain of one table; empty where no row is the best."""
    figures: list[tuple[str, str, str]] = []
    if len(tables) != 1:
        return figures
    for column, name in (("average", "best average"), ("worst", "best worst domain")):
        best = best_row(tables[0].rows, column)
        if best is None:
            continue
        value = best.value(column)
        if value is not None:
            figures.append((f"{value.mean:.1f} %", name, best.label))
    return figures


def _wall_seconds(run: RunRecord) -> float:
    if run.facts.end is not None:
        return run.facts.end.seconds
    if not run.events:
        return 0.0
    return float(run.events[-1]["time"]) - float(run.events[0]["time"])


def rules_of(tables: Sequence[ScoreTable]) -> dict[str, ScoreRule]:
    """Return the rules by which a run of the page was scored."""
    rules = dict(RULES)
    for table in tables:
        for run in table.runs:
            if "validated" in run.rules:
                return rules
    del rules["validated"]
    return rules


def metric_tables(table: ScoreTable) -> list[tuple[str, ScoreTable]]:
    """Return the table with its scores by each other metric that all its runs have, after the metric's name.

    Metrics of confusion counts are left out if a run lacks such counts.
    """
    others: list[tuple[str, ScoreTable]] = []
    measures = table.rows[0].runs[0].measures
    for metric in (*COUNTED, *measures):
        other = table.by_metric(metric)
        if other is None or metric == "accuracy" or metric in [known for known, _ in others]:
            continue
        others.append((metric, other))
    return [(measures[metric].label, other) for metric, other in others]


class Recalls(NamedTuple):
    """A table of recall by class on the page.

    Args:
        table: the table of the row.
        class_table: the whole table of recalls.
        shown: the numbers of the classes that are shown, in their order.
        notes: what a partial score lacks, and how many classes are left out.
    """

    table: ScoreTable
    class_table: ClassTable
    shown: list[int]
    notes: list[str]


def recalls(tables: Sequence[ScoreTable]) -> list[Recalls]:
    """Return the recall by class and domain after the last round, of each row with confusion counts.

    Of more than :data:`MAX_CLASSES_SHOWN` classes those with the lowest average are shown.
    """
    parts: list[Recalls] = []
    for table in tables:
        for class_table in class_tables(table, "final"):
            shown, notes = list(range(len(class_table.classes))), list(class_table.notes)
            if len(shown) > MAX_CLASSES_SHOWN:
                averages = [_average_recall(each) for each in class_table.classes]
                shown.sort(key=averages.__getitem__)
                shown = shown[:MAX_CLASSES_SHOWN]
                notes.append(
                    f"The {MAX_CLASSES_SHOWN} classes with the lowest average of {len(class_table.classes)}; "
                    "goldfinch table --classes shows all"
                )
            parts.append(Recalls(table, class_table, shown, notes))
    return parts


def _average_recall(row: ScoreRow[KnownRun]) -> float:
    value = row.value("average")
    if value is None:
        return math.inf
    return value.mean


def score_rows(table: ScoreTable, rule: str) -> list[tuple[ScoreRow[RunRecord], list[dict[str, Any]]]]:
    """Return each row with its cells, the records of :func:`goldfinch.results.frames.score_frame`."""
    frame = score_frame(table, rule)
    rows: list[tuple[ScoreRow[RunRecord], list[dict[str, Any]]]] = []
    for row in table.rows:
        rows.append((row, frame[frame["method"] == row.label].to_dict("records")))
    return rows


def meaning_of_cells(rows: Sequence[ScoreRow[RunRecord]]) -> str:
    """Return what the two numbers of a cell are, for a caption; empty if no row has several runs."""
    if all(len(row.runs) < 2 for row in rows):
        return ""
    return f"{OVER_SEEDS}; "


def score_notes(table: ScoreTable, rule: str) -> list[str]:
    """Return the notes below a table of scores."""
    return table_notes(table, score_frame(table, rule), rule)


def partial_groups(table: ScoreTable) -> list[tuple[str, str]]:
    """Return the label of each row with a partial final score, and what the score lacks."""
    partial: list[tuple[str, str]] = []
    for row in table.rows:
        missing = row.missing()
        if missing and row.runs[0].scored:
            partial.append((row.label, "; ".join(missing)))
    return partial


def unscored_runs(table: ScoreTable) -> list[str]:
    """Return a sentence on each run that scores no test images: its best round by validation, if it has one."""
    sentences: list[str] = []
    for name, run in table.named_runs:
        if run.scored:
            continue
        best = run.summary.get("validation")
        sentence = f"{name} scores no test images (rounds.test=false)."
        if best:
            sentence += f" Its best round by validation is {best['round']}, with {best['average']:.1f} %."
        sentences.append(sentence)
    return sentences


def client_rows(run: RunRecord) -> list[dict[str, Any]]:
    """Return each client's data and its cost over the run.

    ``trained`` counts the exchanges in which the client trained and its update was used; each of
    :data:`common.wire.messages.COUNTED_STATUSES` counts the replies with that status, and ``unused`` those that were
    not used. ``up`` and ``down`` are bytes, ``memory`` is the peak in bytes.
    """
    rows: dict[str, dict[str, Any]] = {}
    for client, entry in run.facts.registrations.items():
        rows[client] = _client(client, entry)
    for row in run.replies:
        client, status = str(row["client"]), str(row["status"])
        if client not in rows:
            rows[client] = _client(client, row)
        client_row = rows[client]
        client_row["trained"] += update_was_used(status)
        if status in COUNTED_STATUSES:
            client_row[status] += 1
        client_row["unused"] += status in UNUSED_STATUSES
        for direction in ("up", "down"):
            client_row[direction] += int(row.get(f"bytes_{direction}") or 0)
        for phase in ("load", "score", "train", "save"):
            client_row["seconds"] += float(row.get(f"seconds_{phase}") or 0)
        client_row["memory"] = max(client_row["memory"], int(row.get("peak_bytes") or 0))
    return list(rows.values())


def _client(client: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "client": client,
        "domain": str(entry.get("domain", "")),
        "samples": int(entry.get("samples") or 0),
        "device": str(entry.get("device", "")),
        **dict.fromkeys(("trained", *COUNTED_STATUSES, "unused", "up", "down", "seconds", "memory"), 0),
    }


def device_rows(run: RunRecord) -> list[tuple[str, dict[str, str]]]:
    """Return each client of a deployment with the texts of its line in the table of devices; empty in a simulation."""
    if not is_deployed(run):
        return []
    return [(client, each.cells()) for client, each in contributions([run]).items()]


def statuses_in(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the statuses of the clients' replies, without ``trained``.

    Args:
        rows: the rows of :func:`client_rows`.
    """
    statuses: list[str] = []
    for status in COUNTED_STATUSES:
        if any(row[status] for row in rows):
            statuses.append(status)
    return statuses


def cost(run: RunRecord) -> dict[str, dict[str, float]]:
    """Return the totals of a run: ``seconds`` over clients by phase, and ``bytes`` by direction and content."""
    sent = {"down": _total(run, "bytes_down")}
    header = _total(run, "bytes_up")
    for part in ("weights", "prototypes", "extra"):
        sent[f"up, {part}"] = _total(run, f"bytes_up_{part}")
        header -= sent[f"up, {part}"]
    sent["up, header"] = max(0.0, header)
    seconds = {}
    for phase in ("train", "score", "load", "save"):
        seconds[phase] = _total(run, f"seconds_{phase}")
    return {"bytes": sent, "seconds": seconds}


def _total(run: RunRecord, column: str) -> float:
    """Return the sum of a column of ``replies.jsonl``."""
    return sum(float(row.get(column) or 0) for row in run.replies)


def total_bytes(run: RunRecord) -> float:
    """Return the bytes of a run's messages, both ways."""
    return sum(cost(run)["bytes"].values())


def mean_cost(row: ScoreRow[RunRecord], what: str) -> dict[str, float]:
    """Return the parts of a row's cost, and ``all``, their sum: the mean over its runs; see :func:`cost`."""
    costs = [cost(run)[what] for run in row.runs]
    means: dict[str, float] = {}
    for name in costs[0]:
        means[name] = statistics.fmean([entry[name] for entry in costs])
    return {**means, "all": sum(means.values())}


def event_rows(run: RunRecord) -> list[dict[str, str | bool]]:
    """Return the events that do not occur in every round.

    Each has ``time`` (UTC), ``name``, ``line`` (its text), ``traceback``, and whether it is ``trouble``.
    """
    rows: list[dict[str, str | bool]] = []
    for entry in run.told_events(without=ORDINARY):
        name = str(entry["event"])
        line = describe(name, entry, run.facts.planned)
        if not line:
            continue
        when = datetime.datetime.fromtimestamp(float(entry["time"]), datetime.UTC)
        rows.append(
            {
                "time": f"{when:%Y-%m-%d %H:%M:%S}",
                "name": name,
                "line": line,
                "traceback": str(entry.get("traceback") or ""),
                "trouble": name not in ("start", "finish"),
            }
        )
    return rows


def headline(run: RunRecord) -> str:
    """Return the state of a run; for a failed or unfinished run with its last event out of the ordinary."""
    trouble = [str(row["line"]) for row in event_rows(run) if row["trouble"]]
    if run.status == "failed":
        return trouble[-1]
    if run.status == "unfinished" and trouble:
        return f"{STATES[run.status]}: {trouble[-1]}"
    return STATES[run.status]


def setting_rows(rows: Sequence[ScoreRow[RunRecord]]) -> list[tuple[str, list[str]]]:
    """Return the settings in which the rows differ, each with its value in every row."""
    keys: dict[str, None] = {}
    for row in rows:
        keys |= dict.fromkeys(row.runs[0].options)
    differing = []
    for key in keys:
        shown: list[str] = []
        for row in rows:
            value = row.runs[0].options.get(key, "-")
            if not isinstance(value, str):
                value = json.dumps(value, default=str)
            shown.append(value)
        if not key.endswith("_target_") and len(set(shown)) > 1:
            differing.append((key, shown))
    return differing


def versions(runs: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Return the versions of each package on the server."""
    numbers_by_package: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.facts.versions.items():
            numbers_by_package.setdefault(str(name), set()).add(str(version))
    return {name: sorted(numbers) for name, numbers in numbers_by_package.items()}


def splits(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """Return each client with the SHA-256 of its split; twice if runs differ in it."""
    pairs: dict[tuple[str, str], None] = {}
    for run in runs:
        pairs |= dict.fromkeys(run.facts.splits.items())
    return list(pairs)


def privacy_rows(runs: Sequence[tuple[str, RunRecord]]) -> list[dict[str, str]]:
    """Return what each private run protects and has released.

    Args:
        runs: names on the page, and runs. Runs without differential privacy have no row.

    Returns:
        A row per run with ``run``, ``unit``, ``covers``, ``releases``, ``epsilon`` and ``why``: the conditions for an
        epsilon that the run does not meet.
    """
    rows = []
    for name, run in runs:
        report = RunModel(run).privacy()
        if report is None:
            continue
        epsilon = largest_epsilon(report)
        why = ""
        if report["conditions"]:
            why = "; ".join(report["conditions"]) + f" (otherwise {epsilon})"
            epsilon = "none"
        rows.append(
            {
                "run": name,
                "unit": f"one {report['unit']}",
                "covers": listing(report["covers"]) or "nothing",
                "releases": str(max(report["releases"].values(), default=0)),
                "epsilon": epsilon,
                "why": why,
            }
        )
    return rows
