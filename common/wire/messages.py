"""The headers of messages between server and devices: requests, answers and registrations.

A request asks a device to score the received model, to train it, or to take part in a later exchange. A request is
text in the config of Flower's FitIns. An answer contains the scores and the costs of an update; it is the header
of the :class:`~common.wire.payload.Payload` with the update's tensors. A registration has no tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, ValidationError
from typing_extensions import TypedDict  # pydantic takes typing's own from Python 3.12 on

from common.config import checked, mistakes
from common.errors import PayloadError
from common.text import printable

Integer = Annotated[int, Field(gt=-(2**63), lt=2**63)]
Whole = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(gt=-1e300, lt=1e300)]
"""A float in a header; larger numbers are errors."""

MAX_ENTRIES = 50
"""Most entries of a mapping in a header, such as loss terms. With names of 100 characters they fit in one CSV field."""

MAX_DOMAINS = 1000
MAX_CLASSES = 10_000
MAX_FILES = 1000

OTHER_VERSION = "if client and server differ in their version, install the same Goldfinch on both"
"""The remedy for a header whose fields are others."""

SCALED = "scaled"
"""Status in ``replies.jsonl`` of a client whose update a filter scaled down, and which was used."""

TRAINED_STATUSES = frozenset({"trained", SCALED})
"""Statuses of a client that trained, if its update was used."""

UNUSED_STATUSES = ("refused", "failed", "lost")
"""Statuses of a client whose update was not used, although it was waited for."""

COUNTED_STATUSES = (SCALED, *UNUSED_STATUSES, "late")
"""Every status that is counted and shown on its own, in the order in which it is shown."""


def update_was_used(status: str) -> bool:
    """Return whether a client with this ``status`` trained in the exchange and its update was used."""
    return status in TRAINED_STATUSES


def trained_count(counts: Mapping[str, int]) -> int:
    """Return how many clients trained, of ``counts`` of clients by status."""
    return sum(count for status, count in counts.items() if update_was_used(status))


def completed_status(*, train: bool) -> str:
    """Return the status of a client that did what it was asked: train, or only score the model.

    Args:
        train: whether it trained.
    """
    if train:
        return "trained"
    return "scored"


ClassCounts = Annotated[list[Integer], FailFast(), Field(max_length=MAX_CLASSES)]
"""Samples per class."""


def _printable(value: str) -> str:
    if printable(value) != value:
        raise ValueError("has characters that cannot be printed, or begins like a formula")
    return value


Text = Annotated[str, Field(max_length=300), AfterValidator(_printable)]
Name = Annotated[str, Field(max_length=100), AfterValidator(_printable)]


def _few(value: object) -> object:
    if isinstance(value, Mapping) and len(value) > MAX_ENTRIES:
        raise ValueError(f"more than {MAX_ENTRIES} entries")
    return value


Few = BeforeValidator(_few)


class Score(TypedDict):
    """A model's score on one domain: samples, correct ones, mean loss, and ``[K][K]`` counts, true class first.

    With ``own_metric`` it has the metric's ``sums``, and with ``rounds.scores`` the counts of ``confidence``, see
    :class:`common.confidence.ConfidenceCounts`. The gate checks both.
    """

    domain: str
    count: Integer
    correct: Integer
    loss: Number
    confusion: NotRequired[Any]
    sums: NotRequired[Annotated[dict[Name, Number], Few]]
    confidence: NotRequired[Any]


class OwnVersion(TypedDict):
    """The name of a version of a client's own state: the exchange that made it, and the part of the run that asked."""

    round: Whole
    exchange: Name
    attempt: Whole


@checked
class Request:
    """The server's request to one device in one exchange.

    Args:
        run: id of the run, under which the device keeps its state.
        identity: the run's settings, hashed; a device with other settings refuses.
        method: name of the method.
        round: 1-based round; ``rounds + 1`` for the scoring after the last round.
        exchange: name of the exchange.
        client: id of the client that is asked.
        client_count: clients in the federation.
        client_index: position of the client among them, by id.
        train: whether the client takes part in the exchange, or only scores.
        score: domains whose test sets this device scores.
        code: the server's :func:`common.versions.code_sha256`.
        validate: whether this device scores its own validation samples.
        keep: the device keeps the state of this round, the best by validation so far; -1 if there is none.
        attempt: number of the part of the run that asks; larger in each part that a resume begins. The number tells
            apart two replies to the same exchange.
        own: the version of the client's own state that the server counted last, from which the client starts; ``None``
            if it has counted none.
    """

    run: Text
    identity: Text
    method: Name
    round: Whole
    exchange: Name
    client: Text
    client_count: Integer
    client_index: Integer
    train: bool
    score: Annotated[list[Text], FailFast(), Field(max_length=MAX_DOMAINS)]
    code: Text
    validate: bool = False
    keep: Integer = -1
    attempt: Whole = 0
    own: OwnVersion | None = None


