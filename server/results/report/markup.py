"""Pieces of HTML; every text that a device or a person may have chosen goes through :func:`text`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def text(value: object) -> str:
    """``value`` with everything that HTML would read as markup escaped."""
    return html.escape(str(value), quote=True)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str, *, numbers: int = 1, kind: str = "") -> str:
    """A table whose first cell of each row is its heading; cells are HTML already.

    Args:
        head: column headings.
        rows: cells.
        caption: what the table shows; for those who do not see it, too.
        numbers: the column from which on cells are numbers.
        kind: further classes of the table.
    """

    def cells(tag: str, values: Sequence[str]) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        made = []
        for index, value in enumerate(values):
            style = ' class="number"' if index >= numbers else ""
            if tag == "td" and index == 0:
                made.append(f'<th scope="row">{value}</th>')
            else:
                made.append(f"<{tag}{scope}{style}>{value}</{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join(cells("td", row) for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}">'
        f'<table class="{kind}"><caption>{text(caption)}</caption><thead>{cells("th", list(head))}</thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def details(summary: str, content: str) -> str:
    """Content that is folded away; ``content`` is HTML, ``summary`` is not."""
    return f"<details><summary>{text(summary)}</summary>{content}</details>"


def bar(parts: Sequence[tuple[str, float]], whole: float, description: str) -> str:
    """A horizontal bar of stacked parts, ``whole`` being the full width."""
    x, made = 0.0, []
    for index, (name, value) in enumerate(parts):
        width = 100 * value / whole if whole > 0 else 0.0
        if width > 0:
            made.append(
                f'<rect class="part{index}" x="{x:.2f}%" y="0" width="{width:.2f}%" height="100%">'
                f"<title>{text(name)}</title></rect>"
            )
        x += width
    return f'<svg class="bar" role="img" aria-label="{text(description)}">{"".join(made)}</svg>'


def strip(counts: Sequence[int], names: Sequence[str], most: int) -> str:
    """Samples per class as a row of small columns."""
    if not counts:
        return ""
    width = 100 / len(counts)
    made = [
        f'<rect x="{index * width:.2f}%" y="{100 - 100 * count / max(1, most):.1f}%" width="{0.8 * width:.2f}%" '
        f'height="{100 * count / max(1, most):.1f}%"><title>{text(name)}: {count}</title></rect>'
        for index, (count, name) in enumerate(zip(counts, names, strict=False))
    ]
    said = ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=False))
    return f'<svg class="strip" role="img" aria-label="samples per class: {text(said)}">{"".join(made)}</svg>'


def size(count: float) -> str:
    """Bytes as a person reads them, decimal units."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f}\u00a0{unit}"
    return f"{count:.0f}\u00a0B"


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds < 600:
        return f"{seconds:.{1 if seconds < 100 else 0}f}\u00a0s"
    minutes = round(seconds / 60)
    return f"{minutes}\u00a0min" if minutes < 120 else f"{minutes // 60}\u00a0h {minutes % 60}\u00a0min"


def listing(items: Sequence[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else ""
