"""Changes to the files that a run recorded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from goldfinch.record import RunRecord

Line = dict[str, Any]


def rewrite(path: Path, edit: Callable[[Line], Line | None]) -> None:
    """Replace each line of a JSONL file by what ``edit`` makes of it; a line of which it makes nothing is dropped."""
    kept: list[str] = []
    for text in path.read_text().splitlines():
        line = edit(json.loads(text))
        if line is not None:
            kept.append(f"{json.dumps(line)}\n")
    path.write_text("".join(kept))


def change_events(folder: Path, name: str, **content: Any) -> None:
    """Change what a run's events of a name say."""
    rewrite(folder / "events.jsonl", lambda line: {**line, **content} if line["event"] == name else line)


def run_by_other_code(folder: Path) -> str:
    """Change a run's record as if one file of its code had been another; return the hash of that code."""
    path = folder / "code.json"
    files = json.loads(path.read_text())
    files["strategies/fedavg.py"] = "feedfeedfeedfeed"
    path.write_text(json.dumps(files))
    return RunRecord(folder).facts.code


def without_counts(folder: Path) -> None:
    """Take the confusion counts from a run's scores."""
    rewrite(folder / "scores.jsonl", lambda line: {name: line[name] for name in line if name != "confusion"})
