"""Metrics of a run for Prometheus, from the process that runs the rounds."""

import math
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, start_http_server

from common.settings import RunSettings

ROUND_SECONDS = (0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
"""Upper limits of the histogram of a round's duration, in seconds."""


class PrometheusExporter:
    """Answers Prometheus at ``http://address:port/metrics`` with a run's metrics; docker/grafana shows them.

    Args:
        port: TCP port, in [0, 65535]; 0 takes a free one.
        address: network address to listen on.
        settings: the run's settings.

    Attributes:
        registry: the metrics.
        port: the TCP port that is in use.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, address: str, settings: RunSettings) -> None:
        registry = CollectorRegistry()
        self.registry = registry

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"goldfinch_{name}", text, labels, registry=registry)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"goldfinch_{name}", text, labels, registry=registry)

        self.run = Info("goldfinch_run", "What is trained", registry=registry)
        self.training = gauge("training", "1 while rounds go on, 0 before and after")
        self.rounds = gauge("rounds", "Rounds of the run")
        self.round = gauge("round", "Rounds completed")
        self.round_started = gauge("round_started_timestamp_seconds", "When the present round began, Unix time")
        self.round_seconds = Histogram(
            "goldfinch_round_duration_seconds", "Wall time of a round", buckets=ROUND_SECONDS, registry=registry
        )
        self.skipped = counter("rounds_skipped", "Rounds that missed their quorum")
        self.registered = gauge("clients_registered", "Clients admitted to the run")
        self.participants = gauge("round_participants", "Clients asked in the present round")
        self.answers = counter("answers", "Answers and failures of clients", ("client", "domain", "status"))
        self.refused_registrations = counter("registrations_refused", "Registrations that were refused")
        self.accuracy = gauge("accuracy_percent", "Test accuracy after the last scored round", ("domain",))
        self.average = gauge("accuracy_average_percent", "Mean of the accuracy over all domains; NaN if one is missing")
        self.worst = gauge("accuracy_worst_percent", "Accuracy of the worst of all domains; NaN if one is missing")
        self.missing = gauge("domains_missing", "Domains that the last scored round lacks")
        self.test_loss = gauge("test_loss", "Test loss after the last scored round", ("client", "domain"))
        self.loss = gauge("train_loss", "Mean of a loss term over the clients of the last round", ("term",))
        self.seconds = gauge("client_seconds", "A client's last exchange by phase", ("client", "domain", "phase"))
        self.bytes = counter("transferred_bytes", "Bytes between server and clients", ("way",))
        self.run.info({"method": settings.method.name, "data": settings.data.name, "seed": str(settings.seed)})
        self.rounds.set(settings.train.rounds)
        self._server, self._thread = start_http_server(port, address, registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __call__(self, name: str, entry: Mapping[str, Any]) -> None:
        """See :class:`~server.trackers.base.Tracker`."""
        if name in ("start", "resume"):
            self.training.set(1)
            self.round.set(entry["round"])
            self.rounds.set(entry["rounds"])
            self.registered.set(len(entry["clients"]))
        elif name == "registration refused":
            self.refused_registrations.inc()
        elif name == "round":
            self.round_started.set(entry["time"])
            self.participants.set(len(entry["clients"]))
        elif name == "round done":
            self.round.set(entry["round"])
            self.round_seconds.observe(entry["seconds"])
            for term, value in entry["losses"].items():
                self.loss.labels(term).set(value)
        elif name == "round skipped":
            self.round.set(entry["round"])
            self.skipped.inc()
        elif name == "score":
            self._score(entry)
        elif name in ("finish", "failed", "stopped"):
            self.training.set(0)
        elif name == "scores":
            for row in entry["rows"]:
                self.test_loss.labels(row["client"], row["domain"]).set(row["loss"])
        elif name == "activity":
            for row in entry["rows"]:
                self._activity(row)

    def _score(self, entry: Mapping[str, Any]) -> None:
        """Set the accuracies. A missing domain, and the summaries that lack it, are NaN."""
        missing = entry.get("missing", {})
        for domain in missing:
            self.accuracy.labels(domain).set(math.nan)
        for domain, value in entry["accuracy"].items():
            self.accuracy.labels(domain).set(value)
        average = entry["average"]
        worst = entry["worst"]
        if missing:
            average = math.nan
            worst = math.nan
        self.average.set(average)
        self.worst.set(worst)
        self.missing.set(len(missing))

    def _activity(self, row: Mapping[str, Any]) -> None:
        client = str(row["client"])
        domain = str(row["domain"])
        self.answers.labels(client, domain, row["status"]).inc()
        for way in ("up", "down"):
            self.bytes.labels(way).inc(int(row.get(f"bytes_{way}") or 0))
        for phase in ("load", "score", "train", "save"):
            value = row.get(f"seconds_{phase}")
            if value not in ("", None):
                self.seconds.labels(client, domain, phase).set(value)
