"""The page of a reproduced table, as Markdown with a picture beside it and as one HTML file that needs nothing else."""

import base64
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.data.protocols import combined_hash
from common.metrics import PARTIAL, named_missing
from common.versions import package_versions
from server.reproduction.comparison import Comparison, Line
from server.results.table import RULES
from server.results.templates import templates

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
        """The PNG as text."""
        return base64.b64encode(self.content).decode()


def pages(
    comparison: Comparison, command: str, pictures: Sequence[Picture] = (), changed: Sequence[str] = ()
) -> tuple[str, str]:
    """The page as Markdown and as HTML; ``command`` makes it again, ``changed`` are overrides of the command line."""
    table = comparison.table
    content: dict[str, Any] = {
        "table": table,
        "scale": comparison.scale,
        "reduced": table.reduction(comparison.scale),
        "command": command,
        "changed": changed,
        "pictures": pictures,
        "rule": RULES[table.rule].name,
        "scored": sorted({summary["scored"] for line in comparison.lines for summary in line.summaries.values()}),
        "mixed": any(line.personal for line in comparison.lines)
        and not all(line.personal for line in comparison.lines),
        "ours": _ours(comparison),
        "published": _published(comparison),
        "stand_ins": [column.scored for column in comparison.columns if not column.comparable],
        "mark": PARTIAL,
        "misprints": [
            f"{line.row.label}: printed average {line.row.average}, {line.row.misprint}"
            for line in comparison.lines
            if line.row.misprint
        ],
        "order": _order(comparison),
        "partial": _partial(comparison),
        "best": _best(comparison),
        "verdict": comparison.verdict(),
        "facts": (("", ""), _facts(comparison)),
        "runs": (("row", "seed", "folder", "final state or what went wrong"), _runs(comparison)),
    }
    plain = templates(HERE, escape=False)
    markdown = plain.get_template("page.j2").render({**content, "as": plain.get_template("markdown.j2").module})
    escaping = templates(HERE)
    form: Any = escaping.get_template("html.j2").module
    body = escaping.get_template("page.j2").render({**content, "as": form})
    html = form.page(f"{table.name}, scale={comparison.scale}", Markup(body))  # noqa: S704  # escaped by the template
    return markdown.rstrip() + "\n", str(html).lstrip()


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _ours(comparison: Comparison) -> tuple[tuple[str, ...], Rows, list[int]]:
    table, columns = comparison.table, comparison.columns
    measure = (table.measure.replace("_", " "),) if table.measure else ()
    header = ("row", *(column.title for column in columns), "average", "worst", "spread", *measure)
    rows = []
    for line in comparison.lines:
        cells = [*(comparison.ours(line, column) for column in columns), comparison.our_average(line, columns)]
        cells += [comparison.over_domains(line, what) for what in ("worst", "spread")]
        measured = (_number(statistics.fmean(line.measured) if line.measured else None),) if table.measure else ()
        size = _number(value.mean, ".1f") if (value := comparison.megabytes(line)) else "-"
        seeds = ",".join(map(str, sorted(line.summaries))) or "-"
        shown = tuple("-" if cell is None else str(cell) for cell in cells)
        label = line.row.label + " (own models)" * line.personal
        rows.append((label, *shown, *measured, size, _number(comparison.per_megabyte(line), ".3g"), seeds))
    best = comparison.best()
    strong = [index for index, line in enumerate(comparison.lines) if line in best]
    return (*header, "MB", "points/MB", "seeds"), rows, strong


def _published(comparison: Comparison) -> tuple[tuple[str, ...], Rows]:
    table, columns = comparison.table, comparison.columns
    rows = []
    for line in comparison.lines:
        cells = []
        for place, column in enumerate(columns):
            deviation = line.row.deviations[place] if line.row.deviations else None
            cells.append(_with_gap(comparison.published(line, column), deviation, comparison.gap(line, column)))
        average = comparison.published_average(line, columns)
        whole = len(comparison.comparable) == len(columns)
        cells.append(_with_gap(average, None, comparison.average_gap(line) if whole else None))
        rows.append((line.row.label, *cells, *((_number(line.row.measured),) if table.measure else ())))
    return ("row", *table.domains.values(), "average", *(("measured",) if table.measure else ())), rows


