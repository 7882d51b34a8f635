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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param("FPL is ahead. It has +1.2 [-0.3, +2.7] points.", 1, id="interval in another sentence"),
        pytest.param("FPL is ahead by +1.2 [-0.3, +2.7] points.", 0, id="interval in the sentence"),
        pytest.param("| FPL | level with FedAvg |\n| MOON | -1.0 [-2.0, +0.1], behind |", 1, id="rows of a table"),
        pytest.param("- The features are\n  not the reason.\n- Runs are short.", 1, id="items of a list"),
        pytest.param("```\nnobody is ahead\n```", 0, id="code"),
        pytest.param("[No difference](page.md#ahead).", 1, id="a link"),
        pytest.param("They are not distinguished.", 0, id="no claim"),
    ],
)
def test_claims_are_found(text: str, found: int) -> None:
    claims = [statement for statement in statements(text) if CLAIM.search(statement)]
    assert len([claim for claim in claims if not INTERVAL.search(claim)]) == found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_a_page_with_amazon_s_images_says_that_some_are_copies(path: Path) -> None:
    text = " ".join(path.read_text().split())
    if re.search(r"office|amazon", re.sub(r"\]\([^)]*\)|`[^`]*`", "", text), re.IGNORECASE):
        assert re.search(r"of Amazon's (?:\d+ )?test images (?:are copies|is a copy) of (?:a )?train", text)
        assert "protocols.md" in text
