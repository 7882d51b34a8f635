"""Say where the minutes of ``make setup`` went, from the times in pip's own log.

    pip --log pip.log install ...
    python set_up_times.py pip.log SECONDS_OF_COMPILING

pip resolves and fetches all packages before it unpacks the first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

LINE = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d),\d+ (.*)")
UNPACKS = "Installing collected packages"
DONE = "Successfully installed"


def seconds_of(lines: Iterable[str]) -> tuple[float, float]:
    """Return the seconds in which pip resolved and fetched, and those in which it unpacked, over all its calls."""
    fetching = unpacking = 0.0
    before = began = None
    for line in lines:
        match = LINE.match(line)
        if match is None:
            continue
        time = datetime.fromisoformat(match[1])
        text = match[2].strip()
        if before is None:
            before = time
        if text.startswith(UNPACKS):
            fetching += (time - before).total_seconds()
            began = time
        elif text.startswith(DONE) and began is not None:
            unpacking += (time - began).total_seconds()
            before = began = None
    return fetching, unpacking


def main() -> None:
    """Print one line."""
    path, compiling = Path(sys.argv[1]), float(sys.argv[2])
    fetching, unpacking = seconds_of(path.read_text(errors="replace").splitlines())
    print(f"set up: resolving and fetching {fetching:.0f} s, unpacking {unpacking:.0f} s, compiling {compiling:.0f} s")


if __name__ == "__main__":
    main()
