"""Rows to Weights & Biases, offline unless asked otherwise: ``wandb sync DIR/wandb/offline-run-*`` sends them later."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from common.config import checked
from common.settings import RunSettings
from server.trackers.base import Tracker, TrackerSettings, scalars


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
        """See :class:`~server.trackers.base.TrackerSettings`."""
        return [*super().trackers(settings), WandbTracker(self.project, self.mode, settings)]


class WandbTracker:
    """One W&B run per run, under the run's own id, so that a resumed run goes on with it."""

    def __init__(self, project: str, mode: Literal["offline", "online"], settings: RunSettings) -> None:
        self.project, self.mode, self.settings = project, mode, settings
        self.run: Any = None
        self.finished = False

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """See :class:`~server.trackers.base.Tracker`."""
        if name in ("start", "resume"):
            self._open(str(entry["run"]))
        if self.run is None:
            return
        by_round: dict[int, dict[str, float]] = {}
        for scalar in scalars(name, entry):
            by_round.setdefault(scalar.round, {})[scalar.tag] = scalar.value
        for number, values in by_round.items():  # scores of a round come with the next one's training, so steps jump
            self.run.log({"round": number, **values})
        if name in ("finish", "stopped"):
            self.finished = True
            if name == "finish":
                self.run.summary["state_sha256"] = entry["sha256"]

    def _open(self, run: str) -> None:
        import wandb

        settings = self.settings
        self.run = wandb.init(
            project=self.project,
            id=run,
            name=f"{settings.method.name} {settings.data.name} seed {settings.seed}",
            config=dict(settings.raw),
            dir=str(settings.output_folder),
            mode=self.mode,
            resume="allow" if self.mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )
        self.run.define_metric("round", hidden=True)
        self.run.define_metric("*", step_metric="round")

    def close(self) -> None:
        """See :class:`~server.trackers.base.Tracker`."""
        if self.run is not None:
            self.run.finish(exit_code=0 if self.finished else 1)
