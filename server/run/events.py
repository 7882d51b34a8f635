"""A run's events: the type of their listeners, and their text for people."""

from __future__ import annotations

import builtins
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import errors
from common.errors import PARTS, kind_of, some_of
from common.metrics import CONFIDENCE_MEASURES, METRICS, named_missing
from common.text import quantity
from common.wire.messages import COUNTED_STATUSES, SCALED, UNUSED_STATUSES
from server.run.schema import EVENTS, NEEDED, REPLIES, read_lines, stream_lines

if TYPE_CHECKING:  # imports torch, which the text of an event does without
    from common.settings import RunSettings

Listener = Callable[[str, Mapping[str, Any]], None]
"""Called with an event's name and content."""

MAX_SITES = 12
"""Clients whose training images are counted at a run's start; the report has all."""

MAX_COLUMNS, MAX_COLUMN = 10, 8
"""Classes with a column each, and the letters of its name that are shown."""

MAX_ALIKE = 5
"""Lines that are shown of a round before others like them are only counted."""

LINES = {
    "code changed": "code changed since the rounds that are done: {reason}",
    "data changed": "data changed since the rounds that are done: {reason}",
    "missing": "going on without {clients}",
    "metric failed": "round {round}: your own metric has no value: {reason}",
    "deadline derived": (
        "round {round}: from now on the server waits about {seconds:.0f} s for an exchange, ten times the median; "
        "rounds.deadline sets another limit"
    ),
    "late": "round {round}: enough have answered; late: {clients}",
    "registration lost": "{client} has not registered: {reason}",
    "registration refused": "{client} was not admitted: {reason}",
    "privacy warning": "privacy: {reason}",
    "privacy spent": "privacy: {reason}",
    "harmless attack": (
        "the attack changed nothing that {clients} sent: this method or network has not the parts that it changes"
    ),
    "tracker failed": "{tracker} is left out from here on: {reason}",
    "stopped": "stopped after round {round}; resume=true goes on",
    "stopped early": (
        "stopped early after round {round} of {rounds}: validation was best after round {best} and did not improve in "
        "{patience} later rounds with all clients' scores (train.patience)"
    ),
    "failed": "failed after round {round}: {reason}",
    "interrupted": "interrupted: {reason}; resume=true goes on",
}
"""The line of each event that only names its content."""


SCALED_EVENT = f"client {SCALED}"
"""The event of an update that a filter scaled down."""

WAITING_EVENT = "waiting"
"""The event of a deployment whose engine has waited for the same clients for some time."""

COUNTS_LESS_EVENT = "client counts less"
"""The event of a client that counts for fewer samples than it registered."""

COUNTS_LESS_SETTINGS = "rounds.largest_client, rounds.largest_share"
"""The settings by which a client counts for fewer samples."""

FIRST_SCALED = (
    "round {round}: scaled: {updates}, such as {client}: {reason}. replies.jsonl lists all, and the last line counts "
    "them"
)
"""The line of the first round in which updates were scaled."""


def counts_text(answers: Mapping[str, int]) -> str:
    """Return the number of replies of each status that is counted on its own, as text; empty if there are none.

    >>> counts_text({"admitted": 30, "scaled": 7, "refused": 1})
    '7 of 30 updates scaled, 1 refused'

    Args:
        answers: the updates that were ``admitted``, and the number of each status of
            :data:`common.wire.messages.COUNTED_STATUSES`.
    """
    parts: list[str] = []
    for status in COUNTED_STATUSES:
        count = answers.get(status, 0)
        if count and status == SCALED:
            parts.append(f"{count:,} of {answers['admitted']:,} updates {SCALED}")
        elif count:
            parts.append(f"{count:,} {status}")
    return ", ".join(parts)