def _with_gap(printed: float | None, deviation: float | None, gap: float | None) -> str:
    if printed is None:
        return "-"
    text = f"{printed:.2f}" + (f" ± {deviation:.2f}" if deviation is not None else "")
    return text + (f" ({gap:+.2f})" if gap is not None else "")


def _order(comparison: Comparison) -> tuple[tuple[str, ...], Rows]:
    columns = comparison.comparable if any(line.row.cells for line in comparison.lines) else ()
    rows: Rows = []
    for kind in comparison.ranked_kinds or (False,):
        name = f", {KINDS[kind]}" if len(comparison.kinds) > 1 else ""
        named = [(column.title, comparison.order(column, kind)) for column in columns]
        for title, order in [*named, ("average", comparison.order(None, kind))]:
            pairs = f"{order.kept} of {order.pairs}" + (f", {order.tied} tied" if order.tied else "")
            rows.append((title + name, str(order.rows), _number(order.correlation), pairs))
    return ("column", "rows", "Spearman", "pairs in the paper's order"), rows


def _partial(comparison: Comparison) -> str:
    """What each row's scores lack, by seed; empty where all are whole."""
    found = []
    for line in comparison.lines:
        for seed, missing in comparison.missing(line).items():
            found.append(f"{line.row.label}, seed {seed}: without {named_missing(missing)}")
    return "; ".join(found)


def _best(comparison: Comparison) -> str:
    """The best rows of each kind by name; empty where nothing was scored."""
    found = []
    for kind in comparison.ranked_kinds:
        labels = [line.row.label for line in comparison.best_of(kind)]
        among = f"among rows of {KINDS[kind]} " if len(comparison.kinds) > 1 else ""
        same = ", with the same average" if len(labels) > 1 else ""
        found += [among + " and ".join(labels) + same] if labels else []
    return "; ".join(found)


def _facts(comparison: Comparison) -> Rows:
    table, splits = comparison.table, comparison.splits()
    seconds = [float(summary["wall_seconds"]) for line in comparison.lines for summary in line.summaries.values()]
    versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    return [
        ("setting", f"conf/experiment/{table.name}.yaml, where the paper's setting and what it leaves open are stated"),
        ("seeds", ", ".join(map(str, comparison.seeds))),
        ("split, SHA-256", combined_hash(splits) if splits else "-"),
        ("code", _codes(comparison)),
        ("versions", versions),
        ("wall seconds", f"{sum(seconds):.0f} in {len(seconds)} runs"),
    ]


def _codes(comparison: Comparison) -> str:
    """The hash of the code that ran; where it is not the same for all runs, each with the runs that it made."""
    made: dict[str, list[str]] = {}
    for line in comparison.lines:
        for seed, summary in sorted(line.summaries.items()):
            made.setdefault(str(summary.get("code", "not recorded")), []).append(f"{line.row.label} seed {seed}")
    if len(made) <= 1:
        return next(iter(made), "-")
    return "NOT THE SAME IN ALL RUNS: " + "; ".join(f"{code}: {', '.join(runs)}" for code, runs in made.items())


def _runs(comparison: Comparison) -> Rows:
    return [
        (line.row.label, str(seed), str(folder.name and f"runs/{folder.parent.name}/{folder.name}"), _state(line, seed))
        for line in comparison.lines
        for seed, folder in sorted(line.folders.items())
    ]


def _state(line: Line, seed: int) -> str:
    if seed in line.summaries:
        return str(line.summaries[seed]["state_sha256"])[:16]
    return line.failures.get(seed, "not run yet")
