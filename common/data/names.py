"""How names that people give are compared and checked: of classes, domains, folders, columns and splits."""

import re
import unicodedata
from collections.abc import Iterable, Mapping

from common.errors import ConfigError
from common.text import printable

SPLIT_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "training", "trn"), "train"),
    **dict.fromkeys(("test", "testing", "tst"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation", "crossval"), "validation"),
}
"""Words of splits by :func:`name_key`, and the split that each means."""

SPLIT_COLUMNS = frozenset({"split", "splits", "set", "subset", "partition", "phase", "usage", "fold"})
"""Names of a column of splits, by :func:`name_key`."""

SPLIT_FLAGS: Mapping[str, str] = {
    **dict.fromkeys(("is_train", "train", "is_training", "training"), "train"),
    **dict.fromkeys(("is_test", "test"), "test"),
    **dict.fromkeys(("is_val", "is_valid", "val", "is_validation"), "validation"),
}
"""Names of a column that says yes or no, by :func:`name_key`, and the split of the rows that say yes."""

YES, NO = frozenset({"1", "true", "yes", "y", "t"}), frozenset({"0", "false", "no", "n", "f"})

_NUMBER = re.compile(r"([+-]?)0*([0-9]+?)(?:\.([0-9]*?)0*)?")


def name_key(name: str) -> str:
    """Return what two spellings of one name have in common.

    Equal are names that differ in case, in Unicode's composition, in space at the ends, in the kind and number of
    spaces, hyphens and underscores between words, or that are the same number.

    >>> name_key(" Alarm  clock"), name_key("01"), name_key("1.0")
    ('alarm_clock', '1', '1')
    """
    text = unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()).strip()
    if number := _NUMBER.fullmatch(text):
        sign, whole, fraction = number.groups(default="")
        if fraction:
            whole += f".{fraction}"
        if sign == "-" and whole != "0":
            return f"-{whole}"
        return whole
    return re.sub(r"[\s_\-]+", "_", text)


def normal_name(name: str) -> str:
    """Return the letters and digits of :func:`name_key`: 'Real World' and 'RealWorld' are the same published folder."""
    return "".join(letter for letter in name_key(name) if letter.isalnum())


def split_of(word: str) -> str:
    """Return ``train``, ``test`` or ``validation`` for a word of a split; empty for any other."""
    return SPLIT_WORDS.get(name_key(word), "")


def coinciding(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first two different names that are spellings of one; ``None`` if there are none."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name_key(name), name)
        if other != name:
            return other, name
    return None


RESERVED = ("average", "worst", "spread")
"""Columns of tables beside those of the domains."""


def check_names(kind: str, names: Iterable[str]) -> None:
    """Check the names of domains or classes, which messages, records and tables show.

    Args:
        kind: ``domain`` or ``class``.
        names: the names.

    Raises:
        ConfigError: a name cannot be shown, or is that of another column.
    """
    for name in names:
        shown = printable(name)
        if shown != name:
            raise ConfigError(
                f"{kind} {shown[:100]}: its name has characters that cannot be printed, or begins like a spreadsheet's "
                "formula; rename its folder, or its entries in the list"
            )
        if kind == "domain" and name in RESERVED:
            raise ConfigError(f"a domain is called {name!r}, as a column of every table is; rename it")
