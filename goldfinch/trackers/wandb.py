"""Log runs to Weights & Biases, offline by default: ``wandb sync DIR/wandb/offline-run-*`` sends a run later."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from common.config import checked
from common.settings import RunSettings
from goldfinch.trackers.base import ScalarTracker
from goldfinch.trackers.scalars import Scalar
from server.run.trackers import Tracker, TrackerSettings


@checked
class WeightsAndBiases(TrackerSettings):
    """conf/tracker/wandb.yaml.

    Args:
        project: the project's name.
        mode: ``offline`` writes to the run's folder only; ``online`` sends at once and needs ``wandb login``.
    """

    library: ClassVar[str] = "wandb"

    project: str = "goldfinch"
    mode: Literal["offline", "online"] = "offline"

    def trackers(self, settings: RunSettings) -> list[Tracker]:
        """Return the tracker that writes to Weights & Biases."""
        return [WandbTracker(self.project, self.mode, settings)]


class WandbTracker(ScalarTracker):
    """Logs to one W&B run with the run's own id, so that a resumed run continues it.

    Args:
        project: the project's name.
        mode: ``offline`` or ``online``.
        settings: the run's settings.
    """

    def __init__(self, project: str, mode: Literal["offline", "online"], settings: RunSettings) -> None:
        super().__init__(settings)
        self.project = project
        self.mode = mode
        self.run: Any = None

    def open(self, run: str, completed: int) -> None:  # noqa: ARG002  # W&B needs no number of rounds
        """Open the W&B run, or go on with the one of an earlier call."""
        import wandb

        resume = None
        if self.mode == "online":
            resume = "allow"
        self.run = wandb.init(
            project=self.project,
            id=run,
            name=self.title,
            config=dict(self.settings.raw),
            dir=str(self.settings.output_folder),
            mode=self.mode,
            resume=resume,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self.run.define_metric("round", hidden=True)
        self.run.define_metric("*", step_metric="round")

    def log(self, numbers: Sequence[Scalar]) -> None:
        """Log the numbers by round."""
        by_round: dict[int, dict[str, float]] = {}
        for scalar in numbers:
            by_round.setdefault(scalar.round, {})[scalar.tag] = scalar.value
        for number, values in by_round.items():  # scores of a round arrive with the next round's training
            self.run.log({"round": number, **values})

    def log_hash(self, sha256: str) -> None:
        """Write the SHA-256 of the final state into the summary of the W&B run."""
        self.run.summary["state_sha256"] = sha256

    def close(self) -> None:
        """Finish the W&B run."""
        if self.run is None:
            return
        self.run.finish(exit_code=int(self.status == "failed"))
