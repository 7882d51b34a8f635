"""``goldfinch list``: the choices of each group of ``conf/``, and what a choice or a setting means.

Choices are listed with a line on each, without importing them.
"""

from __future__ import annotations

import ast
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.choices import CONF, choices_of
from common.versions import place_of

if TYPE_CHECKING:
    from goldfinch.explanation import Explanation, Setting

ALTERATIONS_GROUP = "alterations"
"""What ``goldfinch list`` shows besides the groups of ``conf/``."""


MIN_WIDTH = 60
MAX_WIDTH = 100
"""Characters of the lines that explain settings."""


def print_names(names: Sequence[str]) -> None:
    """Print the choices of groups, and what choices and settings are; the choices of all groups without a name.

    Args:
        names: groups (``method``), choices (``fpl``, ``protocol.fpl_office``), settings (``method.temperature``), or
            ``alterations``, which may change a published algorithm (:mod:`goldfinch.alterations`).

    Raises:
        ConfigError: a name is none of these.
    """
    groups = sorted(path.name for path in CONF.iterdir() if path.is_dir())
    for name in names or groups:
        if name == ALTERATIONS_GROUP:
            print_alterations()
        elif name in groups:
            print_choices(name)
            if names and "default" in choices_of(name):  # as of train, which is more than a choice
                print_explanation(name)
        else:
            print_explanation(name)


def print_choices(group: str) -> None:
    """Print the choices of a group, with a line on each."""
    width = max(MIN_WIDTH, shutil.get_terminal_size((1000, 24)).columns)  # without a terminal nothing is cut
    print(f"{group}=")
    for _, path in sorted(choices_of(group).items()):
        print(f"  {path.stem:24} {textwrap.shorten(description(path), width - 27, placeholder=' ...')}".rstrip())


def print_explanation(name: str) -> None:
    """Print what a group, a choice or a setting is, and its settings.

    Raises:
        ConfigError: there is none of this name.
    """
    from goldfinch.explanation import explain  # slow to import, and needed for no list

    explanation = explain(name.replace("=", ".", 1))
    columns = shutil.get_terminal_size((MAX_WIDTH, 24)).columns
    print(_page(explanation, min(MAX_WIDTH, max(MIN_WIDTH, columns))))


def _page(explanation: Explanation, width: int) -> str:
    parts = [explanation.title]
    for paragraph in explanation.text.splitlines():
        parts.append(textwrap.fill(paragraph, width, subsequent_indent="  "))
    for setting in explanation.settings:
        parts += ["", *_lines(setting, width)]
    if not explanation.settings:
        parts += ["", "It has no settings."]
    return "\n".join([*parts, ""])


def _lines(setting: Setting, width: int) -> list[str]:
    """Return a line with key, default and type, and indented lines with the meaning."""
    head = f"{setting.key}={setting.default}"
    if setting.kind:
        head = f"{head}  ({setting.kind})"
    texts = [setting.meaning]
    if setting.search:
        texts.append(f"Searched by goldfinch compare: {setting.search}.")
    if setting.published:
        values = ", ".join(f"{value} ({data})" for data, value in setting.published.items())
        texts.append(f"In papers: {values}.")
    lines = [head]
    for text in texts:
        lines += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
    return lines


def print_alterations() -> None:
    """Print what may change a published algorithm, when, and why a plain run may have it."""
    from goldfinch.alterations import WHOSE, alterations

    print("What may change a published algorithm; a plain run has none of those that are off by default")
    for alteration in alterations():
        print(f"  {alteration.name} ({WHOSE[alteration.whose]})")
        print(f"      {alteration.changes}")
        print(f"      when: {alteration.when}")


def description(path: Path) -> str:
    """Return the first sentence on a choice: of the comment at the top of its file, or of its class's docstring."""
    text = path.read_text(encoding="utf-8")
    comment: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            comment.append(line[1:].strip())
    if comment and comment[0].startswith("goldfinch "):  # a command, and its purpose after two spaces
        purpose = comment.pop(0).partition("  ")[2]
        if purpose:
            comment = [purpose]
    sentences = " ".join([line for line in comment if not line.startswith("goldfinch ")]).strip()
    if sentences.startswith("(") and sentences.endswith(")"):
        sentences = sentences[1:-1]
    target = re.search(r"^_target_: ([\w.]+)\.(\w+)$", text, re.MULTILINE)
    if not sentences and target:
        sentences = _docstring(target[1], target[2])
    return re.split(r"(?<=[^.]\.)\s(?=[A-Z])", sentences, maxsplit=1)[0]


def _docstring(module: str, name: str) -> str:
    """Return the first paragraph of a class's docstring; empty if its package is not installed."""
    package, _, rest = module.partition(".")
    path = place_of(package)
    if path and rest:
        path = path.joinpath(*rest.split(".")).with_suffix(".py")
    if path is None or not path.is_file():
        return ""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
            return " ".join(paragraph.split())
    return ""
