"""``goldfinch list``: print the choices of each group of ``conf/`` with a line on each, without importing them."""

import ast
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from common.alterations import ALTERATIONS, WHOSE
from common.choices import CONF, choices_of
from common.errors import ConfigError, nearest
from common.versions import place_of

ALTERATIONS_GROUP = "alterations"
"""What ``goldfinch list`` shows besides the groups of ``conf/``."""


def print_choices(groups: Sequence[str]) -> None:
    """Print the choices of ``groups``, or of all.

    ``alterations`` among them prints what may change a published algorithm (:mod:`common.alterations`).

    Raises:
        ConfigError: there is no such group.
    """
    known = sorted(path.name for path in CONF.iterdir() if path.is_dir())
    width = max(60, shutil.get_terminal_size((1000, 24)).columns)  # without a terminal nothing is cut
    for group in groups or known:
        if group == ALTERATIONS_GROUP:
            print_alterations()
            continue
        if group not in known:
            raise ConfigError(f"{group}: no such group; {nearest(group, [*known, ALTERATIONS_GROUP])}")
        print(f"{group}=")
        for _, path in sorted(choices_of(group).items()):
            print(f"  {path.stem:24} {textwrap.shorten(description(path), width - 27, placeholder=' ...')}".rstrip())


def print_alterations() -> None:
    """Print what may change a published algorithm, when, and why a plain run may have it."""
    print("What may change a published algorithm; a plain run has none of those that are off by default")
    for alteration in ALTERATIONS:
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
    found = " ".join([line for line in comment if not line.startswith("goldfinch ")]).strip()
    if found.startswith("(") and found.endswith(")"):
        found = found[1:-1]
    target = re.search(r"^_target_: ([\w.]+)\.(\w+)$", text, re.MULTILINE)
    if not found and target:
        found = _docstring(target[1], target[2])
    return re.split(r"(?<=[^.]\.)\s(?=[A-Z])", found, maxsplit=1)[0]


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
