"""The Flower ServerApp: settings from the run's overrides, and the round loop as Flower's Server."""

from __future__ import annotations

from flwr.app import Context
from flwr.server import ServerAppComponents, ServerConfig, SimpleClientManager
from flwr.serverapp import ServerApp

from common.config import split_overrides
from common.settings import load_settings
from server.engines.flower import RoundServer
from server.run.conduct import prepare_output
from server.trackers.events import plain_lines


def server_fn(context: Context) -> ServerAppComponents:
    """Check the settings and the output folder, then hand Flower the server."""
    settings = load_settings(split_overrides(str(context.run_config.get("overrides", ""))))
    prepare_output(settings)
    server = RoundServer(settings, SimpleClientManager(), [plain_lines(settings)])
    return ServerAppComponents(
        server=server,
        config=ServerConfig(num_rounds=settings.train.rounds, round_timeout=settings.rounds.deadline),
    )


app = ServerApp(server_fn=server_fn)
