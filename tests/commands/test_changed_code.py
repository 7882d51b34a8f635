"""A letter is changed in a copy of the checkout: what counts as other code, and what becomes of finished runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.checkouts import copied, goldfinch, python, replaced
from support.exchanges import registration
from support.toy import toy_settings

from strategies.core.participants import Registry

USED, UNUSED = "conf/experiment/used.yaml", "conf/experiment/unused.yaml"
RECIPE = "# @package _global_\n# A recipe of a test.\ntrain:\n  learning_rate: 0.05\n"
METHOD = "strategies/fedavg.py"
TINY = [
    *("experiment=used", "method=fedavg", "data=glyphs", "data.domains=[printed,signs]", "model=small"),
    *("protocol.samples=16", "train.device=cpu", "train.rounds=1", "train.local_steps=1", "rounds.test_samples=8"),
]
SWEEP = ["sweep", *TINY, "seed=0,1", "--output", "swept"]


def of_a_docstring(name: str) -> Callable[[Path], None]:
    return lambda checkout: replaced(checkout, name, '"""', '"""A ')


TELLING: dict[str, Callable[[Path], None]] = {
    "a page": of_a_docstring("goldfinch/results/report/page.py"),
    "a table": of_a_docstring("goldfinch/results/frames.py"),
    "a command": of_a_docstring("goldfinch/commands/running.py"),
    "a comment of the recipe": lambda checkout: replaced(checkout, USED, "of a test", "of one test"),
    "a value of another recipe": lambda checkout: replaced(checkout, UNUSED, "0.05", "0.1"),
}
"""Changes of code that tells of runs, and of recipes."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    place = copied(tmp_path / "checkout")
    for name in (USED, UNUSED):
        (place / name).write_text(RECIPE)
    return place


