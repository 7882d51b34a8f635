"""A method of the user's own package on SuperNodes: its choices travel, the package must be there, and be the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.own import forget

from common.choices import search
from common.settings import load_settings
from goldfinch.commands.deployment import LocalDeployment, one_node_per_client
from goldfinch.record import RunRecord
from server.run.conduct import prepare_output

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
FAIR = """
from common.config import NonNegative, checked
from strategies.core.method import Method

@checked
class QFair(Method):
    q: NonNegative = 1.0
"""


class Devices(LocalDeployment):
    """Nodes of which each has the packages of a folder of its own."""

    def start_node(self, name: str):  # type: ignore[no-untyped-def]
        """With the folder that is called as the node's client."""
        before = os.environ["PYTHONPATH"]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(self.folder.parent / name)])
        try:
            return super().start_node(name)
        finally:
            os.environ["PYTHONPATH"] = before


def test_only_devices_with_the_same_package_take_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "method").mkdir(parents=True)
    (tmp_path / "mine" / "method" / "qfair.yaml").write_text("_target_: ownlib.fair.QFair\nq: 2.0\n")
    for place, text in {"server": FAIR, "sketch-0": FAIR, "signs-0": FAIR + "#"}.items():  # printed-0 has none
        (tmp_path / place / "ownlib").mkdir(parents=True)
        (tmp_path / place / "ownlib" / "fair.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path / "server")]))
    monkeypatch.syspath_prepend(tmp_path / "server")
    search(tmp_path / "mine")
    words = ["method=qfair", "engine=superlink", "train.rounds=1", "train.local_steps=1", "protocol.samples=24"]
    words += ["data.domains=[printed,signs,sketch]", "rounds.quorum=0.3", "rounds.test_samples=8"]
    words += ["rounds.registration=150", "rounds.deadline=300", f"output={tmp_path / 'run'}"]
    settings = load_settings(words)
    prepare_output(settings)
    with Devices(tmp_path / "flower", one_node_per_client(settings), secure=False) as deployment:
        deployment.run(settings)
    told = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    refused = " ".join(entry["reason"] for entry in told if entry["event"] == "registration refused")
    assert "install the same Goldfinch and the same ownlib on both" in refused
    assert "the device cannot use the run's settings, or lacks a library; the log of the device says more" in refused
    log = (tmp_path / "flower" / "logs" / "printed-0.log").read_text()
    assert "No module named 'ownlib'; put the module's folder on PYTHONPATH" in log
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["method"], sorted(summary["clients"])) == ("fair", ["sketch-0"])
    assert RunRecord(tmp_path / "run").options["method.q"] == 2.0
    forget("ownlib")
