"""The lines of a run's files, read and checked: a folder may come from elsewhere, and somebody may have edited it."""

import contextlib
import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BeforeValidator, Field, Json, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes typing's own from Python 3.12 on

from common.errors import ConfigError
from common.regular_files import check_regular
from common.wire.messages import LEFT_OUT, MAX_CLASSES, SCALED, ClassCounts, Integer, Number, Text, printable

Whole = Annotated[Integer, BeforeValidator(int)]
"""In a CSV, where everything is text."""
Real = Annotated[Number, BeforeValidator(float), Field(allow_inf_nan=False)]
Maybe = Real | Literal[""]
Finite = Annotated[Number, Field(allow_inf_nan=False)]

Class = Annotated[int, Field(ge=0, lt=MAX_CLASSES)]


Missing = dict[Text, Integer | None]
"""Domains that a score lacks, and the last round that scored each."""


class ScoreRow(TypedDict):
    """A row of ``history.csv``."""

    round: Whole
    client: Text
    domain: Text
    scored_on: Literal["test", "validation"]
    count: Annotated[Whole, Field(gt=0)]
    correct: Whole
    loss: Real


class ActivityRow(TypedDict):
    """A row of ``activity.csv``; what a failed client did not report is empty."""

    round: Whole
    client: Text
    domain: Text
    status: Text
    samples: Maybe
    losses: Json[dict[str, Finite]] | Literal[""]
    seconds_train: Maybe
    bytes_down: Maybe
    bytes_up: Maybe
    peak_bytes: Maybe


class Confusion(TypedDict):
    """A line of ``confusion.jsonl``."""

    round: Integer
    domain: Text
    classes: Annotated[int, Field(gt=0, le=MAX_CLASSES)]
    true: list[Class]
    predicted: list[Class]
    count: list[Integer]


class MeasuresLine(TypedDict):
    """A line of ``metrics.jsonl``."""

    round: Integer
    domain: Text
    scored_on: Literal["test", "validation"]
    values: dict[Text, Finite | None]
    sums: NotRequired[dict[Text, Finite]]
    resolution: NotRequired[dict[Text, Finite]]


class MeasureShape(TypedDict):
    """The description of a metric, see :class:`common.metrics.Measure`."""

    label: Text
    unit: Text
    lower_is_better: bool


class FinalMeasure(MeasureShape):
    """A metric that only some runs have, by domain and over domains, in the last scored round."""

    domains: dict[Text, Finite]
    average: Finite | None
    worst: Finite | None
    missing: NotRequired[Missing]
    resolution: NotRequired[Finite]


class Event(TypedDict):
    """A line of ``events.jsonl``. Fields that are shown are checked for their type; other fields are free."""

    event: str
    time: Annotated[float, Field(ge=0, lt=1e11)]
    round: NotRequired[Integer]
    rounds: NotRequired[Integer]
    client: NotRequired[str]
    clients: NotRequired[list[str]]
    domain: NotRequired[str]
    class_counts: NotRequired[ClassCounts]
    samples: NotRequired[Integer]
    seconds: NotRequired[Finite]
    accuracy: NotRequired[dict[str, Finite]]
    average: NotRequired[Finite]
    worst: NotRequired[Finite]
    metric: NotRequired[Text]
    measures: NotRequired[dict[Text, MeasureShape]]
    missing: NotRequired[Missing]
    test: NotRequired[dict[str, Integer]]
    validation: NotRequired[dict[str, Integer]]
    unseen: NotRequired[list[str]]
    reason: NotRequired[str]
    counted: NotRequired[Integer]
    registered: NotRequired[Integer]
    answers: NotRequired[dict[Text, Integer]]
    sha256: NotRequired[str]


class Scores(TypedDict):
    """A run's scores by one rule."""

    accuracy: dict[Text, Finite]
    average: Finite
    worst: Finite
    spread: Finite
    missing: NotRequired[Missing]
    validation: NotRequired[Finite]
    validation_missing: NotRequired[Missing]
    seen_average: NotRequired[Finite]
    unseen_average: NotRequired[Finite]


