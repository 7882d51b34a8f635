"""The census of concepts: what someone has to learn who takes Goldfinch up, counted from the checkout.

``make measure`` prints it; ``tests/test_census.py`` holds its figures below upper limits, so that they do not creep up.

- classes of a round: classes of the product whose methods run between the events ``round`` and ``round done`` of the
  second round of FPL on the inline engine.
- settings: keys of the composed configuration, over all options of all groups of conf/. A key that several options
  have, such as ``method.weighting``, counts once.
- values of conf/ that equal a default: values of options that their class has as its default, too.
- settings never set: of these, the keys that no experiment, tuned or printed value, published row or benchmark sets.
- settings nobody names: of these, the keys that no page names either.
- kinds of record: files and folders that a run writes into its folder, with validation and with one resumption.
- commands of the ``goldfinch`` program; those of a group count as one.
- public names defined twice: functions and classes at the top of two modules, without a leading underscore.
- renderers of a table: functions that write the rows of a table of text, Markdown, HTML, LaTeX or of a terminal.
- classes that are a row: classes with a mean over runs of their own, which is a member of the type ``Value`` (mean and
  deviation) or ``Difference`` (with its interval), or a collection of them. Those two types themselves are none.
- modules and names imported from the code that computes (common, strategies, client, server): by all of goldfinch/, and
  by what reads runs, results/, study/ and reproduction/.
- circles: groups of modules that import each other, where imports inside functions count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from common.choices import choices_of
from common.composition import CLASSES
from common.config import with_defaults

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
VALUES = ("experiment", "tuned", "printed")
"""Groups of conf/ whose files set values of other groups' keys and define none."""

TABLE_MARKS = ("---:", "\\\\ \\hline", "\\midrule", "\\toprule", "<table", "<tr>", "<td>")
"""Text that only a function that writes a table has in its strings."""

TABLE_CALLS = ("Table", "to_markdown", "to_latex", "to_html")
"""Calls that make a table: of rich and of pandas."""

ABSENT = object()
"""Stands for no value."""

VALUES_BY_NAME = ("counts", "fractions")
"""Settings whose value is a mapping by domain; its keys are no settings."""


def settings() -> set[str]:
    """Return the keys of all options of conf/, such as ``train.rounds``."""
    keys = set(leaves(read(CONF / "config.yaml")))
    for group, path in options():
        node = read(path)
        if "_target_" in node or group in CLASSES:
            node = with_defaults(node, group, CLASSES.get(group))
        keys.update(f"{group}.{key}" for key in leaves(node))
    return {key for key in keys if "_target_" not in key}


def values_equal_to_a_default() -> list[str]:
    """Return the values of options that would be the same if the file did not have them."""
    found: list[str] = []
    for group, path in options():
        node = read(path)
        target = _target_of(group, path)
        if target is None and group not in CLASSES:
            continue
        named = {"_target_": target} if target else {}
        defaults = with_defaults(named, group, CLASSES.get(group))
        for key in leaves(node):
            value, default = value_at(node, key), value_at(defaults, key)
            if key != "_target_" and value == default and type(value) is type(default):
                found.append(f"{path.relative_to(ROOT).as_posix()} {key}={value}")
    return found


def options() -> Iterator[tuple[str, Path]]:
    """Yield the group and the file of every option that has settings of its own group."""
    for folder in sorted(path for path in CONF.iterdir() if path.is_dir() and path.name not in VALUES):
        for path in sorted(folder.glob("*.yaml")):
            yield folder.name, path


def _target_of(group: str, path: Path) -> str | None:
    """Return the class that an option names, or the option of its group that it begins with."""
    content = yaml.safe_load(path.read_text()) or {}
    for item in content.get("defaults", ()):
        if isinstance(item, str) and item in choices_of(group):
            return _target_of(group, choices_of(group)[item])
    return content.get("_target_")


