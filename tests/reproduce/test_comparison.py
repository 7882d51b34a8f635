"""Means, gaps and order, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from support.scored import scored_run

from common.metrics import Missing
from goldfinch.commands import reproduce
from goldfinch.record import RunRecord
from goldfinch.reproduction.comparison import Comparison, Line, agreement
from goldfinch.reproduction.pages import Picture, pages
from goldfinch.reproduction.published import PublishedRow, PublishedTable, Reduction
from goldfinch.results.rows import ScoreRow
from goldfinch.results.seeds import Value, curve
from server.run.history import append_lines


def run_of(
    seed: int, first: float, second: float, fonts: float, *, personal: bool = False, missing: Missing | None = None
) -> RunRecord:
    accuracy = {"mnist": first, "usps": second, "computer_fonts": fonts}
    mean = sum(accuracy.values()) / 3
    score = {"accuracy": accuracy, "average": mean, "worst": min(accuracy.values()), "spread": 1.5}
    run = scored_run(mean, seed=seed, personal=personal)
    vars(run).update(rules={"final": {**score, "missing": missing or {}}})
    return run


ROWS = (
    PublishedRow("A", ("method=fedavg",), (90.0, 80.0, 50.0), average=73.33),
    PublishedRow("B", ("method=fedproto",), (92.0, 84.0, 52.0), average=70.0, misprint="its cells give 76.00"),
    PublishedRow("C|D", ("method=fpl",), (94.0, 82.0, 60.0), (0.5, 0.25, 1.0), average=78.67),
)


def comparison(label: str = "C|D", personal: str = "", *, whole: bool = True) -> Comparison:
    """Three rows; the last lacks seed 1 unless they are whole."""
    table = PublishedTable(
        "digits_table",
        "A Paper, 2023",
        "Table 9",
        "final",
        {"mnist": "MNIST", "usps": "USPS", "syn": "SYN"},
        Reduction(("a smaller network",), ("model=small",), {"syn": "computer_fonts"}),
        own=label,
        listed=tuple(dataclasses.replace(row, label=label) if row.label == "C|D" else row for row in ROWS),
    )
    scores = [((80, 70, 30), (84, 74, 30)), ((86, 70, 99), (86, 72, 99)), ((85, 75, 10), (85, 75, 10))]
    if not whole:
        scores[2] = scores[2][:1]
    lines: list[Line] = []
    for row, of_row in zip(table.listed, scores, strict=True):
        runs = [run_of(seed, *each, personal=row.label == personal) for seed, each in enumerate(of_row)]
        absent = {f"seed {seed}": "not run yet" for seed in range(len(runs), 2)}
        lines.append(Line(row, ScoreRow(row.label, runs, absent=absent)))
    return Comparison(table, "small", tuple(lines), (0, 1))


def test_ours_is_mean_and_sample_deviation_over_seeds() -> None:
    found = comparison()
    value = found.lines[0].ours.value(found.columns[0].key)
    assert value is not None
    assert (value.mean, value.deviation) == (82.0, pytest.approx(8.0**0.5))
    assert str(comparison(whole=False).lines[2].ours.value("domain:mnist")) == "85.00"  # one seed has no deviation
    assert str(found.lines[0].ours.value("worst")) == "30.00 ± 0.00"


def test_a_partial_score_has_no_bar_and_a_row_that_lacks_a_seed_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = comparison(whole=False)
    for each in found.lines[1].ours.runs:
        each.rules["final"]["missing"] = {"usps": 1}
    drawn: dict[str, list[Value | None]] = {}
    monkeypatch.setattr(reproduce, "convergence", lambda curves, title: Figure())
    monkeypatch.setattr(reproduce, "curve", lambda runs, average: {})

    def kept(heads: list[str], series: dict[str, list[Value | None]], title: str) -> Figure:
        drawn.update(series)
        return Figure()

    monkeypatch.setattr(reproduce, "bars", kept)
    reproduce.pictures_of(found, "x")
    given = {label: [value is not None for value in values] for label, values in drawn.items()}
    assert given == {"A": [True] * 4, "B": [True, False, True, False], "C|D": [True] * 4}


def test_a_stand_in_is_named_and_never_compared() -> None:
    found = comparison()
    column = found.columns[2]
    assert column.title == "computer_fonts (stands in for SYN)"
    assert found.gap(found.lines[0], column) is None
    assert found.gap(found.lines[0], found.columns[0]) == pytest.approx(-8.0)
    # the average gap is over MNIST and USPS alone: (82 + 72) / 2 - (90 + 80) / 2
    assert found.average_gap(found.lines[0]) == pytest.approx(-8.0)


def test_order_is_over_comparable_columns_only() -> None:
    found = comparison()
    order = found.order()
    # ours: A 77, B 78.5, C 80; printed: A 85, B 88, C 88. B and C are not told apart by the paper.
    assert (order.rows, order.pairs, order.kept) == (3, 2, 2)
    assert order.correlation == pytest.approx(3**0.5 / 2)
    assert found.order(found.columns[0]).kept == 2  # 82, 86, 85 for 90, 92, 94
    assert found.order(found.columns[0]).correlation == pytest.approx(0.5)


def test_where_averages_alone_are_printed_they_are_compared_with_ours_over_all_columns() -> None:
    found = comparison()
    bare = [dataclasses.replace(line, printed=dataclasses.replace(line.printed, cells=())) for line in found.lines]
    found = dataclasses.replace(found, lines=tuple(bare))
    # ours: A 61.3, B 85.3, C 56.7; printed: 73.3, 70, 78.7
    assert (found.order().rows, found.order().kept) == (3, 0)
    idle = tuple(dataclasses.replace(line, ours=ScoreRow(line.printed.label)) for line in comparison().lines)
    assert "## Effects" not in pages(dataclasses.replace(comparison(), lines=idle), "x")[0]  # before a run is finished


def test_agreement_needs_three_rows_that_differ() -> None:
    assert agreement([(1.0, 2.0), (2.0, 3.0)]).correlation is None
    assert agreement([(1.0, 2.0), (1.0, 3.0), (1.0, 4.0)]).correlation is None
    reverse = agreement([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)])
    assert (reverse.correlation, reverse.pairs, reverse.kept) == (pytest.approx(-1.0), 3, 0)


def test_rows_that_tie_are_named_together_and_win_no_pair() -> None:
    found = comparison()
    lines = [
        dataclasses.replace(line, ours=ScoreRow(line.printed.label, found.lines[0].ours.runs)) for line in found.lines
    ]
    same = dataclasses.replace(found, lines=tuple(lines))
    assert same.best(same.average) == []
    assert (same.order().kept, same.order().tied, same.order().pairs) == (0, 2, 2)
    markdown, html = pages(same, "goldfinch reproduce digits_table")
    assert "**82" not in markdown
    assert "Identical: A, B, C|D ended in the same state" in markdown
    assert "| A | +0.00 |" in markdown
    assert "0 of 2 pairs (2 tied) are in the paper" in html


def test_rows_scored_on_own_models_are_marked_and_not_ranked_with_shared_ones() -> None:
    found = comparison(personal="B")  # by far the best, on models of its own
    markdown, html = pages(found, "goldfinch reproduce digits_table")
    assert "| B (own models) | 86.00" in markdown
    assert "not ranked with rows of one shared model" in markdown
    assert html.count("own models)") == 2
    assert "not ranked" not in pages(comparison(), "x")[0]


def test_the_page_names_small_scale_stand_in_misprint_and_gap() -> None:
    text, _ = pages(comparison(whole=False), "goldfinch reproduce digits_table scale=small", (), ["train.rounds=2"])
    for told in (
        "SMALL SCALE, not the paper's setting: a smaller network.",
        "in every row: train.rounds=2.",
        "computer_fonts (stands in for SYN)",
        "90.00 (-8.00)",
        "94.00 ± 0.50 (-9.00)",
        "printed average 70.0, its cells give 76.00",
        "not run yet",  # row C has no second seed
    ):
        assert told in text
    for part in text.split("\n\n"):
        bars = {line.count("|") - line.count("\\|") for line in part.splitlines() if line.startswith("|")}
        assert len(bars) <= 1, part


def test_html_stands_alone_and_escapes() -> None:
    picture = Picture(b"\x89PNG-not-really", "x.png", 'curves "of" <all>')
    markdown, page = pages(comparison(label="<i>&"), "run <b>", [picture], ["x=<script>"])
    assert "<pre>run &lt;b&gt;</pre>" in page
    assert "<td>&lt;i&gt;&amp;</td>" in page
    assert "every row: x=&lt;script&gt;" in page
    assert 'alt="curves &#34;of&#34; &lt;all&gt;"' in page
    assert 'src="data:image/png;base64,iVBORy' in page
    assert "http" not in page
    assert "<script" not in page
    assert "prefers-color-scheme: dark" in page
    assert '![curves "of" <all>](x.png)' in markdown
    assert "    run <b>" in markdown  # Markdown is not escaped


CONFIG = {
    "method": {"_target_": "strategies.fedavg.FedAvg"},
    "seed": 0,
    "choices": {},
    "train": {"rounds": 3},
    "rounds": {"last_rounds": 5},
    "data": {},
}
"""As much of a run's configuration as its scores need."""


def test_averages_by_round_count_each_client_of_a_domain_once(tmp_path: Path) -> None:
    second = [(2, "a", 10, 6), (2, "a", 20, 20), (2, "b", 10, 4)]  # a client's own model has 60, another's 100
    third = [(3, "a", 10, 9)]  # b was not scored: a mean would be of other domains
    for number, domain, count, correct in [(1, "a", 10, 5), (1, "b", 10, 10), *second, *third]:
        scored = {"round": number, "client": "a", "domain": domain, "scored_on": "test", "loss": 0.0}
        append_lines(tmp_path / "scores.jsonl", [scored | {"count": count, "correct": correct}])
    record = RunRecord(tmp_path)
    vars(record)["config"] = CONFIG
    assert curve([record]) == {1: Value(75.0, None), 2: Value(60.0, None)}
