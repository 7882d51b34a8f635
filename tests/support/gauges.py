"""Files for node exporters, read."""

from __future__ import annotations

from pathlib import Path


def read_gauges(path: Path) -> dict[str, float]:
    """The numbers, by name without Goldfinch's prefix, with its label if it has one."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, number = line.rpartition(" ")
        if name.startswith("goldfinch_"):
            found[name.removeprefix("goldfinch_")] = float(number)
    return found
