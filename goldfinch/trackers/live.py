"""Shows a run while it goes on: a live view in a terminal, plain lines elsewhere, nothing with ``quiet``.

The live view has the round, the time left, the accuracy of each domain, losses, clients and bytes.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.errors import some_of
from common.metrics import PARTIAL, named_missing
from common.text import duration, size
from common.wire.messages import COUNTED_STATUSES, UNUSED_STATUSES, trained_count
from goldfinch.trackers.wait_lines import wait_lines
from server.run.events import (
    COUNTS_LESS_EVENT,
    MAX_SITES,
    SCALED_EVENT,
    WAITING_EVENT,
    Listener,
    SiteCounts,
    Subject,
    describe,
    plain_lines,
    waiting_for,
)

if TYPE_CHECKING:  # it imports torch, which a terminal that only watches does not need
    from common.settings import RunSettings

SUMMARIES = ("average", "worst", "validation")
BARS = "▁▂▃▄▅▆▇█"
MAX_NOTES = 4
SMOOTHING = 0.6
"""Weight of the past in the moving average of a round's seconds, in [0, 1)."""

SILENT_SECONDS = 30.0
"""Seconds without an event after which the view says for how long there was none."""

MIN_WIDTH = 44
"""Columns below which the live view gives way to plain lines."""

WIDE, WIDEST = 60, 66
"""Columns from which the live view also has the time gone and the best score, and from which it has all bytes."""

NOT_NOTED = (
    *("start", "score", "validation", "finish", "stopped", "scores", "replies", "metrics"),
    *(SCALED_EVENT, COUNTS_LESS_EVENT, WAITING_EVENT),
)
"""Events that the view shows elsewhere; the line of every other event is a note at the end."""

STATE_STYLES = {"finished": "green", "failed": "bold red"}


