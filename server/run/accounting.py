"""What differential privacy has cost so far: epsilon per client, counted by Opacus' Renyi accountant.

``epsilon`` is a number only where everything that leaves a device is noised, and nobody can predict the noise. Where a
condition of that does not hold it is ``None``, which stands for infinity, and the accountant's figure for the noised
parts is called ``conditional_epsilon``.
"""

import importlib.metadata
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from common.accounting import LIBRARY, composed, epsilon, new_accountant
from common.errors import CheckpointError
from common.privacy import NEIGHBOURS, GaussianPrivacy
from common.regular_files import read_small
from common.settings import RunSettings
from common.storage.files import write_json
from common.wire.messages import TRAINED_STATUSES

DIGITS = 4
"""Decimals of an epsilon that is written down. It is rounded up, so that it stays a bound and is never 0."""

LEDGER = "privacy.json"
"""The file of :class:`Ledger` in a run's folder."""

RELEASED = TRAINED_STATUSES | {"refused", "late"}
"""What becomes of an answer that was sent."""

MEASUREMENTS = ("seconds_load", "seconds_score", "seconds_train", "seconds_save", "peak_bytes")
"""Columns of ``activity.csv`` that a device measured. They may depend on images, and are not noised."""

PUBLIC = (
    "samples and class counts (labels are not protected)",
    "optimiser steps, which follow from them",
    "scores of the received model on test images (which are not protected)",
    "whether and when a client answers, and errors that it reports",
    "hardware and package versions",
)
"""What leaves a device as it is, and is no function of a training image other than through what was released."""

CONDITIONS = {
    "prototypes": "prototypes leave without noise; set privacy.noise_multiplier above 0",
    "weights": "weights leave without noise; set privacy.update_clip and privacy.update_noise_multiplier above 0",
    "measurements": "seconds and memory leave as the device measured them",
    "keyed": "the noise is drawn from the run's seed, so whoever knows the seed can subtract it; "
    "privacy.randomness=system draws it from the operating system",
    "": "a device does not say where its noise comes from",
}
"""Why a run has no epsilon, by the part that is not noised or by the noise's randomness."""


def check_accountant(settings: RunSettings) -> None:
    """Find out before the first round whether there is an accountant.

    Raises:
        ConfigError: the run is private and the library is missing.
    """
    if isinstance(settings.privacy, GaussianPrivacy):
        new_accountant()


# ---- what was released -----------------------------------------------------------------------------------------------


