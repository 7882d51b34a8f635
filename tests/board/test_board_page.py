"""The board's tables, and its page in a real browser: ranks, marks, sorting, links, and nothing from the network."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
from report.chromium import Browser, find_chromium

from server.cli import main
from server.results.board.record import IN_DOMAIN, BoardRecord, Case, FinalRun, Row, read_record, write_record
from server.results.board.statistics import holm, paired_difference
from server.results.board.table import BoardTable, board_markdown, description, overall, tables_of

NAME = "glyphs-small-views_none-uniform"


@pytest.fixture
def record(runs: Path) -> BoardRecord:
    return read_record(runs / f"{NAME}.json")


def with_scores(record: BoardRecord, **scores: list[float]) -> BoardRecord:
    """Return a copy of a board with these scores in the final runs of its rows."""
    made = record.model_copy(deep=True)
    pattern = made.rows["fedavg"]
    made.rows = {}
    for name, values in scores.items():
        row = pattern.model_copy(deep=True)
        row.method = name
        _set_scores(row.cases[IN_DOMAIN], values)
        made.rows[name] = row
    return made


def _set_scores(case: Case, values: list[float]) -> None:
    runs: list[FinalRun] = []
    for run, value in zip(case.runs, values, strict=False):
        runs.append(run.model_copy(update={"average": value, "accuracy": {"a": value, "b": value - 1}}))
    case.runs = runs


def names(table: BoardTable) -> list[str]:
    return [row.row.method for row in table.rows]


def row_of(table: BoardTable, name: str) -> Row:
    return next(row.row for row in table.rows if row.row.method == name)


def test_rows_are_ranked_and_compared_with_fedavg(record: BoardRecord) -> None:
    scores = {"fedavg": [50.0, 52.0, 51.0], "moon": [60.0, 61.0, 65.0], "fpl": [50.5, 53.0, 51.0]}
    table = tables_of(with_scores(record, **scores))[0]
    assert names(table) == ["moon", "fpl", "fedavg"]
    assert [row.rank for row in table.rows] == [1, 2, 3]
    expected = [paired_difference(scores[name], scores["fedavg"]) for name in ("moon", "fpl")]
    assert [row.difference for row in table.rows] == [*expected, None]
    corrected = holm([each.p or 0.0 for each in expected])
    assert [row.p for row in table.rows] == [*corrected, None]
    assert table.rows[0].value is not None
    assert table.rows[0].value.mean == pytest.approx(statistics.fmean(scores["moon"]))
    assert list(table.rows[0].worst.values()) == [59.0, 60.0, 64.0]


def test_rows_that_are_not_whole_and_rows_of_own_models_are_marked_and_have_no_rank(record: BoardRecord) -> None:
    made = with_scores(record, fedavg=[50.0, 52.0, 51.0], moon=[99.0, 99.0], fedbn=[98.0, 98.0, 98.0], fpl=[1.0] * 3)
    made.rows["fedbn"].personal = True
    made.rows["fpl"].cases[IN_DOMAIN].studies[1].done = False
    made.rows["idle"] = Row(method="idle", cases={IN_DOMAIN: Case()})
    table = tables_of(made)[0]
    assert [row.row.method for row in table.rows if row.rank is not None] == ["fedavg"]
    assert [row.name for row in table.rows[1:]] == ["moon †", "fedbn *", "fpl †"]
    for row in table.rows[1:]:
        assert (row.difference, row.p) == (None, None)
    text = board_markdown([made])
    assert "† moon is not whole and has no rank: in_domain: 2 of 3 final runs." in text
    assert "† fpl is not whole and has no rank: in_domain: 1 of 2 studies." in text
    assert "Planned and not begun: idle." in text
    assert "99.00 ± 0.00 †" in text


def test_other_code_and_processors_are_named(record: BoardRecord) -> None:
    record.rows["fedproto"].cases[IN_DOMAIN].runs[0].code = "feedfacefeedface"
    record.rows["fedproto"].cases[IN_DOMAIN].runs[0].processor = "another"
    text = board_markdown([record])
    assert re.search(r"fedproto: code .*feedfacefeedface.*; processor .*another", text)


def test_the_code_of_another_kind_of_score_is_not_named(record: BoardRecord) -> None:
    left_out = record.rows["fedavg"].cases[IN_DOMAIN].model_copy(deep=True)
    for run in left_out.runs:
        run.code = "feedfacefeedface"
    for domain in ("handwritten", "printed"):
        record.rows["fedavg"].cases[f"leave_out:{domain}"] = left_out
    assert "feedfacefeedface" not in board_markdown([record])


IMAGES = {
    "all": ([], {}, ", all training images a client"),
    "at most some": ([], {"protocol.samples": 40}, ", at most 40 training images a client"),
    "a share": ([], {"protocol.fraction": 0.5}, ", a share of 0.5 of the training images a client"),
    "counts": (
        ["protocol=fpl_office"],
        {"protocol.fraction": 0.2, "protocol.counts.caltech": 3, "protocol.counts.dslr": 4},
        ", images of the clients of protocol=fpl_office (caltech 3, dslr 4)",
    ),
    "other": (["protocol=dirichlet"], {}, ", images of the clients of protocol=dirichlet, of which"),
}


@pytest.mark.parametrize("case", IMAGES)
def test_the_description_says_which_images_clients_have(record: BoardRecord, case: str) -> None:
    overrides, settings, text = IMAGES[case]
    record.overrides = overrides
    kept = {name: value for name, value in record.shared.items() if not name.startswith("protocol.")}
    record.shared = {**kept, **settings}
    assert text in description(record)


def test_a_case_that_was_not_run_is_named(record: BoardRecord) -> None:
    """Of two domains one was left out: the row is not whole, however many runs it has."""
    case = record.rows["fedavg"].cases[IN_DOMAIN].model_copy(deep=True)
    record.rows["fedavg"].cases["leave_out:printed"] = case
    table = tables_of(record)[1]
    assert table.kind == "leave_one_out"
    assert table.rows[0].lacks == ["leave_out:handwritten was not run"]
    assert table.rows[0].rank is None


def test_the_score_of_left_out_domains_is_their_mean_by_seed(record: BoardRecord) -> None:
    row = record.rows["fedavg"]
    for domain, values in (("handwritten", [10.0, 20.0, 30.0]), ("printed", [50.0, 50.0, 20.0])):
        case = row.cases[IN_DOMAIN].model_copy(deep=True)
        _set_scores(case, values)
        row.cases[f"leave_out:{domain}"] = case
    found = tables_of(record)[1].rows[0]
    assert found.scores == {0: 30.0, 1: 35.0, 2: 25.0}
    assert found.worst == {0: 10.0, 1: 20.0, 2: 20.0}


def test_ranks_over_data_sets_are_of_the_methods_that_all_have(record: BoardRecord) -> None:
    one = with_scores(record, fedavg=[50.0] * 3, moon=[60.0] * 3, fpl=[55.0] * 3)
    other = with_scores(record, fedavg=[50.0] * 3, moon=[45.0] * 3)
    other.data = "digits"
    found = overall([one, other])[0]
    assert found.data == ["glyphs", "digits"]
    assert found.ranks == {"fedavg": 1.5, "moon": 1.5}
    assert found.left_out == {"fpl": ["digits"]}
    assert found.difference is not None
    assert [sorted(group) for group in found.groups] == [["fedavg", "moon"]]
    assert found.profile["moon"][4:6] == [0.5, 1.0]
    single = overall([one])[0]
    assert (single.difference, single.test, single.groups) == (None, None, [])


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_every_run_s_hash_command_and_log_and_escapes_text(
    runs: Path, record: BoardRecord, tmp_path: Path
) -> None:
    run = record.rows["fedproto"].cases[IN_DOMAIN].runs[0]
    run.log.append("<script>alert(1)</script>")
    write_record(runs / f"{NAME}.json", record)
    assert main(["board", "show", str(runs), "--output", str(tmp_path / "board.html")]) == 0
    page = (tmp_path / "board.html").read_text()
    for row in record.rows.values():
        for stated in row.cases[IN_DOMAIN].runs:
            assert stated.state_sha256 in page
            assert stated.log[0] in page
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_final_runs_are_grouped_by_the_domain_that_was_left_out(
    runs: Path, record: BoardRecord, tmp_path: Path
) -> None:
    for domain, value in (("handwritten", 11.25), ("printed", 71.25)):
        case = record.rows["fedavg"].cases[IN_DOMAIN].model_copy(deep=True)
        _set_scores(case, [value] * len(case.runs))
        record.rows["fedavg"].cases[f"leave_out:{domain}"] = case
    write_record(runs / f"{NAME}.json", record)
    assert main(["board", "show", str(runs), "--output", str(tmp_path / "board.html")]) == 0
    words = re.sub(r"<[^>]*>", " ", (tmp_path / "board.html").read_text()).split()
    text = " ".join(words)
    assert "by the domain left out and by seed" in text
    assert "handwritten 11.2 11.2 11.2 printed 71.2 71.2 71.2" in text


def test_markdown_between_the_marks_is_replaced_and_the_rest_is_kept(runs: Path, tmp_path: Path) -> None:
    page = tmp_path / "board.md"
    words = ["board", "show", str(runs), "--output", str(tmp_path / "b.html"), "--markdown", str(page)]
    assert main(words) == 0
    page.write_text("# My own title\n\n" + page.read_text().partition("# The board\n\n")[2] + "\nMy own end.\n")
    assert main(words) == 0
    text = page.read_text()
    assert text.startswith("# My own title\n")
    assert text.endswith("My own end.\n")
    assert text.count("| fedavg |") == 1


@pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed")
def test_tables_sort_and_links_open_their_run(runs: Path, record: BoardRecord, tmp_path: Path) -> None:
    one = with_scores(record, fedavg=[50.0, 52.0, 51.0], moon=[60.0, 61.0, 65.0], fpl=[50.5, 53.0, 51.0])
    other = one.model_copy(deep=True)
    other.data, other.name = "digits", NAME.replace("glyphs", "digits")
    for board in (one, other):
        write_record(runs / f"{board.name}.json", board)
    assert main(["board", "show", str(runs), "--output", str(tmp_path / "board.html")]) == 0
    with Browser(tmp_path / "profile") as browser:
        browser.size(1200)
        browser.open(tmp_path / "board.html")
        order = "[...document.querySelector('table.sortable').tBodies[0].rows].map((row) => row.dataset.name)"
        assert set(browser.evaluate(order)) == {"fedavg", "moon", "fpl"}
        browser.click("table.sortable th:nth-child(3) button")
        assert browser.evaluate(order) == ["fedavg", "fpl", "moon"]
        browser.click("table.sortable th:nth-child(3) button")
        assert browser.evaluate(order) == ["moon", "fpl", "fedavg"]
        browser.click("td.runs a")
        browser.frame()
        target = "document.querySelector('details:target')"
        assert browser.evaluate(f"{target}.open && {target}.getBoundingClientRect().height > 40")
        assert browser.evaluate("document.querySelectorAll('.curves path.line').length") == 6
        assert browser.evaluate("[...document.images].every((image) => image.naturalWidth > 100)")
        assert browser.evaluate("document.images.length") == 2
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
