"""Log runs to TensorBoard's event files: ``tensorboard --logdir outputs``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from common.config import checked
from common.run_config import flat
from common.settings import RunSettings
from goldfinch.trackers.base import ScalarTracker
from goldfinch.trackers.scalars import Scalar
from server.run.trackers import Tracker, TrackerSettings


@checked
class TensorBoard(TrackerSettings):
    """conf/tracker/tensorboard.yaml.

    Args:
        folder: each run has its event files in a folder here, named by its id; ``None`` is ``tensorboard`` in the run's
            own folder.
    """

    library: ClassVar[str] = "tensorboard"

    folder: str | None = None

    def trackers(self, settings: RunSettings) -> list[Tracker]:
        """Return the tracker that writes TensorBoard event files."""
        return [TensorBoardTracker(self.folder, settings)]


class TensorBoardTracker(ScalarTracker):
    """Writes scalars by round. A resumed run hides what an interrupted round wrote.

    Args:
        folder: see :class:`TensorBoard`.
        settings: the run's settings.
    """

    def __init__(self, folder: str | None, settings: RunSettings) -> None:
        super().__init__(settings)
        self.folder = folder
        self.writer: Any = None

    def open(self, run: str, completed: int) -> None:
        """Open the event files and write the settings as a text."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self.settings.output_folder / "tensorboard"
        if self.folder:
            folder = Path(self.folder) / run
        first_hidden = 0
        if completed:
            first_hidden = completed + 1
        self.writer = SummaryWriter(str(folder), purge_step=first_hidden)
        lines = ["| key | value |", "|---|---|"]
        for key, value in flat(self.settings.raw).items():
            lines.append(f"| {key} | {value} |")
        self.writer.add_text("settings", "\n".join(lines), completed)

    def log(self, numbers: Sequence[Scalar]) -> None:
        """Write each number as a scalar of its round."""
        for scalar in numbers:
            self.writer.add_scalar(scalar.tag, scalar.value, scalar.round)
        self.writer.flush()

    def close(self) -> None:
        """Close the event files."""
        if self.writer is not None:
            self.writer.close()
