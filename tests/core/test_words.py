"""A device's own texts and numbers reach terminal, CSV and record bounded and printable."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.exchanges import ANSWER
from support.runs import TouchedEngine, run
from support.toy import toy_settings

from client.resident.messages import TrainerReply
from common.errors import MAX_REASON, MAX_TRACEBACK, DataError, PayloadError
from common.text import FORMULA, printable
from common.wire.messages import MAX_ENTRIES, Answer, Registration, Request, read_header
from common.wire.payload import Payload
from goldfinch.trackers.live import LiveView
from server.run.engine import Failure
from server.run.events import Subject
from server.run.history import History
from server.run.schema import EVENTS, read_lines
from strategies.core.codec import MAX_REGISTERED, read_registrations, write_registrations

ODD = {
    "a control sequence": "\x1b[2Jgone",
    "a new line": "two\nlines",
    "half a pair": "\ud800",
    "another direction": "\u202eevil",
    "a formula": "=cmd|' /C calc'!A0",
}

REGISTRATION: dict[str, Any] = {
    "client": "dark-0", "domain": "dark", "samples": 2, "class_counts": [2], "scores": ["dark"], "split": "0",
    "classes": "0", "identity": "0", "code": "0", "device": "a CPU", "versions": {"python": "3"},
}  # fmt: skip


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_text_is_refused_in_every_field_that_a_device_fills(text: str) -> None:
    assert read_header(Answer, ANSWER).device == read_header(Registration, REGISTRATION).device == "a CPU"
    for changes in ({"device": text}, {"losses": {text: 1.0}}, {"seconds": {text: 1.0}}):
        with pytest.raises(PayloadError):
            read_header(Answer, {**ANSWER, **changes})
    for name in ("client", "domain", "split", "classes", "identity", "code", "device"):
        with pytest.raises(PayloadError):
            read_header(Registration, {**REGISTRATION, name: text})
    for versions in ({text: "3"}, {"python": text}):
        with pytest.raises(PayloadError):
            read_header(Registration, {**REGISTRATION, "versions": versions})


ENDLESS: dict[str, dict[str, Any]] = {
    "a device's name": {"device": "x" * 20_000_000},
    "names of domains": {"scores": [f"d{i}" for i in range(1001)]},
    "the name of a domain": {"scores": ["x" * 301]},
    "the version of a package": {"versions": {"python": "3" * 101}},
    "packages": {"versions": {str(i): "1" for i in range(MAX_ENTRIES + 1)}},
    "classes": {"class_counts": [1] * 10_001},
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_registration_is_bounded(case: str) -> None:
    with pytest.raises(PayloadError) as caught:
        read_header(Registration, {**REGISTRATION, **ENDLESS[case]})
    assert len(str(caught.value)) < 1000


def test_what_a_node_registers_is_not_even_read_beyond_a_bound() -> None:
    text = write_registrations([read_header(Registration, REGISTRATION)])
    assert [found.client for found in read_registrations(text)] == ["dark-0"]
    with pytest.raises(PayloadError, match="at most 16777216 are read"):
        read_registrations(text + " " * MAX_REGISTERED)


def test_a_node_registers_each_client_once() -> None:
    registration = read_header(Registration, REGISTRATION)
    with pytest.raises(PayloadError, match="twice"):
        read_registrations(write_registrations([registration] * 3))


def test_as_many_loss_terms_as_are_accepted_fit_into_a_field(tmp_path: Path) -> None:
    """9,000 of them made a field that Python's reader of CSV refuses."""
    with pytest.raises(PayloadError, match="more than 50 entries"):
        read_header(Answer, {**ANSWER, "losses": {f"term {i}": 1.0 for i in range(9000)}})
    many = {f"{i:02}" + "\U0001f600" * 98: -1.2345678e29 for i in range(MAX_ENTRIES)}  # twelve bytes each in JSON
    read_header(Answer, {**ANSWER, "losses": many})

    def edit(request: Request, payload: Payload) -> Payload:
        return replace(payload, header={**payload.header, "losses": many}) if request.train else payload

    settings = toy_settings("fedavg", tmp_path, train={"rounds": 1})
    done = run(settings, TouchedEngine(settings, edit=edit))
    rows = [row for row in done.replies() if row["losses"] != "{}"]
    assert len(json.loads(rows[0]["losses"])) == MAX_ENTRIES


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_the_message_of_a_failure_is_printable_in_the_record_and_on_the_screen(text: str, tmp_path: Path) -> None:
    failure = Failure("dark-0", "failed", text, f"Traceback:\n  {text}")
    assert failure.reason.isprintable()
    assert not FORMULA.match(failure.reason)
    assert all(line.isprintable() for line in failure.traceback.splitlines())
    assert failure.traceback.startswith("Traceback:\n  ")
    stream = StringIO()
    csv.writer(stream).writerow([failure.reason])
    assert stream.getvalue().encode()
    screen = StringIO()
    console = Console(file=screen, width=100, force_terminal=False)
    view = LiveView(Subject.of(toy_settings("fedavg", tmp_path)), console)
    view("client failed", {"round": 1, "client": failure.client, "reason": failure.reason})
    console.print(view)
    assert "\x1b[2J" not in screen.getvalue()
    assert "dark-0 failed" in screen.getvalue()
    assert screen.getvalue().encode()


def test_the_message_of_a_failure_is_bounded_and_a_plain_one_unchanged() -> None:
    found = Failure("dark-0", "failed", "\x1b" * 10**6, "\x1b" * 10**6)
    assert (len(found.reason), len(found.traceback)) == (MAX_REASON, MAX_TRACEBACK)
    assert Failure("dark-0", "failed", "", "y" * 10**6 + "the end").traceback.endswith("the end")
    plain = "ValueError: 3 < 4, größer als erlaubt"
    assert Failure("dark-0", "failed", plain).reason == printable(plain) == plain


def test_a_reason_is_cut_where_it_is_made(tmp_path: Path) -> None:
    """A refusal of a million characters was sent, recorded and shown."""
    told: list[str] = []
    history = History(tmp_path, listeners=[lambda _, entry: told.append(entry["reason"])])
    try:
        raise DataError("x" * 10**6)
    except DataError as error:
        sent = TrainerReply.of(error, private=False)
        history.event("interrupted", reason=str(error))
    assert len(sent.text) == MAX_REASON
    assert len(sent.traceback) == MAX_TRACEBACK
    assert told == ["x" * MAX_REASON]
    assert read_lines(tmp_path / EVENTS)[0]["reason"] == told[0]


def test_a_test_set_stays_as_large_as_it_was(tmp_path: Path) -> None:
    """Of 16 images as first scored, none may become a million later; nor may it have more than are asked for."""

    def edit(request: Request, payload: Payload) -> Payload:
        entries = [{**entry} for entry in payload.header["scores"]]
        for entry in entries:
            if request.client == "dark-0" and request.round > 1:
                entry["count"] = entry["correct"] = 10**6
        return replace(payload, header={**payload.header, "scores": entries})

    for samples in (None, 10):
        rounds = {"test_samples": samples, "quorum": 0.3}
        settings = toy_settings("fedavg", tmp_path / str(samples), rounds=rounds)
        done = run(settings, TouchedEngine(settings, edit=edit))
        refused = [row for row in done.replies() if row["status"] == "refused"]
        assert {(row["client"], row["round"]) for row in refused} == {("dark-0", number) for number in "23"}
        assert "on dark is over 1000000 test images" in refused[0]["reason"]
        dark = [row["count"] for row in done.history() if row["domain"] == "dark"]
        assert set(dark) == {str(samples or 16)}