def count_lines(names: Sequence[str], counts: Mapping[str, Sequence[int]], most: int = MAX_SITES) -> list[str]:
    """Return the sites with their training images by class, as lines; the report has all of them.

    Args:
        names: of the classes, by label.
        counts: the training images of each class, by client.
        most: sites with a line.
    """
    sites = list(counts)[:most]
    if len(names) <= MAX_COLUMNS:
        lines = _count_table(names, {site: counts[site] for site in sites})
    else:
        lines = [f"training images of {len(names)} classes"]
        for site in sites:
            held = [count for count in counts[site] if count]
            lines.append(
                f"  {site:20} {sum(held):>7,}  {len(held)} classes, {min(held, default=0):,} to "
                f"{max(held, default=0):,} images each"
            )
    if len(counts) > len(sites):
        lines.append(f"  and {len(counts) - len(sites):,} more clients: goldfinch report has all")
    return lines + _rare_classes(names, counts)


def _count_table(names: Sequence[str], counts: Mapping[str, Sequence[int]]) -> list[str]:
    """Return a line with the classes' names, and one for each site."""
    first = max([len("training images"), *(len(site) + 2 for site in counts)])
    widths = [min(max(len(name), 4), MAX_COLUMN) for name in names]
    lines: list[str] = []
    rows = [("training images", "all", list(names))]
    for site, row in counts.items():
        rows.append((f"  {site}", f"{sum(row)}", list(map(str, row))))
    for label, total, cells in rows:
        line = f"{label:{first}}  {total:>6}"
        for cell, width in zip(cells, widths, strict=True):
            line += f"  {cell[:width]:>{width}}"
        lines.append(line)
    return lines


def _rare_classes(names: Sequence[str], counts: Mapping[str, Sequence[int]]) -> list[str]:
    """Return lines about classes that no site, or only one of several, has training images of."""
    nowhere: list[str] = []
    single: list[str] = []
    for label, name in enumerate(names):
        sites = [site for site, row in counts.items() if row[label]]
        if not sites:
            nowhere.append(name)
        elif len(sites) == 1 and len(counts) > 1:
            single.append(f"{name} ({sites[0]})")
    lines: list[str] = []
    if nowhere:
        lines.append(f"  no client trains on {some_of(nowhere, MAX_ALIKE)}")
    if single:
        lines.append(f"  only one client trains on {some_of(single, MAX_ALIKE)}")
    return lines


@dataclass(frozen=True)
class Subject:
    """What is shown of a run besides its events.

    Args:
        method: the method's name.
        data: the data set's name.
        seed: the seed.
        rounds: the rounds of the whole run; 0 if the method does not train.
        engine: the engine's name.
        folder: the run's folder.
        classes: the names of the classes by label; empty if they are not known, and then no images are counted.
    """

    method: str
    data: str
    seed: int
    rounds: int
    engine: str
    folder: Path
    classes: Sequence[str] = ()

    @classmethod
    def of(cls, settings: RunSettings) -> Subject:
        """Return what is shown of a run with these settings."""
        return cls(
            method=settings.method.name,
            data=settings.data.name,
            seed=settings.seed,
            rounds=settings.train.rounds if settings.method.trains else 0,
            engine=str(settings.engine.get("name")),
            folder=settings.output_folder,
            classes=settings.data.class_names,
        )