class LiveView:
    """A listener that draws the run's events several times a second, below the lines that are printed meanwhile.

    Args:
        subject: the run.
        console: the terminal.
        clock: returns the time in seconds; only differences are used.
    """

    def __init__(self, subject: Subject, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self.subject = subject
        self.clock = clock
        self.state = waiting_for(subject.engine)
        self.clients = 0
        self.total = subject.rounds
        self.done = 0
        self.current = 0
        self.began = clock()
        self.round_began = self.began
        self.round_seconds: float | None = None
        self.scores: dict[str, list[float]] = {}  # by domain or summary
        self.best: dict[str, float] = {}  # of scores that are not partial, also those before the run was resumed
        self.latest: dict[str, float] = {}  # the last round's accuracy, by domain
        self.missing: dict[str, int | None] = {}
        self.partial: set[str] = set()  # domains and summaries with a partial last score
        self.losses: dict[str, list[float]] = {}
        self.outcomes: Counter[str] = Counter()
        self.last_outcomes: dict[str, int] = {}
        self.counting_less = 0  # clients that count for fewer samples than they registered
        self.bytes = {"up": 0, "down": 0}
        self.last_bytes = {"up": 0, "down": 0}
        self.notes: list[str] = []
        self.asked = 0  # clients of the present round
        self.awaited: list[str] = []  # clients whose reply the present exchange waits for
        self.waited_since = 0.0
        self.heard = self.began
        self._counts = SiteCounts(subject.classes)
        self._live = Live(self, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveView:
        self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.state = "interrupted"
        elif kind is not None:
            self.state = "failed"
        self._live.stop()

    # ---- events ----------------------------------------------------------------------------------------------------

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """Receive an event."""
        self.heard = self.clock()
        self.awaited = []
        for line in self._counts.lines(name, entry):
            self._live.console.print(Text(line, "dim", no_wrap=True, overflow="ellipsis"))
        if name in ("start", "resume"):
            self._start(entry)
        elif name == "registered" and self.state.startswith("waiting"):
            self.clients += 1
        elif name == "round":
            self.current = int(entry["round"])
            self.round_began = self.clock()
            self.asked = len(entry["clients"])
        elif name == WAITING_EVENT:
            self.awaited = list(entry["clients"])
            self.waited_since = self.clock() - float(entry["seconds"])
        elif name == "score":
            self._add_scores(entry)
        elif name == "validation":
            self._add_score("validation", float(entry["average"]), partial=bool(entry.get("missing")))
        elif name == "round done":
            self._finish_round(entry)
        elif name == "round skipped":
            self.done = int(entry["round"])
        elif name == "finish":
            self.state = "finished"
            if entry.get("missing"):
                self.state = "finished, score partial"
        elif name == COUNTS_LESS_EVENT:
            self.counting_less += 1
        elif name == "stopped":
            self.state = "stopped"
        if name in NOT_NOTED:
            return
        line = describe(name, entry, self.total)
        if line:
            self.notes.append(line)

    def _start(self, entry: Mapping[str, Any]) -> None:
        self.done = int(entry["round"])
        self.current = self.done
        self.total = int(entry["rounds"])
        self.clients = len(entry["clients"])
        self.best = dict(entry.get("best", {}))
        self.state = "training"
        if self.done >= self.total:
            self.state = "scoring"

    def _add_scores(self, entry: Mapping[str, Any]) -> None:
        self.missing = dict(entry.get("missing", {}))
        self.latest = dict(entry["accuracy"])
        for domain, value in self.latest.items():
            self._add_score(domain, float(value), partial=domain in self.missing)
        for name in ("average", "worst"):
            self._add_score(name, float(entry[name]), partial=bool(self.missing))

    def _add_score(self, name: str, value: float, *, partial: bool) -> None:
        """Add a score of a domain or summary. A partial score is marked, and is never the best."""
        self.scores.setdefault(name, []).append(value)
        if partial:
            self.partial.add(name)
            return
        self.partial.discard(name)
        self.best[name] = max(value, self.best.get(name, value))

    def _finish_round(self, entry: Mapping[str, Any]) -> None:
        self.done = int(entry["round"])
        if self.done >= self.total:
            self.state = "scoring"
        seconds = float(entry["seconds"])
        if self.round_seconds is None:
            self.round_seconds = seconds
        else:
            self.round_seconds = SMOOTHING * self.round_seconds + (1 - SMOOTHING) * seconds
        for term, value in entry.get("losses", {}).items():
            self.losses.setdefault(term, []).append(float(value))
        self.last_outcomes = {str(outcome): int(count) for outcome, count in entry.get("outcomes", {}).items()}
        self.outcomes.update(self.last_outcomes)
        for way in self.bytes:
            self.last_bytes[way] = int(entry.get(f"bytes_{way}", 0))
            self.bytes[way] += self.last_bytes[way]

    # ---- drawing ---------------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the whole view, no wider than the terminal."""
        width = options.max_width
        parts: list[RenderableType] = [self._head(width), self._progress(width)]
        if self.scores:
            parts.append(Padding(self._accuracy(width), (1, 0, 0, 0)))
        if self.missing:
            parts.append(Text(f"{PARTIAL} partial, without {named_missing(self.missing)}", "bold red", overflow="fold"))
        facts = self._facts(width)
        if facts.row_count:
            parts.append(Padding(facts, (1, 0, 0, 0)))
        for note in self.notes[-MAX_NOTES:]:
            parts.append(Text(f"! {note}", "yellow", no_wrap=True, overflow="ellipsis"))
        if len(self.notes) > MAX_NOTES:
            parts.append(Text(f"  {len(self.notes) - MAX_NOTES} more in events.jsonl", "dim"))
        if self.state.startswith("finished"):
            parts.append(Text(f"wrote {self.subject.folder}", "dim", overflow="fold"))
        yield Group(*parts)

    def _head(self, width: int) -> Text:
        """Return the line with method, data, clients and seed on the left and the state on the right."""
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(self.subject.method, "bold")
        head.append(f" on {self.subject.data}")
        if self.clients:
            head.append(f"  {self.clients} clients", "dim")
        head.append(f"  seed {self.subject.seed}", "dim")
        gap = width - head.cell_len - len(self.state)
        if gap < 2:
            gap = 2
        head.append(" " * gap)
        head.append(self.state, STATE_STYLES.get(self.state, "yellow"))
        return head

    def _progress(self, width: int) -> Table:
        """Return the line with the round, the progress bar, and the time gone and left."""
        number = self.done
        if self.state == "training":
            number = self.current
        times = duration(self.clock() - self.began)
        left = self._left()
        if left and width >= WIDE:
            times = f"{times} gone, {left} left"
        elif left:
            times = f"{left} left"
        bar = ProgressBar(
            total=max(1, self.total), completed=self.done, complete_style="yellow", finished_style="green"
        )
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right")
        table.add_row(Text(f"round {number} of {self.total}"), bar, Text(times, "dim"))
        return table

    def _left(self) -> str:
        """Return the time that the remaining rounds take; empty before the first round and after the last.

        The estimate counts down during a round. ``rich.progress`` changes its estimate only when a step is done. There
        is none while clients are late for the present round, since nobody knows when they reply.
        """
        if self.state != "training" or self.round_seconds is None:
            return ""
        spent = 0.0
        if self.current > self.done:
            spent = self.clock() - self.round_began
        if self.awaited and spent > self.round_seconds:
            return ""
        spent = min(spent, self.round_seconds)
        remaining = (self.total - self.done) * self.round_seconds - spent
        return duration(max(0.0, remaining))

    def _accuracy(self, width: int) -> Table:
        """Return the table of accuracies: a row for each domain, then one for each summary."""
        domains = sorted((self.scores.keys() | self.missing.keys()) - set(SUMMARIES))
        max_label_width = max(10, width // 3)
        label_width = len("accuracy in %")
        for name in [*domains, "average"]:
            needed = len(name)
            if self.missing:
                needed += len(f" {PARTIAL}")
            label_width = max(label_width, needed)
        label_width = min(label_width, max_label_width)
        other_columns_width = 22
        if width >= WIDE:
            other_columns_width = 30
        chart_width = max(4, min(40, width - label_width - other_columns_width))

        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), expand=False)
        table.add_column("accuracy in %", no_wrap=True, overflow="ellipsis", max_width=max_label_width)
        table.add_column("now", justify="right", no_wrap=True)
        table.add_column("change", justify="right", no_wrap=True)
        if width >= WIDE:
            table.add_column("best", justify="right", no_wrap=True)
        table.add_column("over rounds", no_wrap=True)
        for name in domains:
            self._add_accuracy_row(table, name, chart_width, with_best=width >= WIDE)
        for name in SUMMARIES:
            if name not in self.scores:
                continue
            if name == "average":
                table.add_section()
            self._add_accuracy_row(table, name, chart_width, with_best=width >= WIDE)
        return table

    def _add_accuracy_row(self, table: Table, name: str, chart_width: int, *, with_best: bool) -> None:
        """Add a domain or summary: its name, last score, change, best score if asked for, and course over rounds."""
        values = self.scores.get(name, [])
        label = name
        now = "-"
        change = Text("")
        style = ""
        is_absent = name in self.missing and name not in self.latest
        is_marked = is_absent or name in self.partial
        if not is_absent:
            now = f"{values[-1]:.1f}"
        if is_marked:
            label += f" {PARTIAL}"
        else:
            change = _change(values)
            if name == "average":
                style = "bold"
        cells = [Text(label), Text(now), change]
        if with_best:
            best = "-"
            if name in self.best:
                best = f"{self.best[name]:.1f}"
            cells.append(Text(best, "dim"))
        cells.append(Text(sparkline(values, chart_width), "yellow"))
        table.add_row(*cells, style=style)

    def _facts(self, width: int) -> Table:
        """Return the table of losses, clients by status, and bytes; each row appears with its first value."""
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        if self.losses:
            terms = [_loss_text(term, values) for term, values in self.losses.items()]
            table.add_row("loss", Text("   ".join(terms)))
        since = duration(self.clock() - self.waited_since)
        if self.awaited:
            table.add_row("waiting", Text(f"for {some_of(self.awaited, MAX_SITES)}, {since}", "yellow"))
        elif self.state in ("training", "scoring") and self.clock() - self.heard > SILENT_SECONDS:
            table.add_row("silent", Text(f"no event for {duration(self.clock() - self.heard)}", "yellow"))
        if self.last_outcomes or (self.awaited and self.asked):
            for label, outcomes in self._outcomes():
                table.add_row(label, outcomes)
        if self.counting_less:
            table.add_row("samples", f"fewer than registered count: {self.counting_less:,} clients")
        if self.bytes["up"] or self.bytes["down"]:
            text = f"{size(self.last_bytes['down'])} down, {size(self.last_bytes['up'])} up a round"
            if width >= WIDEST:
                text += f"; {size(self.bytes['down'])} and {size(self.bytes['up'])} so far"
            table.add_row("bytes", Text(text))
        return table

    def _outcomes(self) -> list[tuple[str, Text]]:
        """Return a label and a text for the clients that trained, and for each other status that occurred.

        Each text has the numbers of the last round and of all rounds, and fits the narrowest view.
        """
        trained = Text(f"{trained_count(self.last_outcomes)} of {sum(self.last_outcomes.values())} trained")
        if self.awaited and self.asked:
            trained = Text(f"{self.asked - len(self.awaited)} of {self.asked} have answered")
        rows = [("clients", trained)]
        for status in COUNTED_STATUSES:
            in_all = self.outcomes[status]
            if not in_all:
                continue
            now = self.last_outcomes.get(status, 0)
            text = Text(f"{now:,} now, {in_all:,} in all")
            if status in UNUSED_STATUSES:
                text.stylize("red" if now else "yellow")
            rows.append((status, text))
        if not self.awaited and not any(self.outcomes[status] for status in UNUSED_STATUSES):
            trained.append("   none refused, none failed", "dim")
        return rows


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the course of ``values`` as at most ``width`` block characters; equal values give a flat line.

    If there are more values than characters, evenly spaced values are drawn, with the first and the last among them.

    Args:
        values: finite numbers, in the order of the rounds.
        width: the number of characters; below 1, nothing is drawn.
    """
    if not values or width < 1:
        return ""
    if len(values) > width:
        last = len(values) - 1
        picks = [round(index * last / max(1, width - 1)) for index in range(width)]
        picks[-1] = last
        values = [values[pick] for pick in picks]
    low = min(values)
    high = max(values)
    if high - low < 1e-9:
        return BARS[3] * len(values)
    drawn = ""
    for value in values:
        drawn += BARS[round((value - low) / (high - low) * (len(BARS) - 1))]
    return drawn


def _change(values: Sequence[float]) -> Text:
    if len(values) < 2:
        return Text("")
    change = values[-1] - values[-2]
    if abs(change) < 0.05:
        return Text("0.0", "dim")
    if change > 0:
        return Text(f"{change:+.1f}", "green")
    return Text(f"{change:+.1f}", "red")


def _loss_text(term: str, values: Sequence[float]) -> str:
    """Return a loss term with its last value, and an arrow if it changed; no-break spaces keep them together."""
    text = f"{term}\u00a0{values[-1]:.3f}"
    if len(values) < 2:
        return text
    change = values[-1] - values[-2]
    if change >= 5e-4:
        return text + "\u00a0↑"
    if change <= -5e-4:
        return text + "\u00a0↓"
    return text


# ---- choice of view --------------------------------------------------------------------------------------------------


def can_draw(console: Console) -> bool:
    """Return whether the live view can be drawn on the console; otherwise lines are printed."""
    return console.is_terminal and not console.is_dumb_terminal and console.width >= MIN_WIDTH


@contextlib.contextmanager
def watching(settings: RunSettings, *, quiet: bool = False, console: Console | None = None) -> Iterator[Listener]:
    """Yield a listener that shows the run within the block.

    Log records and warnings go to ``logs/goldfinch.log`` in the run's folder instead of the screen.

    Args:
        settings: the run's settings.
        quiet: show nothing but the failure of a tracker or of the user's own metric. Errors are raised all the same.
        console: the terminal; ``None`` is the standard output.
    """
    console = console or Console()
    with logging_to_file(settings, quiet=quiet):
        if quiet:
            yield _failures
        elif can_draw(console):
            with LiveView(Subject.of(settings), console) as view:
                yield view
        elif settings.engine.get("name") == "inline":
            yield plain_lines(settings)
        else:
            with wait_lines(waiting_for(str(settings.engine.get("name")))) as heard:
                lines = plain_lines(settings)

                def show(name: str, entry: Mapping[str, Any]) -> None:
                    heard.set()
                    lines(name, entry)

                yield show


def _failures(name: str, entry: Mapping[str, Any]) -> None:
    """Print that a tracker or the user's own metric failed, which ends no run; print nothing else."""
    if name in ("tracker failed", "metric failed"):
        print(describe(name, entry, 0), file=sys.stderr)


HEARD = ("common.data", "common.text")
"""Loggers of warnings for the user: of the cache of data, and of :func:`~common.text.warn_once`."""


@contextlib.contextmanager
def logging_to_file(settings: RunSettings, *, quiet: bool) -> Iterator[None]:
    """Send log records and Python warnings to ``logs/goldfinch.log`` within the block.

    What :data:`HEARD` warns of is shown on the terminal as well.

    Args:
        settings: the run's settings.
        quiet: show no warnings.
    """
    loggers = [logging.getLogger()]
    for name in ("flwr", "ray"):
        logger = logging.getLogger(name)
        if logger.handlers:
            loggers.append(logger)
    folder = settings.output_folder / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / "goldfinch.log", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers_before = [list(logger.handlers) for logger in loggers]
    showwarning_before = warnings.showwarning
    for logger in loggers:
        logger.handlers = [handler]
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(logging.WARNING)
    heard = [logging.getLogger(name) for name in HEARD if not quiet]
    for logger in heard:
        logger.addHandler(shown)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger in heard:
            logger.removeHandler(shown)
        warnings.showwarning = showwarning_before
        for logger, handlers in zip(loggers, handlers_before, strict=True):
            logger.handlers = handlers
        handler.close()
        with contextlib.suppress(OSError):
            folder.rmdir()  # only succeeds when nothing was written
