"""Write the page of a reproduced table: Markdown with pictures as files, and one HTML file that holds everything."""

import base64
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.metrics import PARTIAL, RULES
from common.versions import combined_hash
from goldfinch.reproduction.comparison import Comparison, Line
from goldfinch.reproduction.effects import percent
from goldfinch.results.frames import BEST
from goldfinch.results.rows import ScoreColumn, notes_on
from goldfinch.results.seeds import Value
from goldfinch.results.sheets import Sheet, number_text
from goldfinch.results.templates import templates

HERE = Path(__file__).resolve().parent
KINDS = {True: "own models", False: "one shared model"}

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Picture:
    """A PNG and the name of its file."""

    content: bytes
    name: str
    says: str

    @property
    def base64(self) -> str:
        """Return the PNG in Base64."""
        return base64.b64encode(self.content).decode()


def pages(
    comparison: Comparison, command: str, pictures: Sequence[Picture] = (), changed: Sequence[str] = ()
) -> tuple[str, str]:
    """Return the page as Markdown and as HTML.

    Args:
        comparison: the reproduced table and the published one.
        command: the command line that makes the page again.
        pictures: figures to put on the page.
        changed: overrides from the command line.
    """
    table = comparison.table
    scored = set()
    misprints = []
    for line in comparison.lines:
        for run in line.ours.runs:
            scored.add(run.facts.scored)
        if line.printed.misprint:
            misprints.append(f"{line.printed.label}: printed average {line.printed.average}, {line.printed.misprint}")
    personal = {line.ours.personal for line in comparison.lines}
    ours = _ours(comparison)
    content: dict[str, Any] = {
        "table": table,
        "scale": comparison.scale,
        "reduced": table.reduction(comparison.scale),
        "command": command,
        "changed": changed,
        "pictures": pictures,
        "rule": RULES[table.rule].name,
        "scored": sorted(scored),
        "mixed": len(personal) > 1,
        "ours": ours,
        "is_published": any(line.printed.expected_average is not None for line in comparison.lines),
        "published": _published(comparison),
        "stand_ins": [column.scored for column in comparison.columns if not column.comparable],
        "mark": PARTIAL,
        "misprints": misprints,
        "partial": _partial(comparison),
        "notes": notes_on([line.ours for line in comparison.lines]),
        "best": BEST if ours.strong else "",
        "effects": _effects(comparison),
        "chance": _chance(comparison),
        "seeds": len(comparison.seeds),
        "own": table.own,
        "noise": any(comparison.noise(line, comparison.comparable) for line in comparison.lines),
        "facts": Sheet("", ("", ""), _facts(comparison)),
        "unfinished": Sheet("", ("row", "run", "what went wrong"), _unfinished(comparison)),
    }
    plain = templates(HERE, escape=False)
    plain.globals["written"] = _markdown_table
    markdown = plain.get_template("page.j2").render({**content, "as": plain.get_template("markdown.j2").module})
    escaping = templates(HERE)
    escaping.globals["written"] = _html_table
    form: Any = escaping.get_template("html.j2").module
    body = escaping.get_template("page.j2").render({**content, "as": form})
    html = form.page(f"{table.name}, scale={comparison.scale}", Markup(body))  # noqa: S704  # escaped by the template
    return markdown.rstrip() + "\n", str(html).lstrip()


def _markdown_table(sheet: Sheet) -> str:
    """Return a table in Markdown."""
    return sheet.markdown() + "\n"


def _html_table(sheet: Sheet) -> Markup:
    """Return a table in HTML."""
    return Markup('<div class="scroll">{}</div>').format(Markup(sheet.html()))  # noqa: S704  # escaped by the sheet


def _ours(comparison: Comparison) -> Sheet:
    """Return our table; in each column the best row of each kind is bold."""
    table = comparison.table
    columns: list[ScoreColumn] = [column.key for column in comparison.columns]
    columns += [comparison.average, "worst", "spread"]
    header = ["row"]
    for column in comparison.columns:
        header.append(column.title)
    header += ["average", "worst", "spread"]
    if table.measure:
        header.append(table.measure.replace("_", " "))
    header += ["MB", "seeds"]
    rows = []
    for line in comparison.lines:
        rows.append(_our_row(comparison, line, columns))
    for row in comparison.not_asked:
        rows.append((row.label, "not asked for", *[""] * (len(header) - 2)))
    strong: set[tuple[int, int]] = set()
    for place, key in enumerate(columns, 1):
        for best in comparison.best(key):
            strong.add((comparison.lines.index(best), place))
    return Sheet("", header, rows, strong)


def _our_row(comparison: Comparison, line: Line, columns: Sequence[ScoreColumn]) -> tuple[str, ...]:
    """Return the cells of one row of our table; ``-`` where there is no number."""
    label = line.printed.label
    if line.ours.personal:
        label += " (own models)"
    cells = [label]
    for column in columns:
        cells.append(str(line.ours.value(column, comparison.table.rule) or "-"))
    if comparison.table.measure:
        measured = None
        if line.measured:
            measured = statistics.fmean(line.measured)
        cells.append(number_text(measured))
    cells.append(number_text(line.ours.megabytes, 1))
    cells.append(",".join(map(str, line.ours.seeds)) or "-")
    return tuple(cells)


