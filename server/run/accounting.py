"""The privacy budget that a run has spent: epsilon per client, from Opacus' Renyi accountant.

``epsilon`` is a number only if everything that leaves a device is noised with noise that cannot be predicted. If a
condition for that is not met it is ``None``, which stands for infinity, and ``conditional_epsilon`` is the accountant's
number for the noised parts.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common.accounting import LIBRARY, composed, epsilon, new_accountant
from common.errors import CheckpointError
from common.privacy import NEIGHBOURS, GaussianPrivacy, Unit
from common.regular_files import read_small
from common.settings import RunSettings
from common.storage import write_json
from common.wire.messages import TRAINED_STATUSES
from server.run.schema import REPLIES
from strategies.core.federation import Federation
from strategies.core.participants import Registry

DIGITS = 4
"""Decimals of a recorded epsilon, which is rounded up so that the number remains a bound and is never 0."""

LEDGER = "privacy.json"
"""The file of :class:`ReleaseCounts` in a run's folder."""

COUNTS = ("counted", "came", "open", "lost")
"""Counts of a client in a run: releases up to its last report, replies that arrived, requests since that report, and
releases that the device does not know of, since it has lost its ledger."""

RELEASED = TRAINED_STATUSES | {"refused", "late"}
"""Statuses of replies that left the device."""

MEASUREMENTS = ("seconds_load", "seconds_score", "seconds_train", "seconds_save", "peak_bytes")
"""Columns of ``replies.jsonl`` that a device measured. The values may depend on images, and have no noise."""

PUBLIC = (
    "samples and class counts (labels are not protected)",
    "optimiser steps, which follow from them",
    "scores of the received model on test images (which are not protected)",
    "whether and when a client replies, and which of a few fixed reasons it gives if it cannot",
    "hardware, package versions, clock, and the seconds in which its process started",
)
"""What leaves a device without noise, and depends on training images only through noised releases."""

CONDITIONS = {
    "prototypes": "prototypes leave without noise; set privacy.noise_multiplier above 0",
    "weights": "weights leave without noise; set privacy.update_clip and privacy.update_noise_multiplier above 0",
    "measurements": "seconds and memory leave as the device measured them",
    "keyed": "the noise is drawn from the run's seed, so anyone who knows the seed can subtract it; "
    "privacy.randomness=system draws it from the operating system",
    "": "a device does not say where its noise comes from",
}
"""Why a run has no epsilon, by the part without noise or by the source of the noise."""


def require_accountant(settings: RunSettings) -> None:
    """Check before the first round that the accountant's library is installed.

    Raises:
        ConfigError: the run has differential privacy and the library is missing.
    """
    if isinstance(settings.privacy, GaussianPrivacy):
        new_accountant()


# ---- what was released -----------------------------------------------------------------------------------------------


