"""A whole run over TLS with enrolled nodes, behind the proxy where nginx is installed, equals the inline run.

One more enrolled node claims to be another's client: it is refused by name and changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.faults import events
from support.federation import NGINX, start_proxy
from support.runs import run

from common.settings import load_settings
from goldfinch.commands.deployment import LocalDeployment, one_node_per_client
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CHOSEN = ["method=fpl", "train.rounds=2", "seed=3"]


def test_four_nodes_two_rounds(tmp_path: Path) -> None:
    chosen = [*CHOSEN, "engine=superlink", f"output={tmp_path / 'secure'}"]
    settings = load_settings(chosen)
    nodes = one_node_per_client(settings)
    assert len(nodes) == 4
    prepare_output(settings)
    deployment = LocalDeployment(tmp_path / "processes", {"thief-0": nodes["sketch-0"], **nodes})
    deployment.start_link()
    with deployment.processes:
        proxy = None
        if NGINX:
            proxy, deployment.node_address = start_proxy(deployment)
        deployment.enrolment.enrol()
        for name in deployment.nodes:
            deployment.start_node(name)
        deployment.wait_for_nodes()
        deployment.run(settings)
    summary = summary_of(tmp_path / "secure")
    assert summary["rounds"] == 2
    assert set(summary["clients"]) == set(nodes)
    assert summary["state_sha256"] == inline_hash(tmp_path)
    refused = list(events(tmp_path / "secure", "registration refused"))
    assert [entry["client"] for entry in refused] == ["thief-0"]
    assert refused[0]["reason"].endswith("claims to be sketch-0, but its key is enrolled for thief-0")
    assert "thief-0 was not admitted: node " in (tmp_path / "secure" / "logs" / "flower.log").read_text()
    if proxy is not None:  # what it refuses is in its log; nothing that a run needs was
        assert [line for line in proxy.log.read_text().splitlines() if "buffered to a temporary file" not in line] == []


def inline_hash(folder: Path) -> str:
    settings = load_settings([*CHOSEN, f"output={folder / 'inline'}"])
    return run(settings, InlineEngine(settings)).sha256


def summary_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return content
