"""What happened in a run: every client x domain x round row, every exchange, every event, appended as it happens."""

import csv
import io
import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.metrics import Coverage, RoundScore
from common.storage.files import write_text
from common.wire.messages import Request, completed_status, request_text
from common.wire.payload import Payload, encoded_size
from server.run.engine import Failure
from server.run.prototype_log import Confusions, PrototypeLog
from server.run.schema import read_lines, read_rows, stream_rows
from server.trackers.events import Listener
from strategies.core.federation import Reply

SCORES = ("round", "client", "client_domain", "domain", "count", "correct", "accuracy", "loss")
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
    "bytes_up",
    "bytes_up_weights",
    "bytes_up_prototypes",
    "bytes_up_extra",
    "peak_bytes",
    "releases",
    "randomness",
)
PARTS = ("weights", "prototypes", "extra", "header")
BYTES = ("round", "exchange", "client", "method", "way", "status", *PARTS, "total")


class History:
    """The files in a run's folder that grow with it, and the listeners that are told as rows come.

    ``history.csv``: one row per client, scored domain and round; ``validation.csv``: the same of clients' own
    validation samples, where there are any. ``activity.csv``: one row per client and exchange with losses, seconds,
    bytes and, for failures and refusals, the reason. ``events.jsonl``: one line per event of the run.
    ``confusion.jsonl`` and ``prototypes/``: see :mod:`server.run.prototype_log`; ``bytes.csv``: what every message
    weighs, per client, way and part, see :func:`exchange_rows`.

    Listeners are told of every event and, as ``scores`` and ``activity``, of every row; these two are in no file.

    Args:
        keep_until: activity and events of later rounds are dropped, since a resumed run writes them again. ``-1``
            starts anew.
        scores_until: the same for scores.
        listeners: told of every event and row.
        scorers: the domains that are scored, and how many scores complete each; see
            :class:`common.metrics.Coverage`.
        validators: the same of validation samples.
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
    ) -> None:
        self.folder = folder
        self._scorers, self._validators = scorers, validators
        self.listeners = list(listeners)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("history.csv", *(["validation.csv"] if (folder / "validation.csv").exists() else [])):
            _reopen(folder / name, SCORES, scores_until)
        _reopen(folder / "activity.csv", ACTIVITY, keep_until)
        _reopen(folder / "bytes.csv", BYTES, keep_until)
        self._latest: list[dict[str, Any]] = []  # the present round's activity; all others are on the disk alone
        self.confusions = Confusions(folder / "confusion.jsonl", scores_until)
        self.prototype_log = PrototypeLog(folder / "prototypes", keep_until)
        events = folder / "events.jsonl"
        old = read_lines(events) if keep_until >= 0 and events.exists() else []
        until = dict.fromkeys(("score", "validation"), scores_until)  # others belong to their round's exchanges
        kept = [entry for entry in old if entry.get("round", 0) <= until.get(entry["event"], keep_until)]
        write_text(events, "".join(f"{json.dumps(entry)}\n" for entry in kept))

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
        """Append rows of ``history.csv``."""
        _append(self.folder / "history.csv", SCORES, rows)
        self._tell("scores", {"rows": rows})

    def add_validation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of ``validation.csv``."""
        path = self.folder / "validation.csv"
        if rows and not path.exists():
            _reopen(path, SCORES, -1)
        if rows:
            _append(path, SCORES, rows)

    def add_activity(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of ``activity.csv``."""
        numbers = {row["round"] for row in rows}
        self._latest = [row for row in self._latest if row["round"] in numbers] + [dict(row) for row in rows]
        _append(self.folder / "activity.csv", ACTIVITY, rows)
        self._tell("activity", {"rows": rows})

    def add_bytes(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows of ``bytes.csv``."""
        _append(self.folder / "bytes.csv", BYTES, rows)

    def round_totals(self, number: int) -> dict[str, Any]:
        """What the present round came to: clients by outcome, mean loss terms by sample count, bytes up and down."""
        rows = [row for row in self._latest if int(row["round"]) == number]
        outcomes = Counter(str(row["status"]) for row in rows)
        return {
            "outcomes": dict(sorted(outcomes.items())),
            "losses": {term: round(value, 6) for term, value in mean_losses(rows).items()},
            **{f"bytes_{way}": sum(int(row.get(f"bytes_{way}") or 0) for row in rows) for way in ("up", "down")},
        }

    def round_scores(self) -> list[RoundScore]:
        """Accuracy per domain of every scored round, ascending."""
        return round_scores(stream_rows(self.folder / "history.csv"), self._scorers)

    def validation_scores(self) -> list[RoundScore]:
        """Accuracy per domain of every round on clients' validation samples, ascending; each client counts once."""
        return round_scores(stream_rows(self.folder / "validation.csv"), self._validators)

    def rounds(self, event: str) -> list[int]:
        """The rounds of all events of that name, such as ``round done``."""
        found = read_lines(self.folder / "events.jsonl")
        return [int(entry["round"]) for entry in found if entry["event"] == event]

    def commonest_trouble(self) -> str:
        """The commonest reason why an answer did not count, in words; reasons that differ in numbers are one."""
        kinds: Counter[tuple[str, str]] = Counter()
        shown: dict[tuple[str, str], str] = {}
        count = 0
        for row in stream_rows(self.folder / "activity.csv"):  # a long run's rows would fill the memory
            if row["status"] in ("refused", "failed", "lost"):
                kind = row["status"], re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", row["reason"].replace(row["client"], "#"))
                kinds[kind] += 1
                shown.setdefault(kind, f"{row['client']} in round {row['round']}: {row['reason']}")
                count += 1
        if not count:
            return "no client was there to be asked"
        (kind, times), *_ = kinds.most_common(1)
        return f"{times} of the {count} answers that are missing were {kind[0]}, such as {shown[kind]}"


def mean_losses(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Each loss term's mean over rows of ``activity.csv``, weighted by their samples."""
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
        rows: rows of ``history.csv`` or ``validation.csv``.
        scorers: the run's domains, and how many scores complete each; ``None`` takes the domains of any row.
    """
    by_round: dict[int, list[tuple[str, int, int]]] = {}
    for row in rows:
        entry = (str(row["domain"]), int(row["correct"]), int(row["count"]))
        by_round.setdefault(int(row["round"]), []).append(entry)
    if scorers is None:
        scorers = dict.fromkeys(sorted({domain for entries in by_round.values() for domain, _, _ in entries}), 1)
    coverage = Coverage(scorers)
    return [coverage.score(number, by_round[number]) for number in sorted(by_round)]


def _reopen(path: Path, columns: Sequence[str], keep_until: int) -> None:
    """Rewrite ``path`` with its header and the rows of rounds up to ``keep_until``."""
    rows = [row for row in read_rows(path) if int(row["round"]) <= keep_until] if keep_until >= 0 else []
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


# ---- bytes.csv -------------------------------------------------------------------------------------------------------


def exchange_rows(
    message: Payload, requests: Mapping[str, Request], replies: Sequence[Reply], failures: Sequence[Failure]
) -> list[dict[str, Any]]:
    """Two rows of ``bytes.csv`` per client that was asked, down and up, the same on every engine.

    Counted is what Goldfinch hands to the engine and is handed by it: the blob of tensors, the request's text beside
    it, and the words of a client that failed. What a transport adds (framing, signatures, TLS, polls, the app's code)
    is not in it; docs/results/bytes.md compares it with the wire.

    ``replies`` are answers that could be read, whether or not the gate let them in; ``failures`` clients without one,
    and answers that were not let in.
    """
    parts, size = message.part_bytes(), encoded_size(message)
    answers = {reply.client: reply for reply in replies}
    failed = {failure.client: failure for failure in failures}
    rows = []
    for client, request in requests.items():
        failure = failed.get(client)
        facts = {
            "round": request.round,
            "exchange": request.exchange,
            "client": client,
            "method": request.method,
            "status": failure.status if failure else completed_status(train=request.train),
        }
        sent = failure is None or failure.sent
        total = size + len(request_text(request).encode())
        rows.append({**facts, "way": "down", **(_split(parts, total) if sent else _split({}, 0))})
        rows.append({**facts, "way": "up", **_up(answers.get(client), failure)})
    return rows


def _up(reply: Reply | None, failure: Failure | None) -> dict[str, int]:
    if reply is not None:
        return _split(reply.payload.part_bytes(), reply.bytes_up)
    if failure is None or failure.status in ("lost", "late"):
        return _split({}, 0)
    words = len(failure.reason.encode()) + len(failure.traceback.encode())
    return _split({}, failure.bytes_up or words)


def _split(parts: Mapping[str, int], total: int) -> dict[str, int]:
    """The parts, and as header whatever else there is: names, shapes, JSON, padding."""
    known = {part: parts.get(part, 0) for part in PARTS[:-1]}
    return {**known, "header": total - sum(known.values()), "total": total}
