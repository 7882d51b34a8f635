"""Numbers for monitoring, in the text format that node exporters collect from a folder of files (``*.prom``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "goldfinch_"


@dataclass
class Gauge:
    """A number, or several that differ by a label.

    Args:
        name: without the prefix; the unit is its last word, as in ``last_contact_timestamp_seconds``.
        meaning: one line.
        label: name of the label; empty for a single number.
        values: the numbers by the label's value; the key of a single number is empty.
    """

    name: str
    meaning: str
    label: str = ""
    values: dict[str, float] = field(default_factory=dict)


def gauge(name: str, meaning: str, value: float | None) -> Gauge:
    """Return a gauge with a single number; without a number, if ``value`` is ``None``."""
    values = {} if value is None else {"": float(value)}
    return Gauge(name, meaning, values=values)


def write_gauges(path: Path, gauges: Sequence[Gauge]) -> None:
    """Write the gauges that have numbers to ``path``, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    lines: list[str] = []
    for each in gauges:
        if not each.values:
            continue
        name = PREFIX + each.name
        lines += [f"# HELP {name} {each.meaning}", f"# TYPE {name} gauge"]
        for value, number in each.values.items():
            lines.append(f"{name}{_labels(each.label, value)} {number:.17g}")
    new = path.with_name(f".{path.name}.new")  # exporters read names that end in .prom
    new.write_text("\n".join(lines) + "\n")
    new.chmod(0o644)  # the exporter is another user
    new.replace(path)


def read_gauges(text: str) -> Mapping[str, float]:
    """Return the numbers without labels, by name without the prefix."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, _, number = line.partition(" ")
        if name.startswith(PREFIX) and "{" not in name:
            found[name.removeprefix(PREFIX)] = float(number)
    return found


def _labels(label: str, value: str) -> str:
    if not label:
        return ""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{{{label}="{escaped}"}}'
