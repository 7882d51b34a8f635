"""How large the house is: lines, files that one round runs through, circles, and what should exist once.

    make measure
    python bench/measure.py --dry-run   # the same: it takes seconds and writes nothing

Every figure is counted, none is written down here:

- product lines: all lines of client/, common/, server/ and strategies/.
- files of an FPL round: the project's files of which a function runs between the events ``round`` and ``round done`` of
  the second round of FPL on the inline engine, which is what someone opens who follows a round with a debugger. Lines
  are those of the whole files.
- circles: groups of modules that import each other when they are loaded, at whatever length.
- closing an exchange: functions that call a method's ``aggregate``. Reading a finished run: files outside server/run/
  in which the name of one of a run's files is a string of its own. What does not change a result: collections that list
  both ``output`` and ``overwrite``.
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, whatever is installed

from bench.measuring import arguments, start

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client", "common", "server", "strategies")
RUN_FILES = ("config.yaml", "summary.json", "history.csv", "activity.csv")
SMALL = ["method=fpl", "engine=inline", "train.device=cpu", "train.rounds=2", "train.local_steps=2"]
SMALL += ["protocol.samples=24", "rounds.test_samples=8"]


def main() -> None:
    """Print the table, then what lies behind it."""
    arguments(__doc__).parse_args()
    sources = product()
    texts = {path: path.read_text() for path in sources}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    visited = files_of_a_round()
    prototype = [
        path
        for path in sources
        if path.parent == ROOT / "common/kernels" or path.match("common/losses/prototype*.py")
        if path.name != "__init__.py"
    ]
    found = circles(imports_of(sources))
    longest = max((path for path in sources if path.parent == ROOT / "strategies"), key=lines.__getitem__)
    closing = list(closes_an_exchange(trees))
    reading = list(reads_a_run(trees))
    neutral = list(lists_what_is_neutral(trees))
    rows = [
        ("product lines", f"{sum(lines.values()):,} in {len(sources)} files"),
        ("files of one FPL round, inline", f"{len(visited)} ({sum(lines[path] for path in visited):,} lines)"),
        (
            "prototype losses, operator and kernels",
            f"{len(prototype)} files, {sum(lines[path] for path in prototype):,} lines",
        ),
        ("circles of imports", str(len(found))),
        ("longest method file", f"{longest.stem}, {lines[longest]} lines"),
        ("ways to close an exchange / read a finished run / say what does not change a result",
         f"{len(closing)} / {len(reading)} / {len(neutral)}"),
    ]  # fmt: skip
    for name, value in rows:
        print(f"| {name} | {value} |")
    for title, places in (
        ("files of one FPL round", [f"{place(path)} {lines[path]}" for path in visited]),
        ("circles", [" <-> ".join(members) for members in found]),
        ("closing an exchange", closing),
        ("reading a finished run", reading),
        ("what does not change a result", neutral),
    ):
        print(f"\n{title}:", *(places or ["none"]), sep="\n  ")


def place(path: Path) -> str:
    """``path`` as the repository names it."""
    return path.relative_to(ROOT).as_posix()


def product() -> list[Path]:
    """All Python files that are shipped."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def files_of_a_round() -> list[Path]:
    """The files of which a function ran in the second round of FPL, inline."""
    from common.settings import load_settings
    from server.engines.inline import InlineEngine
    from server.run.conduct import conduct, prepare_output

    within, seen = False, set()

    def listen(name: str, entry: Mapping[str, Any]) -> None:
        nonlocal within
        if name in ("round", "round done"):
            within = name == "round" and entry["round"] == 2

    def profile(frame: Any, event: str, _argument: object) -> None:
        if within and event == "call" and frame.f_code.co_name != "<module>":
            seen.add(frame.f_code.co_filename)

    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings([*SMALL, f"output={folder}/run"])
        prepare_output(settings)
        engine = InlineEngine(settings)
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            conduct(settings, engine, [listen])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # as documented
    known = {os.path.realpath(path): path for path in product()}
    return sorted(known[name] for name in map(os.path.realpath, seen) if name in known)


# ---- imports ---------------------------------------------------------------------------------------------------------


def imports_of(paths: Sequence[Path]) -> dict[str, set[str]]:
    """By module, the modules among ``paths`` that loading it imports; what is imported in functions does not count."""
    modules = {module_name(path): path for path in paths}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        graph[name] = set()
        for node in at_module_level(ast.parse(path.read_text()).body):
            for wanted in named_by(node):
                while wanted and wanted not in modules:  # a class of a module, or what another package has
                    wanted = wanted.rpartition(".")[0]
                if wanted and wanted != name:
                    graph[name].add(wanted)
    return graph


def module_name(path: Path) -> str:
    """The dotted name under which ``path`` is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def at_module_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is loaded, also within ``if``, ``try`` and classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_module_level(node.orelse)
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from at_module_level(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from at_module_level(handler.body)


def named_by(node: ast.stmt) -> list[str]:
    """The modules, or names in modules, that an import statement names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of two or more modules each of which reaches all others: strongly connected components (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for name in sorted(graph):
        if name not in order:
            visit(name)
    return found


# ---- what should exist once ------------------------------------------------------------------------------------------


def closes_an_exchange(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Functions outside the methods that call ``something.aggregate(...)``."""
    for path, tree in trees.items():
        if path.parent.name == "strategies":
            continue
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "aggregate":
                    yield f"{place(path)}:{node.lineno} {function.name}"


def reads_a_run(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Files outside server/run/ that name one of a run's files."""
    for path, tree in trees.items():
        named = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in RUN_FILES}
        if named and path.parent != ROOT / "server/run":
            yield f"{place(path)}: {', '.join(sorted(named))}"


def lists_what_is_neutral(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Collections that hold both ``output`` and ``overwrite``."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                values = {getattr(item, "value", None) for item in node.elts}
                if {"output", "overwrite"} <= {value for value in values if isinstance(value, str)}:
                    yield f"{place(path)}:{node.lineno}"


if __name__ == "__main__":
    start(main)
