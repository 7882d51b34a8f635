"""Scripts, their options and targets of make that a page or the Makefile names are there, and who runs each target."""

from __future__ import annotations

import re

import pytest
from support.scripts import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "Makefile"]
BLOCK = re.compile(r"```(?:bash|sh|console)?\n(.*?)```", re.DOTALL)


def lines(name: str) -> list[str]:
    text = (ROOT / name).read_text()
    code = [text] if name == "Makefile" else BLOCK.findall(text)
    return "\n".join(code).replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in PAGES])
def test_scripts_and_targets_of_a_page_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in lines(page):
        command = line.partition(" #")[0].strip()
        if found := re.search(r"python (bench/\w+\.py)(.*)", command):
            source = (ROOT / found[1]).read_text()
            for option in re.findall(r"(?<!\S)--[a-z-]+", found[2]):
                assert option == "--dry-run" or f'"{option}"' in source, f"{found[1]} has no {option}: {line}"
        if page != "Makefile" and (target := re.match(r"make ([a-z-]+)", command)):
            assert target[1] in targets, line


RUN_BY = {
    "setup": "every other target",
    "test": ".ci/run",
    "lint": "make test",
    "test-fast": "make test",
    "test-portable": "make test",
    "test-without-data": ".ci/run",
    "demo": "tests/report/test_demo_report.py, without Ray; make demo itself before a release, in a fresh clone",
    "certificates": "tests/deployment/test_certificates.py",
    "doctor": "tests/deployment/test_clock.py",
    "docs": "tests/test_documentation.py builds the site, where mkdocs is installed; .github/workflows",
}
"""What runs a target of the Makefile, or the command behind it."""

NOT_RUN = {
    "compose-demo": "needs Docker and minutes; docker/last_run.json says when it last ran, and .ci/run prints it",
    "test-compose": "needs Docker and minutes; docker/last_run.json says when it last ran, and .ci/run prints it",
    "deployment-demo": "a minute; tests/engines/test_processes.py runs the same SuperLink and SuperNodes",
    "test-slow": "minutes; before a release",
    "test-faults": "hours: each fault thirty times; make test-fast tries each fault once",
    "soak": "half an hour; make test-slow runs four minutes of it",
    "test-times": "make test with durations",
    "bench": "hours on an idle machine; test_scripts.py runs every script dry",
    "measure": "test_scripts.py runs bench/measure.py",
    "lock": "resolves versions over the network; tests/deployment/test_installing.py checks what it wrote",
    "format": "rewrites the sources; make lint checks that there is nothing to rewrite",
    "clean": "removes what was made here",
    "help": "prints the targets that have a description",
}
"""Targets that no test and no continuous integration runs, and why."""


def test_every_target_is_run_by_something_or_has_a_reason_not_to() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets == set(RUN_BY) | set(NOT_RUN)
    assert not set(RUN_BY) & set(NOT_RUN)
