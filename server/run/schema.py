"""The lines of a run's files, written, read and checked: a folder may come from elsewhere, or have been edited."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes typing's own from Python 3.12 on

from common.errors import ConfigError
from common.regular_files import check_regular
from common.text import printable
from common.wire.messages import MAX_CLASSES, ClassCounts, Integer, Number, Text

SCORES, REPLIES, EVENTS = "scores.jsonl", "replies.jsonl", "events.jsonl"
"""The three files of a run that grow with it."""

Finite = Annotated[Number, Field(allow_inf_nan=False)]

Time = Annotated[float, Field(ge=0, lt=1e11)]
"""Seconds since 1970 (UTC)."""

Class = Annotated[int, Field(ge=0, lt=MAX_CLASSES)]


Key = Annotated[int, Field(gt=-(2**128), lt=2**128)]
"""A seed, or what a deployment draws its participants from (:data:`server.run.registration.KEY_BITS`)."""

Missing = dict[Text, Integer | None]
"""Domains that a score lacks, and the last round that scored each."""


class Confusion(TypedDict):
    """Confusion counts of a score, see :func:`common.metrics.cells_of`."""

    classes: Annotated[int, Field(gt=0, le=MAX_CLASSES)]
    true: list[Class]
    predicted: list[Class]
    count: list[Integer]


class ScoreLine(TypedDict):
    """A line of ``scores.jsonl``.

    ``values`` are those of ``rounds.scores`` and ``own_metric`` for this client alone.
    """

    round: Integer
    client: Text
    domain: Text
    scored_on: Literal["test", "validation"]
    count: Annotated[int, Field(gt=0, lt=2**63)]
    correct: Integer
    loss: Finite
    confusion: NotRequired[Confusion]
    values: NotRequired[dict[Text, Finite]]
    sums: NotRequired[dict[Text, Finite]]


class ReplyLine(TypedDict):
    """A line of ``replies.jsonl``; what is empty or 0 is left out."""

    round: Integer
    exchange: Text
    time: NotRequired[Time]
    client: Text
    domain: Text
    status: Text
    reason: NotRequired[str]
    samples: NotRequired[Integer]
    steps: NotRequired[Integer]
    losses: NotRequired[dict[Text, Finite]]
    seconds_load: NotRequired[Finite]
    seconds_score: NotRequired[Finite]
    seconds_train: NotRequired[Finite]
    seconds_save: NotRequired[Finite]
    bytes_down: NotRequired[Integer]
    bytes_down_weights: NotRequired[Integer]
    bytes_down_prototypes: NotRequired[Integer]
    bytes_down_extra: NotRequired[Integer]
    bytes_down_header: NotRequired[Integer]
    bytes_up: NotRequired[Integer]
    bytes_up_weights: NotRequired[Integer]
    bytes_up_prototypes: NotRequired[Integer]
    bytes_up_extra: NotRequired[Integer]
    bytes_up_header: NotRequired[Integer]
    peak_bytes: NotRequired[Integer]
    releases: NotRequired[Integer]
    randomness: NotRequired[Text]


class MeasureShape(TypedDict):
    """The description of a metric, see :class:`common.metrics.Measure`."""

    label: Text
    unit: Text
    lower_is_better: bool


class Privacy(TypedDict):
    """What a run released."""

    unit: Literal["sample", "group", "client"]
    neighbours: Text
    delta: Finite
    covers: list[Text]
    unprotected: list[Text]
    randomness: NotRequired[list[Text]]
    releases: dict[Text, Integer]
    epsilon: dict[Text, Finite | None]
    conditional_epsilon: dict[Text, Finite | None]
    conditions: list[Text]
    warnings: list[Text]


class Event(TypedDict):
    """A line of ``events.jsonl``. Fields that are shown are checked for their type; other fields are free."""

    event: str
    time: Time
    run: NotRequired[Text]
    method: NotRequired[Text]
    data: NotRequired[Text]
    content: NotRequired[Text]
    device: NotRequired[str]
    versions: NotRequired[dict[str, str]]
    round: NotRequired[Integer]
    rounds: NotRequired[Integer]
    client: NotRequired[str]
    clients: NotRequired[list[str]]
    domain: NotRequired[str]
    class_counts: NotRequired[ClassCounts]
    samples: NotRequired[Integer]
    seconds: NotRequired[Finite]
    average: NotRequired[Finite]
    metric: NotRequired[Text]
    measures: NotRequired[dict[Text, MeasureShape]]
    attack: NotRequired[Text]
    values: NotRequired[dict[Text, dict[Text, Finite | None]]]
    resolution: NotRequired[dict[Text, Finite]]
    test: NotRequired[dict[str, Integer]]
    validation: NotRequired[dict[str, Integer]]
    unseen: NotRequired[list[str]]
    reason: NotRequired[str]
    error: NotRequired[Text]
    places: NotRequired[list[Text]]
    counted: NotRequired[Integer]
    attempt: NotRequired[Integer]
    registered: NotRequired[Integer]
    start_seconds: NotRequired[Finite]
    clock_ahead: NotRequired[Finite]
    sha256: NotRequired[Text]
    server_peak_bytes: NotRequired[Integer]
    key: NotRequired[Key | None]
    joined_batches: NotRequired[list[Text]]
    privacy: NotRequired[Privacy]
    split: NotRequired[Text]
    scored: NotRequired[Text]
    bound: NotRequired[Literal["lower", "upper"] | None]
    processor: NotRequired[dict[Text, Text]]
    best: NotRequired[int]
    patience: NotRequired[Integer]


MAX_RECORD = 4 * 2**30
"""Largest file of a run's record that is read, bytes."""