class Validation(TypedDict):
    """The round that is best on validation samples."""

    round: Integer
    average: Finite
    missing: NotRequired[Missing]
    metric: NotRequired[Text]


class EarlyStop(TypedDict):
    """Why a run ended before its last round."""

    rounds_planned: Integer
    patience: Integer
    best_round: Integer


class Privacy(TypedDict):
    """What a run released; older versions did not record the conditions of an epsilon."""

    unit: Literal["sample", "client"]
    neighbours: NotRequired[Text]
    delta: Finite
    covers: list[Text]
    unprotected: list[Text]
    randomness: NotRequired[list[Text]]
    releases: dict[Text, Integer]
    epsilon: dict[Text, Finite | None]
    conditional_epsilon: NotRequired[dict[Text, Finite | None]]
    conditions: NotRequired[list[Text]]
    warnings: NotRequired[list[Text]]


class CountsLess(TypedDict):
    """The samples that a client registered, and that it counted for from a round on."""

    registered: Integer
    counted: Integer
    round: Integer


class Summary(TypedDict):
    """``summary.json``, as far as others read it."""

    method: Text
    data: Text
    protocol: Text
    model: Text
    seed: Integer
    identity: Text
    configuration: Text
    scoring: NotRequired[Text]
    code: NotRequired[Text]
    rounds: Integer
    rounds_skipped: Integer
    stopped_early: NotRequired[EarlyStop]
    joined_batches: NotRequired[list[Text]]
    scored: Text
    scores: dict[str, Scores]
    missing: NotRequired[Missing]
    partial: NotRequired[bool]
    unseen: NotRequired[list[str]]
    average: Finite | None
    worst: Finite | None
    validation: NotRequired[Validation]
    metrics: NotRequired[dict[Text, FinalMeasure]]
    answers: NotRequired[dict[Text, Integer]]
    counts_less: NotRequired[dict[Text, CountsLess]]
    privacy: NotRequired[Privacy]
    state_sha256: Text
    bytes: dict[Literal["up", "down"], Integer]
    wall_seconds: NotRequired[Finite]
    splits: NotRequired[dict[str, str]]
    versions: NotRequired[dict[str, str]]


EARLIER_SCALED = "clipped"
"""How older versions recorded updates that were scaled, and those that were left out; the reason tells which."""

MAX_RECORD = 4 * 2**30
"""Largest file of a run's record that is read, bytes."""

SHAPES: dict[str, TypeAdapter[Any]] = {
    "history.csv": TypeAdapter(list[ScoreRow]),
    "activity.csv": TypeAdapter(list[ActivityRow]),
    "confusion.jsonl": TypeAdapter(list[Confusion]),
    "validation_confusion.jsonl": TypeAdapter(list[Confusion]),
    "metrics.jsonl": TypeAdapter(list[MeasuresLine]),
    "events.jsonl": TypeAdapter(list[Event]),
    "summary.json": TypeAdapter(list[Summary]),
}
"""Of the entries of each file, by its name."""

