"""``goldfinch report DIR --watch``: show a run that another process trains, from its record."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from common.errors import ConfigError
from goldfinch.record import RunRecord
from goldfinch.trackers.live import LiveView, can_draw
from server.run.events import Listener, Subject, lines_about
from server.run.schema import EVENTS
from server.run.tail import Tail

ENDINGS = ("finish", "failed", "stopped", "interrupted")
"""Events after which a run adds no other until it is resumed."""

POLL_SECONDS = 0.3


def watch(folder: Path, console: Console | None = None) -> None:
    """Show the run in ``folder`` from its beginning, and go on until it ends. Nothing is written, the run is untouched.

    Args:
        folder: the run's folder.
        console: the terminal; ``None`` is the standard output.

    Raises:
        ConfigError: the folder holds no run, or an event is not as a run writes it.
        KeyboardInterrupt: Ctrl-C; its message says that the run goes on.
    """
    subject = subject_in(RunRecord(folder))
    path = folder / EVENTS
    if not path.exists():
        raise ConfigError(f"{folder} has no {EVENTS} yet: the run has not started, or its server writes elsewhere")
    tail = Tail(path)
    entries = tail.read()
    clock = EventClock(entries[0]["time"] if entries else time.time())
    console = console or Console()
    with ExitStack() as stack:
        if can_draw(console):
            show: Listener = stack.enter_context(LiveView(subject, console, clock))
        else:
            show = lines_about(subject, clock())
        interrupted = None
        try:
            while not _shown(entries, show, clock):
                time.sleep(POLL_SECONDS)
                entries = tail.read()
        except KeyboardInterrupt as error:  # caught here, since the view would call the run interrupted
            interrupted = type(error)
            if isinstance(show, LiveView):
                show.state = "no longer watched"
    if interrupted:
        raise interrupted("no longer watching; the run is untouched")


class EventClock:
    """The time of the event that is being shown, and the present time once all that are there have been shown.

    Args:
        now: the time of the first event.
    """

    def __init__(self, now: float) -> None:
        self.shown: float | None = now

    def __call__(self) -> float:
        """Return the time in seconds."""
        if self.shown is None:
            return time.time()
        return self.shown


def _shown(entries: Sequence[Mapping[str, Any]], show: Listener, clock: EventClock) -> bool:
    """Show the events in their own time; return whether the last of them ends the run."""
    last = ""
    for entry in entries:
        clock.shown = float(entry["time"])
        show(entry["event"], entry)
        last = entry["event"]
    ended = last in ENDINGS
    if not ended:
        clock.shown = None
    return ended


def subject_in(run: RunRecord) -> Subject:
    """Return what is shown of a recorded run; no class that its configuration names is imported."""
    config = run.config
    choices: Mapping[str, Any] = config["choices"]
    return Subject(
        method=str(choices["method"]),
        data=str(choices["data"]),
        seed=config["seed"],
        rounds=config["train"]["rounds"],
        engine=str(config["engine"].get("name")),
        folder=run.folder,
    )
