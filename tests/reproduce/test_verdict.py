"""Ties on counts, the rule for a page's verdict, and the words of the documentation against what the rule gives."""

from __future__ import annotations

import dataclasses
import re
import statistics
from pathlib import Path

import pytest
from support.recorded_pages import PAGES, RESULTS, generated, read_page, section
from test_comparison import comparison, run_of

from goldfinch.reproduction.comparison import EXACT, agreement, levels
from goldfinch.reproduction.pages import pages
from goldfinch.reproduction.verdict import Claim, Order, Verdict, verdict
from goldfinch.results.rows import ScoreRow

WORDS = r"\*\*(yes|mostly|no)\*\*"


def mean(corrects: list[int], count: int) -> float:
    """As a page's mean over seeds: every accuracy in per cent first."""
    return statistics.fmean(100.0 * correct / count for correct in corrects)


def test_the_same_sum_of_correct_images_is_a_tie_despite_rounding() -> None:
    ours = [mean([25, 34, 41], 46), mean([26, 35, 39], 46), mean([26, 35, 40], 46)]
    assert ours[0] != ours[1]  # 100 of 138 both
    assert levels(ours) == [0, 0, 1]
    order = agreement(list(zip(ours, [1.0, 2.0, 3.0], strict=True)))
    assert (order.kept, order.tied, order.pairs) == (2, 1, 3)
    assert order.correlation == pytest.approx(0.75**0.5)


def test_rows_share_a_level_up_to_the_tolerance_and_no_further() -> None:
    assert levels([5.0, 1.0, 1.4, 3.0], 0.5) == [2, 0, 0, 1]


def test_the_tolerance_is_half_the_step_that_one_image_makes() -> None:
    found = comparison()
    counted = comparison()
    scored = [("mnist", "a", 500), ("usps", "a", 200), ("usps", "b", 200)]
    lines = [{"domain": domain, "client": client, "count": count} for domain, client, count in scored]
    for line in counted.lines:
        for run in line.ours.runs:
            vars(run).update(test_lines=lines)
    mnist, usps, _ = counted.columns
    assert counted.tolerance([mnist]) == pytest.approx(100 / 500 / 2 / 2)  # two seeds
    assert counted.tolerance([usps]) == pytest.approx(100 / (200 * 2) / 2 / 2)  # two clients' models
    assert counted.tolerance([mnist, usps]) == pytest.approx(100 / 500 / 2 / 2 / 2)
    assert found.tolerance([mnist]) == EXACT


def claim(lead: float, deviation: float | None = 1.0) -> Claim:
    return Claim("A", "B", 5, 1 if lead > 0 else 2, lead, EXACT, deviation)


@pytest.mark.parametrize(
    ("kept", "correlation", "lead", "deviation", "word"),
    [
        pytest.param(8, 0.70, 1.0, 1.0, "yes", id="all at their least"),
        pytest.param(8, 0.6951, 1.0, 1.0, "yes", id="Spearman as it is printed"),
        pytest.param(8, 0.69, 1.0, 1.0, "mostly", id="Spearman too low for a yes"),
        pytest.param(7, 0.90, 1.0, 1.0, "mostly", id="too few pairs for a yes"),
        pytest.param(10, 1.0, 0.9, 1.0, "mostly", id="ahead by less than a deviation"),
        pytest.param(10, 1.0, 9.0, None, "mostly", id="one seed is never a yes"),
        pytest.param(6, 0.40, 1.0, 1.0, "mostly", id="first, and half agrees"),
        pytest.param(5, 0.40, 1.0, 1.0, "no", id="first, too few pairs"),
        pytest.param(6, 0.39, 1.0, 1.0, "no", id="first, Spearman too low"),
        pytest.param(8, 0.70, -1.0, 1.0, "mostly", id="not first, the order holds"),
        pytest.param(7, 0.90, -1.0, 1.0, "no", id="not first, too few pairs"),
        pytest.param(9, 0.69, -1.0, 1.0, "no", id="not first, Spearman too low"),
        pytest.param(8, 0.70, 0.0, 1.0, "mostly", id="a tie for the first place is not first"),
        pytest.param(6, 0.40, 0.0, 1.0, "no", id="a tie for the first place with a weak order"),
        pytest.param(8, None, 1.0, 1.0, "yes", id="fewer than three rows"),
    ],
)
def test_the_rule(kept: int, correlation: float | None, lead: float, deviation: float | None, word: str) -> None:
    assert verdict(Order(5, correlation, 10, kept), claim(lead, deviation)).word == word


def test_there_is_no_verdict_without_a_rival_or_a_published_order() -> None:
    assert verdict(Order(5, 1.0, 10, 10), None) == Verdict("-", "nothing to judge")
    assert verdict(Order(0, None, 0, 0), claim(1.0)).word == "-"
    alone = comparison(personal="C|D")  # the paper's own row keeps own models, the others share one
    assert alone.claim() is None
    assert "Does the order hold?" not in pages(alone, "x")[0]


