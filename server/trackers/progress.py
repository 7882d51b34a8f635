"""What a person sees while a run goes on: a live view in a terminal, plain lines elsewhere, nothing when quiet."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

from rich.console import Console

from common.settings import RunSettings
from server.trackers.events import Listener, plain_lines
from server.trackers.live import LiveView

LEAST_WIDTH = 44
"""Columns below which the live view gives way to plain lines."""


@contextlib.contextmanager
def watching(settings: RunSettings, *, quiet: bool = False, console: Console | None = None) -> Iterator[Listener]:
    """A listener that shows the run, for as long as it goes on.

    Meanwhile log records and warnings go to ``logs/goldfinch.log`` in the run's folder instead of the screen.
    With ``quiet`` it shows nothing; errors are raised all the same.
    """
    console = console or Console()
    with logging_to_file(settings):
        if quiet:
            yield lambda name, entry: None  # noqa: ARG005
        elif console.is_terminal and not console.is_dumb_terminal and console.width >= LEAST_WIDTH:
            with LiveView(settings, console) as view:
                yield view
        else:
            yield plain_lines(settings)


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
