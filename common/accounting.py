"""Epsilon of Gaussian mechanisms that compose, by Opacus' Renyi accountant; on the server and on devices."""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from common.extras import libraries_of

LIBRARY = "opacus"

ORDERS = [1.0 + 10.0 ** (step / 100) for step in range(-600, 701)]
"""Renyi orders from 1 + 1e-6 to 1 + 1e7. Opacus' own are from 1.1 to 63, too few for very little or very much noise."""

DELTA = 1e-5
"""Delta of a device's own budget by default. The server's delta is not used, since it could be any number."""

MIN_EPSILON = 1e-9
"""Smallest epsilon of a release. No release has epsilon 0, even with very much noise."""


def new_accountant(what: str = "privacy=gaussian") -> Any:
    """Return an accountant without a history.

    Args:
        what: the setting or feature that needs it, for the message.

    Raises:
        ConfigError: the library is missing; the message says how to install it.
    """
    with libraries_of("privacy", what):
        from opacus.accountants import RDPAccountant
    return RDPAccountant()


def epsilon(multipliers: Sequence[float], releases: int, delta: float) -> float:
    """Return epsilon of ``releases`` answers, each of Gaussian mechanisms with these noise multipliers.

    There is no subsampling.

    Args:
        multipliers: standard deviation over L2 sensitivity of each mechanism in an answer.
        releases: answers, >= 0.
        delta: delta of the bound, in (0, 1).

    Returns:
        An upper bound; 0 if nothing was released, infinite if a mechanism has no noise.
    """
    return composed([(multipliers, releases)], delta)


def composed(spent: Iterable[tuple[Sequence[float], int]], delta: float) -> float:
    """Return epsilon of several runs on the same data, see :func:`epsilon`.

    Args:
        spent: noise multipliers and number of answers of each run.
        delta: delta of the bound, in (0, 1).
    """
    history: list[tuple[float, float, int]] = []
    for multipliers, releases in spent:
        if not releases:
            continue
        for multiplier in multipliers:
            if multiplier <= 0:
                return math.inf
            history.append((multiplier, 1.0, releases))
    if not history:
        return 0.0
    accountant = new_accountant()
    accountant.history = history  # faster than one call of its step function per release
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # with very little noise the smallest order is the best
        return max(MIN_EPSILON, float(accountant.get_epsilon(delta, alphas=ORDERS)))
