"""Numbers for monitoring, as text."""

from collections.abc import Mapping


def gauge(name: str, meaning: str, values: Mapping[str, float | None], label: str = "") -> list[str]:
    """Return numbers as lines of the text format that node exporters collect from files (``*.prom``).

    Args:
        name: the unit is its last word, as in ``last_heartbeat_timestamp_seconds``.
        meaning: one line.
        values: the numbers by the label's value; ``None`` is left out. The key of a number without a label is empty.
        label: name of the label.

    Returns:
        The lines; none if there is no number.
    """
    full = f"goldfinch_{name}"
    lines = [f"# HELP {full} {meaning}", f"# TYPE {full} gauge"]
    for key, value in values.items():
        labels = ""
        if label:
            escaped = key.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            labels = f'{{{label}="{escaped}"}}'
        if value is not None:
            lines.append(f"{full}{labels} {float(value):.17g}")
    if len(lines) == 2:
        return []
    return lines
