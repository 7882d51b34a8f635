"""The cells of benchmark tables: mean and spread, and marks of numbers over other seeds than their neighbours'."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import poisoning
from bench.rows import mean_and_spread


@pytest.mark.parametrize(
    ("values", "cell"),
    [
        pytest.param([], "-", id="none"),
        pytest.param([61.25], "61.2 (1 of 3 seeds)", id="one"),
        pytest.param([60.0, 62.0], "61.0 ± 1.4 (2 of 3 seeds)", id="two"),
        pytest.param([60.0, 61.0, 62.0], "61.0 ± 1.0", id="all"),
        pytest.param([60.0, 61.0, 62.0, 62.0], "61.2 ± 1.0 (4 of 3 seeds)", id="one-too-many"),
    ],
)
def test_other_seeds_than_the_tables_are_marked(values: list[float], cell: str) -> None:
    assert mean_and_spread(values, 3) == cell


def test_the_sign_and_the_digits_can_be_chosen() -> None:
    assert mean_and_spread([1.0, 2.0], digits=2, sign="+") == "+1.50 ± 0.71"


def test_a_run_that_is_recorded_twice_counts_once() -> None:
    outcomes = poisoning.load(poisoning.RESULTS)
    keys = [poisoning.key_of(outcome) for outcome in outcomes]
    assert len(keys) == len(set(keys))
    assert len(keys) < len(poisoning.RESULTS.read_text().splitlines()) - 1  # one run is there twice


def test_every_cell_of_the_poisoning_page_has_all_seeds() -> None:
    page = Path(poisoning.__file__).parent.parent / "docs" / "results" / "poisoning.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith(("| 1 of 5 |", "| 2 of 10 |"))]
    assert rows
    table = poisoning.table(poisoning.load(poisoning.RESULTS))
    assert [line for line in table.splitlines() if line in rows] == rows
    assert "seeds)" not in table
