"""The server's certificate ends during a run: what both sides say, what is kept, and whether the remedy works."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from support.faults import events, node_log, wait_until

from common.errors import EngineError
from common.settings import load_settings
from goldfinch.cli import main
from goldfinch.commands.deployment import LocalDeployment
from goldfinch.record import RunRecord
from server.admission import certificates
from server.flower.processes import EXPIRED

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(1800)]

SECONDS = float(os.environ.get("GOLDFINCH_CERTIFICATE", "120"))
"""How long the certificate is valid: some rounds."""


def run_words(output: Path, *more: str) -> list[str]:
    words = ["method=fedavg", "data=glyphs", "data.domains=[sketch]", "protocol.samples=24", "model=small"]
    words += ["train.device=cpu", "train.local_steps=1", "rounds.test_samples=8", "rounds.deadline=60"]
    return [*words, f"output={output}", *more]


def test_a_certificate_that_ends_in_a_run_is_named_and_a_renewed_one_lets_the_run_go_on(tmp_path: Path) -> None:
    output = tmp_path / "run"
    deployment = LocalDeployment(tmp_path / "deployment", {"sketch-0": {"domain": "sketch"}})
    files = deployment.certificates
    certificates.ensure(files.folder, [], ["sketch-0"])
    certificates._make_server(files, list(certificates.LOCAL_HOSTS), SECONDS / 86_400)  # type: ignore[arg-type]
    with patch.object(certificates, "RENEWAL_DAYS", -1):
        deployment.__enter__()
    with deployment.processes:
        with pytest.raises(EngineError) as error:
            deployment.run(load_settings(run_words(output, "train.rounds=500")))
        said = str(error.value)
        print(f"\n{said}")
        assert f"its certificate is not accepted: {EXPIRED}; renew it (goldfinch devices certificates)" in said
        assert deployment.children["superlink"].process.poll() is None
        before = RunRecord(output)
        assert before.rounds_done >= 1
        recorded = [event.get("reason", "") for event in events(output, "interrupted", "client lost")]
        print(recorded)
        # the first to open a new connection is the server process, or the device, which is offline then
        assert any(EXPIRED in reason or "its node is offline" in reason for reason in recorded)

        deployment.children["sketch-0"].stop()
        said_before = node_log(deployment, "sketch-0").count(EXPIRED)
        node = deployment.start_node("sketch-0").process  # as a restart policy does, before the renewal
        wait_until(lambda: node.poll() is not None, "the end of the node")
        assert node.returncode
        assert node_log(deployment, "sketch-0").count(EXPIRED) > said_before

        assert main(["devices", "certificates", str(files.folder)]) == 0
        deployment.children["superlink"].stop()
        deployment.start_link()
        deployment.start_node("sketch-0")
        deployment.wait_for_nodes()
        rounds = before.rounds_done + 2
        deployment.run(load_settings(run_words(output, f"train.rounds={rounds}", "resume=true")))
    after = RunRecord(output)
    assert after.rounds_done == rounds
    kept = [line for line in before.replies if line["round"] <= before.rounds_done and line["status"] != "lost"]
    assert [line for line in after.replies if line in kept] == kept
