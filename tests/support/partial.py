"""Recorded runs whose last score is made partial."""

from __future__ import annotations

from pathlib import Path

from support.records import rewrite


def without_domain(folder: Path, domain: str, rounds: int) -> None:
    """Change a recorded run as if no client had scored a domain after the last of its ``rounds``."""
    rewrite(folder / "scores.jsonl", lambda line: None if (line["round"], line["domain"]) == (rounds, domain) else line)
