"""Sentences on results are as strong as their tables: who says "ahead" or "no difference" gives an interval."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.recorded_pages import RESULTS
from support.scripts import ROOT

from bench.census import pages

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


EVERYWHERE = sorted(set(pages()) - {ROOT / "CHANGELOG.md"})


@pytest.mark.parametrize("path", EVERYWHERE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_says_that_its_plus_minus_is_a_deviation(path: Path) -> None:
    text = " ".join(path.read_text().split())
    if "±" in text:
        assert re.search(r"±\)?,? (is a |is the |its )?(sample |standard )?(deviation|std)|deviation \(±\)", text)
    assert not re.search(r"\d±\d|[+-]\d+\.\d+ ± \d", text) or path.stem == "poisoning"  # gains over seeds


def test_one_function_writes_a_deviation_after_a_mean() -> None:
    """Every other ± of the program is in a sentence that says what it is."""
    writers: list[str] = []
    for path in sorted((ROOT / "goldfinch").rglob("*")):
        if path.suffix not in (".py", ".html", ".j2"):
            continue
        for line in path.read_text().splitlines():
            if "±" in line and not re.search(r"± (a |is a )?(standard deviation|std)|71\.20 ± 0\.50|pm\$", line):
                writers.append(f"{path.name}: {line.strip()}")
    assert [writer.partition(":")[0] for writer in writers] == ["page.html", "seeds.py"]
    assert "cell.std" in writers[0]
    assert "self.deviation" in writers[1]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_a_page_with_amazon_s_images_says_that_some_are_copies(path: Path) -> None:
    text = " ".join(path.read_text().split())
    if re.search(r"office|amazon", re.sub(r"\]\([^)]*\)|`[^`]*`", "", text), re.IGNORECASE):
        assert re.search(r"of Amazon's (?:\d+ )?test images (?:are copies|is a copy) of (?:a )?train", text)
        assert "protocols.md" in text