class SiteCounts:
    """Collects the training images of each client by class, and has their lines when the run starts.

    Args:
        classes: the names of the classes by label.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = classes
        self._counts: dict[str, Sequence[int]] = {}

    def lines(self, name: str, entry: Mapping[str, Any]) -> list[str]:
        """Return the lines to show after an event: those of :func:`count_lines` when the run starts, else none."""
        if name == "registered" and "class_counts" in entry:
            self._counts[str(entry["client"])] = entry["class_counts"]
        if name not in ("start", "resume") or not self._counts or not self._classes:
            return []
        return count_lines(self._classes, dict(sorted(self._counts.items())))


def waiting_for(engine: str) -> str:
    """Return what a run on the engine of this name waits for before its clients register."""
    if engine == "ray":
        return "waiting for Flower and Ray to start"
    return "waiting for clients"


def plain_lines(settings: RunSettings) -> Listener:
    """Return a listener that prints a line for each scored round and for each failure, refusal and warning.

    Args:
        settings: the run's settings.
    """
    return lines_about(Subject.of(settings), time.time())


def lines_about(subject: Subject, began: float) -> Listener:
    """Return a listener as :func:`plain_lines` does.

    Args:
        subject: the run.
        began: the time from which the seconds of its events are counted.
    """
    repeats = Repeats()
    counts = SiteCounts(subject.classes)
    if subject.engine != "inline":
        print(f"{waiting_for(subject.engine)} ...", flush=True)

    def show(name: str, entry: Mapping[str, Any]) -> None:
        lines = repeats.lines_after(name, entry, describe(name, entry, subject.rounds))
        if name == "finish":
            lines.append(f"wrote {subject.folder}")
        try:
            for line in lines:
                print(f"[{entry.get('time', time.time()) - began:7.1f} s] {line}", flush=True)
            for line in counts.lines(name, entry):
                print(line, flush=True)
        except OSError as error:  # of which Python does not say that it is no file of the run
            raise OSError(error.errno, error.strerror, "standard output") from error

    return show


class Repeats:
    """Holds back lines that report the same of many clients in one round, and counts them instead."""

    def __init__(self) -> None:
        self._round: Any = None
        self._counts: Counter[str] = Counter()
        self._scaled: list[Mapping[str, Any]] = []
        """The events of updates that were scaled in the present round."""
        self._told_of_scaling = False

    def lines_after(self, name: str, entry: Mapping[str, Any], line: str) -> list[str]:
        """Return the lines to show for an event: the counts of the round that ended, and the event's own line.

        Args:
            name: the event's name.
            entry: its content.
            line: its text; empty for an event without one.
        """
        lines: list[str] = []
        if entry.get("round") != self._round or name in ("failed", "stopped", "finish"):
            lines = self._held_back()
            self._round = entry.get("round")
        if name in ("round done", "round skipped"):
            lines += self._first_scaled(entry)
        if name == SCALED_EVENT:
            self._scaled.append(entry)
            return lines
        if not line:
            return lines
        if "client" in entry:
            kind = kind_of(line.replace(str(entry["client"]), "…"))
            self._counts[kind] += 1
            if self._counts[kind] > MAX_ALIKE:
                return lines
        return [*lines, line]

    def _first_scaled(self, entry: Mapping[str, Any]) -> list[str]:
        """Return the line of a round in which updates were scaled if it is the first, and reset their list."""
        scaled, self._scaled = self._scaled, []
        if not scaled or self._told_of_scaling:
            return []
        self._told_of_scaling = True
        updates = f"{len(scaled):,} updates"
        if len(scaled) == 1:
            updates = "1 update"
        first = scaled[0]
        words = {"round": entry["round"], "updates": updates, "client": first["client"], "reason": first["reason"]}
        return [FIRST_SCALED.format(**words)]

    def _held_back(self) -> list[str]:
        """Return a line for each kind of which lines were held back, and reset the counts."""
        lines: list[str] = []
        for kind, count in self._counts.items():
            if count > MAX_ALIKE:
                noun = "clients"
                if count - MAX_ALIKE == 1:
                    noun = "client"
                lines.append(f"{count - MAX_ALIKE:,} more {noun}: {kind}")
        self._counts.clear()
        return lines


def describe(name: str, entry: Mapping[str, Any], rounds: int) -> str:
    """Return an event as one line of text; empty for an event that needs no line.

    Args:
        name: the event's name.
        entry: the event's content.
        rounds: the number of rounds of the run.
    """
    if name == "score":
        return _score_line(entry, rounds)
    if name == "validation":
        return _validation_line(entry, rounds)
    if name == "score missing":
        return _missing_score_line(entry)
    if name == "collapsed":
        return _collapsed_line(entry)
    if name == "at chance":
        return _chance_line(entry)
    if name == "start":
        attack = f", under attack: {entry['attack']}" if "attack" in entry else ""
        return f"{entry['method']} on {entry['data']} starts: {_scope(entry)}{attack}"
    if name == "resume":
        return f"{entry['method']} on {entry['data']} resumes after round {entry['round']}: {_scope(entry)}"
    if name == "round skipped":
        return _skipped_line(entry)
    if name == "finish":
        return _finish_line(entry)
    if name == WAITING_EVENT:
        return _waiting_line(entry)
    if name.startswith("client "):
        return f"round {entry['round']}: {entry['client']} {name.removeprefix('client ')}: {entry['reason']}"
    if name in LINES:
        clients = some_of(entry.get("clients", ()))
        return LINES[name].format_map({**entry, "clients": clients})
    return ""


def _score_line(entry: Mapping[str, Any], rounds: int) -> str:
    domains = "  ".join(f"{domain} {accuracy:5.1f}" for domain, accuracy in entry["accuracy"].items())
    average = f"average {entry['average']:5.1f}"
    worst = f"worst {entry['worst']:5.1f}"
    return f"round {entry['round']:>3}/{rounds}  {domains}  |  {average}  {worst}{partial_note(entry)}"


def _validation_line(entry: Mapping[str, Any], rounds: int) -> str:
    measure = "validation"
    average = f"{entry['average']:5.1f}"
    if "metric" in entry:
        metric = str(entry["metric"])
        label = METRICS.get(metric, metric)
        if metric in CONFIDENCE_MEASURES:
            label = CONFIDENCE_MEASURES[metric].label
        measure += f" {label}"
        if metric not in METRICS:  # it may have another unit than per cent
            average = f"{entry['average']:.4g}"
    return f"round {entry['round']:>3}/{rounds}  {measure} {average}{partial_note(entry)}"


def _missing_score_line(entry: Mapping[str, Any]) -> str:
    """Return the line of a score that is missing; empty if the client's failure has a line of its own."""
    if entry["status"] == "unasked":
        return f"round {entry['round']}: {entry['domain']} is not scored: {entry['reason']}"
    if entry["status"] == "silent":
        return f"round {entry['round']}: {entry['client']} did not score {entry['domain']}: {entry['reason']}"
    return ""


