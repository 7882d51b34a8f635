"""Flower's FedAvg; when each round began and ended goes to the file that ``times`` names."""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.net import build

app = ServerApp()


class Timed(FedAvg):
    """FedAvg that writes down the ends of its rounds."""

    times: list[float]

    def aggregate_evaluate(self, server_round, replies):  # type: ignore[no-untyped-def]  # Flower's signature
        """A round ends with its evaluation."""
        found = super().aggregate_evaluate(server_round, replies)
        self.times.append(time.time())
        return found


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and evaluate on all nodes, as often as was asked."""
    nodes = int(context.run_config["min-nodes"])
    strategy = Timed(min_train_nodes=nodes, min_evaluate_nodes=nodes, min_available_nodes=nodes)
    strategy.times = []
    begun = time.time()
    initial = ArrayRecord(build().state_dict())
    strategy.start(grid=grid, initial_arrays=initial, num_rounds=int(context.run_config["num-rounds"]))
    Path(str(context.run_config["times"])).write_text(json.dumps({"begun": begun, "ends": strategy.times}))
