"""Ties on counts, differences beside the printed ones, what chance gives, and the pages that state them."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from pathlib import Path

import pytest
from support.recorded_pages import PAGES, RESULTS, generated, read_page, section
from test_comparison import comparison, run_of

from goldfinch.commands.reproduce import ReproductionRequest, numbers
from goldfinch.reproduction.comparison import Comparison, agreement, ranks_of
from goldfinch.reproduction.effects import Effect, Standing, chance_of, percent
from goldfinch.reproduction.pages import pages
from goldfinch.results.rows import ScoreRow
from goldfinch.results.statistics import EXACT, paired_difference


def mean(corrects: list[int], count: int) -> float:
    """As a page's mean over seeds: every accuracy in per cent first."""
    return statistics.fmean(100.0 * correct / count for correct in corrects)


def test_the_same_sum_of_correct_images_is_a_tie_despite_rounding() -> None:
    ours = [mean([25, 34, 41], 46), mean([26, 35, 39], 46), mean([26, 35, 40], 46)]
    assert ours[0] != ours[1]  # 100 of 138 both
    assert ranks_of(ours, EXACT) == [0.5, 0.5, 2]
    order = agreement(list(zip(ours, [1.0, 2.0, 3.0], strict=True)))
    assert (order.kept, order.tied, order.pairs) == (2, 1, 3)
    assert order.correlation == pytest.approx(0.75**0.5)


def test_rows_tie_up_to_the_tolerance_and_no_further() -> None:
    """Also with a third row between them."""
    assert ranks_of([5.0, 1.0, 1.4, 3.0], 0.5) == [3, 0.5, 0.5, 2]
    order = agreement([(50.0, 1.0), (50.09, 2.0), (50.18, 3.0), (50.27, 4.0)], 0.1)
    assert (order.kept, order.tied, order.pairs) == (3, 3, 6)
    assert order.correlation == pytest.approx(1.0)


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


@pytest.mark.parametrize("groups", [(1, 1, 1), (1, 1, 1, 1, 1), (2, 1, 2), (3, 2), (4,)])
def test_chance_is_the_share_of_all_orders_that_keep_as_many_pairs(groups: tuple[int, ...]) -> None:
    printed = [level for level, size in enumerate(groups) for _ in range(size)]
    kept: list[int] = []
    for ours in itertools.permutations(range(len(printed))):
        pairs = itertools.combinations(zip(ours, printed, strict=True), 2)
        kept.append(sum((mine - other) * (level - another) > 0 for (mine, level), (other, another) in pairs))
    for least in range(max(kept) + 1):
        assert chance_of(least, groups) == pytest.approx(sum(count >= least for count in kept) / len(kept))
    assert chance_of(max(kept) + 1, groups) == 0


def test_percent_has_no_more_digits_than_it_means() -> None:
    assert [percent(chance) for chance in (0.0004, 0.001, 0.125, 1.0)] == ["under 0.1 %", "0.1 %", "12.5 %", "100.0 %"]


@pytest.mark.parametrize(
    ("interval", "printed", "lies"),
    [
        ((1.0, 3.0), 3.0, "inside"),
        ((1.0, 3.0), 3.01, "outside"),
        ((1.0, 3.0), 0.9, "outside"),
        ((1.0, 3.0), None, "-"),
        ((None, None), 2.0, "-"),
    ],
)
def test_a_printed_difference_lies_inside_our_interval_or_outside(
    interval: tuple[float | None, float | None], printed: float | None, lies: str
) -> None:
    assert Effect("B", 2.0, *interval, printed).lies == lies
    assert Effect("B", 2.0, *interval, printed, tested=False).lies == "-"


def counted(found: Comparison, images: int, clients: str = "a") -> Comparison:
    """The comparison with a record of test images, of clients with a letter each."""
    lines = []
    for domain in ("mnist", "usps", "computer_fonts"):
        for client in clients:
            lines.append({"domain": domain, "client": client, "count": images, "scored_on": "test"})
    for line in found.lines:
        for run in line.ours.runs:
            vars(run).update(test_lines=lines, score_lines=lines)
    return found


def test_a_gap_to_print_has_the_noise_of_the_test_images() -> None:
    found = counted(comparison(), 100)
    mnist, usps, fonts = found.columns
    line = found.lines[0]  # ours 82 and 72; printed 90 and 80
    first = 1.96 * (0.82 * 0.18 / 100 + 0.9 * 0.1 / 100) ** 0.5
    second = 1.96 * (0.72 * 0.28 / 100 + 0.8 * 0.2 / 100) ** 0.5
    assert found.noise(line, [mnist]) == pytest.approx(100 * first)
    assert found.noise(line, [mnist, usps]) == pytest.approx(100 * (first**2 + second**2) ** 0.5 / 2)
    models = counted(comparison(), 100, "abcd")
    assert models.noise(models.lines[0], [mnist]) == pytest.approx(100 * first), "of 100 images, however many models"
    assert found.noise(line, [fonts]) is None, "a stand-in has no gap"
    assert comparison().noise(comparison().lines[0], [mnist]) is None, "no record of the images"
    assert f"90.00 (-8.00; {100 * first:.2f})" in pages(found, "x")[0]
    assert "half the 95 % interval from test images" in pages(found, "x")[0]


def of_b(*, whole: bool = True) -> Comparison:
    """The comparison as if B were the paper's own row."""
    found = comparison(whole=whole)
    return dataclasses.replace(found, table=dataclasses.replace(found.table, own="B"))