def _collapsed_line(entry: Mapping[str, Any]) -> str:
    share = f"{100 * entry['share']:.0f} % of the test images of {entry['domain']}"
    return (
        f"round {entry['round']}: {share} are predicted as {entry['label']}, although training fits them (loss "
        f"{entry['loss']:.2f}). Batch normalisation's averaged statistics may not fit this domain: try "
        "method=fedbn method.refresh_statistics=true, or model.norm=group; see docs/own-domain.md"
    )


def _chance_line(entry: Mapping[str, Any]) -> str:
    head, relation = "AT CHANCE", "no better"
    if entry["average"] > entry["chance"]:  # by less than two standard errors
        head, relation = "PERHAPS AT CHANCE", "not clearly better"
    line = (
        f"{head} after round {entry['round']}: the average of {entry['average']:.1f} % is {relation} than one class "
        f"for every image, which gives {entry['chance']:.1f} % ({entry['images']} test images)"
    )
    if entry["remedies"]:
        line += f". Try {'; '.join(entry['remedies'])}; see docs/own-domain.md"
    return line


def _scope(entry: Mapping[str, Any]) -> str:
    return f"{quantity(len(entry['clients']), 'client')}, {quantity(entry['rounds'], 'round')}"


def _skipped_line(entry: Mapping[str, Any]) -> str:
    by = ""
    if "by" in entry:
        by = f" ({entry['by']})"
    return f"round {entry['round']} is skipped: {entry['answered']} of {entry['needed']} needed{by} clients answered"


def _waiting_line(entry: Mapping[str, Any]) -> str:
    awaited = f"waiting for {some_of(entry['clients'], MAX_SITES)} for {entry['seconds']:.0f} s"
    if "round" in entry:
        return f"round {entry['round']}: {awaited}"
    return awaited


