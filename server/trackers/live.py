"""What a person sees while a run goes on: a live view in a terminal, plain lines elsewhere, nothing when quiet.

The view: round, time left, accuracy per domain, losses, clients, bytes.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from common.metrics import PARTIAL, named_missing
from common.settings import RunSettings
from common.text import duration, size
from common.wire.messages import CLIPPED, trained_count
from server.trackers.events import Listener, describe, plain_lines

SUMMARIES = ("average", "worst", "validation")
BARS = "▁▂▃▄▅▆▇█"
MAX_NOTES = 4
TROUBLES = (CLIPPED, "refused", "failed", "lost")
SMOOTHING = 0.6
MIN_WIDTH = 44
"""Columns below which the live view gives way to plain lines."""


class LiveView:
    """A listener that draws what it was told of, several times a second, below what is printed meanwhile."""

    def __init__(self, settings: RunSettings, console: Console, clock: Callable[[], float] = time.perf_counter) -> None:
        self.settings, self.console, self.clock = settings, console, clock
        self.total, self.done, self.current = settings.train.rounds, 0, 0
        self.began = clock()
        self.round_began = self.began
        self.round_seconds: float | None = None
        self.scores: dict[str, list[float]] = {}
        self.best: dict[str, float] = {}  # of whole scores, those before the run was resumed among them
        self.now: dict[str, float] = {}
        self.missing: dict[str, int | None] = {}
        self.partial: set[str] = set()
        self.losses: dict[str, list[float]] = {}
        self.outcomes: Counter[str] = Counter()
        self.last_outcomes: dict[str, int] = {}
        self.bytes = {"up": 0, "down": 0}
        self.last_bytes = {"up": 0, "down": 0}
        self.clients = 0
        self.notes: list[str] = []
        self.state = "waiting for clients"
        self._live = Live(self, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveView:
        self._live.start(refresh=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.state = "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed"
        self._live.stop()

    # ---- what it is told -------------------------------------------------------------------------------------------

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """Take an event in."""
        if name in ("start", "resume"):
            self.done = self.current = int(entry["round"])
            self.total, self.clients = int(entry["rounds"]), len(entry["clients"])
            self.best = dict(entry.get("best", {}))
            self.state = "scoring" if self.done >= self.total else "training"
        elif name == "registered":
            self.clients += self.state == "waiting for clients"
        elif name == "round":
            self.current, self.round_began = int(entry["round"]), self.clock()
        elif name == "score":
            self._take_scores(entry)
        elif name == "validation":
            self._take("validation", float(entry["average"]), partial=bool(entry.get("missing")))
        elif name == "round done":
            self._finish_round(entry)
        elif name == "round skipped":
            self.done = int(entry["round"])
        elif name == "finish":
            self.state = "finished, score partial" if entry.get("missing") else "finished"
        elif name == "stopped":
            self.state = "stopped; resume=true goes on"
        if name not in ("start", "score", "validation", "finish", "stopped", "scores", "activity"):
            line = describe(name, entry, self.total)
            self.notes += [line] if line else []

    def _take_scores(self, entry: Mapping[str, Any]) -> None:
        self.missing = dict(entry.get("missing", {}))
        self.now = dict(entry["accuracy"])
        for domain, value in entry["accuracy"].items():
            self._take(domain, float(value), partial=domain in self.missing)
        for name in ("average", "worst"):
            self._take(name, float(entry[name]), partial=bool(self.missing))

    def _take(self, name: str, value: float, *, partial: bool) -> None:
        """Take in a row's value; one that lacks domains or clients is marked, and is never the best."""
        self.scores.setdefault(name, []).append(value)
        self.partial = self.partial - {name} | ({name} if partial else set())
        if not partial:
            self.best[name] = max(value, self.best.get(name, value))

    def _finish_round(self, entry: Mapping[str, Any]) -> None:
        self.done = int(entry["round"])
        if self.done >= self.total:
            self.state = "scoring"
        seconds = float(entry["seconds"])
        past = self.round_seconds
        self.round_seconds = seconds if past is None else SMOOTHING * past + (1 - SMOOTHING) * seconds
        for term, value in entry.get("losses", {}).items():
            self.losses.setdefault(term, []).append(float(value))
        self.last_outcomes = {str(key): int(value) for key, value in entry.get("outcomes", {}).items()}
        self.outcomes.update(self.last_outcomes)
        for way in self.bytes:
            self.last_bytes[way] = int(entry.get(f"bytes_{way}", 0))
            self.bytes[way] += self.last_bytes[way]

    # ---- what it draws ---------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The whole view, no wider than the terminal."""
        width = options.max_width
        parts: list[RenderableType] = [self._head(width), self._bar(width)]
        if self.scores:
            parts.append(Padding(self._accuracy(width), (1, 0, 0, 0)))
        if self.missing:
            parts.append(Text(f"{PARTIAL} partial, without {named_missing(self.missing)}", "bold red", overflow="fold"))
        facts = self._facts(width)
        if facts.row_count:
            parts.append(Padding(facts, (1, 0, 0, 0)))
        parts += [Text(f"! {note}", "yellow", no_wrap=True, overflow="ellipsis") for note in self.notes[-MAX_NOTES:]]
        if len(self.notes) > MAX_NOTES:
            parts.append(Text(f"  {len(self.notes) - MAX_NOTES} more in events.jsonl", "dim"))
        if self.state.startswith("finished"):
            parts.append(Text(f"wrote {self.settings.output_folder}", "dim", overflow="fold"))
        yield Group(*parts)

    def _head(self, width: int) -> Text:
        head = Text(no_wrap=True, overflow="ellipsis")
        head.append(self.settings.method.name, "bold")
        head.append(f" on {self.settings.data.name}")
        head.append(f"  {self.clients} clients" if self.clients else "", "dim")
        head.append(f"  seed {self.settings.seed}", "dim")
        style = {"finished": "green", "failed": "bold red"}.get(self.state, "yellow")
        gap = width - head.cell_len - len(self.state)
        return head.append(" " * gap if gap > 1 else "  ").append(self.state, style)

    def _bar(self, width: int) -> Table:
        seconds = self.clock() - self.began
        elapsed, left = duration(seconds), self._left()
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True, justify="right")
        shown = self.current if self.state == "training" else self.done
        times = f"{elapsed} gone, {left} left" if left and width >= 60 else f"{left} left" if left else elapsed
        bar = ProgressBar(
            total=max(1, self.total), completed=self.done, complete_style="yellow", finished_style="green"
        )
        table.add_row(Text(f"round {shown} of {self.total}"), bar, Text(times, "dim"))
        return table

    def _left(self) -> str:
        if self.state != "training" or self.round_seconds is None:
            return ""
        spent = self.clock() - self.round_began if self.current > self.done else 0.0
        remaining = (self.total - self.done) * self.round_seconds - min(spent, self.round_seconds)
        return duration(max(0.0, remaining))

    def _accuracy(self, width: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1), expand=False)
        table.add_column("accuracy in %", no_wrap=True, overflow="ellipsis", max_width=max(10, width // 3))
        table.add_column("now", justify="right", no_wrap=True)
        table.add_column("change", justify="right", no_wrap=True)
        roomy = width >= 60
        if roomy:
            table.add_column("best", justify="right", no_wrap=True)
        names = list({name for name in [*self.scores, *self.missing] if name not in SUMMARIES})
        label = min(max(10, width // 3), max(13, *(len(name) + 2 * bool(self.missing) for name in [*names, "average"])))
        room = max(4, min(40, width - label - (30 if roomy else 22)))
        table.add_column("over rounds", no_wrap=True)
        for name in [*sorted(names), *(name for name in SUMMARIES if name in self.scores)]:
            values = self.scores.get(name, [])
            gone = name in self.missing and name not in self.now
            marked = gone or name in self.partial
            cells = [Text(name + f" {PARTIAL}" * marked), Text("-" if gone else f"{values[-1]:.1f}")]
            cells += [Text("") if marked else _change(values)]
            cells += [Text(f"{self.best[name]:.1f}" if name in self.best else "-", "dim")] if roomy else []
            if name == "average":
                table.add_section()
            style = "bold" if name == "average" and not marked else ""
            table.add_row(*cells, Text(sparkline(values, room), "yellow"), style=style)
        return table

    def _facts(self, width: int) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        if self.losses:
            terms = Text()
            for term, values in self.losses.items():
                change = values[-1] - values[-2] if len(values) > 1 else 0.0
                arrow = "" if abs(change) < 5e-4 else "\u00a0↓" if change < 0 else "\u00a0↑"
                terms.append("   " if terms else "").append(f"{term}\u00a0{values[-1]:.3f}{arrow}")
            table.add_row("loss", terms)
        if self.last_outcomes:
            table.add_row("clients", self._outcomes())
        if any(self.bytes.values()):
            now, all_ = self.last_bytes, self.bytes
            text = f"{size(now['down'])} down, {size(now['up'])} up a round"
            if width >= 66:
                text += f"; {size(all_['down'])} and {size(all_['up'])} so far"
            table.add_row("bytes", Text(text))
        return table

    def _outcomes(self) -> Text:
        asked = sum(self.last_outcomes.values())
        trained = trained_count(self.last_outcomes)
        text = Text(f"{trained} of {asked} trained")
        if self.outcomes["late"]:
            text.append(f"   {self.last_outcomes.get('late', 0)} late ({self.outcomes['late']} in all)", "dim")
        for word in TROUBLES:
            now, ever = self.last_outcomes.get(word, 0), self.outcomes[word]
            if ever:
                text.append(f"   {now} {word} ({ever} in all)", "red" if now else "yellow")
        if not any(self.outcomes[outcome] for outcome in TROUBLES):
            text.append("   none refused, none failed", "dim")
        return text


def sparkline(values: Sequence[float], width: int) -> str:
    """At most ``width`` block characters for the course of ``values``; equal values give a flat line.

    More values than characters are thinned to evenly spaced ones that include the first and the last.
    """
    if not values or width < 1:
        return ""
    if len(values) > width:
        last = len(values) - 1
        picks = [round(index * last / max(1, width - 1)) for index in range(width)]
        picks[-1] = last
        values = [values[pick] for pick in picks]
    low, high = min(values), max(values)
    if high - low < 1e-9:
        return BARS[3] * len(values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def _change(values: Sequence[float]) -> Text:
    if len(values) < 2:
        return Text("")
    change = values[-1] - values[-2]
    if abs(change) < 0.05:
        return Text("0.0", "dim")
    return Text(f"{change:+.1f}", "green" if change > 0 else "red")


# ---- what is shown where there is no such terminal -------------------------------------------------------------------


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
        elif console.is_terminal and not console.is_dumb_terminal and console.width >= MIN_WIDTH:
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
