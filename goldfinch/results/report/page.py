"""Write the report: texts, tables, figures and style in one HTML file, without scripts."""

import base64
import datetime
import hashlib
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure

from common.errors import ConfigError, writing
from common.storage import write_text
from common.versions import package_versions
from goldfinch.record import RunRecord, find_runs
from goldfinch.results.figures import charts
from goldfinch.results.figures.svg import inline_svg
from goldfinch.results.frames import FACTS, measure
from goldfinch.results.groups import ScoreTable, exported_run, group_runs
from goldfinch.results.overrides import export_command, repeat_command
from goldfinch.results.report import figures, results
from goldfinch.results.rows import ranked
from goldfinch.results.templates import templates

HERE = Path(__file__).resolve().parent


def write_report(folders: Sequence[str], output: Path | None = None) -> Path:
    """Write the report on the runs in and below ``folders``, and return its path.

    Args:
        folders: run folders, or folders with runs below them.
        output: the page; ``None`` writes ``report.html`` into the first folder.

    Raises:
        ConfigError: there is no run, or the file cannot be written, or is of another kind.
    """
    if output is not None and output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{output}: a report is a page: name an .html file")
    tables = group_runs(find_runs(folders, finished=False), name=attrgetter("title"))
    path = output or Path(folders[0]) / "report.html"
    with writing(path, "another place"):
        write_text(path, render(tables))
    return path


def render(tables: Sequence[ScoreTable]) -> str:
    """Return the page as HTML. The page forbids the browser to fetch anything and to run scripts."""
    style = (HERE / "style.css").read_text()
    drawn: list[Figure] = []

    def svg(figure: Figure, description: str, *, paper: bool = False) -> Markup:
        """Return a figure as an element of the page."""
        drawn.append(figure)
        salt = f"figure {len(drawn)}"
        return Markup(inline_svg(figure, description, salt, paper=paper))  # noqa: S704  # its texts are escaped

    def key(index: int, bound: str | None = None) -> Markup:
        """Return the mark of a line in a legend, before the line's name."""
        return svg(charts.key(index, bound), "")

    runs: list[tuple[str, RunRecord]] = []
    for table in tables:
        runs += table.named_runs
    policy = [
        "default-src 'none'",
        f"style-src {style_hash(style)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    content: dict[str, Any] = {
        "tables": tables,
        "runs": runs,
        "style": Markup(style),  # noqa: S704  # our own file
        "policy": "; ".join(policy),
        "made": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "version": package_versions().get("goldfinch", ""),
    }
    page = templates(HERE)
    page.globals.update(svg=svg, key=key, figures=figures, results=results, ranked=ranked, exported_run=exported_run)
    page.globals.update(facts=FACTS, measure=measure, repeat_command=repeat_command, export_command=export_command)
    return page.get_template("page.html").render(content)


def style_hash(content: str) -> str:
    """Return a style's hash as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
