"""What a person sees while a run goes on: a live view in a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from common.settings import RunSettings
from server.history import Listener

LEAST_WIDTH = 44
"""Columns below which the live view gives way to plain lines."""


@contextlib.contextmanager
def watching(settings: RunSettings, *, quiet: bool = False, console: Console | None = None) -> Iterator[Listener]:
    """A listener that shows the run, for as long as it goes on.

    Meanwhile log records and warnings go to ``logs/goldfinch.log`` in the run's folder instead of the screen.

    Args:
        settings: the run's settings.
        quiet: show nothing; errors are raised all the same.
        console: where to; ``None`` is standard output.
    """
    console = console or Console()
    with logging_to_file(settings):
        if quiet:
            yield _nothing
        elif console.is_terminal and not console.is_dumb_terminal and console.width >= LEAST_WIDTH:
            from server.live import LiveView

            with LiveView(settings, console) as view:
                yield view
        else:
            yield plain_lines(settings)


def _nothing(name: str, entry: Mapping[str, Any]) -> None:
    """Shows nothing."""


@contextlib.contextmanager
def logging_to_file(settings: RunSettings) -> Iterator[None]:
    """Send log records and Python warnings to ``logs/goldfinch.log``; the root logger is as before afterwards."""
    root = logging.getLogger()
    others = [logger for logger in (logging.getLogger(name) for name in ("flwr", "ray")) if logger.handlers]
    folder = settings.output_folder / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "goldfinch.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = [(logger, list(logger.handlers)) for logger in (root, *others)]
    shown = warnings.showwarning
    for logger in (root, *others):
        logger.handlers = [handler]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        warnings.showwarning = shown
        for logger, handlers in before:
            logger.handlers = handlers
        handler.close()
        with contextlib.suppress(OSError):
            folder.rmdir()  # only succeeds when nothing was written


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
    if name in ("start", "resume"):
        verb = "starts" if name == "start" else f"resumes after round {entry['round']}"
        return f"{entry['method']} on {entry['data']} {verb}: {len(entry['clients'])} clients, {entry['rounds']} rounds"
    if name == "missing":
        return f"going on without {', '.join(entry['clients'])}"
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
    if name == "finish":
        return f"finished after round {entry['round']}, state {entry['sha256'][:16]}"
    return ""