def hashes(checkout: Path, folder: Path) -> dict[str, Any]:
    """The hash of the checkout's code, and that of each file."""
    text = "import json; from common.versions import code_files, code_sha256; "
    text += "print(json.dumps({'code': code_sha256(), 'files': code_files()}))"
    return dict(json.loads(python(checkout, "-c", text, folder=folder)))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def states(folder: Path) -> dict[str, str]:
    """The code and the final state of each run below the folder."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("summary.json")):
        summary = json.loads(path.read_text())
        found[path.parent.name] = f"{summary['code']} {summary['state_sha256']}"
    return found


def test_a_device_is_refused_by_computing_code_alone_and_its_files_are_named(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = toy_settings("fedavg", tmp_path / "run")
    monkeypatch.setitem(vars(settings), "own_packages", ())  # without that of the toy data
    registry = Registry(settings)
    for change in TELLING.values():
        change(checkout)
    same = hashes(checkout, tmp_path)
    assert registry.admit(registration(settings, "dark-0", code=same["code"], files=same["files"])) is None
    of_a_docstring(METHOD)(checkout)
    (checkout / "common" / "added.py").write_text("")
    other = hashes(checkout, tmp_path)
    reason = registry.admit(registration(settings, "bright-0", code=other["code"], files=other["files"]))
    assert reason is not None
    assert f"differ in common/added.py, {METHOD}: install the same Goldfinch on both" in reason
    own = Registry(toy_settings("fedavg", tmp_path / "run"))
    reason = own.admit(registration(own.settings, "dark-0", code=same["code"], files=same["files"]))
    assert reason is not None
    assert "differ in support: install the same Goldfinch and the same support on both" in reason
    unasked = registry.admit(registration(settings, "bright-0", code=other["code"]))
    assert unasked is not None
    assert "install the same Goldfinch on both" in unasked


@pytest.fixture
def swept(checkout: Path, tmp_path: Path) -> Path:
    """A finished sweep of two seeds."""
    goldfinch(checkout, *SWEEP, folder=tmp_path)
    return tmp_path / "swept"


@pytest.mark.long
def test_what_tells_of_runs_changes_nothing_and_splits_no_row(swept: Path, checkout: Path, tmp_path: Path) -> None:
    for change in TELLING.values():
        change(checkout)
    before = states(swept)
    printed = goldfinch(checkout, *SWEEP, folder=tmp_path)
    assert "2 runs, 2 finished already\n" in printed
    assert "starting" not in printed
    assert states(swept) == before
    goldfinch(checkout, "run", *TINY, "seed=2", "output=later", folder=tmp_path)
    table = goldfinch(checkout, "table", "swept", "later", "--format", "md", folder=tmp_path)
    head, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    assert len(rows) == 1, table
    assert dict(zip(head.split("|"), rows[0].split("|"), strict=True))[" seeds "].strip() == "0,1,2"
    assert "code" not in table


def commands_in(printed: str) -> dict[str, list[str]]:
    """The two commands that a study prints."""
    found: dict[str, list[str]] = {}
    for name, line in re.findall(r"^ *(keep both|train again): +goldfinch (.*)$", printed, flags=re.MULTILINE):
        found[name] = shlex.split(line)
    return found


@pytest.mark.long
def test_other_code_that_computes_is_kept_and_both_commands_work(swept: Path, checkout: Path, tmp_path: Path) -> None:
    of_a_docstring(METHOD)(checkout)
    before = states(swept)
    files = content(swept / "seed-0")
    printed = goldfinch(checkout, *SWEEP, folder=tmp_path)
    assert "2 runs, 0 finished already, 2 kept\n" in printed
    assert printed.count(f"it is of other code, which differs in {METHOD}") == 2
    assert "wrote" in printed, "the table of what is kept"
    assert content(swept / "seed-0") == files
    commands = commands_in(printed)
    assert commands["keep both"][-2:] == ["--output", "swept-2"]
    goldfinch(checkout, *commands["keep both"], folder=tmp_path)
    assert content(swept / "seed-0") == files
    kept = states(tmp_path / "swept-2")
    assert kept.keys() == before.keys()
    goldfinch(checkout, *commands["train again"], folder=tmp_path)
    again = states(swept)
    assert again == kept
    assert {value.split()[0] for value in again.values()}.isdisjoint(value.split()[0] for value in before.values())
    assert "2 runs, 2 finished already\n" in goldfinch(checkout, *commands["train again"], folder=tmp_path)
    assert states(swept) == again


@pytest.mark.long
def test_a_changed_value_is_another_run_which_is_said(swept: Path, checkout: Path, tmp_path: Path) -> None:
    replaced(checkout, USED, "0.05", "0.1")
    shutil.rmtree(swept / "seed-1")
    files = content(swept / "seed-0")
    printed = goldfinch(checkout, *SWEEP, folder=tmp_path, code=1)
    assert "seed=0: the run in its folder is kept: it has other settings: train.learning_rate=0.1, which was" in printed
    assert "some runs are missing" in printed
    assert content(swept / "seed-0") == files
    assert (swept / "seed-1" / "summary.json").exists(), "the other run is done"
    goldfinch(checkout, *commands_in(printed)["train again"], folder=tmp_path)
    assert json.loads((swept / "sweep.json").read_text())["arguments"] == [*TINY, "seed=0,1"]
    assert "2 runs, 2 finished already\n" in goldfinch(checkout, *SWEEP, folder=tmp_path)


@pytest.mark.long
def test_a_run_that_goes_on_with_other_code_says_which_file(checkout: Path, tmp_path: Path) -> None:
    goldfinch(checkout, "run", *TINY, "output=run", folder=tmp_path)
    TELLING["a page"](checkout)
    goldfinch(checkout, "resume", "run", "train.rounds=2", folder=tmp_path)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "code changed" not in events
    of_a_docstring(METHOD)(checkout)
    printed = goldfinch(checkout, "resume", "run", "train.rounds=3", folder=tmp_path)
    assert f"code changed since the rounds that are done: {METHOD}" in printed