class ReleaseCounts:
    """The number of releases of each client, kept in ``privacy.json``; resuming a run never lowers it.

    A device counts its own releases for each run's id and reports the count with its reply. Requests since its last
    report count as releases too, until it reports again. A device whose count does not grow has lost its ledger and
    counts anew: what it released before stays.

    Args:
        folder: the run's folder.
        sent: whether clients send ``prototypes`` and ``weights``, in addition to what the file records.
        new_run: whether another run starts in the folder, which deletes the file.
        resumed: whether the folder's run has rounds, so that the file must be there.

    Raises:
        CheckpointError: the file is damaged or missing, so the number of releases is unknown.
    """

    def __init__(
        self,
        folder: Path,
        sent: Mapping[str, bool] = MappingProxyType({}),
        *,
        new_run: bool = False,
        resumed: bool = False,
    ) -> None:
        self.path = folder / LEDGER
        self.sent = {"prototypes": False, "weights": False, "measurements": False, **sent}
        self._clients: dict[str, dict[str, Any]] = {}
        if resumed and not self.path.exists():
            raise CheckpointError(
                f"{self.path} is missing, so what clients have released is not known; restore it, or begin another run "
                "in another output="
            )
        if new_run:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            try:
                content = json.loads(read_small(self.path))
                for client, entry in content["clients"].items():
                    self._clients[str(client)] = _entry(entry)
                for part in self.sent:
                    self.sent[part] |= bool(content["sent"][part])
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(
                    f"{self.path} is damaged, so what clients have released is not known ({error}); restore it, or "
                    "begin another run in another output="
                ) from error

    def count_requests(self, run: str, clients: Iterable[str]) -> None:
        """Record before an exchange that each of ``clients`` is asked for a release."""
        for client in clients:
            self._of(run, client)["open"] += 1
        self._write()

    def count_replies(self, run: str, rows: Iterable[Mapping[str, Any]], unsent: Collection[str] = ()) -> None:
        """Record the outcome of an exchange.

        Args:
            run: the run's id.
            rows: lines of ``replies.jsonl``.
            unsent: clients whose request did not leave, so that they released nothing.
        """
        for row in rows:
            client, status = str(row["client"]), str(row["status"])
            entry = self._of(run, client)
            if client in unsent:
                entry["open"] = max(0, entry["open"] - 1)
                continue
            entry["came"] += status in RELEASED
            for column in MEASUREMENTS:
                if float(row.get(column) or 0) > 0:
                    self.sent["measurements"] = True
            if status == "failed":  # the device reported an error in place of a release
                entry["open"] = max(0, entry["open"] - 1)
            releases = int(row.get("releases") or 0)
            if releases:
                _take_over(entry, releases)
                sources = self._clients[client]["randomness"]
                self._clients[client]["randomness"] = sorted({*sources, str(row.get("randomness") or "")})
        self._write()

    def releases(self) -> dict[str, int]:
        """Return the number of releases of each client in this folder, over all runs and their resumed parts."""
        by_client: dict[str, int] = {}
        for client, entry in sorted(self._clients.items()):
            by_client[client] = 0
            for counts in entry["runs"].values():
                by_client[client] += max(counts["counted"] + counts["open"], counts["came"])
        return by_client

    def randomness(self) -> list[str]:
        """Return the sources of the noise that the devices reported, each once."""
        sources: set[str] = set()
        for entry in self._clients.values():
            sources.update(entry["randomness"])
        return sorted(sources)

    def _of(self, run: str, client: str) -> dict[str, int]:
        entry = self._clients.setdefault(client, {"randomness": [], "runs": {}})
        counts: dict[str, int] = entry["runs"].setdefault(run, dict.fromkeys(COUNTS, 0))
        return counts

    def _write(self) -> None:
        write_json(self.path, {"sent": self.sent, "clients": self._clients})


def _take_over(entry: dict[str, int], releases: int) -> None:
    """Take over the count of ``releases`` that a device reports."""
    counted = entry["lost"] + releases
    if counted <= entry["counted"]:  # the device has lost its ledger: each request since its last report may be one
        counted = entry["counted"] + max(1, entry["open"])
        entry["lost"] = counted - releases
    entry["counted"], entry["open"] = counted, 0


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client's entry of ``privacy.json``, checked; its counts by run are :data:`COUNTS`."""
    runs: dict[str, dict[str, int]] = {}
    for run, counts in entry["runs"].items():
        runs[str(run)] = {key: int(counts[key]) for key in COUNTS}
    return {"randomness": list(map(str, entry["randomness"])), "runs": runs}


# ---- reports ---------------------------------------------------------------------------------------------------------


def unprotected_parts(privacy: GaussianPrivacy, sent: Mapping[str, bool]) -> list[str]:
    """Return the parts that are ``sent`` without noise."""
    noised = privacy.noised(prototypes=sent["prototypes"], weights=sent["weights"])
    return [part for part, is_sent in sent.items() if is_sent and part not in noised]


def unmet_conditions(bare: Iterable[str], randomness: Iterable[str]) -> list[str]:
    """Return why there is no epsilon; empty if there is one.

    Args:
        bare: the parts that leave without noise.
        randomness: the sources of the devices' noise; only ``system`` cannot be predicted.
    """
    reasons = [CONDITIONS[part] for part in bare]
    for source in randomness:
        if source != "system":
            reasons.append(CONDITIONS.get(source, f"the noise is drawn from {source!r}"))
    return reasons


