"""A run's events: who is told of them, and what they are in words."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from common.metrics import named_missing
from common.settings import RunSettings

Listener = Callable[[str, Mapping[str, Any]], None]
"""Called with an event's name and content."""

WORDS = {
    "code changed": "code changed since the rounds that are done: {reason}",
    "data changed": "data changed since the rounds that are done: {reason}",
    "missing": "going on without {clients}",
    "late": "round {round}: enough have answered; late: {clients}",
    "registration refused": "{client} was not admitted: {reason}",
    "privacy warning": "privacy: {reason}",
    "privacy spent": "privacy: {reason}",
    "tracker failed": "{tracker} is left out from here on: {reason}",
    "stopped": "stopped after round {round}; resume=true goes on",
    "failed": "failed after round {round}: {reason}",
}
"""What is said of an event out of the ordinary."""


def plain_lines(settings: RunSettings) -> Listener:
    """A listener that prints one line per scored round, and a line for everything out of the ordinary."""
    started = time.perf_counter()
    rounds = settings.train.rounds

    def show(name: str, entry: Mapping[str, Any]) -> None:
        line = describe(name, entry, rounds)
        if line:
            print(f"[{time.perf_counter() - started:7.1f} s] {line}", flush=True)
        if name == "finish":
            print(f"[{time.perf_counter() - started:7.1f} s] wrote {settings.output_folder}", flush=True)

    return show


def describe(name: str, entry: Mapping[str, Any], rounds: int) -> str:
    """One line for an event; empty for events that need none."""
    if name == "score":
        cells = "  ".join(f"{domain} {value:5.1f}" for domain, value in entry["accuracy"].items())
        average, worst = f"average {entry['average']:5.1f}", f"worst {entry['worst']:5.1f}"
        return f"round {entry['round']:>3}/{rounds}  {cells}  |  {average}  {worst}{partial_words(entry)}"
    if name == "validation":
        return f"round {entry['round']:>3}/{rounds}  validation {entry['average']:5.1f}{partial_words(entry)}"
    if name == "score missing":
        return _score_missing(entry)
    if name in ("start", "resume"):
        verb = "starts" if name == "start" else f"resumes after round {entry['round']}"
        return f"{entry['method']} on {entry['data']} {verb}: {len(entry['clients'])} clients, {entry['rounds']} rounds"
    if name in WORDS:
        return WORDS[name].format_map({**entry, "clients": ", ".join(entry.get("clients", ()))})
    if name == "round skipped":
        by = f" ({entry['by']})" if "by" in entry else ""
        return (
            f"round {entry['round']} is skipped: {entry['answered']} of {entry['needed']} needed{by} clients answered"
        )
    if name.startswith("client "):
        return f"round {entry['round']}: {entry['client']} {name.removeprefix('client ')}: {entry['reason']}"
    if name == "finish":
        missing = entry.get("missing", {})
        partial = f"; THE FINAL SCORE IS PARTIAL, without {named_missing(missing)}" if missing else ""
        return f"finished after round {entry['round']}, state {entry['sha256'][:16]}{partial}"
    return ""


def _score_missing(entry: Mapping[str, Any]) -> str:
    """One line for a score that did not come; empty if the client's failure is told of already."""
    if entry["status"] == "unasked":
        return f"round {entry['round']}: {entry['domain']} is not scored: {entry['reason']}"
    if entry["status"] != "silent":
        return ""
    return f"round {entry['round']}: {entry['client']} did not score {entry['domain']}: {entry['reason']}"


def partial_words(entry: Mapping[str, Any]) -> str:
    """Return what is added to a score that lacks domains: that it is partial, and since when each is missing."""
    missing = entry.get("missing", {})
    return f"  PARTIAL, without {named_missing(missing)}" if missing else ""
