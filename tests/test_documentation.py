"""The documentation's Python is run, so that it stays true."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import yaml

from common.config import build, trust
from common.settings import load_settings, with_method
from server.engines.inline import InlineEngine
from server.run.conduct import conduct, prepare_output

ROOT = Path(__file__).resolve().parent.parent
TINY = ["train.rounds=3", "protocol.samples=24", "rounds.evaluate_every=3"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(3))
def test_python_api_blocks_run(number: int, tmp_path: Path) -> None:
    source = blocks("python-api.md", "python")
    assert len(source) == 3
    exec(compile(source[number], f"python-api.md block {number}", "exec"), {"folder": str(tmp_path / "run")})


def test_added_method_runs_and_is_fedavg_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = blocks("add-a-method.md", "python")[0]
    assert len(source.splitlines()) <= 60
    module = types.ModuleType("strategies.warm_contrast")
    monkeypatch.setitem(sys.modules, "strategies.warm_contrast", module)
    exec(compile(source, "add-a-method.md", "exec"), module.__dict__)
    node = yaml.safe_load(blocks("add-a-method.md", "yaml")[0])
    trust([node["_target_"]])  # it is not in conf/
    hashes = {}
    for label, contrast in (("on", 1.0), ("off", 0.0)):
        settings = load_settings([*TINY, f"output='{tmp_path / label}'"])
        settings = with_method(settings, build({**node, "contrast": contrast}, "method"))
        prepare_output(settings)
        engine = InlineEngine(settings)
        assert conduct(settings, engine)["method"] == "warm_contrast"
        hashes[label] = weights_of(tmp_path / label)
    settings = load_settings([*TINY, "method=fedavg", f"output='{tmp_path / 'fedavg'}'"])
    prepare_output(settings)
    conduct(settings, InlineEngine(settings))
    fedavg = weights_of(tmp_path / "fedavg")
    assert hashes["off"] == fedavg
    assert hashes["on"] != fedavg


def weights_of(folder: Path) -> str:
    from common.storage.state import tensors_sha256
    from server.run.checkpoint import Checkpoints

    checkpoint = Checkpoints(folder / "checkpoint").load()
    assert checkpoint is not None
    return tensors_sha256(checkpoint.state.weights)


def test_pages_link_to_files_that_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
