"""Rows to MLflow: ``mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db``."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from common.config import checked
from common.settings import RunSettings, flat
from server.trackers.base import Tracker, TrackerSettings, scalars

MAX_METRICS = 1000
MAX_PARAMETERS = 100
MAX_PARAMETER_LENGTH = 500
RUN_TAG = "goldfinch.run"


@checked
class MLflow(TrackerSettings):
    """conf/tracker/mlflow.yaml.

    Args:
        tracking_uri: MLflow's store or server; ``None`` is the database ``mlflow.db`` in the run's folder.
        experiment: MLflow's name for a group of runs.
    """

    library: ClassVar[str] = "mlflow"

    tracking_uri: str | None = None
    experiment: str = "goldfinch"

    def trackers(self, settings: RunSettings) -> list[Tracker]:
        """See :class:`~server.trackers.base.TrackerSettings`."""
        address = self.tracking_uri or f"sqlite:///{settings.output_folder / 'mlflow.db'}"
        return [*super().trackers(settings), MLflowTracker(address, self.experiment, settings)]


class MLflowTracker:
    """One MLflow run per run; a resumed run goes on with the MLflow run that carries its id as a tag."""

    def __init__(self, address: str, experiment: str, settings: RunSettings) -> None:
        self.address, self.experiment, self.settings = address, experiment, settings
        self.client: Any = None
        self.run = ""
        self.status = "FAILED"

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """See :class:`~server.trackers.base.Tracker`."""
        if name in ("start", "resume"):
            self._open(str(entry["run"]))
        if self.client is None:
            return
        if name == "finish":
            self.status = "FINISHED"
            self.client.set_tag(self.run, "goldfinch.state_sha256", entry["sha256"])
        elif name == "stopped":
            self.status = "KILLED"
        self._log(name, entry)

    def _log(self, name: str, entry: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [Metric(item.tag, item.value, now, item.round) for item in scalars(name, entry)]
        for part in _parts(metrics, MAX_METRICS):
            self.client.log_batch(self.run, metrics=part)

    def _open(self, run: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self.client = MlflowClient(self.address)
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self.client.create_experiment(self.experiment)
        earlier = self.client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run}'")
        if earlier:
            self.run = earlier[0].info.run_id
            self.client.update_run(self.run, "RUNNING")
            return
        title = f"{self.settings.method.name} {self.settings.data.name} seed {self.settings.seed}"
        self.run = self.client.create_run(experiment, tags={RUN_TAG: run}, run_name=title).info.run_id
        settings = {key: str(value)[:MAX_PARAMETER_LENGTH] for key, value in flat(self.settings.raw).items()}
        for part in _parts([Param(key, value) for key, value in settings.items()], MAX_PARAMETERS):
            self.client.log_batch(self.run, params=part)

    def close(self) -> None:
        """See :class:`~server.trackers.base.Tracker`."""
        if self.client is not None and self.run:
            self.client.set_terminated(self.run, self.status)


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
