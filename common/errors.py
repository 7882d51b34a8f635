"""Errors that say what was wrong, where, and what to do next."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator


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
