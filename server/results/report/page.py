"""The page: words, tables, numbers, style and script in one file."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from common.errors import ConfigError
from common.storage.files import write_text
from common.versions import package_versions
from server.results.report.account import events_section, repeat_section, settings_section
from server.results.report.activation_maps import activation_maps_section
from server.results.report.figures import page_data
from server.results.report.markup import text
from server.results.report.records import Board, arrange, find_records
from server.results.report.results import (
    RULES,
    clients_section,
    cost_table,
    key_figures,
    score_tables,
    standfirst,
    title,
)

HERE = Path(__file__).resolve().parent
SCRIPTS = ("marks.js", "chart.js", "curves.js", "matrix.js", "map.js", "main.js")


def write_report(
    folders: Sequence[str], output: Path | None = None, *, tsne: bool = False, images: bool = False
) -> Path:
    """Write the report on the runs in and below ``folders``; its path.

    Args:
        folders: run folders, or folders of them.
        output: the file; ``None`` is ``report.html`` in the first folder.
        tsne: place prototypes by t-SNE too, which takes longer.
        images: show test images with class activation maps; for that, the data must be here, and the page then holds
            some of them.

    Raises:
        ConfigError: there is no run, or the file cannot be written.
    """
    boards = arrange(find_records(folders))
    path = output or Path(folders[0]) / "report.html"
    try:
        write_text(path, render(boards, tsne=tsne, images=images))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; choose another --output") from error
    return path


def render(boards: Sequence[Board], *, tsne: bool = False, images: bool = False) -> str:
    """The page as HTML. Nothing in it is fetched: its own policy forbids the browser to."""
    style = (HERE / "style.css").read_text()
    script = "\n".join((HERE / name).read_text() for name in SCRIPTS)
    now = datetime.datetime.now(datetime.UTC)
    return Template((HERE / "page.html").read_text()).substitute(
        title=text(title(boards)),
        policy=f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        style=style,
        script=script,
        data=_embedded(page_data(boards, tsne=tsne)),
        standfirst=standfirst(boards),
        figures=key_figures(boards),
        rules=_rules(),
        scores="".join(score_tables(board) for board in boards),
        curves="".join(_place("curves", index, board, boards) for index, board in enumerate(boards)),
        losses="".join(_place("losses", index, board, boards) for index, board in enumerate(boards)),
        costs="".join(_place("costs", index, board, boards) + cost_table(board) for index, board in enumerate(boards)),
        looks=_looks(boards) if images else "",
        looks_link='<li><a href="#looks">Images</a></li>' if images else "",
        clients=clients_section(boards),
        events=events_section(boards),
        settings=settings_section(boards),
        repeat=repeat_section(boards),
        made=f"{now:%Y-%m-%d %H:%M} UTC",
        version=text(package_versions().get("goldfinch", "")),
    )


def _looks(boards: Sequence[Board]) -> str:
    return f'<section id="looks"><h2>What the net looks at</h2>{activation_maps_section(boards)}</section>'


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return plain.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _place(kind: str, index: int, board: Board, boards: Sequence[Board]) -> str:
    heading = f"<h3>{text(board.title)}</h3>" if len(boards) > 1 else ""
    return f'{heading}<div data-figure="{kind}" data-board="{index}"></div>'


def _rules() -> str:
    made = []
    for position, (rule, (name, _)) in enumerate(RULES.items()):
        checked = "" if position else " checked"
        made.append(f'<label><input type="radio" name="rule" value="{rule}"{checked}><span>{text(name)}</span></label>')
    return "".join(made)
