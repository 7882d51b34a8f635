"""Paper, released code and ours, point by point: what the methods' files say is what methods, tables and pages have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.composition import compose_config
from goldfinch.alterations import alterations
from goldfinch.cli import main
from goldfinch.papers import NAMES, PAPERS, cited
from goldfinch.readings import lines_of, plain_methods, table_rows
from goldfinch.reproduction.published import PublishedRow, PublishedTable, method_of, published_tables
from strategies.core.method import Method
from strategies.core.readings import NOT_KNOWN, Point

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
METHODS = plain_methods()
OF_NO_PAPER = {"combined", "single_set", "pooled", "fedavg"}
"""Methods without a point on which a paper and a release could differ."""


def readings() -> Iterator[tuple[str, Method, Point]]:
    for name, method in METHODS.items():
        for reading in method.readings:
            yield name, method, reading


def made(name: str, **options: object) -> Method:
    """The method with some options."""
    return dataclasses.replace(METHODS[name], **options)  # type: ignore[arg-type]  # the values are checked


def test_every_method_with_a_paper_of_its_own_has_readings_with_names_of_their_own() -> None:
    for name, method in METHODS.items():
        assert bool(method.readings) != (name in OF_NO_PAPER), name
        about = [reading.about for reading in method.readings]
        assert len(about) == len(set(about)), name


def test_a_reading_of_an_option_has_values_that_the_option_takes() -> None:
    for name, method, reading in readings():
        if not reading.setting:
            assert reading.ours, f"{name}, {reading.about}: what a plain run does"
            if reading.ours in ("paper", "released"):
                assert getattr(reading, reading.ours) != NOT_KNOWN, f"{name}, {reading.about}"
            continue
        assert not reading.ours, f"{name}, {reading.about}: a plain run has the option's default"
        assert reading.setting in {field.name for field in dataclasses.fields(method)}
        for value in (reading.paper, reading.released, *reading.tables.values()):
            if value != NOT_KNOWN:
                assert getattr(made(name, **{reading.setting: value}), reading.setting) == value
        spelled = {str(value) for value in (reading.paper, reading.released, getattr(method, reading.setting))}
        assert not reading.meanings or spelled - {NOT_KNOWN} <= set(reading.meanings)


@pytest.mark.parametrize("fidelity", ["released", "paper"])
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if hasattr(method, "fidelity")])
def test_fidelity_means_paper_or_release_in_every_field(name: str, fidelity: str) -> None:
    method = made(name, fidelity=fidelity)
    for reading in method.readings:
        known = getattr(reading, fidelity)
        if reading.setting and known != NOT_KNOWN:
            assert reading.of(method) == known, reading.about


@pytest.mark.parametrize("name", ["fdse", "fccl_plus", "fedpall", "fedsr"])
def test_a_plain_run_is_the_release_in_every_field(name: str) -> None:
    for reading in METHODS[name].readings:
        if reading.setting and reading.released != NOT_KNOWN:
            assert reading.of(METHODS[name]) == reading.released, reading.about


def test_a_plain_run_is_the_published_algorithm_but_for_what_the_list_and_the_page_say() -> None:
    listed = {each.name for each in alterations() if each.whose == "reading"}
    bold = [line.split(" | ")[:2] for line in PAGE.read_text().splitlines() if line.endswith("** |")]
    found = set()
    for name, method, reading in readings():
        known = [value for value in (reading.paper, reading.released) if value != NOT_KNOWN]
        if known and reading.of(method) not in known:
            found.add(f"{NAMES[name]}: {reading.about}")
            assert name == "fpl_heal" or [f"| {name}", reading.about] in bold
    assert found == listed
    assert "FedBN: average of models" in found
    assert len(bold) == len([each for each in listed if not each.startswith("FPL+HEAL")])


def test_the_page_has_the_table() -> None:
    section = PAGE.read_text().partition("## Readings\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("|")][2:] == table_rows()


def test_the_command_explains_a_method_s_readings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "fedpall"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert len(lines_of("fedpall")) == len(METHODS["fedpall"].readings)
    for line in lines_of("fedpall"):
        assert line in printed
    assert "InfoNCE's denominator: paper fidelity=paper: without the own class (Eq. 7)" in printed


# ---- the published recipes -------------------------------------------------------------------------------------------


def printed_rows() -> Iterator[tuple[str, PublishedTable, PublishedRow]]:
    """Rows with a printed number: others may be made by another reading, to show what it does."""
    for name, table in published_tables().items():
        for row in table.listed:
            if row.average is not None or row.has_cells:
                yield name, table, row


@pytest.mark.long
@pytest.mark.parametrize("table", sorted({name for name, _, _ in printed_rows()}))
def test_a_printed_row_has_the_reading_that_made_it(table: str) -> None:
    """That of the table if a reading names it, the release's in the own paper, and a plain run's elsewhere."""
    for name, published, row in printed_rows():
        method = method_of(row)
        if name != table:
            continue
        paper = next(each for each in PAPERS if cited(each) == published.paper)
        own = method == paper
        if own and row.label != published.own:  # an ablation
            continue
        composed = compose_config(list(row.overrides))["method"]
        for reading in METHODS[method].readings:
            if not reading.setting:
                continue
            wanted = reading.printed(name, paper, own, METHODS[method])
            found = composed.get(reading.setting, getattr(METHODS[method], reading.setting))
            assert found == wanted, f"{row.label}: {reading.about}"
