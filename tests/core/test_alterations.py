"""The list of what changes a published algorithm: page and code agree, and what is off by default is off."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.run_config import flat
from common.settings import load_settings
from goldfinch.alterations import WHOSE, alterations
from goldfinch.cli import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design.md"


def test_the_page_has_what_changes_a_plain_run() -> None:
    section = PAGE.read_text().partition("## What changes a published algorithm\n")[2].partition("\n## ")[0]
    found = [line for line in section.splitlines() if line.startswith("|")][2:]
    expected: list[str] = []
    for each in alterations():
        if each.whose not in ("setting", "reading"):  # docs/methods.md has the readings
            expected.append(f"| {each.name} | {each.changes} | {each.when} | {WHOSE[each.whose]} |")
    assert found == expected


def test_the_command_prints_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "alterations"]) == 0
    printed = capsys.readouterr().out
    for each in alterations():
        assert f"  {each.name} ({WHOSE[each.whose]})\n      {each.changes}\n      when: {each.when}\n" in printed


def test_what_is_off_by_default_is_off_in_a_plain_run() -> None:
    settings = load_settings(["method=feddg_ga"])  # the method with a setting in the list
    plain, choices = flat(settings.raw), settings.choices
    named: list[str] = []
    for each in alterations():
        assert bool(each.default) == (each.whose == "setting"), each.name
        named += each.default
    for setting in named:
        key, _, value = setting.partition("=")
        found = choices[key] if key in choices else plain[key]
        if found is None:
            found = "null"
        assert str(found) == value, setting
