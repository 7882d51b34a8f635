"""The census of concepts stays below its limits: what leaves Goldfinch does not creep back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bench import census
from bench.measure import a_round, circles, functions_of, imports_of, product

LIMITS = {
    "settings": 237,
    "settings never set": 134,
    "settings never set nor named": 93,
    "commands": 21,
    "public names defined twice": 31,
    "renderers of a table": 13,
    "circles": 1,
    "words of Markdown": 87_900,
}
"""The most of each that the checkout may have. Lower a limit when something leaves; raise none without a named user."""

ROUND_LIMITS = {"classes": 52, "functions": 279, "files": 32, "records": 10}
"""The most that the second round of FPL on the inline engine may run through, and that its folder may hold."""


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in product()}


def test_the_census_stays_below_its_limits(trees: dict[Path, ast.Module]) -> None:
    settings = census.settings()
    unset = settings - census.set_somewhere()
    found = {
        "settings": len(settings),
        "settings never set": len(unset),
        "settings never set nor named": len(unset - census.named_on_pages()),
        "commands": len(census.commands()),
        "public names defined twice": len(census.defined_twice(trees)),
        "renderers of a table": len(census.renderers(trees)),
        "circles": len(circles(imports_of(list(trees), within_functions=True))),
        "words of Markdown": census.words(),
    }
    assert found.keys() == LIMITS.keys()
    assert {name: count for name, count in found.items() if count > LIMITS[name]} == {}
    assert min(found.values()) >= 0
    assert found["settings"] > 100, "the settings were not found"
    assert found["words of Markdown"] > 10_000, "the pages were not found"


def test_a_round_stays_below_its_limits(trees: dict[Path, ast.Module], tmp_path: Path) -> None:
    ran, classes = a_round(functions_of(trees), tmp_path)
    found = {
        "classes": len(classes),
        "functions": len(ran),
        "files": len({function.path for function in ran}),
        "records": len(census.records(tmp_path / "run")),
    }
    assert {name: count for name, count in found.items() if count > ROUND_LIMITS[name]} == {}
    assert "strategies.core.federation.Federation" in classes


def test_settings_are_found_by_group_and_key() -> None:
    found = census.settings()
    assert {"train.rounds", "method.temperature", "rounds.quorum", "seed"} <= found
    assert "protocol.counts" in found, "a mapping by domain is one setting"
    assert not any("_target_" in key for key in found)
    assert "train.rounds" in census.set_somewhere()


def test_a_function_that_writes_a_table_is_found() -> None:
    path = census.ROOT / "server/made_up.py"
    code = 'def one():\n    return "|---:|"\n\n\ndef two():\n    return 1\n'
    assert census.renderers({path: ast.parse(code)}) == ["server/made_up.py one"]


def test_a_public_name_that_two_modules_define_is_found() -> None:
    trees = {Path("a.py"): ast.parse("class Run: ..."), Path("b.py"): ast.parse("def Run(): ...\ndef _own(): ...")}
    assert list(census.defined_twice(trees)) == ["Run"]


def test_an_import_within_a_function_counts_as_one_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measure.ROOT", tmp_path)
    (tmp_path / "one.py").write_text("def f():\n    import two\n")
    (tmp_path / "two.py").write_text("import one\n")
    paths = sorted(tmp_path.glob("*.py"))
    assert circles(imports_of(paths)) == []
    assert circles(imports_of(paths, within_functions=True)) == [["one", "two"]]