def test_pairs_of_an_own_model_row_and_a_shared_one_are_left_out() -> None:
    found = comparison()
    assert (found.order().rows, found.order().pairs) == (3, 2)
    mixed = comparison(personal="B")
    assert (mixed.order().rows, mixed.order().pairs) == (2, 1)
    assert (mixed.order(None, True).rows, mixed.order(None, True).pairs) == (1, 0)
    text = pages(mixed, "x")[0]
    assert "| average, one shared model | 2 | - | 1 of 1 |" in text
    assert "average, own models" not in text  # one row alone has no order


def test_a_row_with_a_missing_domain_is_marked_named_and_never_ranked() -> None:
    found = comparison()
    runs = [run_of(0, 86, 70, 99, missing={"usps": 3}), run_of(1, 86, 72, 99)]
    partial = dataclasses.replace(found.lines[1], ours=ScoreRow("B", runs))
    marked = dataclasses.replace(found, lines=(found.lines[0], partial, found.lines[2]))
    assert (found.order().rows, marked.order().rows) == (3, 2)
    text = pages(marked, "x")[0]
    assert "| B | 86.00 ± 0.00 | 71.00 ± 1.41 † | 99.00 ± 0.00 | 85.33 ± 0.47 † |" in text
    assert "† partial, not ranked: B, seed 0: without usps (last scored in round 3)." in text


def test_the_page_has_the_verdict_and_its_reasons() -> None:
    found = comparison()
    text = pages(found, "x")[0]
    assert found.verdict().word == "mostly"  # not first, but the order holds
    assert "> **Does the order hold? mostly.**" in text
    assert "C|D, the paper's own, is number 3 of the 3" in text
    assert "2 of 2 pairs, Spearman 0.87." in text
    best = dataclasses.replace(found.lines[2], ours=ScoreRow("C|D", [run_of(0, 99, 99, 99), run_of(1, 99, 98, 99)]))
    first = dataclasses.replace(found, lines=(*found.lines[:2], best))
    assert first.verdict().word == "yes"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_committed_page_is_what_the_generator_makes_of_its_numbers(path: Path) -> None:
    text, made = path.read_text(), generated(path)
    assert section(text, "Order") == section(made, "Order")
    number = r"[+-]?\d+\.\d\d"
    here, there = (section(page, "Published") for page in (text, made))
    assert re.sub(number, "#", here) == re.sub(number, "#", there)
    pairs = zip(re.findall(number, here), re.findall(number, there), strict=True)
    assert all(abs(float(one) - float(other)) < 0.011 for one, other in pairs)  # a gap is of numbers with more digits


def line_of(page: str, link: str) -> str:
    """The row of a table that begins with a link to a page."""
    rows = [line for line in (RESULTS / page).read_text().splitlines() if line.startswith("| [")]
    lines = [line for line in rows if line.partition(")")[0].endswith(link[:-1])]
    assert len(lines) == 1, link
    return lines[0]


SMALL = [path for path in PAGES if path.parent.name == "small"]


@pytest.mark.parametrize("path", SMALL, ids=lambda path: path.stem)
def test_the_small_pages_list_has_the_numbers_and_the_word_of_each_page(path: Path) -> None:
    found = read_page(path)
    cells = [cell.strip() for cell in line_of("small/README.md", f"({path.stem}.md)").strip("|").split(" | ")]
    order, stand = found.order(), found.claim()
    stated, words = ["-", "-", "-"], []
    if stand is not None:
        tied = f", {order.tied} tied" if order.tied else ""
        stated = [f"{order.correlation:.2f}", f"{order.kept} of {order.pairs}{tied}"]
        stated.append(f"{stand.own}: {stand.place} of {stand.rows}")
        words = [found.verdict().word]
    assert cells[1:4] == stated
    assert re.findall(WORDS, cells[4]) == words


@pytest.mark.parametrize(
    "path", [path for path in PAGES if path.parent.name == "paper_net"], ids=lambda path: path.stem
)
def test_the_results_list_has_the_word_of_each_page_on_the_paper_s_net(path: Path) -> None:
    line = line_of("README.md", f"(paper_net/{path.stem}.md)")
    assert re.findall(WORDS, line) == [read_page(path).verdict().word]


def test_the_results_list_sums_the_small_pages_up() -> None:
    line = line_of("README.md", "(small/README.md)")
    stated = {
        path: word
        for word, names in re.findall(r"\*\*(yes|mostly|no)\*\*: ([\w, ]+)", line)
        for path in names.strip().split(", ")
    }
    assert stated == {path.stem: word for path in SMALL if (word := read_page(path).verdict().word) != "-"}


def test_the_documentation_states_the_rule_s_numbers() -> None:
    text = " ".join((RESULTS.parent / "protocols.md").read_text().split())
    for words in ("80 % of the pairs", "0.70", "60 % of the pairs", "0.40", "Two rows tie"):
        assert words in text.partition("## Does the order hold?")[2]
