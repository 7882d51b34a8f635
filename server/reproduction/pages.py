"""The page of a reproduced table, as Markdown with a picture beside it and as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass

from common.data.protocols import combined_hash
from common.versions import code_sha256, package_versions
from server.reproduction.comparison import Comparison, Line, Order
from server.results.table import RULES


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the page's title."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph; ``warning`` sets it apart, ``code`` is a command."""

    text: str
    warning: bool = False
    code: bool = False


@dataclass(frozen=True)
class Grid:
    """A table; the first column is text, the others are numbers. ``strong`` rows are set bold."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Picture:
    """A PNG and the name of its file."""

    content: bytes
    name: str
    says: str


Block = Heading | Text | Grid | Picture


def compose(
    comparison: Comparison, command: str, pictures: Sequence[Picture] = (), changed: Sequence[str] = ()
) -> list[Block]:
    """Everything the page says.

    Args:
        comparison: ours and the published numbers.
        command: what makes this page again.
        pictures: curves, bars, heat maps.
        changed: overrides from the command line.
    """
    table = comparison.table
    blocks: list[Block] = [
        Heading(f"{table.name}, scale={comparison.scale}", 1),
        Text(f"{table.paper}. {table.title}."),
    ]
    if comparison.scale == "small":
        blocks.append(Text("SMALL SCALE, not the paper's setting: " + "; ".join(table.small.says) + ".", warning=True))
    if changed:
        blocks.append(Text(f"Changed on the command line, in every row: {' '.join(changed)}.", warning=True))
    blocks.append(Text(command, code=True))
    blocks += _ours(comparison)
    blocks += _published(comparison)
    blocks += _order(comparison)
    if pictures:
        blocks += [Heading("Figures"), *pictures]
    blocks += _facts(comparison)
    return blocks


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _ours(comparison: Comparison) -> list[Block]:
    table, columns = comparison.table, comparison.columns
    measure = (table.measure.replace("_", " "),) if table.measure else ()
    header = ("row", *(column.title for column in columns), "average", "worst", "spread", *measure)
    rows = []
    for line in comparison.lines:
        cells = [*(comparison.ours(line, column) for column in columns), comparison.our_average(line, columns)]
        cells += [comparison.worst(line), comparison.spread(line)]
        measured = (_mean(line.measured),) if table.measure else ()
        size = _number(value.mean, ".1f") if (value := comparison.megabytes(line)) else "-"
        seeds = ",".join(map(str, sorted(line.summaries))) or "-"
        shown = tuple("-" if cell is None else str(cell) for cell in cells)
        rows.append((line.row.label, *shown, *measured, size, _number(comparison.per_megabyte(line), ".3g"), seeds))
    personal = {summary["scored"] for line in comparison.lines for summary in line.summaries.values()}
    says = (
        f"Test accuracy in %, {RULES[table.rule]}; mean ± sample deviation over seeds. Scored: "
        f"{' or '.join(sorted(personal)) or 'nothing yet'}. Spread: standard deviation between domains, in points. "
        "MB: megabytes up and down of all clients over the run; points/MB: average accuracy for each of them."
    )
    best = comparison.best()
    strong = frozenset(index for index, line in enumerate(comparison.lines) if line is best)
    return [Heading("Ours"), Text(says), Grid((*header, "MB", "points/MB", "seeds"), tuple(rows), strong)]


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2f}" if values else "-"


def _published(comparison: Comparison) -> list[Block]:
    table, columns = comparison.table, comparison.columns
    header = ("row", *table.domains.values(), "average", *(("measured",) if table.measure else ()))
    rows, notes = [], []
    for line in comparison.lines:
        cells = []
        for place, column in enumerate(columns):
            printed = comparison.published(line, column)
            deviation = line.row.deviations[place] if line.row.deviations else None
            cells.append(_with_gap(printed, deviation, comparison.gap(line, column)))
        average = comparison.published_average(line, comparison.columns)
        whole = len(comparison.comparable) == len(columns)
        cells.append(_with_gap(average, None, comparison.average_gap(line) if whole else None))
        measured = (_number(line.row.measured),) if table.measure else ()
        rows.append((line.row.label, *cells, *measured))
        if line.row.misprint:
            notes.append(f"{line.row.label}: printed average {line.row.average}, {line.row.misprint}")
    says = "As printed, with ours minus printed in brackets; averages are recomputed from the cells."
    if len(comparison.comparable) < len(columns):
        stand_ins = ", ".join(column.scored for column in columns if not column.comparable)
        says += f" No gap is given where {stand_ins} stands in for another data set, nor for averages with it."
    blocks: list[Block] = [Heading("Published"), Text(says), Grid(header, tuple(rows))]
    return [*blocks, Text("Misprints. " + "; ".join(notes) + ".")] if notes else blocks


def _with_gap(printed: float | None, deviation: float | None, gap: float | None) -> str:
    if printed is None:
        return "-"
    text = f"{printed:.2f}" + (f" ± {deviation:.2f}" if deviation is not None else "")
    return text + (f" ({gap:+.2f})" if gap is not None else "")


def _order(comparison: Comparison) -> list[Block]:
    rows = [_order_row(column.title, comparison.order(column)) for column in comparison.comparable]
    overall = comparison.order()
    rows.append(_order_row("average", overall))
    says = "Does the paper's order of the rows hold? Spearman's rank correlation, and pairs of rows in the same order."
    if len(comparison.comparable) < len(comparison.columns):
        says += " The average is over the data sets that both sides have."
    blocks: list[Block] = [Heading("Order"), Text(says)]
    blocks.append(Grid(("column", "rows", "Spearman", "pairs in the paper's order"), tuple(rows)))
    best = comparison.best()
    if best is not None and comparison.table.own:
        blocks.append(Text(f"Best here: {best.row.label}; the paper's own row: {comparison.table.own}."))
    return blocks


def _order_row(name: str, order: Order) -> tuple[str, ...]:
    return name, str(order.rows), _number(order.correlation), f"{order.kept} of {order.pairs}"


def _facts(comparison: Comparison) -> list[Block]:
    table, splits = comparison.table, comparison.splits()
    seconds = [float(summary["wall_seconds"]) for line in comparison.lines for summary in line.summaries.values()]
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    facts = [
        ("setting", f"conf/experiment/{table.name}.yaml, where the paper's setting and what it leaves open are stated"),
        ("seeds", ", ".join(map(str, comparison.seeds))),
        ("split, SHA-256", combined_hash(splits) if splits else "-"),
        ("code", code_sha256()),
        ("versions", versions),
        ("wall seconds", f"{sum(seconds):.0f} in {len(seconds)} runs"),
    ]
    runs = [
        (line.row.label, str(seed), str(folder.name and f"runs/{folder.parent.name}/{folder.name}"), _state(line, seed))
        for line in comparison.lines
        for seed, folder in sorted(line.folders.items())
    ]
    return [
        Heading("What was run"),
        Grid(("", ""), tuple(facts)),
        Heading("Runs", 3),
        Grid(("row", "seed", "folder", "final state or what went wrong"), tuple(runs)),
    ]


def _state(line: Line, seed: int) -> str:
    if seed in line.summaries:
        return str(line.summaries[seed]["state_sha256"])[:16]
    return line.failures.get(seed, "not run yet")


# ---- how it looks ----------------------------------------------------------------------------------------------------


def as_markdown(blocks: Sequence[Block]) -> str:
    """The page as Markdown; pictures are links to files beside it."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append("#" * block.level + " " + block.text)
        elif isinstance(block, Text):
            parts.append(
                f"    {block.text}" if block.code else ("> **" + block.text + "**" if block.warning else block.text)
            )
        elif isinstance(block, Picture):
            parts.append(f"![{block.says}]({block.name})")
        else:
            lines = [block.header, ("---", *("---:" for _ in block.header[1:]))]
            for place, row in enumerate(block.rows):
                lines.append(tuple(f"**{cell}**" for cell in row) if place in block.strong else row)
            parts.append("\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in lines))
    return "\n\n".join(parts) + "\n"


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } h3 { font-size: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; } th { border-bottom: 2px solid #444; }
tr.strong td { font-weight: 600; background: #eef4fb; } .scroll { overflow-x: auto; }
.warning { border-left: 4px solid #D55E00; background: #fdf1e7; padding: .5rem .8rem; }
pre { background: #f4f4f4; padding: .6rem .8rem; overflow-x: auto; } img { max-width: 100%; height: auto; }
"""


def as_html(blocks: Sequence[Block], title: str) -> str:
    """The page as one HTML file: style and pictures are in it, no script, no address of anything else."""
    body = "\n".join(_html(block) for block in blocks)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    return f'<!doctype html>\n<html lang="en"><head>{head}{view}</head>\n<body>\n{body}\n</body></html>\n'


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        text = html.escape(block.text)
        if block.code:
            return f"<pre>{text}</pre>"
        return f'<p class="warning"><b>{text}</b></p>' if block.warning else f"<p>{text}</p>"
    if isinstance(block, Picture):
        data = base64.b64encode(block.content).decode()
        return f'<img alt="{html.escape(block.says)}" src="data:image/png;base64,{data}">'
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in block.header)
    rows = [f"<tr>{head}</tr>"] if any(block.header) else []
    for place, row in enumerate(block.rows):
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        rows.append(f'<tr class="strong">{cells}</tr>' if place in block.strong else f"<tr>{cells}</tr>")
    return '<div class="scroll"><table>' + "\n".join(rows) + "</table></div>"
