"""Scripts, their options and targets of make that a page or the Makefile names are there."""

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
