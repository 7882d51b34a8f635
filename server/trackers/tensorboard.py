"""Rows to TensorBoard's event files: ``tensorboard --logdir outputs``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from common.config import checked
from common.settings import RunSettings, flat
from server.trackers.base import Tracker, TrackerSettings, scalars


@checked
class TensorBoard(TrackerSettings):
    """conf/tracker/tensorboard.yaml.

    Args:
        folder: where the event files go; ``None`` is ``tensorboard`` in the run's folder.
    """

    library: ClassVar[str] = "tensorboard"

    folder: str | None = None

    def trackers(self, settings: RunSettings) -> list[Tracker]:
        """See :class:`~server.trackers.base.TrackerSettings`."""
        folder = Path(self.folder) if self.folder else settings.output_folder / "tensorboard"
        return [*super().trackers(settings), TensorBoardTracker(folder, settings)]


class TensorBoardTracker:
    """Writes scalars by round; a resumed run hides what an interrupted round had written."""

    def __init__(self, folder: Path, settings: RunSettings) -> None:
        self.folder, self.settings = folder, settings
        self.writer: Any = None

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """See :class:`~server.trackers.base.Tracker`."""
        if name in ("start", "resume"):
            self._open(int(entry["round"]))
        if self.writer is None:
            return
        for scalar in scalars(name, entry):
            self.writer.add_scalar(scalar.tag, scalar.value, scalar.round)
        if name in ("round done", "score"):
            self.writer.flush()

    def _open(self, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder), purge_step=done + 1 if done else 0)
        lines = [f"| {key} | {value} |" for key, value in flat(self.settings.raw).items()]
        self.writer.add_text("settings", "\n".join(["| key | value |", "|---|---|", *lines]), done)

    def close(self) -> None:
        """See :class:`~server.trackers.base.Tracker`."""
        if self.writer is not None:
            self.writer.close()
