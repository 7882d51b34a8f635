"""Every ``goldfinch`` and ``flwr run`` command that a page shows is one that the program takes, with those settings."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from flwr.common.config import parse_config_args
from support.scripts import ROOT

import goldfinch.cli
from common.choices import choices_of
from common.overrides import overrides_in, split_overrides
from common.settings import load_settings
from goldfinch.commands import reproduce, sweep
from goldfinch.commands.program import items_of, seeds_of
from goldfinch.study.options import Rules
from goldfinch.study.rules import entrants_of

PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"^```(?:bash|sh|console)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^    (goldfinch .*)$", re.MULTILINE)
SPAN = re.compile(r"`(goldfinch [a-z-]+(?: [^`]*)?|flwr run [^`]*)`")
COMMAND = re.compile(r"(?:^|\s)((?:goldfinch|flwr run) .*)")

ERROR = re.compile(r"^\$ (goldfinch .*)\n(error: .*)$", re.MULTILINE)

VARIABLE = re.compile(r'^([A-Z][A-Z0-9]*)="?(.*?)"?$', re.MULTILINE)

NOT_WHOLE = ("...", "KEY=", "=ID", "NAME=", "TABLE", "$change", "goldfinch program")
"""What a text says in place of words of the reader's own."""

NOT_HERE = ("goldfinch import", "--methods fedavg,fedproto,fpl,warm_fpl")
"""What a block writes or needs that it made: tests/commands/test_first_paper.py runs the page."""

NOT_COMPOSED = {
    "tuned=outputs": "a file that the command before it writes; tests/study/test_compare.py runs both",
    "lr=0.1": "test_the_errors_of_the_pages_are_those_that_are_printed runs it",
    "train.round=5": "likewise",
    "data.path=scans.csv": "a table of the reader's own; tests/data/test_table.py makes such",
    "engine.connection=NAME": "a connection of the reader's own; tests/engines/test_processes.py makes one",
}
"""Commands with settings that are not composed here, by a part of the command, and why."""

NO_SETTINGS = {
    *(
        "certificates",
        "dismiss",
        "doctor",
        "enrol",
        "evaluate",
        "export",
        "figure",
        "list",
        "report",
        "resume",
        "table",
    ),
}
"""Commands that take folders and options, which the program parses, or a run that must be there."""

ALL_METHODS, SOME_METHODS = "method=*", "method=fedavg,fpl"
"""To compose takes a third of a second, and tests/conformance composes every method."""


def documented(page: Path) -> list[str]:
    """The commands of a page, each on one line, with the page's shell variables put in."""
    text = re.sub(r"\s*\\\n\s*", " ", page.read_text())
    found = list(INDENTED.findall(text))
    for block in BLOCK.findall(text):
        for line in block.splitlines():
            match = COMMAND.search(line.split(" #")[0])
            if match and "docker" not in line and "git clone" not in line:
                found.append(match[1])
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found += [" ".join(span.split()) for span in SPAN.findall(prose)]
    variables = dict(VARIABLE.findall(text))
    lines = []
    for line in found:
        for name, value in sorted(variables.items(), key=lambda item: -len(item[0])):
            line = line.replace(f"${name}", value)
        lines.append(re.split(r"\s{2,}|\s[|;&]", line.strip())[0])
    return lines


def shown() -> dict[str, str]:
    """Each command once, with the name of its test."""
    found: dict[str, str] = {}
    for page in PAGES:
        for line in documented(page):
            if not any(word in line for word in (*NOT_WHOLE, *NOT_HERE)):
                found.setdefault(line, f"{page.relative_to(ROOT)}: {line}"[:100].strip())
    return found


SHOWN = shown()


def check_flower(words: list[str]) -> None:
    """Settings that ``flwr run`` would bring to the ServerApp."""
    if "--run-config" in words:
        configuration = parse_config_args([words[words.index("--run-config") + 1]])
        load_settings(split_overrides(overrides_in(configuration)))


def check_goldfinch(name: str, given: dict[str, Any], folder: Path) -> None:
    """Compose the settings of one of our commands, after the program has parsed its arguments and options."""
    overrides = given.get("overrides") or []
    if name in {"run", "demo"}:
        load_settings(overrides)
    elif name == "sweep" and overrides:
        sweep.plan([word.replace(ALL_METHODS, SOME_METHODS) for word in overrides], folder)
    elif name == "compare" and given["methods"]:
        scores, methods = items_of(given["scores"]) or Rules.scores, items_of(given["methods"])
        rules = Rules(given["studies"], given["trials"], given["runs"], scores, given["weighting"])
        assert set(methods) <= choices_of("method").keys()
        assert entrants_of(methods[:2], overrides, rules)[0]
    elif name == "reproduce" and given["table"]:
        seeds = seeds_of(given["seeds"])
        request = reproduce.request_of(given["table"], given["scale"], items_of(given["methods"]), seeds)
        table = request.table
        rows = table.select(request.methods) if request.methods else table.rows_at(request.scale)
        if not request.overrides:  # tests/reproduce/test_published.py checks the settings of all rows
            rows = rows[:1]
        assert reproduce.planned_jobs(table, rows, (0,), request.scale, folder, request.overrides)
    else:
        assert name in NO_SETTINGS or not overrides


@pytest.mark.usefixtures("no_files_needed")
@pytest.mark.parametrize("line", SHOWN, ids=SHOWN.values())
@pytest.mark.long
def test_a_command_of_a_page_is_taken(line: str, tmp_path: Path) -> None:
    words = shlex.split(line)
    if words[0] == "flwr":
        if not any(part in line for part in NOT_COMPOSED):
            check_flower(words)
        return
    group = typer.main.get_command(goldfinch.cli.app)
    assert isinstance(group, click.Group)
    if words[1].startswith("--"):
        group.make_context("goldfinch", words[1:], resilient_parsing=True)
        return
    name = words[1]
    assert name in group.commands, f"goldfinch has no command {name}"
    context = click.Context(group, info_name="goldfinch")
    command, rest = group.commands[name], words[2:]
    if isinstance(command, click.Group) and rest:
        context = click.Context(command, info_name=name, parent=context)
        name, *rest = rest
        assert name in command.commands, f"goldfinch {words[1]} has no command {name}"
        command = command.commands[name]
    if rest:
        given = command.make_context(name, rest, parent=context).params
        if not any(part in line for part in NOT_COMPOSED):
            check_goldfinch(name, given, tmp_path)


def test_commands_of_the_pages_are_found() -> None:
    assert len(SHOWN) > 100
    assert any(line.startswith("flwr run") and "--run-config" in line for line in SHOWN)
    for part in NOT_COMPOSED:
        assert any(part in line for line in SHOWN), f"no page shows {part} any more: take it out of NOT_COMPOSED"


def errors() -> list[tuple[str, str]]:
    """The commands of the pages that fail, with what they print."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        found += ERROR.findall(page.read_text())
    return found


@pytest.mark.parametrize(("line", "printed"), errors(), ids=[line for line, _ in errors()])
def test_the_errors_of_the_pages_are_those_that_are_printed(
    line: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert goldfinch.cli.main(shlex.split(line)[1:]) == 1
    expected = ".*".join(map(re.escape, printed.split("...")))
    assert re.fullmatch(expected, capsys.readouterr().err.strip(), re.DOTALL)
