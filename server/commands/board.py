"""``goldfinch board``: show boards as a page, and take rows that somebody else ran."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, writing
from common.storage import write_bytes, write_text
from server.plots.boards import critical_difference_figure, profile_figure
from server.plots.figures import rendered
from server.results.board.page import render_board
from server.results.board.record import BoardRecord, Row, find_records, read_record, write_record
from server.results.board.submission import SubmissionError, check_row
from server.results.board.table import Overall, board_markdown, overall
from server.run.conduct import run_lock

BEGIN = "<!-- goldfinch board show: begin -->"
END = "<!-- goldfinch board show: end -->"


def show(folders: Sequence[str], output: Path, markdown: Path | None) -> None:
    """Write the boards as one HTML page, and as Markdown.

    Args:
        folders: folders of records, or records.
        output: the page.
        markdown: a page of Markdown; ``None`` writes none. If the file has the lines :data:`BEGIN` and :data:`END`,
            only what is between them is replaced. Figures are written next to it.

    Raises:
        ConfigError: there is no record, one is damaged, or a file cannot be written.
    """
    records = [record for _, record in find_records([Path(folder) for folder in folders])]
    overalls = overall(records)
    pictures: dict[str, list[str]] = {}
    files: dict[str, bytes] = {}
    for number, each in enumerate(overalls):
        drawn = _pictures(each)
        pictures[each.title] = []
        for name, picture in drawn.items():
            text = base64.b64encode(picture).decode()
            pictures[each.title].append(f"data:image/svg+xml;base64,{text}")
            files[f"board-{name}-{number}.svg"] = picture
    with writing(output, "another --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, render_board(records, overalls, pictures))
    print(f"wrote {output}; it needs no network: open it in any browser")
    if markdown is not None:
        with writing(markdown, "another --markdown"):
            markdown.parent.mkdir(parents=True, exist_ok=True)
            write_text(markdown, _placed(markdown, board_markdown(records) + _figure_lines(overalls, list(files))))
            for name, picture in files.items():
                write_bytes(markdown.parent / name, picture)
        print(f"wrote {markdown}")


def _pictures(each: Overall) -> dict[str, bytes]:
    """Return the SVG pictures of ranks over data sets by name; none with one data set."""
    if each.difference is None:
        return {}
    return {
        "critical-difference": rendered(critical_difference_figure(each), "svg"),
        "profile": rendered(profile_figure(each), "svg"),
    }


def _figure_lines(overalls: Sequence[Overall], names: Sequence[str]) -> str:
    lines: list[str] = []
    for number, each in enumerate(overalls):
        for name in names:
            if name.endswith(f"-{number}.svg"):
                lines.append(f"\n![{each.title}: {name.removeprefix('board-').partition('.')[0]}]({name})")
    return "\n".join(lines) + "\n" * bool(lines)


def _placed(path: Path, content: str) -> str:
    """Return the text of a page with ``content`` between its marks, or alone if the page has none."""
    try:
        before = path.read_text()
    except FileNotFoundError:
        before = ""
    if BEGIN in before and END in before:
        head, _, rest = before.partition(BEGIN)
        _, _, tail = rest.partition(END)
        return f"{head}{BEGIN}\n\n{content}\n{END}{tail}"
    return f"# The board\n\n{BEGIN}\n\n{content}\n{END}\n"


def submit(folder: Path, records: Path, source: str, methods: Sequence[str] = (), *, rescore: bool = True) -> list[str]:
    """Append the rows of a submission to a board, all of them or none, and return their names.

    Args:
        folder: the folder that ``goldfinch compare --rules strict --output`` wrote, with its records in it.
        records: the folder of the boards' records.
        source: who submits; it is printed next to the rows.
        methods: the rows; empty is all, without FedAvg if the board has it.
        rescore: whether to score each final run's model again; needs the data on this machine.

    Raises:
        ConfigError: a check failed; the message says what was wrong and where. Nothing is written then.
    """
    if not source.strip():
        raise ConfigError("--by NAME: say who submits these runs; the board prints it next to the rows")
    taken: list[str] = []
    changed: list[tuple[Path, BoardRecord]] = []
    with run_lock(records, "board"):
        for path, submitted in find_records([folder]):
            place = records / path.name
            if not place.exists():
                raise SubmissionError(
                    f"{path}: {records} has no board {submitted.name}; its boards: {_names(records)}. Choose another "
                    "--records, or run the command of one of these boards"
                )
            board = read_record(place)
            rows = _checked_rows(board, submitted, folder, methods, rescore=rescore)
            for name, row in rows.items():
                row.source = source.strip()
                board.rows[name] = row
                taken.append(f"{board.name}: {name}")
            changed.append((place, board))
        if not taken:
            raise SubmissionError(f"{folder} has no row that the boards in {records} lack")
        for place, board in changed:
            write_record(place, board)
    return taken


def _has(board: BoardRecord, name: str) -> bool:
    return name in board.rows and board.rows[name].begun


def _names(records: Path) -> str:
    return ", ".join(sorted(path.stem for path in records.glob("*.json"))) or "none"


def _checked_rows(
    board: BoardRecord, submitted: BoardRecord, folder: Path, methods: Sequence[str], *, rescore: bool
) -> dict[str, Row]:
    """Return the rows of a submission that pass all checks and that the board lacks.

    Raises:
        SubmissionError: a check failed, a row that was named does not exist, or the board has it.
    """
    chosen = list(methods)
    if not chosen:
        chosen = [name for name in submitted.rows if not _has(board, name)]
    found: dict[str, Row] = {}
    for name in chosen:
        if name not in submitted.rows:
            raise SubmissionError(f"{folder} has no row {name}; its rows: {', '.join(submitted.rows)}")
        if _has(board, name):
            raise SubmissionError(
                f"{board.name} has a row {name} (from {board.rows[name].source}): a row is not replaced; leave it out "
                "of --methods"
            )
        found[name] = check_row(board, submitted, name, folder, rescore=rescore)
    return found
