"""Files for node exporters, read."""

from __future__ import annotations

from pathlib import Path


def read_gauges(path: Path) -> dict[str, float]:
    """The numbers without labels, by name without Goldfinch's prefix."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, number = line.partition(" ")
        if name.startswith("goldfinch_") and "{" not in name:
            found[name.removeprefix("goldfinch_")] = float(number)
    return found
