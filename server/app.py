"""The Flower ServerApp: settings from the run's overrides, and the round loop over Flower's Grid."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from common.config import split_overrides
from common.run_config import overrides_in
from common.settings import load_settings
from server.engines.flower import FlowerEngine
from server.run.conduct import conduct, prepare_output
from server.trackers.events import plain_lines

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Check the settings and the output folder, then run all rounds."""
    settings = load_settings(split_overrides(overrides_in(context.run_config)))
    prepare_output(settings)
    enrolled = isinstance(grid, HttpGrid) and not grid._insecure  # without TLS Flower admits whoever comes
    engine = FlowerEngine(grid, simulated=isinstance(grid, InMemoryGrid), enrolled=enrolled)
    conduct(settings, engine, [plain_lines(settings)])
