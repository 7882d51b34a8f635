"""How large the house is: lines, files that one round runs through, circles, and what should exist once.

    make measure
    python bench/measure.py --dry-run   # the same: it takes seconds and writes nothing

Every figure is counted, none is written down here:

- product lines: all lines of client/, common/, goldfinch/, server/ and strategies/.
- files and functions of an FPL round: the project's functions that run between the events ``round`` and ``round done``
  of the second round of FPL on the inline engine, and the files they are in: what someone opens who follows a round
  with a debugger. A function's lines are counted from ``def`` to its end, without its docstring.
- density: comprehensions and generator expressions, and conditional expressions, per 1,000 lines of code. A line of
  code holds something besides a comment or a docstring.
- longest functions: as above, without docstrings.
- circles: groups of modules that import each other when they are loaded, of any length; of the census, also those whose
  imports are inside functions.
- pages older than the last change of states: pages of docs/results/ with a record, or a date in their first lines, from
  before LAST_STATE_CHANGE. A page is as old as its oldest run. Pages without either are listed as undated.
- closing an exchange: functions that call a method's ``aggregate``. Reading a finished run: files outside server/run/
  in which the name of one of a run's files is a string of its own. What does not change a result: collections that list
  both ``output`` and ``overwrite``.
"""

from __future__ import annotations

import ast
import io
import os
import re
import sys
import tempfile
import threading
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench import census
from bench.measuring import arguments, start
from bench.rows import read_all

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("client", "common", "goldfinch", "server", "strategies")
RUN_FILES = ("config.yaml", "summary.json", "scores.jsonl", "replies.jsonl")
SMALL = ["method=fpl", "engine=inline", "train.device=cpu", "train.rounds=2", "train.local_steps=2"]
SMALL += ["protocol.samples=24", "rounds.test_samples=8"]
LONGEST = 10
"""Functions that are listed as the longest."""