def privacy_report(
    settings: RunSettings, ledger: ReleaseCounts | None, samples: Mapping[str, int]
) -> dict[str, Any] | None:
    """Return the entry ``privacy`` of ``summary.json``; ``None`` without differential privacy.

    The epsilons are for this run alone; other runs on the same data add to them. ``None`` stands for infinity.

    Args:
        settings: the run's settings.
        ledger: the releases of each client.
        samples: training samples of each client.
    """
    privacy = settings.privacy
    if not isinstance(privacy, GaussianPrivacy) or ledger is None:
        return None
    noised = privacy.noised(prototypes=ledger.sent["prototypes"], weights=ledger.sent["weights"])
    bare = unprotected_parts(privacy, ledger.sent)
    releases, randomness = ledger.releases(), ledger.randomness()
    unmet = unmet_conditions(bare, randomness)
    by_count: dict[int, float | None] = {}  # most clients have the same number of releases
    conditional: dict[str, float | None] = {}
    for client, count in releases.items():
        if count not in by_count:
            by_count[count] = rounded_up(epsilon(list(noised.values()), count, privacy.delta))
        conditional[client] = by_count[count]
    epsilons = dict(conditional)
    if unmet:
        epsilons = dict.fromkeys(conditional)
    return {
        "unit": privacy.unit,
        "neighbours": NEIGHBOURS[privacy.unit],
        "delta": privacy.delta,
        "noise_multipliers": noised,
        "covers": list(noised),
        "unprotected": bare,
        "public": list(PUBLIC),
        "randomness": randomness,
        "releases": releases,
        "epsilon": epsilons,
        "conditional_epsilon": conditional,
        "conditions": unmet,
        "warnings": warnings_of(privacy, samples),
        "accountant": f"{LIBRARY} {importlib.metadata.version(LIBRARY)}, RDP, no amplification",
    }


class PrivacyAccount:
    """The releases of a run with differential privacy, and the budget that they have spent.

    Args:
        settings: the run's settings, with differential privacy.
        registry: the clients.
        sent: whether clients send ``prototypes`` and ``weights``.
        resumed: whether the run has rounds that are done.
    """

    def __init__(self, settings: RunSettings, registry: Registry, sent: Mapping[str, bool], *, resumed: bool) -> None:
        self.settings, self.registry = settings, registry
        self.ledger = ReleaseCounts(settings.output_folder, sent, new_run=not settings.resume, resumed=resumed)

    @classmethod
    def of(cls, settings: RunSettings, federation: Federation, *, resumed: bool = False) -> PrivacyAccount | None:
        """Return the account of a run; ``None`` without differential privacy.

        Raises:
            CheckpointError: the run is resumed, and what its clients released is not known.
        """
        if not isinstance(settings.privacy, GaussianPrivacy):
            return None
        prototypes = settings.method.prototypes_from != "none"
        sent = {"prototypes": prototypes, "weights": bool(federation.server.shared)}
        return cls(settings, federation.registry, sent, resumed=resumed)

    def warnings(self) -> list[str]:
        """Return why there is no epsilon or a weak one, one sentence each."""
        privacy = self.settings.privacy
        assert isinstance(privacy, GaussianPrivacy)
        unmet = unmet_conditions(unprotected_parts(privacy, self.ledger.sent), ())
        return [f"no epsilon: {reason}" for reason in unmet] + warnings_of(privacy, self._samples())

    def report(self) -> dict[str, Any] | None:
        """Return the entry ``privacy`` of ``summary.json`` for the releases so far."""
        return privacy_report(self.settings, self.ledger, self._samples())

    def summary(self) -> str:
        """Return one line about the spent budget."""
        report = self.report()
        assert report is not None, "the run is private"
        return report_line(report)

    def _samples(self) -> dict[str, int]:
        registrations = self.registry.registrations
        return {client: registrations[client].samples for client in sorted(registrations)}