@checked
class Answer:
    """A device's reply to a request, without its tensors.

    Args:
        run, method, round, exchange, client, attempt: as in the request.
        samples: training samples N_k.
        class_counts: training samples per class.
        trained: whether the answer carries an update.
        scores: one entry per scored domain.
        losses: mean of each loss term over the last local epoch.
        steps: optimiser steps.
        seconds: wall seconds by phase: load, score, train, save; empty with differential privacy.
        peak_bytes: peak resident memory of the process; 0 with differential privacy.
        device: name of the processor, for the record.
        releases: uploads with noise of this client in this run, including this one; 0 without differential privacy.
        validation: the score on the client's own validation samples, if it was asked for.
        randomness: the source of the update's noise: ``system`` is the operating system, ``keyed`` is a generator that
            can be repeated by anyone who knows the run's seed; empty if the update has no noise.
        kept: whether the device kept a state of its own from this exchange, which a later request can name.
        lost: whether the device has lost the state that the request names, so that the client started without one.
    """

    run: str
    method: str
    round: Integer
    exchange: str
    client: str
    samples: Integer
    class_counts: ClassCounts
    trained: bool
    scores: Annotated[list[Annotated[Score, Few]], FailFast()]
    losses: Annotated[dict[Name, Number], Few]
    steps: Integer
    seconds: Annotated[dict[Name, Number], Few]
    peak_bytes: Integer
    device: Text
    releases: Integer
    validation: Annotated[Score, Few] | None = None
    randomness: Literal["", "keyed", "system"] = ""
    attempt: Integer = 0
    kept: bool = False
    lost: bool = False


@checked
class Registration:
    """A device's description of itself before the first round.

    Args:
        client: id of the client.
        domain: the client's domain.
        samples: training samples.
        class_counts: training samples per class.
        scores: domains whose test sets it can score.
        split: SHA-256 of its split of the data.
        classes: :attr:`~common.data.domain.DataSource.classes_sha256` of its data.
        identity, code: as in :class:`Request`.
        device: name of the processor.
        versions: package versions.
        content: SHA-256 of the pixels of its samples, and of its domain's test split; with differential privacy keyed
            by a secret of the device, or empty.
        validation: samples that are used for validation and not for training.
        files: the hash of each of Goldfinch's files that compute (:func:`common.versions.code_files`), if the server
            asked for them by another ``code``; else empty.
        start_seconds: seconds that its process took to start, in a deployment; else 0.
        clock_ahead: seconds by which the device's clock is ahead of the server's, less the reply's way, in a
            deployment; else 0.
    """

    client: Text
    domain: Text
    samples: Integer
    class_counts: ClassCounts
    scores: Annotated[list[Text], FailFast(), Field(max_length=MAX_DOMAINS)]
    split: Text
    classes: Text
    identity: Text
    code: Text
    device: Text
    versions: Annotated[dict[Name, Name], Few]
    content: Text = ""
    validation: Integer = 0
    files: Annotated[dict[Name, Name], Field(max_length=MAX_FILES)] = field(default_factory=dict)
    start_seconds: Number = 0.0
    clock_ahead: Number = 0.0


def header_of(message: Request | Answer | Registration) -> dict[str, Any]:
    """Return the message's fields as containers that JSON can write."""
    return {entry.name: getattr(message, entry.name) for entry in fields(message)}


def request_text(request: Request) -> str:
    """Return the request as the text that is sent with the tensors."""
    return json.dumps(header_of(request), separators=(",", ":"))


Message = TypeVar("Message", Request, Answer, Registration)


def read_header(kind: type[Message], header: Mapping[str, Any]) -> Message:
    """Return the message in ``header``.

    Raises:
        PayloadError: a field is missing, unknown, or of another type.
    """
    try:
        _few(header)
        return kind(**header)
    except ValueError as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            reason = mistakes(error, kind)
        raise PayloadError(f"the message's header is wrong: {reason}; {OTHER_VERSION}") from error
