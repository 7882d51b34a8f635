"""The trackers of a run: their interface, their options, and a guard that keeps their errors out of the run."""

import contextlib
import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from common.config import build, checked
from common.errors import ConfigError
from common.extras import install_command
from common.settings import RunSettings
from server.run.events import Listener

LOG = logging.getLogger("goldfinch.trackers")


class Tracker(Protocol):
    """A listener that is closed when the run ends, also if the run fails."""

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """Receive an event, or the rows of ``scores`` and ``replies``."""

    def close(self) -> None:
        """Write what is pending and release what the tracker holds."""


@checked
class TrackerSettings:
    """conf/tracker/csv.yaml: no library. Other trackers are subclasses."""

    library: ClassVar[str] = ""
    """Module that the tracker writes with, and the extra of the installation that brings it; empty for none."""

    def require(self) -> None:
        """Check that the tracker's library can be imported.

        Raises:
            ConfigError: the library cannot be imported. The message says how to install it.
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
