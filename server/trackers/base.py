"""What all trackers share: their options, their base class, and a guard that keeps their errors out of the run."""

import contextlib
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from common.config import build, checked
from common.errors import ConfigError
from common.extras import install_command
from common.settings import RunSettings
from server.trackers.events import Listener
from server.trackers.scalars import Scalar, scalars

LOG = logging.getLogger("goldfinch.trackers")


class Tracker(Protocol):
    """A listener that is closed when the run ends, also if the run fails."""

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """Receive an event, or the rows of ``scores`` and ``replies``."""

    def close(self) -> None:
        """Write what is pending and release what the tracker holds."""


class ScalarTracker(ABC):
    """Base of the trackers that log a run's numbers to a library.

    The base decides which values of which event are logged (:func:`~server.trackers.scalars.scalars`). A subclass
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
        """See :class:`Tracker`."""
        if name in ("start", "resume"):
            self.open(str(entry["run"]), int(entry["round"]))
            self._started = True
        if not self._started:
            return
        found = scalars(name, entry)
        if found:
            self.log(found)
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
    def log(self, found: Sequence[Scalar]) -> None:
        """Log the numbers of one event.

        Args:
            found: at least one number. Their rounds can differ.
        """

    def log_hash(self, sha256: str) -> None:  # noqa: B027  # a library without a place for it logs no hash
        """Log the SHA-256 of the final state. The default does nothing."""

    @abstractmethod
    def close(self) -> None:
        """Write what is pending and close the library's run. Called also if the run was never opened."""


@checked
class TrackerSettings:
    """conf/tracker/csv.yaml: no library. Other trackers are subclasses."""

    library: ClassVar[str] = ""
    """Module that the tracker writes with, and the extra of the installation that brings it; empty for none."""

    def require(self) -> None:
        """Check that the tracker's library can be imported.

        Raises:
            ConfigError: it cannot be imported. The message says how to install it.
        """
        if not self.library:
            return
        try:
            importlib.import_module(self.library)
        except ImportError as error:
            raise ConfigError(
                f"this tracker needs {self.library}, which cannot be imported ({error}): "
                f"{install_command(self.library)}, or choose tracker=csv"
            ) from error

    def trackers(self, settings: RunSettings) -> list[Tracker]:  # noqa: ARG002  # those of a library need them
        """Return the open trackers. Without a library there is none.

        Args:
            settings: the run's settings.
        """
        return []


def tracker_settings(settings: RunSettings) -> TrackerSettings:
    """Return the chosen tracker's options after a check that its libraries are installed.

    Args:
        settings: the run's settings.

    Raises:
        ConfigError: an option is wrong, or a library is not installed.
    """
    chosen = build(settings.tracker, "tracker")
    if not isinstance(chosen, TrackerSettings):
        raise ConfigError(f"tracker._target_={settings.tracker.get('_target_')} is not a tracker")
    chosen.require()
    return chosen


@contextlib.contextmanager
def tracking(settings: RunSettings, listeners: Sequence[Listener]) -> Iterator[list[Listener]]:
    """Yield ``listeners`` and the run's trackers; the trackers are closed afterwards.

    A tracker that raises receives no more events. ``listeners`` receive the event ``tracker failed``, and the run
    continues.

    Args:
        settings: the run's settings.
        listeners: the run's other listeners.

    Raises:
        ConfigError: an option of the tracker is wrong, a library is not installed, or the port is taken.
    """
    guarded = [GuardedTracker(tracker, listeners) for tracker in tracker_settings(settings).trackers(settings)]
    try:
        yield [*listeners, *guarded]
    finally:
        for tracker in guarded:
            tracker.close()


class GuardedTracker:
    """A tracker that cannot end the run: its first error is reported, and it receives no events afterwards.

    Args:
        tracker: the tracker.
        listeners: receive the event ``tracker failed``.
    """

    def __init__(self, tracker: Tracker, listeners: Sequence[Listener]) -> None:
        self.tracker = tracker
        self.listeners = listeners
        self.failed = False

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """Pass an event on, unless the tracker failed before."""
        if self.failed:
            return
        try:
            self.tracker(name, entry)
        except Exception as error:  # a library can raise any type, and none of them may end the run
            self._report(error)

    def close(self) -> None:
        """Close the tracker, also if it failed before."""
        try:
            self.tracker.close()
        except Exception as error:  # as above
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Report the tracker's first error."""
        if self.failed:
            return
        self.failed = True
        kind = type(self.tracker).__name__
        LOG.warning("%s failed", kind, exc_info=error)
        for listener in self.listeners:
            listener("tracker failed", {"tracker": kind, "reason": f"{type(error).__name__}: {error}"})
