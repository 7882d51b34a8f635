"""The ledger of a device's releases, its privacy budget, and its secret.

All three are kept in one folder per data set of the device, across runs. So a server that starts another run, resumes
one from an earlier round or asks twice finds the same ledger. A release is counted before it is sent: if the device is
killed in between, one release too many is counted, never one too few.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from client.border import Border
from client.private_folder import PrivateFolder
from common.accounting import composed, new_accountant
from common.contract import Contract
from common.errors import BUDGET_SPENT, BudgetSpentError, DataError, PrivacyError

FOLDER = ".privacy"
"""Folder of all ledgers, in the folder with clients' states by run. No run's id begins with a dot."""

LEDGER = "ledger.json"


@dataclass(frozen=True)
class Budget:
    """How much may be released of a client's data, over all runs.

    Args:
        max_releases: updates, >= 1; ``None`` is no limit.
        max_epsilon: > 0; ``None`` is no limit. An update of which a part carries no noise exceeds every limit.
        delta: delta of ``max_epsilon``, in (0, 1).
        releases_key, epsilon_key: the settings of the limits, for messages.
    """

    max_releases: int | None = None
    max_epsilon: float | None = None
    delta: float = 1e-5
    releases_key: str = "privacy.max_releases"
    epsilon_key: str = "privacy.max_epsilon"

    def __bool__(self) -> bool:
        return self.max_releases is not None or self.max_epsilon is not None

    def limits(self, contract: Contract) -> Contract:
        """Return a device's contract with its budget."""
        if not self:
            return contract
        if self.max_epsilon is None:
            return replace(contract, budget=self.releases_key)
        return replace(contract, budget=self.epsilon_key, max_epsilon=f"{self.epsilon_key}={self.max_epsilon:g}")


@dataclass
class Spent:
    """Updates of one client in one run with the same noise.

    Args:
        run: the run's id.
        client: the client's id.
        multipliers: noise multiplier of each part of an update; 0 is no noise.
        count: updates.
    """

    run: str
    client: str
    multipliers: Mapping[str, float]
    count: int


class Ledger(PrivateFolder):
    """The ledger of one client's data on this device, and the device's secret.

    Args:
        folder: created with the first file; only this user may read its files.
        budget: the device's own, which applies with any settings of a server.
        border: which of the device's images are trained on, and which are scored; ``None`` in a simulation, whose
            ledger is that of one run.
    """

    def __init__(self, folder: Path, budget: Budget | None = None, border: Border | None = None) -> None:
        super().__init__(folder)
        self.budget, self.border = budget or Budget(), border

    def check(self, multipliers: Mapping[str, float], budgets: Sequence[Budget]) -> None:
        """Check that another update may be released.

        Args:
            multipliers: noise multipliers of the update; see :class:`Spent`.
            budgets: the device's own and the run's; the stricter one counts.

        Raises:
            PrivacyError: a budget is spent; the message says which.
            DataError: the ledger is damaged.
            ConfigError: the accountant is not installed.
        """
        self._check(self._read(), multipliers, budgets)

    def spend(self, run: str, client: str, multipliers: Mapping[str, float], budgets: Sequence[Budget]) -> int:
        """Count an update, before it is sent.

        Args:
            run: the run's id.
            client: the client's id.
            multipliers: as in :meth:`check`.
            budgets: as in :meth:`check`.

        Returns:
            The number of updates that this client has released in this run, including this one.

        Raises:
            PrivacyError, ConfigError: as in :meth:`check`; nothing is counted.
            DataError: the ledger is damaged, or cannot be written.
        """
        with self._locked():
            entries = self._read()
            self._check(entries, multipliers, budgets)
            released = 1
            counted = False
            for entry in entries:
                if (entry.run, entry.client) != (run, client):
                    continue
                released += entry.count
                if not counted and entry.multipliers == multipliers:
                    entry.count += 1
                    counted = True
            if not counted:
                entries.append(Spent(run, client, dict(multipliers), 1))
            content: dict[str, Any] = {"releases": [vars(entry) for entry in entries]}
            if self.budget.max_epsilon is not None:  # for who watches the device without torch (client.condition)
                spent = [(tuple(entry.multipliers.values()), entry.count) for entry in entries]
                content |= {"epsilon": composed(spent, self.budget.delta), "delta": self.budget.delta}
            self._write(LEDGER, json.dumps(content, indent=2) + "\n")
            return released

    def _check(self, entries: Sequence[Spent], multipliers: Mapping[str, float], budgets: Sequence[Budget]) -> None:
        count = sum(entry.count for entry in entries)
        spent = [(tuple(entry.multipliers.values()), entry.count) for entry in entries]
        spent.append((tuple(multipliers.values()), 1))
        for budget in budgets:
            if budget.max_releases is not None and count >= budget.max_releases:
                raise BudgetSpentError(
                    f"{BUDGET_SPENT}: updates released of this device's data: {count}, and "
                    f"{budget.releases_key}={budget.max_releases} allows no more; nothing was sent"
                )
            if budget.max_epsilon is not None:
                _check_epsilon(spent, budget)

    def _read(self) -> list[Spent]:
        path = self.folder / LEDGER
        content = self._content(LEDGER, "the record of releases")
        if content is None:
            return []
        try:
            return [_entry(entry) for entry in json.loads(content)["releases"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is damaged, so the releases of this device's data are not known, and no update is sent: "
                "restore it; deleting it forgets the releases so far"
            ) from error


def check_accountant(budgets: Sequence[Budget]) -> None:
    """Check that epsilon can be computed here, if a budget needs it.

    Raises:
        ConfigError: the library is missing; the message says how to install it.
    """
    for budget in budgets:
        if budget.max_epsilon is not None:
            new_accountant(budget.epsilon_key)


def _check_epsilon(spent: Sequence[tuple[Sequence[float], int]], budget: Budget) -> None:
    check_accountant([budget])
    limit = f"{budget.epsilon_key}={budget.max_epsilon:g}"
    value = composed(spent, budget.delta)
    if budget.max_epsilon is not None and value <= budget.max_epsilon:
        return
    if min(spent[-1][0], default=0.0) <= 0:
        raise PrivacyError(f"a part of this update would carry no noise, which {limit} forbids; nothing was sent")
    if not math.isfinite(value):
        raise BudgetSpentError(
            f"{BUDGET_SPENT}: updates without noise were released of this device's data before, and "
            f"{limit} allows no more; nothing was sent"
        )
    raise BudgetSpentError(
        f"{BUDGET_SPENT}: with this update epsilon would be {value} at delta {budget.delta:g}, and "
        f"{limit} allows no more; nothing was sent"
    )


def _entry(entry: Mapping[str, Any]) -> Spent:
    multipliers = {str(part): float(value) for part, value in entry["multipliers"].items()}
    count = entry["count"]
    if type(count) is not int or count < 1:
        raise ValueError("a count is not a number of updates")
    return Spent(str(entry["run"]), str(entry["client"]), multipliers, count)
