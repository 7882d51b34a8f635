"""Sentences on results are as strong as their tables: who says "ahead" or "no difference" gives an interval."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.recorded_pages import RESULTS

CLAIM = re.compile(
    r"\b(ahead|behind|better|worse|outperforms?|beats|falls back|level with|(?:is|are) level|no difference|"
    r"not the reason|every (?:method|row) gains|gains over|(?:gains?|brings?|costs?|changes?) nothing|"
    r"(?:equals|same as|as good as) FedAvg)\b",
    re.IGNORECASE,
)
"""Words that state that two methods differ, or that they do not."""

INTERVAL = re.compile(r"\[[+-]?\d+(?:\.\d+)?, [+-]?\d+(?:\.\d+)?\]")
PAGES = sorted(RESULTS.rglob("*.md"))
ALSO = (RESULTS.parents[1] / "README.md", RESULTS.parent / "fair-comparison.md")


def statements(text: str) -> list[str]:
    """The sentences of a page, and each row of its tables as one; without code and addresses of links."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", "]", text)
    found: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=- |\||> )", text):
        plain = " ".join(block.split())
        if plain.startswith("|"):
            found.append(plain)
        else:
            found += re.split(r"(?<=[.?!])\**\s+(?=[^a-z])", plain)
    return found


@pytest.mark.parametrize("path", [*ALSO, *PAGES], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_difference_or_its_absence_has_an_interval(path: Path) -> None:
    claims = [statement for statement in statements(path.read_text()) if CLAIM.search(statement)]
    assert [claim for claim in claims if not INTERVAL.search(claim)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_a_page_with_amazon_s_images_says_that_some_are_copies(path: Path) -> None:
    text = " ".join(path.read_text().split())
    if re.search(r"office|amazon", re.sub(r"\]\([^)]*\)|`[^`]*`", "", text), re.IGNORECASE):
        assert re.search(r"of Amazon's (?:\d+ )?test images (?:are copies|is a copy) of (?:a )?train", text)
        assert "protocols.md" in text
