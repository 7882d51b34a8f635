"""The committed pages of reproduced tables, read back as comparisons, and what the generator makes of their numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from support.scored import scored_run

from bench.rows import read_all
from goldfinch.record import RunRecord
from goldfinch.reproduction.comparison import Comparison, Line
from goldfinch.reproduction.pages import pages
from goldfinch.reproduction.published import Scale, published_table
from goldfinch.results.rows import ScoreColumn, ScoreRow
from goldfinch.results.seeds import Value

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
PAGES = sorted(
    path for folder in ("small", "paper") for path in (RESULTS / folder).glob("*.md") if path.stem != "README"
)

OFFICE = {"amazon": 152, "caltech": 178, "webcam": 46, "dslr": 24}
"""The test images of the pages of Office-Caltech, by which rows tie."""


@dataclass
class RecordedRow(ScoreRow[RunRecord]):
    """A row of a page: means and deviations over seeds, to two decimals.

    Args:
        cells: the cells by domain; the last is the average.
        of_seeds: the seeds of its runs.
        averages: their averages, where they are recorded.
    """

    cells: dict[str, Value] = field(default_factory=dict)
    of_seeds: list[int] = field(default_factory=list)
    averages: dict[int, float] = field(default_factory=dict)

    @property
    def seeds(self) -> list[int]:
        """The seeds that the page names."""
        return self.of_seeds

    def scores(self, column: ScoreColumn = "average", rule: str = "final") -> dict[int, float]:
        """The averages of single seeds that reproduced.csv has."""
        if isinstance(column, str):
            return {}
        return self.averages

    def value(self, column: ScoreColumn = "average", rule: str = "final") -> Value | None:
        """The page's cell; an average over fewer domains is the mean of their cells, without a deviation."""
        if isinstance(column, str):
            return self.cells.get(column.removeprefix("domain:"))
        if len(column) == len(self.cells) - 1:
            return self.cells["average"]
        chosen = [self.cells[domain].mean for domain in column]
        return Value(sum(chosen) / len(chosen), None)

    def partial(self, column: ScoreColumn = "average", rule: str = "final") -> bool:
        """No committed page has a partial score."""
        return False


def section(text: str, name: str) -> str:
    """The text below a heading of the second level, up to the next one."""
    return re.split(r"^## ", text.partition(f"\n## {name}\n")[2], maxsplit=1, flags=re.MULTILINE)[0].strip()


def rows_of(text: str) -> list[list[str]]:
    """The cells of a Markdown table's rows, without its header and without bold."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("*") for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def read_page(path: Path) -> Comparison:
    """The numbers of a committed page."""
    text = path.read_text()
    table = published_table(path.stem)
    scale = cast("Scale", path.parent.name)
    rows = {row.label: row for row in table.rows}
    domains = [table.stand_in(domain, scale) for domain in table.domains]
    lines = []
    for cells in rows_of(section(text, "Ours")):
        if cells[1] == "not run":
            continue
        label = cells[0].removesuffix(" (own models)")
        run = scored_run(0.0, method=label, personal=label != cells[0])
        counted = [{"domain": domain, "client": "a", "count": OFFICE[domain]} for domain in domains if domain in OFFICE]
        rounds = 5 if table.rule == "last_n" else 1
        vars(run).update(rules={table.rule: {"rounds": rounds}}, test_lines=counted)
        values = [_value(cell) for cell in cells[1 : len(domains) + 2]]
        seeds = [int(seed) for seed in cells[-1].split(",")]
        ours = RecordedRow(
            label,
            [run] * len(seeds),
            cells=dict(zip([*domains, "average"], values, strict=True)),
            of_seeds=seeds,
            averages=averages_of(path, label),
        )
        lines.append(Line(rows[label], ours))
    return Comparison(table, scale, tuple(lines), tuple(lines[0].ours.seeds))


def averages_of(path: Path, label: str) -> dict[int, float]:
    """The average of each seed of a row that reproduced.csv has; none unless it has that of all of them."""
    page = path.relative_to(RESULTS.parents[1]).as_posix()
    rows = [row for row in read_all(RESULTS / "reproduced.csv") if (row["page"], row["row"]) == (page, label)]
    if not all(row["average"] for row in rows):
        return {}
    return {int(row["seed"]): float(row["average"]) for row in rows}


def generated(path: Path) -> str:
    """The page as the generator makes it from the numbers that the committed page has."""
    return pages(read_page(path), "")[0]


def _value(cell: str) -> Value:
    mean, _, deviation = cell.partition(" ± ")
    return Value(float(mean), float(deviation) if deviation else None)
