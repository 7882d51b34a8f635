"""The base class of the trackers that log a run's numbers to a library."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from common.settings import RunSettings
from goldfinch.trackers.scalars import Scalar, scalars


class ScalarTracker(ABC):
    """Base of the trackers that log a run's numbers to a library.

    The base decides which values of which event are logged (:func:`~goldfinch.trackers.scalars.scalars`). A subclass
    says how the library opens a run, logs numbers and closes the run.

    Args:
        settings: the run's settings.

    Attributes:
        status: how the run ended; ``failed`` until an event says otherwise.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.status: Literal["failed", "stopped", "finished"] = "failed"
        self._started = False

    @property
    def title(self) -> str:
        """The run's name for people: method, data and seed."""
        return f"{self.settings.method.name} {self.settings.data.name} seed {self.settings.seed}"

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """Log the numbers of an event, and keep how the run ended."""
        if name in ("start", "resume"):
            self.open(str(entry["run"]), int(entry["round"]))
            self._started = True
        if not self._started:
            return
        numbers = scalars(name, entry)
        if numbers:
            self.log(numbers)
        if name == "stopped":
            self.status = "stopped"
        elif name == "finish":
            self.status = "finished"
            self.log_hash(str(entry["sha256"]))

    @abstractmethod
    def open(self, run: str, completed: int) -> None:
        """Open the library's run, or continue the one of an earlier call.

        Args:
            run: the run's id, which a resumed run keeps.
            completed: the number of rounds that are complete, >= 0.
        """

    @abstractmethod
    def log(self, numbers: Sequence[Scalar]) -> None:
        """Log the numbers of one event.

        Args:
            numbers: at least one number. The rounds of the numbers can differ.
        """

    def log_hash(self, sha256: str) -> None:  # noqa: B027  # a library without a place for it logs no hash
        """Log the SHA-256 of the final state. The default does nothing."""

    @abstractmethod
    def close(self) -> None:
        """Write what is pending and close the library's run. Called also if the run was never opened."""
