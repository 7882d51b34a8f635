"""What the tests of the Flower engine share: engines over both of Flower's grids, a refusal, and a clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from flwr.common import Code, FitRes, GetPropertiesRes, Parameters, Status
from support.grids import Deployment, Simulation
from support.nodes import request

from common.wire.messages import Registration, Request
from common.wire.payload import TENSOR_TYPE
from server.engines.flower import FlowerEngine
from server.run.engine import Failure


def failure_to_fit_res(code: Code, reason: str, traceback: str) -> FitRes:
    """A client's own error as its ClientApp sends it."""
    return FitRes(Status(code, reason), Parameters([], TENSOR_TYPE), 0, {"traceback": traceback})


def refusal_to_properties(reason: str) -> GetPropertiesRes:
    """A node's own error at registration."""
    return GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, reason), {})


REFUSAL = failure_to_fit_res(Code.FIT_NOT_IMPLEMENTED, "DataError: no images", "Traceback ...")

GRIDS = pytest.mark.parametrize("grid", [Simulation, Deployment])


def engine_of(grid: Any, *clients: str) -> FlowerEngine:
    """An engine that knows which node each client is on."""
    engine = FlowerEngine(grid, simulated=isinstance(grid, Simulation))
    engine._nodes = dict(zip(clients, grid.world.nodes, strict=False))
    return engine


def asked(*clients: str) -> dict[str, Request]:
    return {client: request(client) for client in clients}


def registered(engine: FlowerEngine, expected: Sequence[str], seconds: float = 0.0) -> tuple[list[str], list[Failure]]:
    """The clients that register, where everybody is admitted, and the failures."""
    found: list[str] = []

    def admit(registration: Registration) -> str:
        found.append(registration.client)
        return ""

    failures = engine.register(expected, admit, seconds)
    return found, failures


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
