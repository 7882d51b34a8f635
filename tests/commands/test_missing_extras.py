"""A command without the library of an extra says which extra has it, and how it is installed here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import run

from common.extras import EXTRA_OF
from common.settings import load_settings

pytestmark = pytest.mark.slow

WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
from goldfinch.cli import main
raise SystemExit(main({words!r}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("run")
    words = ["data=glyphs", "data.domains=[printed,sketch]", "model=small", "method=fpl", "protocol.samples=24"]
    words += ["train.rounds=1", "train.local_steps=1", "train.device=cpu", "rounds.test_samples=8", f"output={output}"]
    run(load_settings(words))
    return output


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("pandas", ["table", "RUN", "--format", "csv"]),
        ("pandas", ["report", "RUN"]),
        ("jinja2", ["report", "RUN"]),
        ("markupsafe", ["report", "RUN"]),
        ("matplotlib", ["figure", "curves", "RUN"]),
        ("sklearn", ["figure", "prototypes", "RUN", "--by", "pca"]),
        ("optuna", ["compare", "--methods", "fedavg", "data=glyphs"]),
        ("onnxscript", ["export", "RUN", "--to", "OUT", "--format", "onnx"]),
        ("scipy", ["run", "data=glyphs", "privacy=gaussian", "privacy.noise_multiplier=1", "output=OUT"]),
        ("matplotlib", ["run", "data=glyphs", "output=OUT"]),
        ("finch", ["run", "data=glyphs", "method=fpl", "train.rounds=1", "engine=inline", "output=OUT"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[:2]),
)
def test_what_lacks_a_library_names_its_extra(module: str, words: list[str], folder: Path, tmp_path: Path) -> None:
    places = {"RUN": str(folder), "OUT": str(tmp_path / "out")}
    given = []
    for word in words:
        for name, place in places.items():
            word = word.replace(name, place)
        given.append(word)
    code = WITHOUT.format(module=module, words=given)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "-m pip install" in done.stderr
    extras = {EXTRA_OF[module], "server", "datasets", "privacy"}
    assert any(f"[{extra}]" in done.stderr for extra in extras), done.stderr
