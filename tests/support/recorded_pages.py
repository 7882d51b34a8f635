"""The committed pages of reproduced tables, read back as comparisons, and what the generator makes of their numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from goldfinch.reproduction.comparison import Column, Comparison, Line
from goldfinch.reproduction.pages import pages
from goldfinch.reproduction.published import Scale, published_table
from goldfinch.results.seeds import Value

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
PAGES = sorted(
    path
    for folder in ("small", "paper_net", "paper")
    for path in (RESULTS / folder).glob("*.md")
    if path.stem != "README"
)


@dataclass(frozen=True)
class Recorded(Comparison):
    """A comparison with the numbers of a page: means and deviations over seeds, to two decimals."""

    numbers: dict[str, list[Value]] = field(default_factory=dict)

    def ours(self, line: Line, column: Column) -> Value | None:
        """The page's cell."""
        return self.numbers[line.row.label][self.columns.index(column)]

    def our_average(self, line: Line, columns: Sequence[Column]) -> Value | None:
        """The page's average; over fewer columns the mean of its cells, without a deviation."""
        cells = self.numbers[line.row.label]
        if len(columns) == len(self.columns):
            return cells[len(columns)]
        chosen = [cells[self.columns.index(column)].mean for column in columns]
        return Value(sum(chosen) / len(chosen), None)


def section(text: str, name: str) -> str:
    """The text below a heading of the second level, up to the next one."""
    return re.split(r"^## ", text.partition(f"\n## {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0].strip()


def rows_of(text: str) -> list[list[str]]:
    """The cells of a Markdown table's rows, without its header and without bold."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("*") for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def read_page(path: Path) -> Recorded:
    """The numbers of a committed page."""
    text = path.read_text()
    table = published_table(path.stem)
    scale = cast("Scale", path.parent.name)
    rows = {row.label: row for row in table.rows}
    numbers: dict[str, list[Value]] = {}
    lines = []
    for cells in rows_of(section(text, "Ours")):
        label = cells[0].removesuffix(" (own models)")
        scored = "own model" if label != cells[0] else "global model"
        numbers[label] = [_value(cell) for cell in cells[1 : len(table.domains) + 2]]
        summary = {
            "scored": scored,
            "splits": {},
            "bytes": {"up": 0, "down": 0},
            "state_sha256": "",
            "wall_seconds": 0.0,
        }
        score = {"accuracy": {}, "worst": 0.0, "spread": 0.0}
        summaries = {0: {**summary, "scores": {table.rule: score}, "code": ""}}
        lines.append(Line(rows[label], {0: Path("none")}, summaries))
    return Recorded(table, scale, tuple(lines), (0,), numbers)


def generated(path: Path) -> str:
    """The page as the generator makes it from the numbers that the committed page has."""
    return pages(read_page(path), "")[0]


def _value(cell: str) -> Value:
    mean, _, deviation = cell.partition(" ± ")
    return Value(float(mean), float(deviation) if deviation else None)
