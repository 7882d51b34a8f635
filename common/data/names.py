"""How names that people give are compared and checked: of classes, domains, folders, columns and splits."""

import re
import unicodedata
from collections.abc import Iterable, Mapping

from common.errors import ConfigError
from common.text import printable

SPLITS: Mapping[str, str] = {
    "train": r"trn|train(ing)?",
    "test": r"tst|test(ing)?",
    "validation": r"val(id(ation)?)?|dev|eval(uation)?|crossval",
}
"""The splits, and the spellings of the word for each, in lower case."""

FILLERS = frozenset({"is", "for", "in", "set", "split", "data", "images", "imgs", "files"})
"""Words beside that of a split which say no more than it does: ``training_set``, ``is_test``, ``Train-Images``."""

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm"})
"""Suffixes of images. A file of another suffix, or of none, may be an image by its first bytes."""

YES, NO = frozenset({"1", "true", "yes", "y", "t"}), frozenset({"0", "false", "no", "n", "f"})

DOMAIN_NAMES = "use letters, digits, - and _, without blanks at the ends"
"""What an error says of a domain's name that :func:`can_be_domain` refuses."""

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


def can_be_domain(name: str) -> bool:
    """Return whether a name can be that of a domain, which becomes a part of client ids and of folders' names."""
    return name.strip() == name != "" and not name.startswith(".") and not set(name) & set("/\\:\n")


def normal_name(name: str) -> str:
    """Return the letters and digits of :func:`name_key`: 'Real World' and 'RealWorld' are the same published folder."""
    return "".join(letter for letter in name_key(name) if letter.isalnum())


def split_of(name: str) -> str:
    """Return ``train``, ``test`` or ``validation`` for a name that says no more than a split; empty for any other.

    >>> split_of("Training_Set"), split_of("val2017"), split_of("test tube")
    ('train', 'validation', '')
    """
    words = [word for word in re.findall(r"[^\W\d_]+", name_key(name)) if word not in FILLERS]
    if len(words) != 1:
        return ""
    for split, spellings in SPLITS.items():
        if re.fullmatch(f"({spellings})(set)?", words[0]):
            return split
    return ""


def coinciding(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the first two different names that are spellings of one; ``None`` if there are none."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name_key(name), name)
        if other != name:
            return other, name
    return None


RESERVED = ("average", "worst", "spread", "seen", "unseen", "validation", "rounds", "seeds", "MB", "together")
"""Columns of tables beside those of the domains, and the last line of ``goldfinch evaluate``."""


def check_names(kind: str, names: Iterable[str]) -> None:
    """Check the names of domains or classes, which messages, records and tables show.

    Args:
        kind: ``domain`` or ``class``.
        names: the names.

    Raises:
        ConfigError: a name cannot be shown, or is that of another column.
    """
    known: set[str] = set()
    for name in names:
        if not isinstance(name, str) or name in known:
            raise ConfigError(f"{kind} {name!r}: names must be texts, and no two alike; correct the data set's names")
        known.add(name)
        if reason := unfit(kind, name):
            raise ConfigError(
                f"{kind} {printable(name)[:100]}: its name {reason}; rename its folder, or its entries in the list"
            )


def unfit(kind: str, name: str) -> str:
    """Return why a name cannot be that of a domain or a class; empty if it can."""
    shown = printable(name)
    if shown == f"'{name}":
        return f"begins with {name[0]}, as a spreadsheet's formula does"
    if shown != name:
        return "has characters that cannot be printed"
    if kind == "domain" and name in RESERVED:
        return "is that of a column of tables, or of their last line"
    return ""
