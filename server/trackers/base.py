"""What all trackers share: their options, what they log, and that their failure is not the run's."""

import contextlib
import importlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol

from pydantic import Field

from common.config import build, checked
from common.errors import ConfigError
from common.settings import RunSettings
from common.wire.messages import trained_count
from server.trackers.events import Listener

LOG = logging.getLogger("goldfinch.trackers")


class Tracker(Protocol):
    """A listener that is closed when the run ends, however it ends."""

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """Take in an event, or rows (``scores`` and ``activity``)."""

    def close(self) -> None:
        """Write out what is pending."""


@checked
class TrackerSettings:
    """conf/tracker/csv.yaml, and what every other tracker has too.

    Args:
        prometheus_port: TCP port on which the server process answers Prometheus at ``/metrics``; ``None`` is off.
        prometheus_address: network address it listens on; ``0.0.0.0`` is every one, as a container needs.
    """

    library: ClassVar[str] = ""
    """What a kind of tracker writes with: the module, and the extra that it is in."""

    prometheus_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    prometheus_address: str = "127.0.0.1"

    def require(self) -> None:
        """Check that the libraries are there.

        Raises:
            ConfigError: one is not; the message says how to install it.
        """
        extras = {"prometheus_client": "prometheus"} if self.prometheus_port is not None else {}
        extras |= {self.library: self.library} if self.library else {}
        for module, extra in extras.items():
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    f"this tracker needs {module}, which cannot be imported ({error}); "
                    f"pip install 'goldfinch-fl[{extra}]', or choose tracker=csv"
                ) from error

    def trackers(self, settings: RunSettings) -> list[Tracker]:
        """The trackers, opened.

        Raises:
            ConfigError: the port is taken.
        """
        if self.prometheus_port is None:
            return []
        from server.trackers.prometheus import PrometheusExporter

        try:
            return [PrometheusExporter(self.prometheus_port, self.prometheus_address, settings)]
        except OSError as error:
            raise ConfigError(
                f"tracker.prometheus_port={self.prometheus_port}: cannot listen on {self.prometheus_address} "
                f"({error.strerror}); choose another port or null"
            ) from error


def tracker_settings(settings: RunSettings) -> TrackerSettings:
    """Return the chosen tracker's options, checked, after its library was found.

    Raises:
        ConfigError: an option is wrong, or the library is not installed.
    """
    chosen = build(settings.tracker, "tracker")
    if not isinstance(chosen, TrackerSettings):
        raise ConfigError(f"tracker._target_={settings.tracker.get('_target_')} is not a tracker")
    chosen.require()
    return chosen


@contextlib.contextmanager
def tracking(settings: RunSettings, listeners: Sequence[Listener]) -> Iterator[list[Listener]]:
    """``listeners`` and the run's trackers, which are closed afterwards.

    A tracker that raises is left out from then on, ``listeners`` are told ``tracker failed``, and the run goes on.
    """
    guards = [Guard(tracker, listeners) for tracker in tracker_settings(settings).trackers(settings)]
    try:
        yield [*listeners, *guards]
    finally:
        for guard in guards:
            guard.close()


class Guard:
    """A tracker whose errors stay its own."""

    def __init__(self, tracker: Tracker, listeners: Sequence[Listener]) -> None:
        self.tracker, self.listeners = tracker, listeners
        self.broken = False

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """Pass on, unless the tracker broke before."""
        if self.broken:
            return
        try:
            self.tracker(name, entry)
        except Exception as error:  # an error of a third library must not end training
            self._give_up(error)

    def close(self) -> None:
        """Close the tracker."""
        try:
            self.tracker.close()
        except Exception as error:  # as above
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self.broken:
            return
        self.broken = True
        kind = type(self.tracker).__name__
        LOG.warning("%s failed", kind, exc_info=error)
        for listener in self.listeners:
            listener("tracker failed", {"tracker": kind, "reason": f"{type(error).__name__}: {error}"})


class Scalar(NamedTuple):
    """One number of one round.

    Args:
        tag: what it is, from the general to the particular: ``accuracy/<domain>/<client>``.
        round: the round it belongs to.
        value: the number.
    """

    tag: str
    round: int
    value: float


def scalars(name: str, entry: Mapping[str, Any]) -> list[Scalar]:
    """The numbers in an event or in rows.

    ``accuracy/<domain>/<client>`` (per cent) and ``test_loss/...`` of every scored row; ``train_loss/<term>/<client>``,
    ``seconds/<phase>/<client>`` and ``bytes/<way>/<client>`` of every activity row; ``summary/...`` over domains,
    which is ``summary/partial/...`` in rounds that lack some, and ``summary/missing_domains``, how many they lack;
    ``round/...`` of the round as a whole.
    """
    if name == "scores":
        return [
            Scalar(f"{tag}/{row['domain']}/{row['client']}", int(row["round"]), float(row[key]))
            for row in entry["rows"]
            for tag, key in (("accuracy", "accuracy"), ("test_loss", "loss"))
        ]
    if name == "activity":
        return [scalar for row in entry["rows"] for scalar in _activity(row)]
    number = int(entry.get("round", 0))
    if name == "score":
        found = {f"summary/accuracy/{domain}": value for domain, value in entry["accuracy"].items()}
        mark = "summary/partial" if entry.get("missing") else "summary"
        found |= {f"{mark}/{key}": entry[key] for key in ("average", "worst")}
        found |= {"summary/missing_domains": len(entry.get("missing", {}))}
    elif name == "validation":
        found = {"summary/partial/validation" if entry.get("missing") else "summary/validation": entry["average"]}
    elif name == "round done":
        found = {"round/seconds": entry["seconds"]}
        found |= {f"round/clients_{status}": count for status, count in entry["outcomes"].items()}
        found["round/clients_trained"] = trained_count(entry["outcomes"])
        found |= {f"round/{term}": value for term, value in entry["losses"].items()}
        found |= {f"round/bytes_{way}": entry[f"bytes_{way}"] for way in ("up", "down")}
    else:
        return []
    return [Scalar(tag, number, float(value)) for tag, value in found.items()]


def _activity(row: Mapping[str, Any]) -> list[Scalar]:
    number, client = int(row["round"]), row["client"]
    found = {f"train_loss/{term}/{client}": value for term, value in json.loads(row.get("losses") or "{}").items()}
    for key, value in row.items():
        what, _, which = key.partition("_")
        if what in ("seconds", "bytes") and which and value not in ("", None):
            found[f"{what}/{which}/{client}"] = value
    return [Scalar(tag, number, float(value)) for tag, value in found.items()]