FOLLOW_SCORES = ("score", "validation", "score missing", "metric failed", "collapsed", "finish")
"""Events that follow from the scores of their round."""

FOLLOW_LAST_SCORE = ("at chance", "privacy spent", "harmless attack")
"""Events of a run's end, which a resumed run has again."""

SHAPES: dict[str, TypeAdapter[Any]] = {
    SCORES: TypeAdapter(list[ScoreLine]),
    REPLIES: TypeAdapter(list[ReplyLine]),
    EVENTS: TypeAdapter(list[Event]),
}
"""The type of the entries of each file, by the file's name."""

END = ("sha256", "seconds", "server_peak_bytes")
"""Fields of the event that ends a run in order; ``stopped`` and ``failed`` have all of them or none."""

NEEDED = {
    "score": ("round",),
    "validation": ("round",),
    "start": ("round", "rounds", "clients", "method", "data", "scored", "processor"),
    "resume": ("round", "rounds", "clients", "method", "data", "scored", "processor"),
    "registered": ("client", "domain", "class_counts", "samples", "split"),
    "registration lost": ("client", "reason"),
    "registration refused": ("client", "reason"),
    "client counts less": ("round", "client", "reason", "registered", "counted"),
    "missing": ("clients",),
    "metric failed": ("round", "reason"),
    "code changed": ("reason",),
    "data changed": ("reason",),
    "deadline derived": ("round", "seconds"),
    "late": ("round", "clients"),
    "waiting": ("clients", "seconds"),
    "score missing": ("round", "domain", "status"),
    "collapsed": ("round", "domain", "label", "share", "loss"),
    "at chance": ("round", "average", "chance", "images", "steps", "remedies"),
    "harmless attack": ("round", "clients"),
    "round done": ("round", "seconds"),
    "round skipped": ("round", "answered", "needed"),
    "stopped": ("round",),
    "stopped early": ("round", "rounds", "best", "patience"),
    "failed": ("round", "reason"),
    "interrupted": ("reason",),
    "finish": ("round", *END),
}
"""What an event of a name holds besides; any other that begins with ``client`` has round, client and reason."""


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Replace the errors of a file that cannot be read by one with a message.

    Raises:
        ConfigError: the file cannot be read; the message names the file.
    """
    try:
        check_regular(path, MAX_RECORD)
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def check_lines(path: Path, lines: Sequence[dict[str, Any]], first: int = 0) -> None:
    """Check that all ``lines`` of the file at ``path``, if it is one of :data:`SHAPES`, have the fields that are read.

    Args:
        path: the file.
        lines: some of its lines.
        first: the number of lines before them.

    Raises:
        ConfigError: a line does not; the message names the first such line and its problem.
    """
    if path.name not in SHAPES:
        return
    try:
        SHAPES[path.name].validate_python(lines, strict=True)
    except ValidationError as error:
        first_error = error.errors(include_url=False)[0]
        place, *key = first_error["loc"]
        shown = printable(repr(first_error["input"]))[:100]
        problem = f"{'.'.join(map(str, key)) or 'it'}: {first_error['msg']}; it is {shown}"
        raise _odd(path, first + int(place), problem) from error
    if path.name == SCORES:
        _check_confusions(path, lines)


def _check_confusions(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Check that confusion counts have columns of one length, classes below their number, and one number of classes."""
    known = 0
    for number, line in enumerate(lines):
        if "confusion" not in line:
            continue
        cells = line["confusion"]
        known = known or cells["classes"]
        if not len(cells["true"]) == len(cells["predicted"]) == len(cells["count"]):
            raise _odd(path, number, "true, predicted and count: are not of one length")
        if cells["classes"] != known:
            raise _odd(path, number, "classes: is another number than in the first entry")
        if max([*cells["true"], *cells["predicted"]], default=0) >= cells["classes"]:
            raise _odd(path, number, "true, predicted: hold a class that is not below classes")


