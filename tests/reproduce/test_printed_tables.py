"""Tables on pages against the scripts of bench/ that print them from their records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.scripts import ROOT, run_script

from bench.census import pages

SCRIPTS = [path for path in sorted((ROOT / "bench").glob("*.py")) if '"--table"' in path.read_text()]
ON_NO_PAGE = {"own_images"}
"""Scripts of which a page states single numbers, and not the table."""


def tables(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each table of a page: its line of heads, and its rows."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("|-"):
            continue
        rows: list[str] = []
        for row in lines[number + 1 :]:
            if not row.startswith("|"):
                break
            rows.append(row)
        yield lines[number - 1], rows


def test_a_page_s_tables_are_found() -> None:
    text = "text\n\n| a | b |\n|---|---:|\n| 1 | 2 |\n| 3 | 4 |\n\n| c |\n|---|\n| 5 |\n"
    assert list(tables(text)) == [("| a | b |", ["| 1 | 2 |", "| 3 | 4 |"]), ("| c |", ["| 5 |"])]


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_page_s_rows_are_those_that_its_script_prints(script: Path, tmp_path: Path) -> None:
    code, text = run_script(script, ["--table"], tmp_path / "empty")
    assert code == 0, text[-3000:]
    printed = {line.strip() for line in text.splitlines()}
    found = 0
    for page in pages():
        for head, rows in tables(page.read_text()):
            if head in printed:
                found += len(rows)
                assert [row for row in rows if row not in printed] == [], page
    assert (found == 0) is (script.stem in ON_NO_PAGE)