LAST_STATE_CHANGE = ("1d64f67", "2026-11-25T17:52Z")
"""The commit since which a plain run ends in another state, and its time; a change of state hashes writes its own."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
NO_CODE = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)
"""Kinds of tokens that make no line a line of code."""


@dataclass(frozen=True)
class Counted:
    """What is counted: of a round, of the sources and of the census.

    Args:
        sources: the text of each file of the product.
        trees: the same, parsed.
        functions: all functions of the product.
        ran: those that ran in the second round of FPL.
        classes: the classes with a method that ran in it.
        records: what the run left in its folder.
    """

    sources: Mapping[Path, str]
    trees: Mapping[Path, ast.Module]
    functions: Sequence[Function]
    ran: Sequence[Function]
    classes: Sequence[str]
    records: Sequence[str]

    @cached_property
    def lines(self) -> dict[Path, int]:
        """Return the lines of each file."""
        return {path: len(text.splitlines()) for path, text in self.sources.items()}

    @cached_property
    def visited(self) -> list[Path]:
        """Return the files that the round ran through."""
        return sorted({function.path for function in self.ran})

    @cached_property
    def longest(self) -> list[Function]:
        """Return the longest functions."""
        return sorted(self.functions, key=lambda function: -function.lines)[:LONGEST]


def main() -> None:
    """Print the tables, then what they count."""
    arguments(__doc__).parse_args()
    counted = count()
    print_rows(size_rows(counted))
    print("\n| census | |\n|---|---:|")
    concepts = census_of(counted)
    print_rows([(name, f"{len(places):,}") for name, places in concepts.items()])
    print_rows([("words of Markdown", f"{census.words():,}")])
    print("\n| room | lines of code | comprehensions per 1,000 | conditional expressions per 1,000 |")
    print("|---|---:|---:|---:|")
    for room in densities(counted.sources, counted.trees):
        print(f"| {room.name} | {room.code:,} | {room.comprehensions:.0f} | {room.conditionals:.0f} |")
    dates = dates_of_pages()
    commit, time = LAST_STATE_CHANGE
    print_places("files of one FPL round", [f"{place(path)} {counted.lines[path]}" for path in counted.visited])
    print_places("longest functions", [f"{each.lines} {place(each.path)} {each.name}" for each in counted.longest])
    for name, places in concepts.items():
        if name not in NOT_LISTED:
            print_places(name, places)
    print_places("closing an exchange", closes_an_exchange(counted.trees))
    print_places("reading a finished run", reads_a_run(counted.trees))
    print_places("what does not change a result", lists_what_is_neutral(counted.trees))
    print_places(f"pages older than the last change of states ({commit}, {time})", older_than(dates, time))
    print_places("undated pages", [page for page, date in dates.items() if not date])


def count() -> Counted:
    """Read the product and run two rounds."""
    sources = {path: path.read_text() for path in product()}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    functions = functions_of(trees)
    with tempfile.TemporaryDirectory() as folder:
        ran, classes = a_round(functions, Path(folder))
        records = census.records(Path(folder) / "run")
    return Counted(sources, trees, functions, ran, classes, records)


def size_rows(counted: Counted) -> list[tuple[str, str]]:
    """Return the rows about lines and functions, and about what should exist once."""
    lines, ran, visited = counted.lines, counted.ran, counted.visited
    longest = counted.longest[0]
    rows = [
        ("product lines of Python", f"{sum(lines.values()):,} in {len(lines)} files"),
        ("lines of tests", f"{lines_of('tests', 'py'):,}"),
    ]
    for suffix in ("css", "html"):
        rows.append((f"product lines of {suffix}", f"{lines_of('goldfinch', suffix):,}"))
    rows += [
        ("lines of YAML in conf/", f"{lines_of('conf', 'yaml'):,}"),
        ("files of one FPL round, inline", f"{len(visited)} ({sum(lines[path] for path in visited):,} lines)"),
        ("functions of one FPL round, inline", f"{len(ran)} ({sum(function.lines for function in ran):,} lines)"),
        ("longest function", f"{longest.name}, {longest.lines} lines"),
        ("circles of imports", str(len(circles(imports_of(list(lines)))))),
        ("ways to close an exchange", str(len(list(closes_an_exchange(counted.trees))))),
        ("files that read a finished run", str(len(list(reads_a_run(counted.trees))))),
        ("lists of what does not change a result", str(len(list(lists_what_is_neutral(counted.trees))))),
    ]
    return rows


NOT_LISTED = ("settings", "settings never set", "names that goldfinch imports")
"""Parts of the census that are counted and not listed, because they are long."""


def census_of(counted: Counted) -> dict[str, list[str]]:
    """Return what the census counts, by its name."""
    settings = census.settings()
    unset = settings - census.set_somewhere()
    twice: list[str] = []
    for name, paths in census.defined_twice(counted.trees).items():
        twice.append(f"{name}: {', '.join(map(place, paths))}")
    everywhere = circles(imports_of(list(counted.sources), within_functions=True))
    imported = census.imported(counted.trees, ("goldfinch/",))
    by_readers = census.imported(counted.trees, census.READS_RUNS)
    return {
        "classes of a round": list(counted.classes),
        "settings": sorted(settings),
        "settings never set": sorted(unset),
        "settings never set nor named on a page": sorted(unset - census.named_on_pages()),
        "kinds of record in a run's folder": list(counted.records),
        "commands": census.commands(),
        "public names defined twice": twice,
        "renderers of a table": census.renderers(counted.trees),
        "classes that are a row": census.classes_of_rows(counted.trees),
        "modules that goldfinch imports": sorted(imported),
        "names that goldfinch imports": census.names_of(imported),
        "modules that readers of runs import": sorted(by_readers),
        "names that readers of runs import": census.names_of(by_readers),
        "values of conf/ that equal a default": census.values_equal_to_a_default(),
        "circles, imports inside functions counted": [" <-> ".join(members) for members in everywhere],
    }


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of a table of two columns."""
    for name, value in rows:
        print(f"| {name} | {value} |")


def print_places(title: str, places: Iterable[str]) -> None:
    """Print a list with its title; ``none`` if it is empty."""
    print(f"\n{title}:", *(list(places) or ["none"]), sep="\n  ")


# ---- pages of results ------------------------------------------------------------------------------------------------


def dates_of_pages() -> dict[str, str]:
    """Return the time of the oldest run of each page of docs/results/, and of README.md; empty where none is recorded.

    A page that says "made on DAY" at its top has that day. Else its runs are in docs/results/runs.csv, or in a CSV of
    its own name in docs/results/ or bench/results/, with the column ``when``.
    """
    results = ROOT / "docs" / "results"
    runs = read_all(results / "runs.csv")
    found: dict[str, str] = {}
    for path in [ROOT / "README.md", *sorted(results.rglob("*.md"))]:
        page = place(path)
        times = re.findall(r"^> .*[Mm]ade on (\d{4}-\d{2}-\d{2})", path.read_text(), re.MULTILINE)
        rows = [row for row in runs if row["page"] == page]
        for folder in (path.parent, ROOT / "bench" / "results"):
            rows += read_all(folder / f"{path.stem}.csv")
        if not times:
            times = [row["when"] for row in rows if row.get("when")]
        found[page] = min(times, default="")
    return found


