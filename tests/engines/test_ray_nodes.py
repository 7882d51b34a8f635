"""How many of Flower's nodes a simulation on Ray has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.toy import toy_settings

from common.data.protocols import ClientSpec
from server.flower import submit


@pytest.mark.parametrize(("clients", "nodes"), [(3, 3), (250, 100)])
def test_nodes_of_many_clients_host_several(
    clients: int, nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower lists all nodes in every round, so that a node per client takes minutes with thousands of clients."""
    overrides = ("engine=ray",)
    settings = toy_settings("fedavg", tmp_path, overrides=overrides)
    monkeypatch.setattr(type(settings.protocol), "clients", lambda *_: (ClientSpec("signs", 0),) * clients)
    given: dict[str, Any] = {}

    def note(*arguments: Any, **_: Any) -> None:
        given.update(arguments[4])

    monkeypatch.setattr(submit, "submit", note)
    link: Any = SimpleNamespace(wait=lambda _: None, environment={}, neutral=tmp_path)
    submit.run_on_ray(settings, [], link)
    assert given["num-supernodes"] == nodes
