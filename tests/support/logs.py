"""Lines of a log."""

from __future__ import annotations

import re
from collections.abc import Iterable

BEGIN = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)( |$)")


def without_time(lines: Iterable[str]) -> list[str]:
    """Return the lines that have an escape code, or do not begin with a time in UTC."""
    return [line for line in lines if "\x1b" in line or not BEGIN.match(line)]
