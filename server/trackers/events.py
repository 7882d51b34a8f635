"""A run's events: who is told of them, and what they are in words."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from common.settings import RunSettings

Listener = Callable[[str, Mapping[str, Any]], None]
"""Called with an event's name and content."""


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
        return f"round {entry['round']:>3}/{rounds}  {cells}  |  {average}  {worst}"
    if name == "validation":
        return f"round {entry['round']:>3}/{rounds}  validation {entry['average']:5.1f}"
    if name in ("start", "resume"):
        verb = "starts" if name == "start" else f"resumes after round {entry['round']}"
        return f"{entry['method']} on {entry['data']} {verb}: {len(entry['clients'])} clients, {entry['rounds']} rounds"
    if name in ("code changed", "data changed"):
        return f"{name} since the rounds that are done: {entry['reason']}"
    if name == "missing":
        return f"going on without {', '.join(entry['clients'])}"
    if name == "late":
        return f"round {entry['round']}: enough have answered; late: {', '.join(entry['clients'])}"
    if name == "registration refused":
        return f"{entry['client']} was not admitted: {entry['reason']}"
    if name == "round skipped":
        by = f" ({entry['by']})" if "by" in entry else ""
        return (
            f"round {entry['round']} is skipped: {entry['answered']} of {entry['needed']} needed{by} clients answered"
        )
    if name == "tracker failed":
        return f"{entry['tracker']} is left out from here on: {entry['reason']}"
    if name.startswith("client "):
        return f"round {entry['round']}: {entry['client']} {name.removeprefix('client ')}: {entry['reason']}"
    if name == "stopped":
        return f"stopped after round {entry['round']}; resume=true goes on"
    if name == "failed":
        return f"failed after round {entry['round']}: {entry['reason']}"
    if name == "finish":
        return f"finished after round {entry['round']}, state {entry['sha256'][:16]}"
    return ""
