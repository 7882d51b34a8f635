"""``goldfinch list``: the choices of each group of ``conf/`` with a line on each, nothing of them imported."""

import ast
import itertools
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from common.choices import CONF, choices_of
from common.errors import ConfigError, nearest
from common.versions import place_of


def print_choices(groups: Sequence[str]) -> None:
    """Print the choices of ``groups``, or of all.

    Raises:
        ConfigError: there is no such group.
    """
    known = sorted(path.name for path in CONF.iterdir() if path.is_dir())
    width = max(60, shutil.get_terminal_size((1000, 24)).columns)  # of no terminal: nothing is cut
    for group in groups or known:
        if group not in known:
            raise ConfigError(f"{group}: no such group; {nearest(group, known)}")
        print(f"{group}=")
        for _, path in sorted(choices_of(group).items()):
            print(f"  {path.stem:24} {textwrap.shorten(description(path), width - 27, placeholder=' ...')}".rstrip())


def description(path: Path) -> str:
    """The first sentence of the comment that a choice's file begins with, else of the docstring of its class."""
    text = path.read_text(encoding="utf-8")
    comment = [line[1:].strip() for line in itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())]
    lines = [line for line in comment if not line.startswith("@package")]
    if lines and lines[0].startswith("goldfinch "):  # a command, and beside it what it is for
        lines = lines[0].split("  ", maxsplit=1)[1:] or lines[1:]
    lines = [line for line in lines if not line.startswith("goldfinch ")]
    target = re.search(r"^_target_: ([\w.]+)\.(\w+)$", text, re.MULTILINE)
    said = " ".join(lines).strip(" ()") or (_docstring(target[1], target[2]) if target else "")
    return re.split(r"(?<=[^.]\.)\s(?=[A-Z])", said, maxsplit=1)[0]


def _docstring(module: str, name: str) -> str:
    package, _, rest = module.partition(".")
    place = place_of(package)
    path = place.joinpath(*rest.split(".")).with_suffix(".py") if place and rest else place
    if path is None or not path.is_file():  # of a package of the user's that is not installed here
        return ""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return " ".join((ast.get_docstring(found[0]) or "").split("\n\n")[0].split()) if found else ""
