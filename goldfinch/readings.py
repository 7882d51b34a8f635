"""The readings of all methods: what papers print, what their released codes do, and what a plain run does.

The methods' own files have them (:class:`strategies.core.readings.Point`). The lines here are those of ``goldfinch
list`` and of docs/methods.md.
"""

from __future__ import annotations

from functools import cache

import yaml

from common.choices import CONF, choices_of
from common.config import class_of
from common.regular_files import read_small
from strategies.core.method import Method


@cache
def plain_methods() -> dict[str, Method]:
    """Return each of Goldfinch's own options of ``conf/method/`` with the defaults of its class, by name."""
    methods: dict[str, Method] = {}
    for name, path in sorted(choices_of("method", [CONF]).items()):
        target = yaml.safe_load(read_small(path))["_target_"]
        methods[name] = class_of(target, "method")()
    return methods


def lines_of(name: str) -> list[str]:
    """Return a line for each reading of a method, by its option of ``conf/method/``; none for a method of one's own."""
    method = plain_methods().get(name)
    lines: list[str] = []
    if method is None:
        return lines
    for reading in method.readings:
        paper, released = reading.words(reading.paper), reading.words(reading.released)
        ours = reading.words(reading.of(method))
        lines.append(f"Reading, {reading.about}: paper {paper}; released code {released}; a plain run {ours}")
    return lines


def table_rows() -> list[str]:
    """Return the rows of the table in docs/methods.md: method, what is read, paper, released code, a plain run.

    Only differences have a row: where all that is known agrees with a plain run, or nothing is known, :func:`lines_of`
    has the reading. What a plain run alone does is bold. FPL+HEAL's readings are those of its two parts.
    """
    rows: list[str] = []
    for name, method in plain_methods().items():
        for reading in method.readings:
            ours = reading.of(method)
            if name == "fpl_heal" or all(other == ours for other in reading.known):
                continue
            cells = [name, reading.about]
            for other in (reading.paper, reading.released):
                written = reading.words(other)
                if other == ours:
                    written = "as here"
                cells.append(written)
            here = reading.words(ours)
            if reading.is_exception(method):
                here = f"**{here}**"
            cells.append(here)
            rows.append("| " + " | ".join(cell.replace("||", "\\|\\|") for cell in cells) + " |")
    return rows
