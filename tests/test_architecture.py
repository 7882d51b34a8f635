"""The house: what may import what, no pickle, small files, and configuration that matches the code."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from importlinter.cli import lint_imports

from bench.measure import circles, imports_of
from common.choices import CONF
from common.composition import compose_config
from common.config import build
from common.overlays import find_overlay
from common.settings import load_settings
from strategies.core.method import Method

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("common", "strategies", "client", "server", "goldfinch")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
METHODS = sorted((CONF / "method").glob("*.yaml"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_contracts_between_the_rooms_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    graph = imports_of(SOURCES)
    assert sum(map(len, graph.values())) > len(SOURCES)
    assert circles(graph) == []


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FORBIDDEN_MODULES = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal")
FORBIDDEN_CALLS = ("torch.load", "torch.save", "np.load", "numpy.load", "eval", "exec", "compile", "__import__")


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(tree: ast.AST) -> list[str]:
    """Ways to run or to write code as data: modules, calls, and ``allow_pickle`` other than False.

    ``torch.load`` may read a user's weights, with ``weights_only=True``, which runs no code.
    """
    found = [name for name in imports(tree) if name.partition(".")[0] in FORBIDDEN_MODULES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            safe = any(
                word.arg == "allow_pickle" and getattr(word.value, "value", 1) is False for word in node.keywords
            )
            if name == "torch.load":
                safe = any(
                    word.arg == "weights_only" and getattr(word.value, "value", 0) is True for word in node.keywords
                )
            if name in FORBIDDEN_CALLS and not safe:
                found.append(f"{name} in line {node.lineno}")
            found += [
                f"allow_pickle in line {node.lineno}"
                for word in node.keywords
                if word.arg == "allow_pickle" and getattr(word.value, "value", 1) is not False
            ]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_pickle_and_no_code_from_data(path: Path) -> None:
    assert not offences(ast.parse(path.read_text()))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import numpy as np\nnp.load('x')",
        "f(allow_pickle=True)",
        "eval('1')",
    ],
    ids=["the module", "a name of it", "torch.load", "torch.load of all", "numpy.load", "allow_pickle", "eval"],
)
def test_the_search_for_pickle_finds_it(text: str) -> None:
    assert offences(ast.parse(text))
    assert not offences(ast.parse("import numpy as np\nnp.load('x', allow_pickle=False)\nmodel.eval()"))


def test_randomness_is_always_keyed() -> None:
    """Global generators would tie results to the order of calls; ``initialised`` and ``seeded_globals`` guard them."""
    wrong = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        tree.body = [node for node in tree.body if getattr(node, "name", "") != "seeded_globals"]
        for node in ast.walk(tree):
            name = dotted(node.func) if isinstance(node, ast.Call) else ""
            draws = name in ("torch.rand", "torch.randn", "torch.randint", "torch.randperm", "torch.bernoulli")
            keyed = isinstance(node, ast.Call) and any(word.arg == "generator" for word in node.keywords)
            if name in ("torch.manual_seed", "np.random.seed", "random.seed", "random.random") or (draws and not keyed):
                wrong.append(f"{name_of(path)}:{node.lineno} {name}")
    assert not wrong


LONGEST_FUNCTION = 60
KNOWN_LONG_FUNCTIONS = {"prototype_kernel": 200, "search": 71, "submit": 61}
"""Lines of functions that are longer; a Triton kernel is one function, the others are to become shorter."""


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_functions_are_short(path: Path) -> None:
    """A function fits on one screen; its docstring is not counted. How long a file is follows from its subject."""
    too_long = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
            if lines > KNOWN_LONG_FUNCTIONS.get(node.name, LONGEST_FUNCTION):
                too_long.append(f"{node.name}: {lines} lines")
    assert not too_long


def test_empty_and_absent_package_files() -> None:
    assert (ROOT / "server/__init__.py").read_text() == ""
    assert (ROOT / "client/__init__.py").read_text() == ""
    assert not list(CONF.rglob("__init__.py"))
    assert not list((ROOT / "docker").rglob("__init__.py"))


def test_which_statuses_trained_is_stated_in_one_place() -> None:
    """A scaled update was used: who compares with "trained" alone forgets those clients."""
    home = ROOT / "common/wire/messages.py"
    wrong = []
    for path in [*SOURCES, *sorted((ROOT / "docker").glob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            spelled = isinstance(node, ast.Constant) and node.value in ("scaled", "trained")
            if spelled and path != home and name_of(path) not in STATUS_NAMED:
                wrong.append(f"{name_of(path)}:{node.lineno} {node.value!r}")
    assert not wrong
    for path in [*(ROOT / "docker").glob("*.sh"), *(ROOT / "server").rglob("*.html")]:
        assert not re.search(r"""status[^\n]{0,10}==\s*['"](trained|scaled)""", path.read_text()), path


STATUS_NAMED = {"goldfinch/results/report/results.py", "strategies/fdse.py"}
"""Where the words name a column of the report, or a choice of a method's own."""


def test_flower_and_ray_are_imported_where_they_belong() -> None:
    allowed = {"strategies/core/flower.py", "client/app.py", "client/supernode.py", "client/supervision.py"}
    wrong = [
        name_of(path)
        for path in SOURCES
        if any(name.partition(".")[0] in ("flwr", "ray") for name in imports(ast.parse(path.read_text())))
        and name_of(path) not in allowed
        and not name_of(path).startswith(("server/engines/", "server/flower/"))
        and name_of(path) != "server/app.py"
    ]
    assert not wrong


# ---- conf/ -----------------------------------------------------------------------------------------------------------


def group_files() -> list[Path]:
    """Every choice of a group; methods, experiments, tuned and printed values have tests of their own."""
    others = ("method", "experiment", "tuned", "printed")
    groups = [folder for folder in CONF.iterdir() if folder.is_dir() and folder.name not in others]
    return sorted(path for folder in groups for path in folder.rglob("*.yaml"))


@cache
def node_of(path: Path, *overrides: str) -> dict[str, Any]:
    group = path.parent.relative_to(CONF).as_posix()
    more = {"folder": ["data.domains=[a]"], "table": ["data.path=images.csv", "data.domains=[a]"]}.get(path.stem, [])
    if group == "attack" and path.stem != "none":
        more = ["attack.clients=[signs-0]"]
    return dict(compose_config([f"{group}={path.stem}", *more, *overrides])[group])


@pytest.mark.parametrize("path", group_files(), ids=lambda path: path.relative_to(CONF).as_posix())
def test_every_file_composes_and_builds(path: Path) -> None:
    node = node_of(path)
    if "_target_" in node:
        build(node, path.parent.name)


def experiments() -> list[Path]:
    return sorted((CONF / "experiment").rglob("*.yaml"))


@pytest.mark.parametrize("path", experiments(), ids=lambda path: path.relative_to(CONF).as_posix())
def test_every_experiment_is_a_run_that_can_start(path: Path, tmp_path: Path) -> None:
    name = path.relative_to(CONF / "experiment").with_suffix("").as_posix()
    settings = load_settings([f"experiment={name}", f"data.root={tmp_path}", f"output={tmp_path}"])
    assert settings.protocol.clients(settings.data)
    assert path.read_text().startswith("# "), "an experiment begins with the command that runs it"


@pytest.mark.long
@pytest.mark.parametrize("path", sorted((CONF / "tuned").glob("*_on_*.yaml")), ids=lambda path: path.stem)
def test_tuned_values_have_their_origin_and_are_values_of_a_method(path: Path) -> None:
    method, _, data = path.stem.partition("_on_")
    tuned = load_settings([f"tuned={path.stem}"])
    assert (tuned.method.name, tuned.choices["data"]) == (method, data)
    assert "No test set was looked at" in find_overlay("tuned", path.stem).source


def significant(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.long
@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_method_is_one_file_and_one_short_yaml(path: Path) -> None:
    node = node_of(path, "data=digits")
    method = build(node, "method")
    assert isinstance(method, Method)
    assert method.name == path.stem
    source = Path(inspect.getfile(type(method)))
    assert source == ROOT / "strategies" / f"{path.stem}.py"
    assert len(significant(path.read_text())) <= 5


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_a_composed_method_has_every_field_at_its_default(path: Path) -> None:
    node = node_of(path, "data=digits")
    method = build(node, "method")
    fields = {field.name for field in dataclasses.fields(method)}
    assert set(node) - {"_target_"} == fields
    assert method == type(method)(), "conf/ and the class disagree about a default"
    texts = "".join(str(kind.__doc__) for kind in type(method).__mro__ if issubclass(kind, Method))
    assert all(f"{name}:" in texts or f"{name}," in texts for name in fields)