def check_events(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Check that all ``events`` hold the fields of an event of their name.

    Raises:
        ConfigError: an event does not; the message names the first such event and its missing field.
    """
    for number, event in enumerate(events):
        name: str = event["event"]
        needed = NEEDED.get(name, ())
        if name.startswith("client ") and not needed:
            needed = ("round", "client", "reason")
        if "sha256" in event:
            needed = (*needed, *END)
        if missing := [key for key in needed if key not in event]:
            raise _odd(path, number, f"{missing[0]}: is missing of {printable(name)[:100]!r}")


def _odd(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError(
        f"{path}: entry {number + 1}: {problem}. No run writes this: leave the run out, or correct the file"
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of one of a run's three files; one that a crash cut short is left out.

    Raises:
        ConfigError: a line is not as a run writes it.
    """
    with read_errors(path):
        lines = list(stream_lines(path))
    check_lines(path, lines)
    return lines


def stream_checked(path: Path) -> Iterator[dict[str, Any]]:
    """Return the lines of one of a run's three files one at a time, checked, without those that a crash cut short.

    Raises:
        ConfigError: a line is not as a run writes it.
    """
    with read_errors(path):
        for number, line in enumerate(stream_lines(path)):
            check_lines(path, [line], number)
            yield line


def stream_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Return the lines of one of a run's three files one at a time, unchecked, without those that a crash cut short."""
    with path.open() as stream:
        yield from entries_of(stream)


def entries_of(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yield the entries in ``lines``, unchecked, without those that a crash cut short."""
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if entry and isinstance(entry, dict):
                yield entry


# ---- writing ---------------------------------------------------------------------------------------------------------


def cut_back(path: Path, last: int, last_scored: int) -> None:
    """Drop from one of a run's three files what a resumed run writes again; the file is made if there is none.

    Args:
        path: the file.
        last: the last round of which replies and events are kept; ``-1`` keeps nothing.
        last_scored: the last round of which scores, and the events that follow from them, are kept.
    """
    from common.storage import write_text

    kept: list[str] = []
    if last >= 0 and path.exists():
        for entry in read_lines(path):
            until = last
            if "scored_on" in entry or entry.get("event") in FOLLOW_SCORES:
                until = last_scored
            elif entry.get("event") in FOLLOW_LAST_SCORE:
                until = -1
            if entry.get("round", 0) <= until:
                kept.append(f"{json.dumps(entry)}\n")
    write_text(path, "".join(kept))
