"""Tables of texts and their two renderers: pandas for files, rich for the terminal."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from html import escape as html_escape
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from common.extras import libraries_of
from common.metrics import PARTIAL

UNSEEN = "°"
"""Marks the score of a domain that no client trained on, where other rows of the column have trained on it."""

LOWEST = "↓"
"""Marks the lowest recall of a column."""

MAX_SHOWN = 20
"""Characters that a remark names."""

LATEX_CHARACTERS = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    PARTIAL: r"$^\dagger$",
    UNSEEN: r"$^\circ$",
    LOWEST: r"$\downarrow$",
}


BEYOND_LATIN = re.compile("[^\u0000-\u024f\u2010-\u2026]")
"""Characters that pdfLaTeX refuses, and of which XeLaTeX's own font has none."""

IDEOGRAPHS = re.compile("[\u1100-\u11ff\u2e80-\ua4cf\uac00-\ud7ff\uf900-\ufaff\ufe30-\uffef\U00020000-\U0003ffff]")
"""Chinese, Japanese and Korean characters."""


@dataclass(frozen=True)
class Sheet:
    """A table of texts. The first column names the rows, and the others are aligned to the right.

    Args:
        title: the line above the table.
        heads: the heads of the columns.
        rows: the texts of each row.
        strong: row and column of each cell in bold.
        notes: the sentences below the table.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: Collection[tuple[int, int]] = ()
    notes: Sequence[str] = ()

    def with_columns(self, places: Sequence[int]) -> Sheet:
        """Return the table with the columns at ``places`` alone, in that order."""
        strong: set[tuple[int, int]] = set()
        for row, place in self.strong:
            if place in places:
                strong.add((row, places.index(place)))
        rows: list[list[str]] = []
        for cells in self.rows:
            rows.append([cells[place] for place in places])
        heads = [self.heads[place] for place in places]
        return replace(self, heads=heads, rows=rows, strong=strong)

    def written(self, form: str) -> str:
        """Return the table as a text, title and notes included.

        Args:
            form: ``md`` or ``latex``.
        """
        if form == "latex":
            return self._latex()
        lines = [] if not self.title else [_sentence(markdown_text(self.title)), ""]
        lines.append(self.markdown())
        for note in self.notes:
            lines += ["", _sentence(markdown_text(note))]
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return the rows in Markdown. pandas needs another package for it, and pads the cells."""
        heads = [markdown_text(head) for head in self.heads]
        lines = [_markdown_row(heads), "|---|" + "---:|" * (len(self.heads) - 1)]
        for cells in self._formatted(markdown_text, "**{}**"):
            lines.append(_markdown_row(_without_empty_end(cells)))
        return "\n".join(lines)

    def html(self) -> str:
        """Return the rows in HTML, escaped."""
        texts = self._formatted(html_escape, "<strong>{}</strong>")
        frame = pandas_library().DataFrame(texts, columns=[html_escape(head) for head in self.heads])
        return str(frame.to_html(index=False, escape=False, border=0, header=any(self.heads)))

    def _latex(self) -> str:
        r"""Return a ``table`` environment for the package booktabs. The caption has the notes.

        A comment before it says what the preamble needs if not all of its text is Latin.
        """
        rows = self._formatted(latex_text, r"\textbf{{{}}}")
        for cells in rows:
            if cells[0].startswith(("[", "*")):  # the end of the line before takes these as its option
                cells[0] = f"{{{cells[0]}}}"
        frame = pandas_library().DataFrame(rows, columns=[latex_text(head) for head in self.heads])
        caption = latex_text(" ".join(map(_sentence, filter(None, [self.title, *self.notes]))))
        columns = "l" + "r" * (len(self.heads) - 1)
        name = re.sub(r"[^a-z0-9]+", "-", self.title.partition(";")[0].lower()).strip("-")
        options = {"caption": caption, "label": f"tab:{name or 'scores'}", "column_format": columns}
        text = str(frame.to_latex(index=False, escape=False, **options))
        text = text.replace("\\begin{table}\n", "\\begin{table}\n\\centering\n", 1)
        return preamble_comment(text) + text

    def _formatted(self, of_text: Any, bold: str) -> list[list[str]]:
        """Return the rows with every text passed through ``of_text`` and those in bold through the format ``bold``."""
        formatted: list[list[str]] = []
        for number, row in enumerate(self.rows):
            texts: list[str] = []
            for place, cell in enumerate(row):
                text = of_text(cell)
                if (number, place) in self.strong:
                    text = bold.format(text)
                texts.append(text)
            formatted.append(texts)
        return formatted

    def show(self) -> None:
        """Print the table at its full width, so that no cell is cut; the terminal may wrap its lines."""
        table = self.terminal()
        needed = Console(width=1000).measure(table).maximum
        Console(width=max(Console().width, needed)).print(table)

    def terminal(self) -> Table:
        """Return the table for the terminal."""
        table = Table(title=escape(self.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        if self.notes:
            table.caption, table.caption_justify = escape("\n".join(self.notes)), "left"
        table.add_column(escape(self.heads[0]), no_wrap=True)
        for head in self.heads[1:]:
            table.add_column(escape(head), justify="right", no_wrap=True)
        for cells in self._formatted(escape, "[bold]{}[/bold]"):
            table.add_row(*cells)
        return table


def pandas_library() -> Any:
    """Return pandas, which takes half a second to import and which a device does not need.

    Raises:
        ConfigError: it is not installed; how to install it.
    """
    with libraries_of("server", "tables as files and DataFrames"):
        import pandas
    return pandas


def number_text(value: float | None, digits: int = 2) -> str:
    """Return a number with so many digits after the point; ``-`` for ``None``."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}"


def latex_text(text: str) -> str:
    """Return a text escaped for LaTeX."""
    return "".join([LATEX_CHARACTERS.get(letter, letter) for letter in text])


def preamble_comment(text: str) -> str:
    """Return a LaTeX comment that says what the preamble needs for the characters of ``text``; empty if nothing.

    Args:
        text: LaTeX that is escaped.
    """
    characters = sorted(set(BEYOND_LATIN.findall(text)))
    if not characters:
        return ""
    line = r"\usepackage{fontspec}\setmainfont{DejaVu Serif}"
    if IDEOGRAPHS.search(text):
        line = r"\usepackage{xeCJK}\setCJKmainfont{Noto Serif CJK SC}"
    shown = "".join(characters[:MAX_SHOWN])
    return f"% compile with XeLaTeX; the preamble needs {line}, or another font that has {shown}\n"


def markdown_text(text: str) -> str:
    """Return a text that Markdown shows as it is, also in a cell of a table: no tag, link, code or emphasis.

    Brackets stay where they make no link, and so do underscores, which mean nothing within a word.
    """
    shown = re.sub(r"([\\`*<|])", r"\\\1", text)
    return shown.replace("](", "]\\(")


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _without_empty_end(cells: Sequence[str]) -> Sequence[str]:
    """Return a row's cells without the empty ones at its end, which Markdown need not have."""
    written = list(cells)
    while len(written) > 2 and not written[-1]:
        written.pop()
    return written


def _sentence(text: str) -> str:
    """Return a text with a full stop at its end."""
    return text if text.endswith(".") else f"{text}."