def rounded_up(value: float) -> float | None:
    """Round an epsilon up to :data:`DIGITS` decimals; ``None`` if it is infinite."""
    if not math.isfinite(value):
        return None
    return math.ceil(value * 10**DIGITS) / 10**DIGITS


def warnings_of(privacy: GaussianPrivacy, samples: Mapping[str, int]) -> list[str]:
    """Return warnings about the settings, one sentence each.

    Args:
        privacy: the run's settings.
        samples: training samples of each client.
    """
    most = max(samples.values(), default=0)
    if not most or privacy.delta < 1 / most:
        return []
    return [
        f"privacy.delta={privacy.delta:g} is no smaller than one over a client's {most} samples, so the bound allows "
        f"whole samples to be published; choose well below {1 / most:.2g}"
    ]


def total_reports(runs: Sequence[tuple[RunSettings, Path]]) -> dict[str, dict[str, Any]]:
    """Return the total epsilon of all runs on the same data, by the name of the data.

    Runs that did not finish count too. Each run counts with the client that released most, since an image may belong to
    different clients in different runs.

    Args:
        runs: settings and folders; runs without differential privacy or without a release are left out.

    Raises:
        CheckpointError: the file of a run's releases is damaged or missing.
    """
    by_data: dict[str, list[tuple[RunSettings, ReleaseCounts]]] = {}
    for settings, folder in runs:
        if not isinstance(settings.privacy, GaussianPrivacy):
            continue
        replies = folder / REPLIES
        ledger = ReleaseCounts(folder, resumed=replies.exists() and replies.stat().st_size > 0)
        if any(ledger.releases().values()):
            by_data.setdefault(settings.data.name, []).append((settings, ledger))
    return {data: _total_report(spent) for data, spent in by_data.items()}


def _total_report(spent: Sequence[tuple[RunSettings, ReleaseCounts]]) -> dict[str, Any]:
    delta = 1.0
    units: set[Unit] = set()
    columns: set[str] = set()
    history: list[tuple[list[float], int]] = []
    unmet: dict[str, None] = {}
    for settings, ledger in spent:
        privacy = settings.privacy
        assert isinstance(privacy, GaussianPrivacy)
        delta = min(delta, privacy.delta)
        units.add(privacy.unit)
        if privacy.unit == "group":
            columns.add(str(getattr(settings.data, "group", "")))
        noised = privacy.noised(prototypes=ledger.sent["prototypes"], weights=ledger.sent["weights"])
        history.append((list(noised.values()), max(ledger.releases().values())))
        unmet |= dict.fromkeys(unmet_conditions(unprotected_parts(privacy, ledger.sent), ledger.randomness()))
    if len(columns) > 1:  # a group of one column may be several of another; a sample is in one of each
        units.add("sample")
    value = rounded_up(composed(history, delta))
    epsilon_of_all = value
    if unmet:
        epsilon_of_all = None
    return {
        "runs": len(spent),
        "unit": min(units, key=list(NEIGHBOURS).index),
        "delta": delta,
        "epsilon": {"all runs": epsilon_of_all},
        "conditional_epsilon": {"all runs": value},
        "conditions": list(unmet),
    }


def largest_epsilon(report: Mapping[str, Any]) -> str:
    """Return the largest epsilon that a report would have if all conditions held; ``infinite`` if it has no bound."""
    spent = [value for value in report["conditional_epsilon"].values() if value is not None]
    if not spent:
        return "infinite"
    return str(max(spent))


def report_line(report: Mapping[str, Any]) -> str:
    """Return one line for people about a report of :func:`privacy_report` or :func:`total_reports`."""
    epsilon = largest_epsilon(report)
    unit = f"per client, one {report['unit']} replaced, delta {report['delta']:g}"
    if not report["conditions"]:
        return f"epsilon at most {epsilon} ({unit})"
    return f"no epsilon: {'; '.join(report['conditions'])}. Otherwise it would be {epsilon} ({unit})"
