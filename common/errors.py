"""Errors that say what was wrong, where, and what to do next."""

import contextlib
import difflib
import errno
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from common.text import printable

PARTS = ("client", "common", "goldfinch", "server", "strategies")
"""Folders of Goldfinch's own code."""

MAX_REASON, MAX_TRACEBACK = 2_000, 20_000
"""Characters of a reason and of a traceback that are sent, recorded and shown."""


class GoldfinchError(Exception):
    """Base of every error a user can cause; the command line prints its message without a traceback."""


class ConfigError(GoldfinchError):
    """A configuration key, type or value that cannot be used."""


class UnknownKeyError(ConfigError):
    """A configuration key that does not exist here, although it may exist with another choice of its group."""


class DataError(GoldfinchError):
    """A data set that is missing, damaged or empty."""


class PayloadError(GoldfinchError):
    """Bytes or tensors from the other side that must not be used."""


class PrivacyError(GoldfinchError):
    """An update that a device does not send, because its privacy budget or its own configuration forbids it."""


IN_A_NEW_RUN = "in a new run"
"""What the text of an error says that would come again if the run were resumed."""

DIVERGED = (
    f"training diverged; lower train.learning_rate or set train.clip_norm, {IN_A_NEW_RUN}; in a method of your own "
    "look for 0 / 0, too, such as a mean of nothing"
)
"""Why a number of a model is not finite or much too large, and what to do."""

BUDGET_SPENT = "the privacy budget is spent"
"""How the text of a :class:`BudgetSpentError` begins, and the reason that a private device sends in its place."""


class BudgetSpentError(PrivacyError):
    """An update that a device does not send, because a privacy budget is spent."""


class ContractError(PrivacyError):
    """A request for what the owner of a device has not allowed, or for other data than earlier requests read."""


class ImageSideError(PrivacyError):
    """A request to score images that a private run trained on, or to train on images that were scored."""


class RepeatedImageError(PrivacyError):
    """A request to protect single images, on a device whose data name an image more than once."""


class CheckpointError(GoldfinchError):
    """A checkpoint that cannot be read, or that belongs to another run."""


class EngineError(GoldfinchError):
    """An engine (inline, Ray, SuperLink) that could not start, or that stopped."""


DISK_ADVICE = {
    errno.ENOSPC: "free space on that disk",
    errno.EDQUOT: "free space in that quota",
    errno.EROFS: "make it writable",
    errno.EACCES: "give this user the right to it",
    errno.EPERM: "give this user the right to it",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EIO: "check that disk (dmesg)",
    errno.EISDIR: "move that folder away",
}
"""What to do if a disk answers with an error number."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return a sentence naming the choices that begin with ``word``, or the closest one, and all choices.

    >>> nearest("fedpol", ["fpl", "fedprox"])
    "did you mean 'fedprox'? (choices: fedprox, fpl)"
    >>> nearest("office", ["digits", "office_caltech", "office_home"])
    "did you mean 'office_caltech' or 'office_home'? (choices: digits, office_caltech, office_home)"
    """
    known = sorted(set(choices))
    begun = [name for name in known if word and name.startswith(f"{word}_")]
    if begun:
        return f"did you mean {' or '.join(map(repr, begun))}? (choices: {', '.join(known)})"
    by_lower: dict[str, str] = {}
    for name in sorted(known, key=lambda name: difflib.SequenceMatcher(None, word, name).ratio()):
        by_lower[name.lower()] = name  # of names that differ in case alone, the one that is most like the word
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    listed = ", ".join(known) or "none"
    if not close:
        return f"choices: {listed}"
    return f"did you mean '{by_lower[close[0]]}'? (choices: {listed})"


def some_of(names: Sequence[str], most: int = 20) -> str:
    """Return the first names and the number of the others.

    >>> some_of(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most:,} more"
    return shown


def reason_of(text: str) -> str:
    """Return the text of an error as the reason of a failure or refusal: printable, and of :data:`MAX_REASON` letters.

    Every reason that is sent or recorded is made here, and an error may hold whatever a file or a device holds.
    """
    return printable(text[:MAX_REASON])[:MAX_REASON]


def traceback_of(text: str) -> str:
    """Return the end of a traceback, printable, and of :data:`MAX_TRACEBACK` letters."""
    return printable(text[-MAX_TRACEBACK:], keep="\n")[-MAX_TRACEBACK:]


def places_of(error: BaseException) -> list[str]:
    """Return where in Goldfinch's own files an error passed, the last place last: ``client/trainer.py:9``."""
    root = Path(__file__).resolve().parent.parent
    places: list[str] = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if path.is_relative_to(root) and path.relative_to(root).parts[0] in PARTS:
            places.append(f"{path.relative_to(root).as_posix()}:{frame.lineno}")
    return places


def kind_of(reason: str) -> str:
    """Return a reason without numbers and without words that contain one, which similar reasons have in common."""
    return re.sub(r"\S*\d\S*", "…", reason)


def summarised(reasons: Sequence[str], most: int = 5) -> list[str]:
    """Return one line for each kind of reason, the commonest first.

    Args:
        reasons: the reason of each client or node; those that differ only in numbers and in words that contain one
            are of one kind.
        most: the largest number of lines.

    Returns:
        The first reason of each kind, with the number of similar ones.
    """
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in reasons:
        kind = kind_of(reason)
        first.setdefault(kind, reason)
        counts[kind] += 1
    lines: list[str] = []
    for kind, count in counts.most_common(most):
        line = first[kind]
        if count > 1:
            line += f" (and {count - 1:,} like it)"
        lines.append(line)
    left = len(counts) - len(lines)
    if left > 0:
        lines.append(f"and {left} other reasons")
    return lines


@contextlib.contextmanager
def writing(place: object, otherwise: str) -> Iterator[None]:
    """Within the context, an error of writing becomes a :class:`ConfigError` with the place and a remedy.

    Args:
        place: the file or folder.
        otherwise: what to choose instead.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write to {error.filename or place}: {error.strerror}; choose {otherwise}") from error
