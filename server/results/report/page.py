"""Write the report: texts, tables, figures, style and script in one HTML file."""

import base64
import datetime
import hashlib
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from common.errors import writing
from common.storage import write_text
from common.versions import package_versions
from server.results import groups
from server.results.frames import measure
from server.results.groups import Board, group_runs, run_name
from server.results.overrides import export_command, repeat_command
from server.results.report import plots, results
from server.results.run import RunFolder, find_runs
from server.results.templates import templates

HERE = Path(__file__).resolve().parent
SCRIPTS = ("charts.js", "plots.js", "page.js")

MAX_PICTURES = 6
"""Groups whose prototypes are shown."""

Picture = Callable[[RunFolder], bytes | None]
"""Draws a run as PNG; ``None`` if there is nothing to draw."""


def write_report(folders: Sequence[str], output: Path | None = None, picture: Picture | None = None) -> Path:
    """Write the report on the runs in and below ``folders``, and return its path.

    Args:
        folders: run folders, or folders with runs below them.
        output: the page; ``None`` writes ``report.html`` into the first folder.
        picture: draws the prototypes of a run; without it the page shows none.

    Raises:
        ConfigError: there is no run, or the file cannot be written.
    """
    boards = group_runs(find_runs(folders, finished=False), name=attrgetter("title"))
    path = output or Path(folders[0]) / "report.html"
    with writing(path, "another --output"):
        write_text(path, render(boards, picture))
    return path


def render(boards: Sequence[Board], picture: Picture | None = None) -> str:
    """Return the page as HTML. Its content security policy forbids the browser to fetch anything."""
    style = (HERE / "style.css").read_text()
    script = "\n".join([(HERE / name).read_text() for name in SCRIPTS])
    drawn: list[plots.Plot] = []

    def draw(plot: plots.Plot) -> Markup:
        """Add a plot to the page, and return the place where ``plots.js`` draws it."""
        drawn.append(plot)
        return Markup('<div data-plot="{}"></div>').format(len(drawn) - 1)

    runs: list[tuple[str, RunFolder]] = []
    for board in boards:
        runs += board.named_runs
    policy = [
        "default-src 'none'",
        f"style-src {content_hash(style)}",
        f"script-src {content_hash(script)}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    content: dict[str, Any] = {
        "boards": boards,
        "runs": runs,
        "pictures": [],
        "style": Markup(style),  # noqa: S704  # our own files, as are the scripts
        "script": Markup(script),  # noqa: S704
        "policy": "; ".join(policy),
        "made": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "version": package_versions().get("goldfinch", ""),
    }
    if picture is not None:
        content["pictures"] = _pictures(boards, picture)
    page = templates(HERE)
    page.globals.update(draw=draw, drawn=drawn, plots=plots, results=results, groups=groups)
    page.globals.update(measure=measure, repeat_command=repeat_command, export_command=export_command)
    return page.get_template("page.html").render(content)


def _pictures(boards: Sequence[Board], picture: Picture) -> list[tuple[str, str]]:
    """Return the name and the picture, as a data URL, of the first run of each group that has one."""
    found: list[tuple[str, str]] = []
    for board in boards:
        for group in board.groups:
            run = group.runs[0]
            drawn = picture(run) if len(found) < MAX_PICTURES else None
            if drawn is not None:
                found.append((run_name(group, run), f"data:image/png;base64,{base64.b64encode(drawn).decode()}"))
    return found


def content_hash(content: str) -> str:
    """Return a script's or style's hash as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
