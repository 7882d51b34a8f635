"""Whole runs in this process, with hands on the messages: reorder, spoil or fail a client's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.errors import PayloadError
from common.scores import score_row
from common.settings import RunSettings
from common.wire.messages import Answer, Request, read_header
from common.wire.payload import Payload, encoded_size
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation
from server.run.engine import Admit, Failure
from server.run.history import reply_row
from server.run.schema import REPLIES, SCORES, read_lines
from strategies.core.federation import Reply

Edit = Callable[[Request, Payload], Payload]


class BrokenError(RuntimeError):
    """What a client that drops out raises."""


@dataclass
class Recorded:
    """One message as the engine carried it."""

    request: Request
    message: Payload
    reply: Reply | None


class TouchedEngine:
    """The inline engine with hands on its messages.

    Args:
        settings: the run's settings.
        arrival: order in which replies reach the server, from the order of client ids.
        failing: whether the device raises instead of answering.
        edit: a changed answer.
        lost: whether the device's answer is lost on the way, after it did all that was asked.
        unasked: whether the request itself is lost, so that the device does nothing.
    """

    simulated = True

    def __init__(
        self,
        settings: RunSettings,
        *,
        arrival: Callable[[list[Any]], list[Any]] = list,
        failing: Callable[[Request], bool] = lambda request: False,
        edit: Edit = lambda request, payload: payload,
        lost: Callable[[Request], bool] = lambda request: False,
        unasked: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        self.inner = InlineEngine(settings)
        self.arrival, self.edit, self.lost, self.unasked = arrival, edit, lost, unasked
        self.messages: list[Recorded] = []
        for device in self.inner.devices.values():
            _make_failing(device, failing)

    def register(self, expected: Sequence[str], admit: Admit, seconds: float) -> list[Failure]:
        found = [self.inner.devices[client].register() for client in expected]
        reasons = [(item.client, admit(item)) for item in self.arrival(found)]
        return [Failure(client, "refused", reason) for client, reason in reasons if reason]

    def exchange(
        self, message: Payload, requests: Mapping[str, Request], seconds: float, **more: Any
    ) -> tuple[list[Reply], list[Failure]]:
        asked = {name: request for name, request in requests.items() if not self.unasked(request)}
        replies, failures = self.inner.exchange(message, asked, seconds, **more)
        gone = [name for name, request in requests.items() if name not in asked or self.lost(request)]
        failures += [Failure(name, "lost", "no complete answer") for name in gone]
        edited: list[Reply] = []
        for reply in (reply for reply in replies if reply.client not in gone):
            try:
                edited.append(self._edited(requests[reply.client], reply))
            except PayloadError as error:  # as an engine does with a header that cannot be read
                failures.append(Failure(reply.client, "refused", str(error)))
        by_client = {reply.client: reply for reply in edited}
        self.messages += [Recorded(request, message, by_client.get(name)) for name, request in requests.items()]
        return self.arrival(edited), failures

    def _edited(self, request: Request, reply: Reply) -> Reply:
        payload = self.edit(request, reply.payload)
        if payload is reply.payload:
            return reply
        answer = read_header(Answer, payload.header)
        return replace(reply, payload=payload, answer=answer, bytes_up=encoded_size(payload))

    def close(self) -> None:
        self.inner.close()


class BackwardsEngine(InlineEngine):
    """The inline engine, whose clients train from the last to the first."""

    def exchange(
        self, message: Payload, requests: Mapping[str, Request], seconds: float, **more: Any
    ) -> tuple[list[Reply], list[Failure]]:
        return super().exchange(message, dict(reversed(requests.items())), seconds, **more)


def _make_failing(device: Any, failing: Callable[[Request], bool]) -> None:
    whole = device.answer

    def answer(request: Request, message: Payload) -> Payload:
        if failing(request):
            raise BrokenError("the camera fell off")
        return whole(request, message)

    device.answer = answer


@dataclass
class Run:
    """What a run left."""

    summary: dict[str, Any]
    folder: Path
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    messages: list[Recorded] = field(default_factory=list)

    @property
    def sha256(self) -> str:
        return str(self.summary["state_sha256"])

    def history(self) -> list[dict[str, str]]:
        """Rows of ``scores.jsonl`` as texts."""
        return [_texts(score_row(line)) for line in read_lines(self.folder / SCORES)]

    def replies(self) -> list[dict[str, str]]:
        """Rows of ``replies.jsonl`` as texts."""
        return [_texts(reply_row(line)) for line in read_lines(self.folder / REPLIES)]

    def scores(self, scored_on: str) -> list[dict[str, str]]:
        """Rows of ``test`` images or of ``validation`` samples, as texts."""
        return [row for row in self.history() if row["scored_on"] == scored_on]

    def averages(self) -> list[float]:
        """Average accuracy of each scored round."""
        return [float(entry["average"]) for name, entry in self.events if name == "score"]


def _texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a row as a CSV file would have it."""
    return {name: "" if value is None else str(value) for name, value in row.items()}


def run(
    settings: RunSettings, engine: TouchedEngine | InlineEngine | None = None, stop_after: int | None = None
) -> Run:
    """One run from settings to files; ``stop_after`` interrupts it, as a person would, after that many rounds."""
    engine = engine or InlineEngine(settings)
    events: list[tuple[str, Mapping[str, Any]]] = []
    done = 0

    def listen(name: str, entry: Mapping[str, Any]) -> None:
        nonlocal done
        events.append((name, entry))
        if name in ("round done", "round skipped"):
            done = int(entry["round"])

    prepare_output(settings)
    summary = run_federation(settings, engine, [listen], lambda: stop_after is not None and done >= stop_after)
    messages = engine.messages if isinstance(engine, TouchedEngine) else []
    return Run(summary, settings.output_folder, events, messages)
