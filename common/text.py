"""Text that people read: warnings, sizes, durations, counts, enumerations, lines for a shell, names of strangers."""

import logging
import re
import shlex
from collections.abc import Iterable, Sequence
from functools import lru_cache

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

FORMULA = re.compile(r"[=@]|[+-](?!\d+(\.\d+)?\Z)")
"""What a cell begins with that a spreadsheet would compute; a number with a sign is none."""

_log = logging.getLogger(__name__)


@lru_cache(maxsize=1024)
def warn_once(message: str) -> None:
    """Log a warning, once in this process: files are read, and networks built, more than once."""
    _log.warning("%s", message)


def size(count: float) -> str:
    """Return a number of bytes with its unit, in powers of 1,000: ``1.5 MB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f}\u00a0{unit}"
    return f"{count:.0f}\u00a0B"


def duration(seconds: float) -> str:
    """Return seconds as text with its unit: ``12.0 s`` below 10 minutes, then ``35 min`` and ``2 h 30 min``."""
    if seconds < 100:
        return f"{seconds:.1f}\u00a0s"
    if seconds < 600:
        return f"{seconds:.0f}\u00a0s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes}\u00a0min"
    return f"{minutes // 60}\u00a0h {minutes % 60}\u00a0min"


def listing(items: Sequence[object]) -> str:
    """Return the items as ``a, b and c``."""
    parts = list(map(str, items))
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun: ``three clients``, ``13 clients``; the plural is by default the noun and an s."""
    number = NUMBERS[count] if count < len(NUMBERS) else str(count)
    several = plural or f"{noun}s"
    return f"{number} {noun if count == 1 else several}"


def quantity(count: int, noun: str) -> str:
    """Return a count in digits with its noun: ``1 client``, ``1,300 clients``."""
    return f"{count:,} {noun if count == 1 else f'{noun}s'}"


def shell_line(words: Iterable[object]) -> str:
    """Return words as a line that a person can read and give to a shell.

    A word with characters that a terminal would obey, such as an escape sequence, is written as bash's ``$'...'``.
    """
    return " ".join([_shell_word(str(word)) for word in words])


def _shell_word(word: str) -> str:
    if word.isprintable():
        if "'" in word and not re.search(r'["$`\\!]', word):
            return f'"{word}"'
        return shlex.quote(word)
    shown = ""
    for letter in word:
        if letter in "\\'":
            shown += f"\\{letter}"
        elif letter.isprintable():
            shown += letter
        else:
            shown += f"\\U{ord(letter):08x}"
    return f"$'{shown}'"


def printable(text: str, keep: str = "") -> str:
    """Return text from a device so that it is safe to show and to write.

    Characters that are not printable are escaped: control characters, line ends, and halves of surrogate pairs. The
    characters in ``keep`` stay. A text that a spreadsheet would compute gets an apostrophe in front.
    """
    shown = ""
    for character in text:
        if character.isprintable() or character in keep:
            shown += character
        else:
            shown += character.encode("unicode_escape").decode()
    if FORMULA.match(shown):
        shown = f"'{shown}"
    return shown