def _published(comparison: Comparison) -> Sheet:
    """Return the published table, with the gap to ours in parentheses, without domains that have no printed number."""
    table = comparison.table
    columns = comparison.columns
    all_comparable = len(comparison.comparable) == len(columns)
    header, printed = ["row"], []
    for place, (column, name) in enumerate(zip(columns, table.domains.values(), strict=True)):
        if any(comparison.published(line, column) is not None for line in comparison.lines):
            printed.append((place, column))
            header.append(name)
    header.append("average")
    if table.measure:
        header.append("measured")
    rows = []
    for line in comparison.lines:
        cells = [line.printed.label]
        for place, column in printed:
            deviation = None
            if line.printed.deviations:
                deviation = line.printed.deviations[place]
            gap, noise = comparison.gap(line, column), comparison.noise(line, [column])
            cells.append(_with_gap(comparison.published(line, column), deviation, gap, noise))
        gap = noise = None
        if all_comparable:
            gap, noise = comparison.average_gap(line), comparison.noise(line, columns)
        cells.append(_with_gap(comparison.published_average(line, columns), None, gap, noise))
        if table.measure:
            cells.append(number_text(line.printed.measured))
        rows.append(tuple(cells))
    return Sheet("", header, rows)


def _with_gap(printed: float | None, deviation: float | None, gap: float | None, noise: float | None = None) -> str:
    """Return the printed number with its deviation, the gap to ours and its noise: ``71.20 ± 0.50 (-1.30; 7.10)``."""
    if printed is None:
        return "-"
    text = str(Value(printed, deviation))
    if gap is None:
        return text
    if noise is None:
        return f"{text} ({gap:+.2f})"
    return f"{text} ({gap:+.2f}; {noise:.2f})"


def _effects(comparison: Comparison) -> Sheet:
    """Return the table of the paper's own row minus each row that is ranked with it."""
    effects = comparison.effects()
    if all(effect.printed is None for effect in effects):
        return Sheet("", ("minus", "ours, 95 %"), [(effect.rival, str(effect)) for effect in effects])
    rows: Rows = []
    for effect in effects:
        printed = "-"
        if effect.printed is not None:
            printed = f"{effect.printed:+.2f}"
        rows.append((effect.rival, str(effect), printed, effect.lies))
    return Sheet("", ("minus", "ours, 95 %", "printed", "printed lies"), rows)


def _chance(comparison: Comparison) -> str:
    """Return what chance alone would give, as a sentence; empty without a rival or a published order."""
    standing, order = comparison.standing(), comparison.order()
    if standing is None or not order.pairs:
        return ""
    tied = f" ({order.tied} tied)" if order.tied else ""
    where = ""
    if len(comparison.compared) < len(comparison.columns):
        where = f"Over {', '.join(column.title for column in comparison.compared)}: "
    return (
        f"{where}{order.kept} of {order.pairs} pairs{tied} are in the paper's order; {standing.own} is number "
        f"{standing.place} of {standing.rows}. If all were equal, {percent(order.chance)} of orders would keep as many."
    )


def _partial(comparison: Comparison) -> str:
    """Return what each row's scores lack, by seed; empty where all are complete."""
    texts: list[str] = []
    for line in comparison.lines:
        texts += [f"{line.printed.label}, {text}" for text in line.ours.missing(comparison.table.rule)]
    return "; ".join(texts)


def _facts(comparison: Comparison) -> Rows:
    """Return how the table was made: setting, data split, code and time."""
    seconds = []
    for line in comparison.lines:
        for run in line.ours.runs:
            if run.facts.end is not None:
                seconds.append(run.facts.end.seconds)
    splits = comparison.splits()
    split_hash = "-"
    if splits:
        split_hash = combined_hash(splits)
    return [
        ("setting", f"conf/experiment/{comparison.table.name}.yaml"),
        ("split, SHA-256", split_hash),
        ("code", _codes(comparison)),
        ("wall seconds", f"{sum(seconds):.0f} in {len(seconds)} runs"),
    ]


def _codes(comparison: Comparison) -> str:
    """Return the hash of the code that ran; where runs differ, each hash with the runs that it made."""
    runs_by_code: dict[str, list[str]] = {}
    for line in comparison.lines:
        for run in line.ours.runs:
            runs_by_code.setdefault(run.code, []).append(f"{line.printed.label} seed {run.seed}")
    if not runs_by_code:
        return "-"
    if len(runs_by_code) == 1:
        return next(iter(runs_by_code))
    parts = []
    for code, runs in runs_by_code.items():
        parts.append(f"{code}: {', '.join(runs)}")
    return "NOT THE SAME IN ALL RUNS: " + "; ".join(parts)


def _unfinished(comparison: Comparison) -> Rows:
    """Return a row for each run that has no final state: label, run, and what went wrong."""
    rows: Rows = []
    for line in comparison.lines:
        for run, reason in line.ours.absent.items():
            rows.append((line.printed.label, run, reason))
    return rows
