"""A device that is twenty times slower than the others, on real SuperNodes: no round waits for it past its deadline."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.faults import events
from support.federation import ROOT

from common.settings import load_settings
from goldfinch.commands.deployment import LocalDeployment, one_node_per_client
from goldfinch.record import RunRecord
from server.run.conduct import prepare_output
from server.run.schema import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(3600)]
PACE, DEADLINE, ROUNDS = 8.0, 100.0, 3
STRAGGLER = "signs-0"


def test_a_straggler_holds_no_round_past_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others take ``PACE`` seconds for their training, the straggler twenty times as long."""
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "slow.py").write_bytes((ROOT / "tests" / "support" / "slow.py").read_bytes())
    monkeypatch.syspath_prepend(tmp_path / "module")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "module"))
    monkeypatch.setenv("SLOW_SECONDS", str(PACE))
    monkeypatch.setenv("SLOW_STRAGGLER", STRAGGLER)
    output = tmp_path / "run"
    overrides = [
        "method=fedavg",
        "method._target_=slow.Slow",
        "tuned=none",
        "engine=superlink",
        "data.domains=[handwritten,printed,signs]",
        "protocol.samples=24",
        "train.batch_size=8",
        "train.device=cpu",
        f"train.rounds={ROUNDS}",
        f"rounds.deadline={DEADLINE}",
        "rounds.registration=600",
        f"output={output}",
    ]
    settings = load_settings(overrides)
    prepare_output(settings)
    with LocalDeployment(tmp_path / "flower", one_node_per_client(settings), secure=False) as deployment:
        deployment.run(settings)
    assert RunRecord.open(output).summary["rounds"] == ROUNDS
    begun = {entry["round"]: entry["time"] for entry in events(output, "round")}
    took = {e["round"]: e["time"] - begun[e["round"]] for e in events(output, "round done", "round skipped")}
    rows = [row for row in read_lines(output / "replies.jsonl") if int(row["round"]) <= ROUNDS]
    late = [row for row in rows if row["client"] == STRAGGLER]
    print(
        "\nseconds of the rounds:", took, *(f"{row['round']} {row['client']} {row['status']}" for row in rows), sep="\n"
    )
    assert [row["status"] for row in late] == ["lost"] * ROUNDS
    assert all(seconds <= DEADLINE + 10 for seconds in took.values())
    assert len(events(output, "round done")) == ROUNDS