def _finish_line(entry: Mapping[str, Any]) -> str:
    line = f"finished after round {entry['round']}; SHA-256 of the final state: {entry['sha256'][:16]}..."
    counts = counts_text(entry.get("answers", {}))
    if counts:
        line += f"; {counts}"
    missing = entry.get("missing")
    if missing:
        line += f"; THE FINAL SCORE IS PARTIAL, without {named_missing(missing)}"
    return line


def partial_note(entry: Mapping[str, Any]) -> str:
    """Return the note on a partial score: the missing domains, each with the last round that scored it.

    Args:
        entry: the content of the event ``score`` or ``validation``.

    Returns:
        The note with two spaces before it; empty if the score is whole.
    """
    missing = entry.get("missing")
    if not missing:
        return ""
    return f"  PARTIAL, without {named_missing(missing)}"


# ---- what of a run may be public -------------------------------------------------------------------------------------

MAX_PROBLEMS = 20
"""Different problems that a public report has."""

STATUSES = frozenset({*COUNTED_STATUSES, *UNUSED_STATUSES, SCALED, "late"})

KNOWN_EVENTS = frozenset({*NEEDED, *LINES, "round", "client state lost", *(f"client {status}" for status in STATUSES)})

ERRORS = frozenset(
    name
    for module in (builtins, errors)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, Exception)
)
"""Classes of errors that may be named: Python's, and Goldfinch's."""

FRAME = re.compile(rf'File "(?:[^"]*/)?((?:{"|".join(PARTS)})/[^"]+\.py)", line (\d{{1,6}})')
"""A frame of a traceback in a file that may be Goldfinch's own."""

PLACE = re.compile(rf"((?:{'|'.join(PARTS)})/.+\.py):(\d{{1,6}})")
RAISED = re.compile(r"^(?:\w+\.)*(\w+)(?::|$)", re.MULTILINE)
"""The line of a traceback with the error's class."""


def public_lines(folder: Path) -> list[str]:
    """Return lines about the run in ``folder`` that hold no text of it.

    They count the events and replies of each kind. Of each error they have its class and where it was raised, if these
    are of Python or of Goldfinch. What is not known is called ``other``, and any text ``<text>``.

    Raises:
        ConfigError: a file cannot be read.
    """
    events: Sequence[Mapping[str, Any]] = ()
    if (folder / EVENTS).exists():
        events = read_lines(folder / EVENTS)
    statuses: Counter[str] = Counter()
    if (folder / REPLIES).exists():
        statuses.update(_known(line.get("status"), STATUSES) for line in stream_lines(folder / REPLIES))
    lines = ["", "events", *_counts(Counter(_known(entry["event"], KNOWN_EVENTS) for entry in events))]
    lines += ["", "replies", *_counts(statuses), "", "problems"]
    problems = Counter(_problem(entry) for entry in events if "reason" in entry)
    lines += [f"  {count} x {problem}" for problem, count in problems.most_common(MAX_PROBLEMS)]
    return lines


def _known(name: object, names: frozenset[str]) -> str:
    if isinstance(name, str) and name in names:
        return name
    return "other"


def _counts(counts: Counter[str]) -> Iterator[str]:
    for name, count in sorted(counts.items()):
        yield f"  {name}: {count}"


def _problem(entry: Mapping[str, Any]) -> str:
    """Return what is public of an event with a reason."""
    trace = str(entry.get("traceback", ""))
    found = FRAME.findall(trace)
    for place in entry.get("places", ()):
        found += PLACE.findall(place)
    places = [f"\n      {path}:{int(line)}" for path, line in found if path in _own_files()]
    codes = [name for name in (entry.get("error"), *RAISED.findall(trace)) if name in ERRORS]
    line = ": ".join([_known(entry["event"], KNOWN_EVENTS), *codes[-1:], "<text>"])
    return "".join([line, *places])


@lru_cache
def _own_files() -> frozenset[str]:
    """Return the names of Goldfinch's own files."""
    root = Path(__file__).resolve().parents[2]
    return frozenset(path.relative_to(root).as_posix() for part in PARTS for path in (root / part).rglob("*.py"))
