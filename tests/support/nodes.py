"""SuperNodes without processes: objects that hand Flower's messages to the ClientApp, and its calls to the client."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

from flwr.app import Context, Message, RecordDict
from flwr.common import FitIns, FitRes, GetPropertiesIns, GetPropertiesRes

from client.app import FlowerClient, app
from common.settings import load_settings
from common.wire.messages import Request
from server.run.conduct import prepare_output, run_federation

OVERRIDES = [
    "data.domains=[printed,sketch,handwritten]",
    "protocol.samples=24",
    "train.rounds=2",
    "train.batch_size=8",
    "train.device=cpu",
    "rounds.registration=5",
]


class Node:
    """A SuperNode: called with a message (see :mod:`support.grids`), or as a proxy of Flower's legacy server."""

    def __init__(self, cid: str, config: dict[str, Any], overrides: list[str]) -> None:
        self.cid = cid
        self.context = Context(1, int(cid), config, RecordDict(), {"overrides": " ".join(overrides)})

    def __call__(self, message: Message) -> Message | None:
        return app(message=message, context=self.context)

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        return FlowerClient(self.context).get_properties(ins)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        return FlowerClient(self.context).fit(ins)


class Manager:
    """Flower's client manager: who is online."""

    def __init__(self, *nodes: Any) -> None:
        self.nodes = {node.cid: node for node in nodes}

    def all(self) -> dict[str, Any]:
        return dict(self.nodes)


class Actor(Node):
    """A node of a simulation. Its ClientApp runs in an actor of Ray."""

    def __call__(self, message: Message) -> Message | None:
        with patch("client.app.in_simulation", return_value=True):
            return super().__call__(message)

    def get_properties(self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None) -> GetPropertiesRes:
        with patch("client.app.in_simulation", return_value=True):
            return super().get_properties(ins, timeout, group_id)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        with patch("client.app.in_simulation", return_value=True):
            return super().fit(ins, timeout, group_id)


def simulation(count: int, overrides: list[str]) -> Manager:
    nodes = [Actor(str(index), {"partition-id": index, "num-partitions": count}, overrides) for index in range(count)]
    return Manager(*nodes)


def deployment(folder: Path, overrides: list[str]) -> Manager:
    domains = ("handwritten", "sketch", "printed")
    return Manager(
        *(
            Node(str(70 + index), {"domain": domain, "index": 0, "state-dir": str(folder / domain)}, overrides)
            for index, domain in enumerate(domains)
        )
    )


def through(engine: Any, overrides: list[str], output: Path) -> dict[str, Any]:
    settings = load_settings([*overrides, f"output={output}"])
    prepare_output(settings)
    return run_federation(settings, engine(settings))


def request(client: str) -> Request:
    """A request of the first round."""
    return Request("run", "id", "fpl", 1, "train", client, 20, 0, train=True, score=[], code="0" * 16)