def older_than(dates: Mapping[str, str], time: str) -> list[str]:
    """Return the dated pages from before ``time``, each with its date."""
    return [f"{page} {date}" for page, date in dates.items() if date and date < time]


# ---- lines and density -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """A function of the product: where it is, its first line, and its lines without the docstring."""

    path: Path
    name: str
    first_line: int
    lines: int


@dataclass(frozen=True)
class Room:
    """A folder of the product: lines of code, and what they hold per 1,000 of them."""

    name: str
    code: int
    comprehensions: float
    conditionals: float


def lines_of(folder: str, suffix: str) -> int:
    """Return the lines of all files with that suffix below a folder of the repository."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob(f"*.{suffix}"))


def functions_of(trees: Mapping[Path, ast.Module]) -> list[Function]:
    """Return every function and method, also those that are defined in others."""
    found = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                docstring = docstring_lines(node)
                last = node.end_lineno or node.lineno
                found.append(Function(path, node.name, first, last - node.lineno + 1 - len(docstring)))
    return found


def docstring_lines(node: ast.AST) -> range:
    """Return the numbers of the lines that a docstring takes; none where there is no docstring."""
    body = getattr(node, "body", [])
    if not body or not isinstance(body[0], ast.Expr):
        return range(0)
    value = body[0].value
    if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
        return range(0)
    return range(body[0].lineno, (body[0].end_lineno or body[0].lineno) + 1)


def code_lines(text: str, tree: ast.Module) -> int:
    """Return how many lines hold something besides a comment or a docstring."""
    documentation: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            documentation.update(docstring_lines(node))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documentation)


def densities(texts: Mapping[Path, str], trees: Mapping[Path, ast.Module]) -> list[Room]:
    """Return each package, each of its folders, and the whole."""
    folders: dict[str, list[Path]] = {}
    for path in texts:
        parts = path.relative_to(ROOT).parent.parts
        names = ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        for name in [*names, "all"]:
            folders.setdefault(name, []).append(path)
    rooms = []
    for name, paths in sorted(folders.items()):
        code = sum(code_lines(texts[path], trees[path]) for path in paths)
        nodes = [node for path in paths for node in ast.walk(trees[path])]
        comprehensions = sum(isinstance(node, COMPREHENSIONS) for node in nodes)
        conditionals = sum(isinstance(node, ast.IfExp) for node in nodes)
        share = 1000 / max(code, 1)
        rooms.append(Room(name, code, comprehensions * share, conditionals * share))
    return rooms


def place(path: Path) -> str:
    """``path`` as the repository names it."""
    return path.relative_to(ROOT).as_posix()


def product() -> list[Path]:
    """All Python files that are shipped."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def a_round(functions: Sequence[Function], folder: Path) -> tuple[list[Function], list[str]]:
    """Run FPL inline and return what ran in its second round: the functions, and the classes with a method that ran.

    Args:
        functions: those of the product.
        folder: the run writes into ``run`` in this folder.
    """
    from common.settings import load_settings
    from server.engines.inline import InlineEngine
    from server.run.conduct import prepare_output, run_federation

    within, seen = False, set()
    classes: set[str] = set()

    def listen(name: str, entry: Mapping[str, Any]) -> None:
        nonlocal within
        if name in ("round", "round done"):
            within = name == "round" and entry["round"] == 2

    def profile(frame: Any, event: str, _argument: object) -> None:
        if within and event == "call":
            seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
            kind = type(frame.f_locals.get("self"))
            if kind.__module__.partition(".")[0] in PACKAGES:
                classes.add(f"{kind.__module__}.{kind.__qualname__}")

    settings = load_settings([*SMALL, "protocol.validation=0.2", f"output={folder}/run"])
    prepare_output(settings)
    engine = InlineEngine(settings)
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        run_federation(settings, engine, [listen])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # as documented
    places = {(os.path.realpath(name), line) for name, line in seen}
    ran = [function for function in functions if (os.path.realpath(function.path), function.first_line) in places]
    return ran, sorted(classes)


# ---- imports ---------------------------------------------------------------------------------------------------------


def imports_of(paths: Sequence[Path], *, within_functions: bool = False) -> dict[str, set[str]]:
    """Return by module the modules among ``paths`` that loading it imports.

    Args:
        paths: the modules' files.
        within_functions: count what is imported inside functions too.
    """
    modules = {module_name(path): path for path in paths}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        graph[name] = set()
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree) if within_functions else at_module_level(tree.body):
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


def named_by(node: ast.AST) -> list[str]:
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
