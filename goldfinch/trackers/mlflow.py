"""Log runs to MLflow: ``mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db``."""

import re
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from common.config import checked
from common.run_config import flat
from common.settings import RunSettings
from goldfinch.trackers.base import ScalarTracker
from goldfinch.trackers.scalars import Scalar
from server.run.trackers import Tracker, TrackerSettings

MAX_METRICS = 1000
MAX_PARAMETERS = 100
MAX_PARAMETER_LENGTH = 500
"""MLflow's limits: metrics and parameters in one batch, characters of a parameter's value."""

RUN_TAG = "goldfinch.run"
STATUS = {"failed": "FAILED", "stopped": "KILLED", "finished": "FINISHED"}


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
        """Return the tracker that writes to MLflow."""
        address = self.tracking_uri or f"sqlite:///{settings.output_folder / 'mlflow.db'}"
        return [MLflowTracker(address, self.experiment, settings)]


class MLflowTracker(ScalarTracker):
    """Logs to one MLflow run. A resumed run continues the MLflow run that has its id as a tag.

    Args:
        address: URI of MLflow's store or server.
        experiment: MLflow's name for a group of runs.
        settings: the run's settings.
    """

    def __init__(self, address: str, experiment: str, settings: RunSettings) -> None:
        super().__init__(settings)
        self.address = address
        self.experiment = experiment
        self.client: Any = None
        self.run = ""

    def open(self, run: str, completed: int) -> None:  # noqa: ARG002  # MLflow needs no number of rounds
        """Open MLflow's run, or go on with the one of an earlier call."""
        from mlflow import MlflowClient

        self.client = MlflowClient(self.address)
        experiment = self._experiment_id()
        earlier = self.client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run}'")
        if earlier:
            self.run = earlier[0].info.run_id
            self.client.update_run(self.run, "RUNNING")
            return
        self.run = self.client.create_run(experiment, tags={RUN_TAG: run}, run_name=self.title).info.run_id
        self._log_settings()

    def _experiment_id(self) -> str:
        experiment = self.client.get_experiment_by_name(self.experiment)
        if experiment:
            return str(experiment.experiment_id)
        return str(self.client.create_experiment(self.experiment))

    def _log_settings(self) -> None:
        from mlflow.entities import Param

        parameters = []
        for key, value in flat(self.settings.raw).items():
            parameters.append(Param(key, str(value)[:MAX_PARAMETER_LENGTH]))
        for start in range(0, len(parameters), MAX_PARAMETERS):
            self.client.log_batch(self.run, params=parameters[start : start + MAX_PARAMETERS])

    def log(self, numbers: Sequence[Scalar]) -> None:
        """Log the numbers as MLflow's metrics, in batches that MLflow accepts."""
        from mlflow.entities import Metric

        now = round(time.time() * 1000)
        metrics = [Metric(metric_name(scalar.tag), scalar.value, now, scalar.round) for scalar in numbers]
        for start in range(0, len(metrics), MAX_METRICS):
            self.client.log_batch(self.run, metrics=metrics[start : start + MAX_METRICS])

    def log_hash(self, sha256: str) -> None:
        """Set the SHA-256 of the final state as a tag of the run."""
        self.client.set_tag(self.run, "goldfinch.state_sha256", sha256)

    def close(self) -> None:
        """Close MLflow's run with the status that Goldfinch's run ended in."""
        if self.client is not None and self.run:
            self.client.set_terminated(self.run, STATUS[self.status])


def metric_name(tag: str) -> str:
    """Return a tag as a name that MLflow accepts: parts of letters, digits and ``_.- ``, none of dots alone.

    A part is text of a device: the name of a domain, of a client, or of a loss term.
    """
    parts = []
    for part in tag.split("/"):
        name = re.sub(r"[^\w.\- ]", "_", part)
        if not name.strip("."):
            name += "_"
        parts.append(name)
    return "/".join(parts)