def test_effects_are_paired_by_seed() -> None:
    found = of_b()
    rivals = found.effects()
    assert [effect.rival for effect in rivals] == ["A", "C|D"]
    ours = [statistics.mean(scores) for scores in ((86, 70, 99), (86, 72, 99))]
    theirs = [statistics.mean(scores) for scores in ((80, 70, 30), (84, 74, 30))]
    assert str(rivals[0]) == str(paired_difference(ours, theirs))
    assert rivals[1].low is not None
    assert [effect.lies for effect in rivals] == ["-", "-"], "two seeds are not tested"
    assert [effect.printed for effect in rivals] == [None, None], "a column is a stand-in"


def test_a_row_that_lacks_a_seed_is_in_no_order_and_has_no_effect() -> None:
    found = of_b(whole=False)
    assert [effect.rival for effect in found.effects()] == ["A"]
    assert found.standing() == Standing("B", 2, 1)
    assert found.order().rows == 2
    text = pages(found, "x")[0]
    assert "### Not finished, and so not ranked\n" in text
    alone = comparison(whole=False)  # the paper's own row itself
    assert (alone.standing(), alone.effects()) == (None, [])


def test_pairs_and_standing_are_of_the_same_columns() -> None:
    found = of_b()  # first with the stand-in: 85.33, A 61.33, C|D 56.67; C|D is without it
    assert found.standing() == Standing("B", 3, 2)
    assert "Over MNIST, USPS: " in pages(found, "x")[0]


def test_one_seed_has_no_interval_and_the_page_says_so() -> None:
    found = of_b()
    lines = [dataclasses.replace(line, ours=ScoreRow(line.ours.label, line.ours.runs[:1])) for line in found.lines]
    text = pages(dataclasses.replace(found, lines=tuple(lines), seeds=(0,)), "x")[0]
    assert "in points; one seed, so no interval." in text


def test_there_are_no_effects_without_a_rival() -> None:
    alone = comparison(personal="C|D")  # the paper's own row keeps own models, the others share one
    assert alone.standing() is None
    assert alone.effects() == []
    assert "## Effects" not in pages(alone, "x")[0]


def test_a_row_that_was_not_asked_for_is_in_the_table() -> None:
    found = comparison()
    fewer = dataclasses.replace(found, lines=found.lines[1:])
    assert [row.label for row in fewer.not_asked] == ["A"]
    assert "\n| A | not asked for |\n" in pages(fewer, "x")[0], "the folder may hold its runs"
    assert "not asked for" not in pages(found, "x")[0]


def test_pairs_of_an_own_model_row_and_a_shared_one_are_left_out() -> None:
    found = comparison()
    assert (found.order().rows, found.order().pairs) == (3, 2)
    mixed = comparison(personal="B")
    assert (mixed.order().rows, mixed.order().pairs) == (2, 1)
    assert (mixed.order(None, True).rows, mixed.order(None, True).pairs) == (1, 0)


def test_a_row_with_a_missing_domain_is_marked_named_and_never_ranked() -> None:
    found = comparison()
    runs = [run_of(0, 86, 70, 99, missing={"usps": 3}), run_of(1, 86, 72, 99)]
    partial = dataclasses.replace(found.lines[1], ours=ScoreRow("B", runs))
    marked = dataclasses.replace(found, lines=(found.lines[0], partial, found.lines[2]))
    assert (found.order().rows, marked.order().rows) == (3, 2)
    text = pages(marked, "x")[0]
    assert "| B | 86.00 ± 0.00 | 71.00 ± 1.41 † | 99.00 ± 0.00 | 85.33 ± 0.47 † |" in text
    assert "† partial, not ranked: B, seed 0: without usps (last scored in round 3)." in text
    assert [marked.gap(partial, column) is None for column in marked.columns] == [False, True, True]
    assert marked.average_gap(partial) is None
    row = numbers(marked, ReproductionRequest(marked.table, "small"))["rows"][1]
    assert row["average"] is None, "JSON has no mark"
    assert row["ours"] == {"mnist": 86.0, "usps": None, "computer_fonts": 99.0}


def test_the_page_has_effects_and_what_chance_gives() -> None:
    text = pages(comparison(), "x")[0]
    assert "C|D minus each row that is ranked with it" in text
    assert "Over MNIST, USPS: 2 of 2 pairs are in the paper's order; C|D is number 1 of 3." in text
    assert "If all were equal, 33.3 % of orders would keep as many." in text


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_committed_page_is_what_the_generator_makes_of_its_numbers(path: Path) -> None:
    text, made = path.read_text(), generated(path)
    assert section(text, "Effects") == section(made, "Effects")
    number = r"[+-]?\d+\.\d\d"
    noise = re.compile(r"; \d+\.\d\d(?=\))|; then half the [^.]*(?=\.)")  # which needs the runs' images
    here, there = (noise.sub("", section(page, "Published")) for page in (text, made))
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
def test_the_small_pages_list_has_the_numbers_of_each_page(path: Path) -> None:
    found = read_page(path)
    cells = [cell.strip() for cell in line_of("small/README.md", f"({path.stem}.md)").strip("|").split(" | ")]
    order, stand = found.order(), found.standing()
    stated = ["-", "-"]
    if stand is not None:
        tied = f", {order.tied} tied" if order.tied else ""
        stated = [f"{order.kept} of {order.pairs}{tied} ({percent(order.chance)})"]
        stated.append(f"{stand.own}: {stand.place} of {stand.rows}")
    assert cells[1:3] == stated


def test_no_page_puts_a_word_in_place_of_an_effect() -> None:
    for path in sorted(RESULTS.rglob("*.md")):
        assert not re.search(r"\*\*(yes|mostly|no)\*\*|Does the order hold", path.read_text()), path


def test_the_documentation_states_the_rules() -> None:
    text = " ".join((RESULTS.parent / "protocols.md").read_text().split()).partition(
        "## Effects, and what chance gives"
    )[2]
    for words in ("paired by seed", "inside or outside", "not asked for", "Two rows tie"):
        assert words in text