NEEDED = {
    "score": ("round", "accuracy", "average", "worst"),
    "validation": ("round", "accuracy", "average", "worst"),
    "start": ("round", "rounds", "clients", "method", "data"),
    "resume": ("round", "rounds", "clients", "method", "data"),
    "registered": ("client", "domain", "class_counts"),
    "registration lost": ("client", "reason"),
    "registration refused": ("client", "reason"),
    "missing": ("clients",),
    "metric failed": ("round", "reason"),
    "code changed": ("reason",),
    "data changed": ("reason",),
    "late": ("round", "clients"),
    "score missing": ("round", "domain", "status"),
    "collapsed": ("round", "domain", "label", "share", "loss"),
    "at chance": ("round", "average", "chance", "images", "steps", "remedies"),
    "round done": ("round", "seconds"),
    "round skipped": ("round", "answered", "needed"),
    "stopped": ("round",),
    "stopped early": ("round", "rounds", "best", "patience"),
    "failed": ("round", "reason"),
    "interrupted": ("reason",),
    "finish": ("round", "sha256"),
}
"""What an event of a name holds besides; one that begins with ``client`` has round, client and reason."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Replace the errors of a file that cannot be read by one with a message.

    Raises:
        ConfigError: with the file's name.
    """
    try:
        check_regular(path, MAX_RECORD)
        yield
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def check_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """See that all ``lines`` of the file at ``path``, if it is one of :data:`SHAPES`, hold what they are read for.

    Raises:
        ConfigError: the first that does not, and what is wrong in it.
    """
    if path.name not in SHAPES:
        return
    try:
        SHAPES[path.name].validate_python(lines, strict=path.suffix != ".csv")
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        place, *key = found["loc"]
        shown = printable(repr(found["input"]))[:100]
        raise _odd(path, int(place), f"{'.'.join(map(str, key)) or 'it'}: {found['msg']}; it is {shown}") from error
    if path.name in ("confusion.jsonl", "validation_confusion.jsonl"):
        for number, line in enumerate(lines):
            if not len(line["true"]) == len(line["predicted"]) == len(line["count"]):
                raise _odd(path, number, "true, predicted and count: are not of one length")
            if line["classes"] != lines[0]["classes"]:
                raise _odd(path, number, "classes: is another number than in the first entry")
            if max([*line["true"], *line["predicted"]], default=0) >= line["classes"]:
                raise _odd(path, number, "true, predicted: hold a class that is not below classes")


def check_events(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """See that all ``events`` hold what is told of an event of their name.

    Raises:
        ConfigError: the first that does not, and what it lacks.
    """
    for number, event in enumerate(events):
        name: str = event["event"]
        needed = ("round", "client", "reason") if name.startswith("client ") else NEEDED.get(name, ())
        if missing := [key for key in needed if key not in event]:
            raise _odd(path, number, f"{missing[0]}: is missing of {printable(name)[:100]!r}")


def _odd(path: Path, number: int, told: str) -> ConfigError:
    return ConfigError(
        f"{path}: entry {number + 1}: {told}. No run writes this: leave the run out, or correct the file"
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of ``events.jsonl`` or ``confusion.jsonl``; one that a crash cut short is left out.

    Raises:
        ConfigError: a line is not as a run writes it.
    """
    with reading(path), path.open() as stream:
        found = [_renamed(entry) for line in stream if (entry := _entry(line))]
    check_lines(path, found)
    return found


def stream_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a CSV that ends with a complete line, one at a time; none if there is no file."""
    if path.exists():
        with path.open(newline="") as stream:
            yield from map(_renamed, csv.DictReader(stream))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV that a run writes; a last line that a crash cut short is left out.

    Raises:
        ConfigError: a row is not as a run writes it.
    """
    if not path.exists():
        return []
    with reading(path):
        text = path.read_text()
        complete = text[: text.rfind("\n") + 1]
        rows = [_renamed(dict(row)) for row in csv.DictReader(io.StringIO(complete)) if None not in row.values()]
    check_lines(path, rows)
    return rows


def _renamed(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a row of ``activity.csv``, or an event, of an older version with the status's present name."""
    reason = str(entry.get("reason"))
    status = SCALED
    if reason.startswith(f"{LEFT_OUT}:") or f"; {LEFT_OUT}:" in reason:
        status = LEFT_OUT
    if entry.get("status") == EARLIER_SCALED:
        return {**entry, "status": status}
    if entry.get("event") == f"client {EARLIER_SCALED}":
        return {**entry, "event": f"client {status}"}
    return entry


def _entry(line: str) -> dict[str, Any]:
    """The event in ``line``; empty if a crash cut the line short."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
