"""The Flower ServerApp: settings from the run configuration, and the round loop over Flower's Grid."""

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

from common.errors import ConfigError, GoldfinchError
from common.settings import RunSettings, settings_in
from common.versions import shadows
from server.engines.flower import FlowerEngine
from server.run.conduct import prepare_output, run_federation
from server.run.deployment import DEADLINE_SECONDS
from server.run.events import plain_lines
from server.run.history import record_waiting
from server.run.resume import record_interruption
from server.run.summary import SUMMARY

SILENCE_SECONDS = 30.0
"""Seconds beyond ``rounds.deadline`` that a SuperLink may take to answer a call."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Check the settings and the output folder, then run all rounds."""
    simulated = isinstance(grid, InMemoryGrid)
    try:
        if simulated and (strangers := shadows([str(Path.cwd())], ("common", "strategies", "client"))):
            raise ConfigError(
                f"{strangers[0]} is imported in place of Goldfinch's package of that name, because the SuperLink was "
                "started in its folder: stop that SuperLink, and start it in another folder"
            )
        settings = settings_in(context.run_config)
        prepare_output(settings)
        enrolled = isinstance(grid, HttpGrid) and not grid._insecure  # without TLS Flower admits any node
        silence = math.inf if simulated else (settings.rounds.deadline or DEADLINE_SECONDS) + SILENCE_SECONDS
        on_silence = partial(record_interruption, settings.output_folder)
        on_waiting = None
        if not simulated:  # where clients wait for a free actor
            on_waiting = partial(_record_waiting, settings)
        engine = FlowerEngine(
            grid,
            code=settings.code,
            simulated=simulated,
            enrolled=enrolled,
            silence=silence,
            on_silence=on_silence,
            on_waiting=on_waiting,
        )
        run_federation(settings, engine, [plain_lines(settings)])
    except GoldfinchError as error:
        sys.tracebacklimit = 0  # Flower prints the error as the reason of the failed run; the message is enough
        raise error from None


def _record_waiting(settings: RunSettings, clients: Sequence[str], seconds: float, number: int | None) -> None:
    """Append the event of a wait (:func:`server.run.history.record_waiting`), but not to a finished run's record.

    Until the clients have registered, the folder holds the run that is replaced.
    """
    if number is None and settings.overwrite and (settings.output_folder / SUMMARY).exists():
        return
    record_waiting(settings.output_folder, clients, seconds, number)
