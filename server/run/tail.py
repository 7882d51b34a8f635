"""Reads a run's events while another process appends to them."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.metrics import best_of
from common.scores import RunScores
from server.run.files import BEGINNINGS, RunFiles, scorers_in
from server.run.measures import measures_in
from server.run.schema import SCORES, check_events, check_lines, entries_of, read_errors


class Lines:
    """The lines of a file that were not read yet.

    Args:
        path: the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = 0
        self._position = 0

    def read(self) -> tuple[list[bytes], bool]:
        """Return the lines that were appended since the last call, and whether the file was replaced in between.

        A line without its end is left for the next call.

        Raises:
            ConfigError: the file cannot be read.
        """
        if not self.path.exists():
            return [], False
        replaced = False
        with read_errors(self.path), self.path.open("rb") as stream:
            inode = os.fstat(stream.fileno()).st_ino
            if inode != self._inode:  # a run replaces the file when it starts, and when all clients are checked
                self._inode = inode
                self._position = 0
                replaced = True
            stream.seek(self._position)
            content = stream.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._position += len(complete)
        return complete.splitlines(), replaced


class Tail:
    """The events of a run that were not read yet, as its listeners got them.

    Args:
        path: ``events.jsonl`` in the run's folder, which need not exist yet.
        known: lines that are not wanted, such as those of before.
    """

    def __init__(self, path: Path, known: Iterable[bytes] = ()) -> None:
        self.path = path
        self._lines = Lines(path)
        self._known = set(known)
        self._told = ToldEvents(path.parent)

    def read(self) -> list[Mapping[str, Any]]:
        """Return the events that were appended since the last call.

        Raises:
            ConfigError: an event is not as a run writes it.
        """
        lines, _ = self._lines.read()
        entries: list[dict[str, Any]] = []
        for line in lines:
            if line not in self._known:
                self._known.add(line)
                entries += entries_of([line])
        check_lines(self.path, entries)
        check_events(self.path, entries)
        return [self._told.complete(entry) for entry in entries]


class ToldEvents:
    """Adds to the events of a run what its listeners were told and its other files hold: scores and counts of replies.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = Lines(folder / SCORES)
        self._lines: list[dict[str, Any]] = []
        self._events: list[Mapping[str, Any]] = []
        self._last_scored = -1

    def complete(self, entry: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an event as the listeners got it; events must come in their order."""
        self.pass_over(entry)
        name, number = entry["event"], int(entry.get("round", 0))
        if name == "resume":
            return {**entry, "best": best_of(self._scores(self._last_scored).tested())}
        if name in ("score", "validation"):
            return {**entry, **self._of(name, number)}
        if name == "finish":
            scores = self._scores(number)
            final = scores.tested() or scores.validated()
            missing = dict(final[-1].missing) if final else {}
            return {**entry, "missing": missing, "answers": RunFiles(self.folder).reply_totals.answers}
        return entry

    def pass_over(self, entry: Mapping[str, Any]) -> None:
        """Take note of an event that need not be completed."""
        if entry["event"] in BEGINNINGS:
            self._events = []
        if entry["event"] == "score":
            self._last_scored = int(entry["round"])
        if entry["event"] in ("score", "validation", *BEGINNINGS):
            self._events.append(entry)

    def _of(self, event: str, number: int) -> dict[str, Any]:
        """Return the numbers of a round's score.

        Raises:
            ConfigError: there is no such score.
        """
        scores = self._scores(number)
        rounds = scores.tested() if event == "score" else scores.validated()
        if not rounds or rounds[-1].round != number:
            raise ConfigError(
                f"{self._file.path} lacks the scores of round {number}, of which events.jsonl has the event"
            )
        return rounds[-1].content()

    def _scores(self, last: int) -> RunScores:
        """Return the scores of the rounds up to ``last``."""
        self._read()
        beginning: Mapping[str, Any] = {}
        chosen_by = "accuracy"
        for entry in self._events:
            if entry["event"] in BEGINNINGS:
                beginning = entry
            if entry["event"] == "validation":
                chosen_by = entry.get("metric", "accuracy")
        return RunScores(
            [line for line in self._lines if line["round"] <= last],
            self._events,
            scorers_in(beginning),
            measures_in(beginning.get("measures", {})),
            chosen_by=chosen_by,
        )

    def _read(self) -> None:
        lines, replaced = self._file.read()
        if replaced:
            self._lines = []
        entries = list(entries_of(lines))
        check_lines(self._file.path, entries, len(self._lines))
        self._lines += entries
