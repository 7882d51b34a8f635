"""The columns of a table of scores, their heads, the marks in its cells, and the notes below it."""

from __future__ import annotations

from collections.abc import Sequence

from common.metrics import PARTIAL
from server.results.groups import Group, footnotes

UNSEEN = "°"
"""Marks the score of a domain that no client trained on, where other rows of the column have trained on it."""


def unseen_in(groups: Sequence[Group], domain: str) -> list[Group]:
    """Return the groups in which no client trained on ``domain``."""
    found: list[Group] = []
    for group in groups:
        names: set[str] = set()
        for run in group.runs:
            names.update(run.unseen)
        if domain in names:
            found.append(group)
    return found


def domain_columns(groups: Sequence[Group], rule: str) -> list[str]:
    """Return the domains of the groups' scores in the order they appear; those that no group scored come last."""
    scored: dict[str, None] = {}
    missing: dict[str, None] = {}
    for group in groups:
        for run in group.runs:
            if rule in run.rules:
                scored |= dict.fromkeys(run.rules[rule]["accuracy"])
                missing |= dict.fromkeys(run.rules[rule]["missing"])
    return list(scored | missing)


def domain_heads(groups: Sequence[Group], domains: Sequence[str]) -> list[str]:
    """Return the heads of the domains' columns; a domain that no group trained on is marked ``(unseen)``."""
    heads = []
    for name in domains:
        head = name
        if len(unseen_in(groups, name)) == len(groups):
            head = f"{name} (unseen)"
        heads.append(head)
    return heads


def summary_columns(groups: Sequence[Group], *, spread: bool = False) -> dict[str, str]:
    """Return the columns after the domains, with their heads.

    Runs with unseen domains have an average over the domains that clients trained on, and one over the others. Runs
    with validation samples have the average on these.

    Args:
        groups: the rows.
        spread: whether the deviation between domains is a column.
    """
    keys: set[str] = set()
    for group in groups:
        for run in group.runs:
            for score in run.rules.values():
                keys.update(score)
    found = {"average": "average", "worst": "worst"}
    if spread:
        found["spread"] = "spread"
    if "unseen_average" in keys:
        found["seen_average"] = "seen"
        found["unseen_average"] = "unseen"
    if "validation" in keys:
        found["validation"] = "validation"
    return found


def score_columns(groups: Sequence[Group], domains: Sequence[str], *, spread: bool = False) -> dict[str, str]:
    """Return all columns of scores with their heads: ``domain:<name>`` for each domain, then the summary columns."""
    found: dict[str, str] = {}
    for name, head in zip(domains, domain_heads(groups, domains), strict=True):
        found[f"domain:{name}"] = head
    return found | summary_columns(groups, spread=spread)


def unseen_mark(groups: Sequence[Group], group: Group, domain: str) -> str:
    """Return the mark of a group that has not trained on ``domain`` where another group has; empty otherwise."""
    unseen = unseen_in(groups, domain)
    if group in unseen and len(unseen) < len(groups):
        return UNSEEN
    return ""


def cell_marks(groups: Sequence[Group], group: Group, columns: Sequence[str], rule: str) -> list[str]:
    """Return the marks of a group's cells: partial, or on a domain that it has not trained on; most are empty."""
    marks = []
    for column in columns:
        mark = ""
        value = group.value(column, rule)
        if value is not None and value.partial:
            mark += PARTIAL
        if column.startswith("domain:"):
            mark += unseen_mark(groups, group, column.removeprefix("domain:"))
        marks.append(mark)
    return marks


def mark_notes(groups: Sequence[Group], rule: str = "final") -> list[str]:
    """Return the notes below a table: what each partial score lacks and since when, and what the marks mean."""
    lines = footnotes(groups, rule)
    domains: set[str] = set()
    for group in groups:
        for run in group.runs:
            domains.update(run.unseen)
    for domain in domains:
        if 0 < len(unseen_in(groups, domain)) < len(groups):
            lines.append(f"{UNSEEN} on a domain that no client of this row trained on")
            break
    return lines