def value_at(node: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key; :data:`ABSENT` without one."""
    found: Any = node
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return ABSENT
        found = found[part]
    return found


def set_somewhere() -> set[str]:
    """Return the keys that an experiment, a tuned or printed value, a published row or a benchmark sets."""
    found: set[str] = set()
    for group in VALUES:
        for path in (CONF / group).glob("*.yaml"):
            found.update(leaves(read(path)))
    text = ""
    for path in (ROOT / "goldfinch/reproduction/published").glob("*.yaml"):
        text += path.read_text()
    for path in (ROOT / "bench").glob("*.py"):
        text += path.read_text()
    plain = {key for key in settings() if "." not in key and f"{key}=" in text}  # such as seed
    return found | named_in(text) | plain


def named_on_pages() -> set[str]:
    """Return the dotted names that occur on a page."""
    text = ""
    for path in pages():
        text += path.read_text()
    plain = {key for key in settings() if "." not in key and f"{key}=" in text}
    return named_in(text) | plain


def named_in(text: str) -> set[str]:
    """Return all dotted lower-case names in a text, such as ``train.rounds``."""
    return set(re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", text))


def read(path: Path) -> Mapping[str, Any]:
    """Return the content of an option, without its list of defaults."""
    content = yaml.safe_load(path.read_text()) or {}
    return {key: value for key, value in content.items() if key != "defaults"}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested values; an empty mapping and a list are values."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value and key not in VALUES_BY_NAME:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def pages() -> list[Path]:
    """Return all Markdown files of the project."""
    found = [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md")]
    for folder in ("docs", "docker", "bench"):
        found += (ROOT / folder).rglob("*.md")
    return sorted(found)


def words() -> int:
    """Return the number of words of all Markdown files."""
    return sum(len(path.read_text().split()) for path in pages())


def commands() -> list[str]:
    """Return the commands of the ``goldfinch`` program; those of a group, such as of ``devices``, count as one."""
    import typer.main

    from goldfinch.cli import app

    program: Any = typer.main.get_command(app)
    return sorted(name for name, member in program.commands.items() if not member.hidden)


def defined_twice(trees: Mapping[Path, ast.Module]) -> dict[str, list[Path]]:
    """Return the public functions and classes that the tops of two or more modules define, with the modules."""
    places: dict[str, list[Path]] = {}
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def renderers(trees: Mapping[Path, ast.Module]) -> list[str]:
    """Return the functions that write rows of a table."""
    found: list[str] = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _writes_a_table(node):
                found.append(f"{path.relative_to(ROOT).as_posix()} {node.name}")
    return sorted(found)


def _writes_a_table(function: ast.FunctionDef) -> bool:
    for node in ast.walk(function):
        text = getattr(node, "value", None)
        if isinstance(node, ast.Constant) and isinstance(text, str) and any(mark in text for mark in TABLE_MARKS):
            return True
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in TABLE_CALLS:
                return True
    return False


ROW_TYPES = ("Value", "Difference")
"""The types of a mean over runs, and of a difference between such means."""


def classes_of_rows(trees: Mapping[Path, ast.Module]) -> list[str]:
    """Return the classes with a field, property or method of a type of :data:`ROW_TYPES`."""
    found: list[str] = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in ROW_TYPES and _has_a_mean(node):
                found.append(f"{path.relative_to(ROOT).as_posix()} {node.name}")
    return sorted(found)


def _has_a_mean(node: ast.ClassDef) -> bool:
    for member in node.body:
        annotation = None
        if isinstance(member, ast.AnnAssign):
            annotation = member.annotation
        elif isinstance(member, ast.FunctionDef):
            annotation = member.returns
        if annotation is not None:
            names = {name.id for name in ast.walk(annotation) if isinstance(name, ast.Name)}
            if names.intersection(ROW_TYPES):
                return True
    return False


COMPUTES = ("common", "strategies", "client", "server")
"""The packages that compute, which the code hash covers."""

READS_RUNS = ("goldfinch/results/", "goldfinch/study/", "goldfinch/reproduction/")
"""The folders that should know of a run only what its record says."""


def imported(trees: Mapping[Path, ast.Module], folders: tuple[str, ...]) -> dict[str, set[str]]:
    """Return the names that modules in ``folders`` import from the code that computes, by the module that has them.

    Imports inside functions and for type checkers count.
    """
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        if not path.relative_to(ROOT).as_posix().startswith(folders):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in COMPUTES:
                found.setdefault(str(node.module), set()).update(name.name for name in node.names)
    return found


def names_of(modules: Mapping[str, set[str]]) -> list[str]:
    """Return the names by their full name, sorted."""
    found: list[str] = []
    for module, names in modules.items():
        found += [f"{module}.{name}" for name in names]
    return sorted(found)


def records(folder: Path) -> list[str]:
    """Return what a run wrote into its folder, without the files inside its folders."""
    return sorted(path.name for path in folder.iterdir())
