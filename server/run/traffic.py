"""Bytes of a run: what every message of a run weighs, per client, round, way and part, the same on every engine.

Counted is what Goldfinch hands to the engine and is handed by it: the blob of tensors, the request's text beside it,
and the words of a client that failed. What a transport adds (framing, signatures, TLS, polls, the app's code) is not in
it; docs/results/bytes.md compares it with the wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.wire.messages import Request, request_text
from common.wire.payload import Payload, encoded_size
from server.run.engine import Failure, Reply

PARTS = ("weights", "prototypes", "extra", "header")
COLUMNS = ("round", "exchange", "client", "method", "way", "status", *PARTS, "total")


def exchange_rows(
    message: Payload, requests: Mapping[str, Request], replies: Sequence[Reply], failures: Sequence[Failure]
) -> list[dict[str, Any]]:
    """Two rows of ``bytes.csv`` per client that was asked: down and up.

    Args:
        message: the tensors every client was sent.
        requests: what each client was asked.
        replies: answers that could be read, whether or not the gate let them in.
        failures: clients without one, and answers that were not let in.
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
            "status": failure.status if failure else "trained" if request.train else "scored",
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


def totals(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Bytes by way and part over all rows."""
    sums = {way: dict.fromkeys((*PARTS, "total"), 0) for way in ("down", "up")}
    for row in rows:
        for part in sums[row["way"]]:
            sums[row["way"]][part] += int(row[part])
    return sums
