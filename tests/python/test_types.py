"""Editors and type checkers find Goldfinch, and know the keywords of its functions."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import goldfinch as gf
from common.overrides import SHORT
from common.round_settings import TrainSettings
from goldfinch.overrides import SETTINGS, RunKeywords, SharedKeywords, SweepKeywords

RIGHT = """\
from pathlib import Path

import goldfinch as gf


class Mine(gf.Method):
    pass


run = gf.run("train.local_steps=2", method="fpl", rounds=3, learning_rate=0.1, output=Path("a"), seed=None)
average: float = run.average
again: gf.Run = gf.resume("a", rounds=4)
runs = gf.sweep(method=["fedavg", Mine], seed=range(3), rounds=2)
gf.table(runs, values="mean")
gf.compare(["fedavg"], studies=2, data="glyphs", rounds=2)
"""

WRONG = {
    "rounds of text": 'gf.run(rounds="ten")',
    "a misspelt name": "gf.run(seeds=0)",
    "a method that is a number": "gf.run(method=3)",
    "a resumed run with a misspelt name": 'gf.resume("a", epoch=2)',
    "a sweep over words for numbers": 'gf.sweep(seed="a")',
    "a comparison of one seed": 'gf.compare(["fpl"], seed=3)',
    "studies of text": 'gf.compare(["fpl"], studies="two")',
    "values that no table has": 'gf.table([], values="median")',
    "a number that is a text": "text: str = gf.load_run('a').average",
}


def checker(name: str) -> list[str]:
    """Return the command of a type checker, which finds Goldfinch as this interpreter does."""
    if name == "mypy":
        return [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent"]
    for program in ("pyright", "basedpyright"):
        if shutil.which(program):
            return [program, "--level", "error", "--pythonpath", sys.executable]
    pytest.skip("neither pyright nor basedpyright is installed")


@pytest.mark.long
@pytest.mark.parametrize("name", ["mypy", "pyright"])
def test_checkers_in_an_empty_folder_accept_what_is_right_and_report_what_is_wrong(name: str, tmp_path: Path) -> None:
    command = checker(name)
    (tmp_path / "right.py").write_text(RIGHT)
    for number, statement in enumerate(WRONG.values()):
        (tmp_path / f"wrong_{number}.py").write_text(f"import goldfinch as gf\n\n{statement}\n")
    done = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "right.py" not in done.stdout, done.stdout
    for number, case in enumerate(WRONG):
        assert f"wrong_{number}.py:3" in done.stdout, (case, done.stdout, done.stderr)


def test_keywords_of_training_have_the_types_of_its_settings() -> None:
    of_settings, of_keywords = get_type_hints(TrainSettings), get_type_hints(RunKeywords)
    for name in SHORT:
        assert of_keywords[name] == of_settings[name] | None


def test_a_sweep_has_the_keywords_of_a_run_but_those_of_one_folder() -> None:
    assert set(SETTINGS) == set(get_type_hints(RunKeywords))
    assert set(get_type_hints(RunKeywords)) - set(get_type_hints(SweepKeywords)) == {"output", "resume"}
    assert set(get_type_hints(SweepKeywords)) - set(get_type_hints(RunKeywords)) == set()


@pytest.mark.parametrize(
    ("function", "keywords"),
    [(gf.run, RunKeywords), (gf.resume, RunKeywords), (gf.sweep, SweepKeywords), (gf.compare, SharedKeywords)],
    ids=["run", "resume", "sweep", "compare"],
)
def test_help_and_notebooks_show_every_keyword(function: object, keywords: type) -> None:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    assert set(get_type_hints(keywords)) <= set(parameters)
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
