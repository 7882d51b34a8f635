"""The census of concepts stays below its limits: what leaves Goldfinch does not creep back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench import census
from bench.measure import Counted, census_of, circles, count, imports_of

LIMITS = {
    "classes of a round": 51,
    "settings": 214,
    "settings never set": 99,
    "settings never set nor named on a page": 0,
    "kinds of record in a run's folder": 8,
    "commands": 14,
    "public names defined twice": 5,
    "renderers of a table": 6,
    "classes that are a row": 1,
    "modules that goldfinch imports": 63,
    "names that goldfinch imports": 225,
    "modules that readers of runs import": 30,
    "names that readers of runs import": 75,
    "circles, imports inside functions counted": 0,
    "values of conf/ that equal a default": 0,
}
"""The most of each that the checkout may have. Lower a limit when something leaves; raise none without a named user."""

FUNCTIONS, FILES = 280, 37
"""The most functions and files that the second round of FPL on the inline engine may run through."""

WORDS = 55_000
"""The most words of Markdown."""

WORDS_OF_PAGES = {"README.md": 1_200, "SECURITY.md": 3_000, "docs/deploy.md": 3_000, "docs/results/board.md": 1_500}
"""The most words of single pages, which somebody reads from top to bottom."""


@pytest.fixture(scope="module")
def counted() -> Counted:
    return count()


def test_the_census_stays_below_its_limits(counted: Counted) -> None:
    found = {name: len(places) for name, places in census_of(counted).items()}
    assert found.keys() == LIMITS.keys()
    assert {name: number for name, number in found.items() if number > LIMITS[name]} == {}
    assert found["settings"] > 100, "the settings were not found"
    assert 10_000 < census.words() <= WORDS


@pytest.mark.parametrize("page", WORDS_OF_PAGES)
def test_a_page_stays_short(page: str) -> None:
    assert len((census.ROOT / page).read_text().split()) <= WORDS_OF_PAGES[page]


def test_a_round_runs_through_few_functions_and_files(counted: Counted) -> None:
    assert 100 < len(counted.ran) <= FUNCTIONS
    assert len(counted.visited) <= FILES
    assert "strategies.core.federation.Federation" in counted.classes
    assert "config.yaml" in counted.records


def test_settings_are_found_by_group_and_key() -> None:
    found = census.settings()
    assert {"train.rounds", "method.temperature", "rounds.quorum", "seed"} <= found
    assert "protocol.counts" in found, "a mapping by domain is one setting"
    assert not any("_target_" in key for key in found)
    assert "train.rounds" in census.set_somewhere()


def test_a_value_of_conf_that_its_class_has_as_its_default_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for group, name, text in (
        ("method", "fpl", "_target_: strategies.fpl.FPL\ntemperature: 0.02\ncontrast: 2.0\n"),
        ("data", "glyphs", "_target_: common.data.glyphs.Glyphs\naugmentation:\n  flip: false\n  crop_padding: 2\n"),
        ("train", "default", "epochs: 1\nrounds: 3\n"),
        ("protocol", "few", "defaults: [one_per_domain, _self_]\nfraction: 1.0\nsamples: 3\n"),
        ("experiment", "mine", "train:\n  epochs: 1\n"),
    ):
        (tmp_path / group).mkdir()
        (tmp_path / group / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(census, "CONF", tmp_path)
    monkeypatch.setattr(census, "ROOT", tmp_path)
    assert census.values_equal_to_a_default() == [
        "data/glyphs.yaml augmentation.flip=False",
        "method/fpl.yaml temperature=0.02",
        "protocol/few.yaml fraction=1.0",
        "train/default.yaml epochs=1",
    ]


def test_a_function_that_writes_a_table_is_found() -> None:
    path = census.ROOT / "server/made_up.py"
    code = 'def one():\n    return "|---:|"\n\n\ndef two():\n    return 1\n'
    assert census.renderers({path: ast.parse(code)}) == ["server/made_up.py one"]


def test_a_class_with_a_mean_over_runs_of_its_own_is_found() -> None:
    code = """
class Line:
    cells: list[Value | None]
class Table:
    def ours(self, column: str) -> dict[int, Value]: ...
class Board:
    rows: list[Row]
class Value:
    @classmethod
    def of(cls) -> Value | None: ...
"""
    path = census.ROOT / "goldfinch/made_up.py"
    assert census.classes_of_rows({path: ast.parse(code)}) == [
        "goldfinch/made_up.py Line",
        "goldfinch/made_up.py Table",
    ]


def test_a_public_name_that_two_modules_define_is_found() -> None:
    trees = {Path("a.py"): ast.parse("class Run: ..."), Path("b.py"): ast.parse("def Run(): ...\ndef _own(): ...")}
    assert list(census.defined_twice(trees)) == ["Run"]


def test_names_that_goldfinch_imports_are_counted_once() -> None:
    path = census.ROOT / "goldfinch/results/made_up.py"
    code = "from common.metrics import RULES\n\n\ndef f():\n    from common.metrics import RULES, COUNTED\n"
    trees = {path: ast.parse(code), census.ROOT / "common/a.py": ast.parse("from common.text import size")}
    found = census.imported(trees, census.READS_RUNS)
    assert census.names_of(found) == ["common.metrics.COUNTED", "common.metrics.RULES"]


def test_an_import_within_a_function_counts_as_one_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measure.ROOT", tmp_path)
    (tmp_path / "one.py").write_text("def f():\n    import two\n")
    (tmp_path / "two.py").write_text("import one\n")
    paths = sorted(tmp_path.glob("*.py"))
    assert circles(imports_of(paths)) == []
    assert circles(imports_of(paths, within_functions=True)) == [["one", "two"]]
