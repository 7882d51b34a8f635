"""What happened in a run, in three files that only grow: scores, replies and events, appended as they come."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from os import SEEK_END
from pathlib import Path
from typing import Any

from common.errors import reason_of
from common.metrics import Measure, RoundScore
from common.scores import RunScores, Scorers, lines_on, score_row
from server.run.events import WAITING_EVENT, Listener
from server.run.files import ReplyTotals, counts_less
from server.run.schema import EVENTS, REPLIES, SCORES, cut_back, read_lines, stream_lines

BYTE_COLUMNS = (
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
)

REPLY_COLUMNS = (
    "round",
    "exchange",
    "time",
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
    *BYTE_COLUMNS,
    "peak_bytes",
    "releases",
    "randomness",
)
"""Columns of :func:`reply_row`."""

CSV_COPIES = ("history.csv", "replies.csv")
"""Copies of scores and replies for a spreadsheet, which ``goldfinch report --csv`` writes."""


def append_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Append entries to one of a run's three files, one JSON object per line, after any line that a crash cut short."""
    text = "".join(f"{json.dumps(entry)}\n" for entry in entries)
    with path.open("ab+") as stream:
        if stream.seek(0, SEEK_END):
            stream.seek(-1, SEEK_END)
            if stream.read(1) != b"\n":
                text = f"\n{text}"
        stream.write(text.encode())


def record_waiting(folder: Path, clients: Sequence[str], seconds: float, number: int | None) -> None:
    """Append the event of an engine that has waited for ``clients`` for ``seconds``, in round ``number`` or before."""
    entry: dict[str, Any] = {"event": WAITING_EVENT, "time": round(time.time(), 3)}
    if number is not None:
        entry["round"] = number
    append_lines(folder / EVENTS, [{**entry, "clients": list(clients), "seconds": round(seconds, 1)}])


