"""Jinja2 as every page uses it: what a device or a person may have chosen is escaped; a missing name is an error."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from server.trackers.events import size

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def templates(folder: Path, *, escape: bool = True) -> Environment:
    """The templates in ``folder``; ``escape`` is for HTML, where every value is text unless it is ``Markup``."""
    made = Environment(
        loader=FileSystemLoader(folder),
        autoescape=escape,  # noqa: S701  # Markdown is the one format without
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters.update(size=size, duration=duration, listing=listing)
    made.globals.update(counted=counted, size=size, duration=duration)
    return made


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds < 600:
        return f"{seconds:.{1 if seconds < 100 else 0}f}\u00a0s"
    minutes = round(seconds / 60)
    return f"{minutes}\u00a0min" if minutes < 120 else f"{minutes // 60}\u00a0h {minutes % 60}\u00a0min"


def listing(items: Sequence[object]) -> str:
    """``a, b and c``."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def counted(count: int, noun: str) -> str:
    """``three clients``."""
    word = NUMBERS[count] if count < len(NUMBERS) else str(count)
    return f"{word} {noun}{'' if count == 1 else 's'}"
