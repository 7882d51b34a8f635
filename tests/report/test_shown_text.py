"""Names that a stranger chose are shown as they are: no tag in Markdown or HTML, no sequence that a terminal obeys."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.text import shell_line
from goldfinch.results.sheets import Sheet, markdown_text

HOSTILE = "<img src=x>|`id`*b*[click](http://x.example)\\"


def sheet() -> Sheet:
    return Sheet(title=HOSTILE, heads=["method", HOSTILE], rows=[[HOSTILE, "1.0"]], strong={(0, 1)}, notes=[HOSTILE])


def test_markdown_has_no_tag_link_or_cell_of_a_name() -> None:
    text = sheet().written("md")
    assert "<img" not in text.replace("\\<", "")
    assert "](" not in text
    assert [line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")] == [3, 3, 3]
    assert "**1.0**" in text


def test_ordinary_cells_stay_as_they_are() -> None:
    for text in ("+4.1 [0.6, 17.1]", "82.16 ± 0.4", "fpl_heal", "mnist_m", "5 of 10 (2 lost)"):
        assert markdown_text(text) == text


def test_html_and_latex_escape_the_same_names() -> None:
    assert "<img" not in sheet().html()
    latex = sheet().written("latex")
    assert latex.count("\\textbackslash{}") == 4, "in the title, the note, a head and a cell"
    assert "<img src=x>|`id`*b*[click](http://x.example)\\ " not in latex


@given(st.text(alphabet=st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20))
def test_a_command_can_be_printed_and_means_the_same_to_bash(word: str) -> None:
    line = shell_line(["printf", "%s", word])
    assert line.isprintable()
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True, env={"LC_ALL": "C.UTF-8"})
    assert done.stdout.decode() == word


@pytest.mark.parametrize("word", ["\x1b[31mred", "a\u202eb", "line\nline"], ids=["colour", "order", "line end"])
def test_what_a_terminal_would_obey_is_written_with_escapes(word: str) -> None:
    assert shell_line(["goldfinch", "table", word]).startswith("goldfinch table $'")