class Ledger:
    """What each client has released in a run's folder, kept in ``privacy.json``, which a resumed run never cuts.

    A device counts its releases itself, for each run's id, and its count is taken. Answers that the device has not
    counted aloud yet, since they came too late or not at all, are added until it does.

    Args:
        folder: the run's folder.
        sent: whether clients send ``prototypes`` and ``weights``, besides what the file says.
        anew: whether the folder begins another run.

    Raises:
        CheckpointError: the file is damaged, so that nobody knows what was released.
    """

    def __init__(self, folder: Path, sent: Mapping[str, bool] = MappingProxyType({}), *, anew: bool = False) -> None:
        self.path = folder / LEDGER
        self.sent = {"prototypes": False, "weights": False, "measurements": False, **sent}
        self._clients: dict[str, dict[str, Any]] = {}
        if anew:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            try:
                content = json.loads(read_small(self.path))
                self._clients = {str(client): _entry(entry) for client, entry in content["clients"].items()}
                before = {part: bool(content["sent"][part]) for part in self.sent}
                self.sent = {part: is_sent or before[part] for part, is_sent in self.sent.items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(
                    f"{self.path} is damaged, so what clients have released is not known ({error}); restore it, or "
                    "begin another run in another output="
                ) from error

    def asked(self, run: str, clients: Iterable[str]) -> None:
        """Note, before an exchange, that each of ``clients`` is asked for a release."""
        for client in clients:
            self._of(run, client)["open"] += 1
        self._write()

    def answered(self, run: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Note what became of an exchange.

        Args:
            run: the run's id.
            rows: rows of ``activity.csv``.
        """
        for row in rows:
            client, status = str(row["client"]), str(row["status"])
            entry = self._of(run, client)
            entry["came"] += status in RELEASED
            self.sent["measurements"] |= any(float(row.get(column) or 0) > 0 for column in MEASUREMENTS)
            if status == "failed":  # the device says itself that it sent nothing
                entry["open"] = max(0, entry["open"] - 1)
            if releases := int(row.get("releases") or 0):
                entry["counted"] = max(entry["counted"], releases)
                entry["open"] = 0
                found = self._clients[client]["randomness"]
                self._clients[client]["randomness"] = sorted({*found, str(row.get("randomness") or "")})
        self._write()

    def releases(self) -> dict[str, int]:
        """Return how many answers each client has released in this folder, over all parts of the run."""
        return {client: sum(map(_total, entry["runs"].values())) for client, entry in sorted(self._clients.items())}

    def randomness(self) -> list[str]:
        """Return where the noise of the answers came from, without repetition."""
        return sorted({word for entry in self._clients.values() for word in entry["randomness"]})

    def _of(self, run: str, client: str) -> dict[str, int]:
        entry = self._clients.setdefault(client, {"randomness": [], "runs": {}})
        counts: dict[str, int] = entry["runs"].setdefault(run, {"counted": 0, "came": 0, "open": 0})
        return counts

    def _write(self) -> None:
        write_json(self.path, {"sent": self.sent, "clients": self._clients})


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    runs = {}
    for run, counts in entry["runs"].items():
        runs[str(run)] = {key: int(counts[key]) for key in ("counted", "came", "open")}
    return {"randomness": [str(word) for word in entry["randomness"]], "runs": runs}


def _total(counts: Mapping[str, int]) -> int:
    return max(counts["counted"] + counts["open"], counts["came"])


# ---- what is said of it ----------------------------------------------------------------------------------------------


def unprotected(privacy: GaussianPrivacy, sent: Mapping[str, bool]) -> list[str]:
    """Return the parts that leave without noise, of those that are ``sent``."""
    noised = privacy.noised(prototypes=sent["prototypes"], weights=sent["weights"])
    return [part for part, is_sent in sent.items() if is_sent and part not in noised]


def conditions(bare: Iterable[str], randomness: Iterable[str]) -> list[str]:
    """Return why there is no epsilon; empty if there is one.

    Args:
        bare: the parts that leave without noise.
        randomness: where the devices' noise comes from; ``system`` is what nobody can predict.
    """
    predictable = [word for word in randomness if word != "system"]
    return [CONDITIONS.get(word, f"the noise is drawn from {word!r}") for word in (*bare, *predictable)]


def privacy_report(settings: RunSettings, ledger: Ledger | None, samples: Mapping[str, int]) -> dict[str, Any] | None:
    """Return what ``summary.json`` says of privacy; ``None`` where there is none.

    Epsilons are of this run alone: other runs on the same data add to them. ``None`` stands for infinity.

    Args:
        settings: the run's settings.
        ledger: what was released.
        samples: training samples of each client.
    """
    privacy = settings.privacy
    if not isinstance(privacy, GaussianPrivacy) or ledger is None:
        return None
    noised = privacy.noised(prototypes=ledger.sent["prototypes"], weights=ledger.sent["weights"])
    bare = unprotected(privacy, ledger.sent)
    releases, randomness = ledger.releases(), ledger.randomness()
    unmet = conditions(bare, randomness)
    found = {count: epsilon(list(noised.values()), count, privacy.delta) for count in set(releases.values())}
    conditional = {client: rounded_up(found[count]) for client, count in releases.items()}
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
        "epsilon": dict.fromkeys(conditional) if unmet else conditional,
        "conditional_epsilon": conditional,
        "conditions": unmet,
        "warnings": warnings_of(privacy, samples),
        "accountant": f"{LIBRARY} {importlib.metadata.version(LIBRARY)}, RDP, no amplification",
    }


class PrivacyAccount:
    """What a run's clients release; does nothing in a run without differential privacy.

    Args:
        settings: the run's settings.
        sent: whether clients send ``prototypes`` and ``weights``.
    """

    def __init__(self, settings: RunSettings, sent: Mapping[str, bool]) -> None:
        self.settings = settings
        self.ledger: Ledger | None = None
        if isinstance(settings.privacy, GaussianPrivacy):
            self.ledger = Ledger(settings.output_folder, sent, anew=not settings.resume)

    def asked(self, run: str, clients: Iterable[str]) -> None:
        """See :meth:`Ledger.asked`."""
        if self.ledger is not None:
            self.ledger.asked(run, clients)

    def answered(self, run: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """See :meth:`Ledger.answered`."""
        if self.ledger is not None:
            self.ledger.answered(run, rows)

    def warnings(self, samples: Mapping[str, int]) -> list[str]:
        """Return what the settings do not protect, one sentence each; ``samples`` are each client's."""
        privacy = self.settings.privacy
        if self.ledger is None or not isinstance(privacy, GaussianPrivacy):
            return []
        unmet = conditions(unprotected(privacy, self.ledger.sent), ())
        return [f"no epsilon: {reason}" for reason in unmet] + warnings_of(privacy, samples)

    def report(self, samples: Mapping[str, int]) -> dict[str, Any] | None:
        """See :func:`privacy_report`."""
        return privacy_report(self.settings, self.ledger, samples)

    def summary(self, samples: Mapping[str, int]) -> str:
        """Return one line about what was spent; empty without differential privacy."""
        report = self.report(samples)
        return report_line(report) if report else ""


def with_conditions(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report as it is, or without epsilon if a version made it that did not look at the conditions."""
    if "conditions" in report:
        return dict(report)
    return {
        **report,
        "neighbours": NEIGHBOURS["client" if report["unit"] == "client" else "sample"],
        "epsilon": dict.fromkeys(report["epsilon"]),
        "conditional_epsilon": dict(report["epsilon"]),
        "conditions": ["the run is of an older version, whose registration held a hash of the images"],
        "warnings": [],
    }


def rounded_up(value: float) -> float | None:
    """Return an epsilon with few decimals, no smaller than it is; ``None`` if it is infinite."""
    if not math.isfinite(value):
        return None
    return math.ceil(value * 10**DIGITS) / 10**DIGITS


def warnings_of(privacy: GaussianPrivacy, samples: Mapping[str, int]) -> list[str]:
    """Return what is odd about the settings, in sentences.

    Args:
        privacy: the run's choice.
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
    """Return what all runs on the same data have released together, by the name of the data.

    A run that did not come to its end counts too. Of each run the client that released most is taken, since an image
    may belong to different clients in different runs.

    Args:
        runs: settings and folders; runs without privacy or without a release are left out.
    """
    found: dict[str, list[tuple[GaussianPrivacy, Ledger]]] = {}
    for settings, folder in runs:
        privacy, ledger = settings.privacy, Ledger(folder)
        if isinstance(privacy, GaussianPrivacy) and any(ledger.releases().values()):
            found.setdefault(settings.data.name, []).append((privacy, ledger))
    return {data: _total_report(spent) for data, spent in found.items()}


def _total_report(spent: Sequence[tuple[GaussianPrivacy, Ledger]]) -> dict[str, Any]:
    delta = min(privacy.delta for privacy, _ in spent)
    history, unmet = [], dict[str, None]()
    for privacy, ledger in spent:
        noised = privacy.noised(prototypes=ledger.sent["prototypes"], weights=ledger.sent["weights"])
        history.append((list(noised.values()), max(ledger.releases().values())))
        unmet |= dict.fromkeys(conditions(unprotected(privacy, ledger.sent), ledger.randomness()))
    value = rounded_up(composed(history, delta))
    unit = "client" if all(privacy.unit == "client" for privacy, _ in spent) else "sample"
    return {
        "runs": len(spent),
        "unit": unit,
        "delta": delta,
        "epsilon": {"all runs": None if unmet else value},
        "conditional_epsilon": {"all runs": value},
        "conditions": list(unmet),
    }


def largest_epsilon(report: Mapping[str, Any]) -> str:
    """Return the largest epsilon that a report would have if all conditions held; ``infinite`` if it has no bound."""
    spent = [value for value in report["conditional_epsilon"].values() if value is not None]
    if not spent:
        return "infinite"
    return f"{max(spent):g}"


def report_line(report: Mapping[str, Any]) -> str:
    """Return one line for people about a report of :func:`privacy_report` or :func:`total_reports`."""
    epsilon = largest_epsilon(report)
    unit = f"per client, one {report['unit']} replaced, delta {report['delta']:g}"
    if not report["conditions"]:
        return f"epsilon at most {epsilon} ({unit})"
    return f"no epsilon: {'; '.join(report['conditions'])}. Otherwise it would be {epsilon} ({unit})"
