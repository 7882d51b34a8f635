"""A day's reading: CONTRIBUTING.md lists the heart, which every run needs, and no other file; it stays a day's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from bench import census
from bench.measure import ROOT, code_lines, imports_of, module_name, product

MOST_LINES = 8_200
"""The most lines of code of the heart."""

MOST_MODULES, MOST_NAMES = 30, 120
"""The most files of the heart that goldfinch/ imports from, and the most names."""

STARTS = ("server.run.conduct", "server.engines.inline", "server.engines.flower", "client.local")
"""Where a run begins: on the server, on each of the two engines, and on a client."""

BESIDE: Mapping[str, tuple[str, ...]] = {
    "methods, one of which a run chooses": (
        r"strategies\.\w+",
        r"strategies\.parts\..*",
        r"strategies\.core\.readings",
    ),
    "networks, one of which a run chooses": (r"common\.models\.(?!base|specs).*",),
    "readers of images": (r"common\.data\.(?!batches|domain|protocols|views).*",),
    "metrics that a run may ask for besides": (r"common\.(confidence|own_metric)", r"server\.run\.measures"),
    "how files and words become settings": (
        r"common\.(choices|composition|config|overlays|overrides|run_config|versions)",
    ),
    "privacy": (
        r"client\.(privacy|ledger|border)",
        r"common\.(privacy|accounting)",
        r"server\.run\.accounting",
        r"strategies\.core\.protection",
    ),
    "guards, and the attacks that they are tried on": (
        r"strategies\.core\.(bounds|robust|attacks)",
        r"server\.run\.attacked",
    ),
    "deployment": (
        r"server\.(app|flower\..*|admission\..*|run\.deployment)",
        r"client\.(app|node|supernode|reasons|private_folder|resident\..*)",
    ),
    "what reads a record again, and tells people of it": (
        r"server\.run\.(chance|schema|files|summary|trackers|tail|events|prototype_log)",
        r"common\.extras",
    ),
    "what makes steps quick, and changes no bit": (
        r"client\.(capture|structure|watched|optimizer|model_state|transfer)",
    ),
    "the kernel": (r"common\.losses\.triton_kernel",),
}
"""The rooms beside the heart: modules by pattern. A run imports them; its data pass through the heart without them."""

GRAPH = imports_of(product(), within_functions=True)
FILES = {module_name(path): path for path in product()}


def is_beside(module: str) -> bool:
    return any(re.fullmatch(pattern, module) for patterns in BESIDE.values() for pattern in patterns)


def heart() -> set[str]:
    """Return the modules that a run reaches by imports, without passing through a room beside."""
    found: set[str] = set()
    waiting = list(STARTS)
    while waiting:
        module = waiting.pop()
        if module not in found and not is_beside(module):
            found.add(module)
            waiting += GRAPH[module]
    return {module for module in found if FILES[module].name != "__init__.py"}


def reading() -> Iterator[tuple[str, str]]:
    """Yield the file and the sentence of each row of CONTRIBUTING's table."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    _, _, section = text.partition("## A day's reading\n")
    section, _, _ = section.partition("\n## ")
    for row in re.finditer(
        r"^\| \[(?P<name>[^\]]+)\]\((?P<link>[^)]+)\) \| (?P<sentence>.+) \|$", section, re.MULTILINE
    ):
        assert row["name"] == row["link"]
        yield row["name"], row["sentence"]


def test_a_day_s_reading_lists_the_heart_and_nothing_else() -> None:
    listed = [name for name, _ in reading()]
    assert len(listed) == len(set(listed))
    expected = {FILES[module].relative_to(ROOT).as_posix() for module in heart()}
    assert set(listed) - expected == set(), "no file of the heart"
    assert expected - set(listed) == set(), "files of the heart without a sentence in CONTRIBUTING.md"


def test_every_file_of_it_has_one_sentence() -> None:
    for name, sentence in reading():
        assert sentence.endswith("."), name
        assert sentence.count(". ") == 0, name


def test_it_can_be_read_in_a_day() -> None:
    lines = 0
    for module in heart():
        text = FILES[module].read_text()
        lines += code_lines(text, ast.parse(text))
    assert 4_000 < lines <= MOST_LINES
    assert f"at most {MOST_LINES:,} lines of code" in (ROOT / "CONTRIBUTING.md").read_text()


def test_every_room_beside_has_files() -> None:
    for room, patterns in BESIDE.items():
        for pattern in patterns:
            assert any(re.fullmatch(pattern, module) for module in FILES), (room, pattern)


def test_the_programme_knows_few_names_of_it() -> None:
    trees = {path: ast.parse(path.read_text()) for path in product()}
    imported = census.imported(trees, ("goldfinch/",))
    of_heart = {module: names for module, names in imported.items() if module in heart()}
    assert 10 < len(of_heart) <= MOST_MODULES
    assert 50 < len(census.names_of(of_heart)) <= MOST_NAMES
