"""Devices and servers of different versions: whose code runs, what is said to both people, and whether it helps."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
from support.checkouts import copied, goldfinch, replaced
from support.faults import events, node_log
from support.scripts import ROOT

from common.errors import EngineError
from common.settings import load_settings
from goldfinch.commands.deployment import CONNECTION, LocalDeployment
from goldfinch.record import RunRecord
from server.engines.inline import InlineEngine
from server.flower.processes import Child
from server.run.conduct import prepare_output, run_federation

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

OWN_CODE = """
import os, sys
if any(os.path.basename(word) == "flwr-clientapp" for word in sys.orig_argv[:4]):
    sys.path.insert(0, {folder!r})
    import client, common, strategies
"""
"""A device whose Python imports its own Goldfinch before Flower unpacks the run's."""

OLD_FLOWER = """
from importlib import metadata
true = metadata.version
metadata.version = lambda name: "1.20.0" if name == "flwr" else true(name)
"""

CHANGES = {
    "line": ("client/trainer.py", "class LocalExchange", "CHANGED = True\n\n\nclass LocalExchange"),
    "field": (
        "common/wire/messages.py",
        "    clock_ahead: Number = 0.0\n",
        "    clock_ahead: Number = 0.0\n    age: int = 1\n",
    ),
}


def run_words(output: Path, *more: str) -> list[str]:
    words = ["method=fedavg", "data=glyphs", "data.domains=[sketch]", "protocol.samples=24", "model=small"]
    words += ["train.device=cpu", "train.rounds=1", "train.local_steps=1", "rounds.test_samples=8"]
    return [*words, "rounds.registration=60", f"output={output}", *more]


@dataclass
class OtherNodes(LocalDeployment):
    """Its nodes find ``modules`` before this checkout."""

    modules: tuple[Path, ...] = ()

    def start_node(self, name: str) -> Child:
        places = [str(place) for place in (*self.modules, ROOT)]
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(places)):
            return super().start_node(name)


def test_a_run_brings_its_code_to_an_old_device_and_to_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old SuperNode, whose own training raises an error; then a server with one more field, and a live device."""
    old = copied(tmp_path / "old")
    replaced(old, "client/trainer.py", "class LocalExchange", 'raise RuntimeError("old")\n\n\nclass LocalExchange')
    other = copied(tmp_path / "other")
    for change in CHANGES.values():
        replaced(other, *change)
    settings = load_settings(run_words(tmp_path / "inline"))
    prepare_output(settings)
    expected = run_federation(settings, InlineEngine(settings))
    nodes = {"sketch-0": {"domain": "sketch"}}
    with OtherNodes(tmp_path / "deployment", nodes, modules=(old,)) as deployment:
        deployment.run(load_settings(run_words(tmp_path / "run")))
        monkeypatch.setenv("FLWR_HOME", str(deployment.home))
        words = run_words(tmp_path / "second", "engine=superlink", f"engine.connection={CONNECTION}")
        goldfinch(other, "run", *words, folder=tmp_path)
    codes = []
    for name in ("run", "second"):
        record = RunRecord(tmp_path / name)
        assert [line["status"] for line in record.replies] == ["trained", "scored"]
        assert record.summary["state_sha256"] == expected["state_sha256"]
        codes.append(json.loads((tmp_path / name / "code.json").read_text())["client/trainer.py"])
    assert codes[0] != codes[1]


@pytest.mark.parametrize("change", CHANGES)
def test_a_device_that_brings_its_own_code_is_refused_and_both_are_told(change: str, tmp_path: Path) -> None:
    other, first = copied(tmp_path / "other"), tmp_path / "first"
    replaced(other, *CHANGES[change])
    first.mkdir()
    (first / "sitecustomize.py").write_text(OWN_CODE.format(folder=str(other)))
    nodes = {"sketch-0": {"domain": "sketch"}}
    with OtherNodes(tmp_path / "deployment", nodes, modules=(first,)) as deployment:
        with pytest.raises(EngineError) as error:
            deployment.run(load_settings(run_words(tmp_path / "run")))
        said = str(error.value)
        print(f"\n{said}")
        assert "install the same Goldfinch on both" in said
        assert CHANGES[change][0] in said or "age: no such key" in said
        log = node_log(deployment, "sketch-0")
        print([line for line in log.splitlines() if "the server runs code" in line])
        assert log.count("it takes no part until both have the same Goldfinch") == 1

        deployment.children["sketch-0"].stop()
        deployment.modules = ()
        deployment.start_node("sketch-0")
        deployment.wait_for_nodes()
        deployment.run(load_settings(run_words(tmp_path / "run", "resume=true")))
    assert [line["status"] for line in RunRecord(tmp_path / "run").replies] == ["trained", "scored"]


def test_a_device_with_another_release_of_flower_takes_part_and_the_record_names_it(tmp_path: Path) -> None:
    """The pinned SuperLink compares releases, but refuses no device for another one, and says nothing."""
    first = tmp_path / "first"
    first.mkdir()
    (first / "sitecustomize.py").write_text(OLD_FLOWER)
    with OtherNodes(tmp_path / "deployment", {"sketch-0": {"domain": "sketch"}}, modules=(first,)) as deployment:
        deployment.run(load_settings(run_words(tmp_path / "run")))
        assert "ncompatib" not in node_log(deployment, "sketch-0")
    (registered,) = events(tmp_path / "run", "registered")
    assert registered["versions"]["flwr"] == "1.20.0"
    assert [line["status"] for line in RunRecord(tmp_path / "run").replies] == ["trained", "scored"]
