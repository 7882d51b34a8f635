"""Errors that say what was wrong, where, and what to do next."""

import contextlib
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence


class GoldfinchError(Exception):
    """Base of every error a user can cause; the command line prints its message without a traceback."""


class ConfigError(GoldfinchError):
    """A configuration key, type or value that cannot be used."""


class DataError(GoldfinchError):
    """A data set that is missing, damaged or empty."""


class PayloadError(GoldfinchError):
    """Bytes or tensors from the other side that must not be used."""


class PrivacyError(GoldfinchError):
    """What a device does not send, since its privacy budget or its own configuration forbids it."""


class CheckpointError(GoldfinchError):
    """A checkpoint that cannot be read, or that belongs to another run."""


class EngineError(GoldfinchError):
    """An engine (inline, Ray, SuperLink) that could not start, or that stopped."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """A sentence naming the choice closest to ``word``, or all choices when none is close.

    >>> nearest("fedpol", ["fpl", "fedprox"])
    "did you mean 'fedprox'? (choices: fedprox, fpl)"
    """
    known = sorted(set(choices))
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    listed = ", ".join(known) if known else "none"
    return f"did you mean '{close[0]}'? (choices: {listed})" if close else f"choices: {listed}"


def some_of(names: Sequence[str], most: int = 20) -> str:
    """Return the first names and the number of the others.

    >>> some_of(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    if len(names) > most:
        shown += f" and {len(names) - most:,} more"
    return shown


def kind_of(reason: str) -> str:
    """Return a reason without its numbers and without the names that contain one: what alike reasons share."""
    return re.sub(r"\S*\d\S*", "…", reason)


def summarised(reasons: Sequence[str], most: int = 5) -> list[str]:
    """Return one line for each kind of reason, the commonest first.

    Args:
        reasons: what went wrong, once for each client or node; those that differ only in numbers and names that
            contain one are of one kind.
        most: the most lines.

    Returns:
        The first reason of each kind, and how many others are like it.
    """
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason in reasons:
        kind = kind_of(reason)
        first.setdefault(kind, reason)
        counts[kind] += 1
    lines: list[str] = []
    for kind, count in counts.most_common(most):
        others = f" (and {count - 1:,} like it)" if count > 1 else ""
        lines.append(first[kind] + others)
    left = len(counts) - len(lines)
    if left > 0:
        lines.append(f"and {left} other reasons")
    return lines


@contextlib.contextmanager
def writing(place: object, otherwise: str) -> Iterator[None]:
    """What cannot be written within the block is a :class:`ConfigError` that names it and says what to choose."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write to {error.filename or place}: {error.strerror}; choose {otherwise}") from error


@contextlib.contextmanager
def libraries_of(extra: str, what: str) -> Iterator[None]:
    """Imports within the block may lack a library, which then is a :class:`ConfigError` that says how to have it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} needs {error.name}: pip install 'goldfinch-fl[{extra}]'") from error
