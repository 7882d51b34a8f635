"""What differential privacy has cost so far: epsilon per client, counted by Opacus' Renyi accountant."""

import importlib.metadata
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.errors import libraries_of
from common.privacy import GaussianPrivacy
from common.settings import RunSettings

LIBRARY = "opacus"


def check_accountant(settings: RunSettings) -> None:
    """Find out before the first round whether there is an accountant.

    Raises:
        ConfigError: the run is private and the library is missing.
    """
    if isinstance(settings.privacy, GaussianPrivacy):
        _accountant()


def _accountant() -> Any:
    with libraries_of("privacy", "privacy=gaussian"):
        from opacus.accountants import RDPAccountant
    return RDPAccountant()


def epsilon(multipliers: Sequence[float], releases: int, delta: float) -> float:
    """Epsilon of ``releases`` answers, each of Gaussian mechanisms with these noise multipliers, without subsampling.

    Args:
        multipliers: standard deviation over L2 sensitivity, of each mechanism that an answer holds.
        releases: answers, >= 0.
        delta: of the bound.

    Returns:
        An upper bound; 0 if nothing was released, infinite if a mechanism has no noise.
    """
    if not releases or not multipliers:
        return 0.0
    if min(multipliers) <= 0:
        return math.inf
    accountant = _accountant()
    accountant.history = [(multiplier, 1.0, releases) for multiplier in multipliers]  # as many steps: no loop
    return float(accountant.get_epsilon(delta))


def privacy_report(
    settings: RunSettings, activity: Iterable[Mapping[str, Any]], *, sends_weights: bool
) -> dict[str, Any] | None:
    """What ``summary.json`` says of privacy; ``None`` where there is none.

    A client's releases are what it counted itself or the answers that came from it, whichever is more. Epsilons are of
    this run alone: other runs on the same data add to them. ``None`` stands for infinity.
    """
    privacy = settings.privacy
    if not isinstance(privacy, GaussianPrivacy):
        return None
    releases = _releases(activity)
    prototypes = settings.method.prototypes_from != "none"
    multipliers = privacy.releases(prototypes=prototypes, weights=sends_weights)
    found = {count: epsilon(multipliers, count, privacy.delta) for count in set(releases.values())}
    clipped = sends_weights and privacy.update_clip is not None
    return {
        "unit": privacy.unit,
        "delta": privacy.delta,
        "covers": ["prototypes"] * prototypes + ["weights"] * clipped,
        "unprotected": ["weights"] * (sends_weights and not clipped),
        "releases": releases,
        "epsilon": {
            client: round(found[count], 4) if math.isfinite(found[count]) else None
            for client, count in releases.items()
        },
        "accountant": f"{LIBRARY} {importlib.metadata.version(LIBRARY)}, RDP, no amplification",
    }


def _releases(activity: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    counted: dict[str, int] = {}
    came: dict[str, int] = {}
    for row in activity:
        client = str(row["client"])
        counted[client] = max(counted.get(client, 0), int(row.get("releases") or 0))
        came[client] = came.get(client, 0) + (row["status"] in ("trained", "clipped", "refused", "late"))
    return {client: max(counted[client], came[client]) for client in sorted(counted)}