class History:
    """The files in a run's folder that grow with it, and the listeners that are called with each new entry.

    - ``scores.jsonl``: one line per client, scored domain and round, on test images or on validation samples: images,
      correct predictions, loss, the images by true and predicted class, and the sums of ``own_metric``.
    - ``replies.jsonl``: one line per client and exchange: status, losses, seconds, bytes of each part of both messages,
      and the reason of a failure or refusal.
    - ``events.jsonl``: one line per event of the run.
    - ``prototypes/``: see :mod:`server.run.prototype_log`.

    Listeners get every event. Listeners also get the rows, as ``scores`` and ``replies``, and each round's other
    metrics by domain, as ``metrics``; these three are not in ``events.jsonl``.

    Args:
        last: replies and events of later rounds are dropped, since a resumed run writes them again. ``-1`` drops all.
        last_scored: the same for scores.
        listeners: get every event and row.
        scorers: the domains that are scored, by ``test`` and ``validation``; see :class:`common.scores.RunScores`.
        metric: what a score on validation samples is.
        measures: the metrics that the run has besides :data:`common.metrics.MEASURES`.
        at_once: whether later rounds are dropped now; otherwise :meth:`rewind` does it, once clients and data are
            checked. Until then only events can be added. Those of a new run are held back: the files are another's.
    """

    def __init__(
        self,
        folder: Path,
        last: int = -1,
        last_scored: int = -1,
        listeners: Sequence[Listener] = (),
        *,
        scorers: Mapping[str, Scorers] | None = None,
        metric: str = "accuracy",
        measures: Mapping[str, Measure] | None = None,
        at_once: bool = True,
    ) -> None:
        self.folder, self.metric = folder, metric
        self._last, self._last_scored = last, last_scored
        self.measures = dict(measures or {})
        self._scorers = dict(scorers or {})
        self.listeners = list(listeners)
        self._held: list[dict[str, Any]] = []  # events that are not written yet
        self._writes = last >= 0
        self._latest: list[Mapping[str, Any]] = []  # the present round's replies; all others are on the disk alone
        folder.mkdir(parents=True, exist_ok=True)
        if at_once:
            self.rewind()

    def rewind(self) -> None:
        """Drop the rounds that the run writes again. Call :meth:`rewind` once, before scores and replies are added."""
        from server.run.prototype_log import PrototypeLog

        for name in (SCORES, REPLIES, EVENTS):
            cut_back(self.folder / name, self._last, self._last_scored)
        self._writes = True
        self.prototype_log = PrototypeLog(self.folder / "prototypes", self._last)

    def event(
        self,
        name: str,
        *,
        recorded: Mapping[str, Any] | None = None,
        told: Mapping[str, Any] | None = None,
        **content: Any,
    ) -> None:
        """Append an event and tell the listeners.

        Args:
            name: the event's name.
            recorded: content that only the file has.
            told: content that only the listeners get, because other files of the run hold it.
            content: what both get.
        """
        if "reason" in content:
            content["reason"] = reason_of(str(content["reason"]))
        entry = {"event": name, "time": round(time.time(), 3), **content}
        self._held.append({**entry, **(recorded or {})})
        if self._writes:
            append_lines(self.folder / EVENTS, self._held)
            self._held.clear()
        self.tell(name, {**entry, **(told or {})})

    def tell(self, name: str, entry: Mapping[str, Any]) -> None:
        """Tell the listeners of something that the events do not keep."""
        for listener in self.listeners:
            listener(name, entry)

    def add_scores(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines of ``scores.jsonl``; listeners get the rows of test images."""
        append_lines(self.folder / SCORES, lines)
        rows = [score_row(line) for line in lines_on("test", lines)]
        self.tell("scores", {"rows": rows, "measures": list(self.measures)})

    def add_replies(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append lines of ``replies.jsonl``; listeners get the rows."""
        numbers = {line["round"] for line in lines}
        self._latest = [line for line in self._latest if line["round"] in numbers]
        self._latest += lines
        append_lines(self.folder / REPLIES, lines)
        self.tell("replies", {"rows": [reply_row(line) for line in lines]})

    def round_totals(self, number: int) -> dict[str, Any]:
        """Return the present round's clients by status, mean loss terms by sample count, and bytes up and down."""
        rows = [row for row in self._latest if row["round"] == number]
        statuses: Counter[str] = Counter()
        sent = {"bytes_up": 0, "bytes_down": 0}
        for row in rows:
            statuses[str(row["status"])] += 1
            for column in sent:
                sent[column] += row.get(column, 0)
        losses = {term: round(value, 6) for term, value in mean_losses(rows).items()}
        totals: dict[str, Any] = {"outcomes": dict(sorted(statuses.items())), "losses": losses, **sent}
        return totals

    def scores(self) -> RunScores:
        """Return the run's scores so far."""
        lines = list(stream_lines(self.folder / SCORES))
        events = read_lines(self.folder / EVENTS)
        return RunScores(lines, events, self._scorers, self.measures, chosen_by=self.metric)

    def round_scores(self) -> list[RoundScore]:
        """Return the accuracy per domain of every scored round, ascending."""
        return self.scores().tested()

    def validation_scores(self) -> list[RoundScore]:
        """Return the metric per domain of every round on clients' validation samples, ascending."""
        return self.scores().validated()

    def rounds(self, event: str) -> list[int]:
        """The rounds of all events of that name, such as ``round done``."""
        lines = read_lines(self.folder / EVENTS)
        return [int(entry["round"]) for entry in lines if entry["event"] == event]

    def answers(self) -> Mapping[str, int]:
        """Return the run's replies by what became of them, see :class:`server.run.files.ReplyTotals`."""
        return ReplyTotals.of(stream_lines(self.folder / REPLIES)).answers

    def counts_less(self) -> dict[str, dict[str, int]]:
        """Return the clients that count for fewer samples than they registered."""
        return counts_less(read_lines(self.folder / EVENTS))


def reply_row(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of ``replies.jsonl`` as a row with all columns; the losses are JSON text."""
    row: dict[str, Any] = dict.fromkeys(REPLY_COLUMNS, "") | dict.fromkeys(BYTE_COLUMNS, 0) | dict(line)
    if "losses" in line:
        row["losses"] = json.dumps(line["losses"])
    return row


def mean_losses(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each loss term's mean over lines of ``replies.jsonl``, weighted by their samples.

    A term is left out if less than half as many replies have it as have the most frequent one: a single device cannot
    fill means and charts with names.
    """
    named: Counter[str] = Counter()
    for row in rows:
        named.update(list(row.get("losses", {})))
    means: dict[str, float] = {}
    for term, count in named.items():
        if 2 * count >= max(named.values()):
            found = [(row["losses"][term], float(row["samples"])) for row in rows if term in row.get("losses", {})]
            means[term] = sum(loss * mass for loss, mass in found) / max(sum(mass for _, mass in found), 1.0)
    return means
