"""What happened in a run: every client x domain x round row, every exchange, every event, appended as it happens."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.metrics import COUNTED, MEASURES, ClassTotals, Coverage, Measure, RoundScore
from common.wire.messages import COUNTED_STATUSES, UNUSED_STATUSES, trained_count
from server.run.measures import MEASURES_FILE, recorded_values, scores_by_values
from server.run.schema import read_lines, read_rows, stream_rows
from server.trackers.events import COUNTS_LESS_EVENT, Listener

if TYPE_CHECKING:  # imports torch, which the readers of records do without
    from server.run.prototype_log import Confusions

SCORES = (
    *("round", "client", "client_domain", "domain", "scored_on", "count", "correct", "accuracy", "loss"),
    *COUNTED,
)
"""Columns of ``history.csv``; ``scored_on`` is ``test`` or ``validation``. A metric without counts is empty.

Columns of ``rounds.scores`` and ``own_metric`` follow, where the run has them.
"""

VALIDATION_COUNTS = "validation_confusion.jsonl"
"""File of the confusion counts on validation samples, which only some values of ``rounds.metric`` need."""

PARTS = ("weights", "prototypes", "extra", "header")
"""Parts of a message. The header is everything besides tensors: names, shapes, JSON, padding."""

ACTIVITY = (
    "round",
    "exchange",
    "client",
    "domain",
    "status",
    "reason",
    "samples",
    "steps",
    "losses",
    "seconds_load",
    "seconds_score",
    "seconds_train",
    "seconds_save",
    "bytes_down",
    "bytes_down_weights",
    "bytes_down_prototypes",
    "bytes_down_extra",
    "bytes_down_header",
    "bytes_up",
    "bytes_up_weights",
    "bytes_up_prototypes",
    "bytes_up_extra",
    "bytes_up_header",
    "peak_bytes",
    "releases",
    "randomness",
)
"""Columns of ``activity.csv``."""


class History:
    """The files in a run's folder that grow with it, and the listeners that are called with each new row.

    - ``history.csv``: one row per client, scored domain and round, on test images or on validation samples.
    - ``activity.csv``: one row per client and exchange: status, losses, seconds, bytes of each part of both messages,
      and the reason of a failure or refusal.
    - ``events.jsonl``: one line per event of the run.
    - ``validation_confusion.jsonl``: the confusion counts on validation samples, if ``metric`` needs them.
    - ``metrics.jsonl``: the values of ``rounds.scores`` and ``own_metric`` by domain, if the run has them.
    - ``confusion.jsonl`` and ``prototypes/``: see :mod:`server.run.prototype_log`.

    Listeners are told of every event and, as ``scores`` and ``activity``, of every row, and as ``metrics`` of each
    round's other metrics by domain; these three are in no file.

    Args:
        keep_until: activity and events of later rounds are dropped, since a resumed run writes them again. ``-1``
            drops all.
        scores_until: the same for scores.
        listeners: told of every event and row.
        scorers: the domains that are scored, and how many scores complete each; see
            :class:`common.metrics.Coverage`.
        validators: the same of validation samples.
        metric: what a score on validation samples is.
        measures: the metrics that the run has besides :data:`common.metrics.MEASURES`.
        at_once: whether later rounds are dropped now; otherwise :meth:`rewind` does it, once clients and data are
            checked. Until then only events can be added.
    """

    def __init__(
        self,
        folder: Path,
        keep_until: int = -1,
        scores_until: int = -1,
        listeners: Sequence[Listener] = (),
        *,
        scorers: Mapping[str, int] | None = None,
        validators: Mapping[str, int] | None = None,
        metric: str = "accuracy",
        measures: Mapping[str, Measure] | None = None,
        at_once: bool = True,
    ) -> None:
        self.folder, self.metric = folder, metric
        self._until = keep_until, scores_until
        self.measures = dict(measures or {})
        self._columns = (*SCORES, *self.measures)
        self._scorers, self._validators = scorers, validators
        self.listeners = list(listeners)
        self._latest: list[dict[str, Any]] = []  # the present round's activity; all others are on the disk alone
        folder.mkdir(parents=True, exist_ok=True)
        if at_once:
            self.rewind()

    def rewind(self) -> None:
        """Drop the rounds that the run writes again. It must be called once before rows are added."""
        from server.run.prototype_log import Confusions, PrototypeLog

        folder, metric = self.folder, self.metric
        keep_until, scores_until = self._until
        _reopen(folder / "history.csv", self._columns, scores_until)
        _reopen(folder / "activity.csv", ACTIVITY, keep_until)
        self.confusions = Confusions(folder / "confusion.jsonl", scores_until)
        self.validation_confusions: Confusions | None = None
        counts = folder / VALIDATION_COUNTS
        if metric in COUNTED:
            self.validation_confusions = Confusions(counts, scores_until)
        else:
            counts.unlink(missing_ok=True)  # of an earlier run in this folder
        self._reopen_measures(scores_until)
        self.prototype_log = PrototypeLog(folder / "prototypes", keep_until)
        self._keep_events(keep_until, scores_until)

    def _keep_events(self, keep_until: int, scores_until: int) -> None:
        """Drop the events of rounds after ``keep_until``, and scores of rounds after ``scores_until``."""
        from common.storage import write_text

        path = self.folder / "events.jsonl"
        kept: list[str] = []
        if keep_until >= 0 and path.exists():
            for entry in read_lines(path):
                until = keep_until
                if entry["event"] in ("score", "validation"):
                    until = scores_until
                if entry.get("round", 0) <= until:
                    kept.append(f"{json.dumps(entry)}\n")
        write_text(path, "".join(kept))

    def _reopen_measures(self, scores_until: int) -> None:
        """Drop the values of rounds after ``scores_until``, or the file if this run has none."""
        path = self.folder / MEASURES_FILE
        if not self.measures:
            path.unlink(missing_ok=True)
            return
        kept: list[str] = []
        if scores_until >= 0 and path.exists():
            for line in read_lines(path):
                if line["round"] <= scores_until:
                    kept.append(f"{json.dumps(line)}\n")
        from common.storage import write_text

        write_text(path, "".join(kept))

    def add_measures(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines of ``metrics.jsonl``."""
        with (self.folder / MEASURES_FILE).open("a") as stream:
            for line in lines:
                stream.write(json.dumps(line) + "\n")

    def event(self, name: str, **content: Any) -> None:
        """Append an event and tell the listeners."""
        entry = {"event": name, "time": round(time.time(), 3), **content}
        with (self.folder / "events.jsonl").open("a") as stream:
            stream.write(json.dumps(entry) + "\n")
        self._tell(name, entry)

    def _tell(self, name: str, entry: Mapping[str, Any]) -> None:
        for listener in self.listeners:
            listener(name, entry)

    def add_scores(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of ``history.csv``; listeners get those of test images."""
        _append(self.folder / "history.csv", self._columns, rows)
        self._tell("scores", {"rows": rows_on("test", rows), "measures": list(self.measures)})

    def tell_metrics(self, number: int, metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Tell the listeners of a round's metrics on test images: values by domain, by the metric's name."""
        self._tell("metrics", {"round": number, "metrics": metrics})

    def add_activity(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of ``activity.csv``."""
        numbers = {row["round"] for row in rows}
        self._latest = [row for row in self._latest if row["round"] in numbers]
        self._latest += map(dict, rows)
        _append(self.folder / "activity.csv", ACTIVITY, rows)
        self._tell("activity", {"rows": rows})

    def round_totals(self, number: int) -> dict[str, Any]:
        """Return the present round's clients by status, mean loss terms by sample count, and bytes up and down."""
        rows = [row for row in self._latest if int(row["round"]) == number]
        statuses: Counter[str] = Counter()
        sent = {"bytes_up": 0, "bytes_down": 0}
        for row in rows:
            statuses[str(row["status"])] += 1
            for column in sent:
                sent[column] += int(row.get(column) or 0)
        losses = {term: round(value, 6) for term, value in mean_losses(rows).items()}
        totals: dict[str, Any] = {"outcomes": dict(sorted(statuses.items())), "losses": losses, **sent}
        return totals

    def round_scores(self) -> list[RoundScore]:
        """Accuracy per domain of every scored round, ascending."""
        return round_scores(rows_on("test", stream_rows(self.folder / "history.csv")), self._scorers)

    def validation_scores(self) -> list[RoundScore]:
        """Return the metric per domain of every round on clients' validation samples, ascending.

        Accuracy counts each client of a domain once; other metrics are of its clients' samples together.
        """
        accuracies = round_scores(rows_on("validation", stream_rows(self.folder / "history.csv")), self._validators)
        return validation_by(self.metric, accuracies, self.folder, self.measures)

    def rounds(self, event: str) -> list[int]:
        """The rounds of all events of that name, such as ``round done``."""
        found = read_lines(self.folder / "events.jsonl")
        return [int(entry["round"]) for entry in found if entry["event"] == event]

    def answers(self) -> dict[str, int]:
        """Return the run's replies by what became of them, see :func:`answers`."""
        return answers(stream_rows(self.folder / "activity.csv"))

    def counts_less(self) -> dict[str, dict[str, int]]:
        """Return the clients that count for fewer samples than they registered, see :func:`counts_less`."""
        return counts_less(read_lines(self.folder / "events.jsonl"))

    def commonest_trouble(self) -> str:
        """Return the most frequent reason why a reply did not count, as text.

        Reasons that differ only in numbers or in the client's name are counted together.
        """
        kinds: Counter[tuple[str, str]] = Counter()
        shown: dict[tuple[str, str], str] = {}
        count = 0
        for row in stream_rows(self.folder / "activity.csv"):  # a long run's rows would fill the memory
            if row["status"] in UNUSED_STATUSES:
                kind = row["status"], re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", row["reason"].replace(row["client"], "#"))
                kinds[kind] += 1
                shown.setdefault(kind, f"{row['client']} in round {row['round']}: {row['reason']}")
                count += 1
        if not count:
            return "no client was asked, because none was available"
        (kind, times), *_ = kinds.most_common(1)
        return f"{times} of the {count} replies that did not count were {kind[0]}, such as {shown[kind]}"


def answers(activity: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of updates that were used, as ``admitted``, and of replies with each other status.

    Updates that were scaled are used, and are also counted on their own.

    Args:
        activity: rows of ``activity.csv``.
    """
    statuses = Counter(row["status"] for row in activity)
    found = {"admitted": trained_count(statuses)}
    for status in COUNTED_STATUSES:
        found[status] = statuses[status]
    return found


def counts_less(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the clients that count for fewer samples than they registered (``rounds.largest_client``).

    Args:
        events: the run's events.

    Returns:
        By client, the samples that it ``registered`` and that it ``counted`` for in the first such ``round``.
    """
    found: dict[str, dict[str, int]] = {}
    for entry in events:
        if entry["event"] == COUNTS_LESS_EVENT and "counted" in entry:  # older versions wrote a text alone
            found[str(entry["client"])] = {key: int(entry[key]) for key in ("registered", "counted", "round")}
    return dict(sorted(found.items()))


def rows_on(scored_on: str, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows of ``history.csv`` that were scored on ``test`` images or on ``validation`` samples."""
    return [row for row in rows if row["scored_on"] == scored_on]


def mean_losses(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return each loss term's mean over rows of ``activity.csv``, weighted by their samples."""
    sums: dict[str, float] = {}
    masses: dict[str, float] = {}
    for row in rows:
        for term, value in json.loads(row.get("losses") or "{}").items():
            sums[term] = sums.get(term, 0.0) + value * float(row["samples"])
            masses[term] = masses.get(term, 0.0) + float(row["samples"])
    return {term: sums[term] / max(masses[term], 1.0) for term in sums}


def round_scores(rows: Iterable[Mapping[str, Any]], scorers: Mapping[str, int] | None = None) -> list[RoundScore]:
    """Return the accuracy per domain of every round in rows of ``history.csv``, ascending, with what each round lacks.

    Args:
        rows: rows of ``history.csv``, all of test images or all of validation samples.
        scorers: the run's domains, and how many scores complete each; ``None`` takes the domains of any row.
    """
    by_round: dict[int, list[tuple[str, int, int]]] = {}
    for row in rows:
        entry = (str(row["domain"]), int(row["correct"]), int(row["count"]))
        by_round.setdefault(int(row["round"]), []).append(entry)
    if scorers is None:
        domains: set[str] = set()
        for entries in by_round.values():
            domains.update(domain for domain, _, _ in entries)
        scorers = dict.fromkeys(sorted(domains), 1)
    coverage = Coverage(scorers)
    return [coverage.score(number, by_round[number]) for number in sorted(by_round)]


def class_totals(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[int, str], ClassTotals]:
    """Return the images by class of each round and domain, summed over the clients that scored it.

    Args:
        lines: lines of ``confusion.jsonl``.
    """
    found: dict[tuple[int, str], ClassTotals] = {}
    for line in lines:
        key = int(line["round"]), str(line["domain"])
        totals = found.setdefault(key, ClassTotals.empty(int(line["classes"])))
        for true, predicted, count in zip(line["true"], line["predicted"], line["count"], strict=True):
            totals.add(true, predicted, count)
    return found


def scores_by(
    metric: str, accuracies: Iterable[RoundScore], totals: Mapping[tuple[int, str], ClassTotals]
) -> list[RoundScore]:
    """Return the scores of the same rounds and domains by another metric.

    Args:
        metric: one of :data:`common.metrics.METRICS`.
        accuracies: the scores by accuracy.
        totals: images by class of each round and domain; see :func:`class_totals`.

    Raises:
        KeyError: ``(round, domain)`` of a score without counts.
    """
    found: list[RoundScore] = []
    for score in accuracies:
        values = {domain: totals[score.round, domain].metric(metric) for domain in score.accuracy}
        found.append(RoundScore(score.round, values, score.missing))
    return found


def validation_by(
    metric: str, accuracies: list[RoundScore], folder: Path, measures: Mapping[str, Measure]
) -> list[RoundScore]:
    """Return the validation scores of a run by its metric.

    Args:
        metric: the run's ``rounds.metric``.
        accuracies: the scores by accuracy.
        folder: the run's folder.
        measures: the metrics that the run has besides :data:`common.metrics.MEASURES`.

    Raises:
        ConfigError: the metric needs confusion counts or values, and they are missing.
    """
    if metric == "accuracy" or not accuracies:
        return accuracies
    if metric not in MEASURES:
        values = recorded_values(folder / MEASURES_FILE, "validation")
        return scores_by_values(metric, measures[metric], accuracies, values)
    path = folder / VALIDATION_COUNTS
    try:
        return scores_by(metric, accuracies, class_totals(read_lines(path)))
    except KeyError as error:
        number, domain = error.args[0]
        raise ConfigError(
            f"{path} has no confusion counts of {domain} in round {number}, which rounds.metric={metric} needs: "
            "restore the file, or run again with overwrite=true"
        ) from error


def _reopen(path: Path, columns: Sequence[str], keep_until: int) -> None:
    """Rewrite ``path`` with its header and the rows of rounds up to ``keep_until``."""
    rows: list[Mapping[str, Any]] = []
    if keep_until >= 0:
        rows += [row for row in read_rows(path) if int(row["round"]) <= keep_until]
    from common.storage import write_text

    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, stream.getvalue())


def _append(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    stream = io.StringIO()
    csv.DictWriter(stream, columns, lineterminator="\n", restval="").writerows(rows)
    with path.open("a") as target:
        target.write(stream.getvalue())
