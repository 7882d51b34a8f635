"""Clients that do nothing, for Flower's own simulation: FedAvg and a NumPyClient that returns what it was sent.

    python bench/apps/flower_no_op.py '{"shapes": [[27, 27], [27]], "clients": 10, "rounds": 5, "actors": 2}'

Prints one line of JSON: the time of day at which each round began, and at which the last was aggregated.
"""

from __future__ import annotations

import json
import math
import sys
import time

import numpy as np
from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar, ndarrays_to_parameters
from flwr.server import ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation


class NoOpClient(NumPyClient):
    """Returns the model as it came."""

    def fit(
        self,
        parameters: NDArrays,
        config: dict[str, Scalar],  # noqa: ARG002
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Nothing is trained."""
        return parameters, 100, {}


def client_fn(context: Context) -> Client:  # noqa: ARG001
    """One client."""
    return NoOpClient().to_client()


class Timed(FedAvg):
    """FedAvg that notes when each round begins and ends."""

    def configure_fit(self, server_round, parameters, client_manager):  # type: ignore[no-untyped-def]
        """As FedAvg's."""
        STAMPS.append(time.time())
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round, results, failures):  # type: ignore[no-untyped-def]
        """As FedAvg's."""
        found = super().aggregate_fit(server_round, results, failures)
        if failures or len(results) != self.min_fit_clients:
            raise RuntimeError(f"{len(results)} results, {len(failures)} failures")
        ENDS.append(time.time())
        return found


STAMPS: list[float] = []
ENDS: list[float] = []


def main() -> None:
    """Run the simulation that the argument describes."""
    task = json.loads(sys.argv[1])
    model = [np.random.default_rng(0).standard_normal(math.prod(s)).astype("f4").reshape(s) for s in task["shapes"]]
    clients = task["clients"]

    def server_fn(context: Context) -> ServerAppComponents:  # noqa: ARG001
        strategy = Timed(
            fraction_evaluate=0.0,
            min_fit_clients=clients,
            min_available_clients=clients,
            initial_parameters=ndarrays_to_parameters(model),
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=task["rounds"]))

    run_simulation(
        ServerApp(server_fn=server_fn),
        ClientApp(client_fn=client_fn),
        num_supernodes=clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": task["actors"], "num_gpus": 0, "log_to_driver": False},
        },
    )
    print(json.dumps({"begins": STAMPS, "ends": ENDS}), flush=True)


if __name__ == "__main__":
    main()
