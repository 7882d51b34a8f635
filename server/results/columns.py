"""The columns of a table of scores, their heads, the marks in its cells, and the lines that explain marks below it."""

from __future__ import annotations

from collections.abc import Sequence

from common.metrics import PARTIAL
from server.results.groups import Group, footnotes

UNSEEN = "°"
"""Marks the score of a domain that no client trained on, where other rows of the column have trained on it."""


def unseen_in(groups: Sequence[Group], domain: str) -> list[Group]:
    """Return the groups in which no client trained on ``domain``."""
    return [group for group in groups if any(domain in run.unseen for run in group.runs)]


def domain_columns(groups: Sequence[Group], rule: str) -> list[str]:
    """Return the domains of the groups' scores in the order they appear, those that all of them lack last."""
    scores = [run.rules[rule] for group in groups for run in group.runs if rule in run.rules]
    found = dict.fromkeys(name for score in scores for name in score["accuracy"])
    return list(found | dict.fromkeys(name for score in scores for name in score["missing"]))


def domain_heads(groups: Sequence[Group], domains: Sequence[str]) -> list[str]:
    """Return the heads of the domains' columns; one that no group trained on says so."""
    every = len(groups)
    return [f"{name} (unseen)" if len(unseen_in(groups, name)) == every else name for name in domains]


def summary_columns(groups: Sequence[Group], *, spread: bool = False) -> dict[str, str]:
    """Return the columns after the domains' own, with their heads.

    Where a run has domains that clients trained on and others, there is an average over each kind; where a run was
    validated, the average on validation samples.

    Args:
        groups: the rows.
        spread: whether the deviation between domains is a column.
    """
    keys: set[str] = set()
    for group in groups:
        for run in group.runs:
            keys.update(key for score in run.rules.values() for key in score)
    found = {"average": "average", "worst": "worst"}
    found |= {"spread": "spread"} if spread else {}
    found |= {"seen_average": "seen", "unseen_average": "unseen"} if "unseen_average" in keys else {}
    return found | ({"validation": "validation"} if "validation" in keys else {})


def unseen_mark(groups: Sequence[Group], group: Group, domain: str) -> str:
    """Return the mark of a group's cell of a domain: it has not trained on it, and another group has; else empty."""
    unseen = unseen_in(groups, domain)
    return UNSEEN if group in unseen and len(unseen) < len(groups) else ""


def cell_marks(groups: Sequence[Group], group: Group, columns: Sequence[str], rule: str) -> list[str]:
    """Return the marks of a group's cells: partial, and on a domain that it has not trained on; mostly empty."""
    marks = []
    for column in columns:
        value = group.value(column, rule)
        mark = PARTIAL if value is not None and value.partial else ""
        domain = column.removeprefix("domain:")
        marks.append(mark + unseen_mark(groups, group, domain) if domain != column else mark)
    return marks


def mark_notes(groups: Sequence[Group], rule: str = "final") -> list[str]:
    """Return the lines that belong under a table: what each partial score lacks and since when, and what marks mean."""
    lines = footnotes(groups, rule)
    domains = dict.fromkeys(name for group in groups for run in group.runs for name in run.unseen)
    marks = [unseen_mark(groups, group, name) for group in groups for name in domains]
    if any(marks):
        lines.append(f"{UNSEEN} on a domain that no client of this row trained on")
    return lines
