"""Epsilon of Gaussian mechanisms that compose, by Opacus' Renyi accountant; on the server and on devices."""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from common.errors import libraries_of

LIBRARY = "opacus"

ORDERS = [1.0 + 10.0 ** (step / 100) for step in range(-600, 701)]
"""Renyi orders from 1 + 1e-6 to 1 + 1e7. Opacus' own end at 1.1 and 63, where little or much noise needs others."""

LEAST = 1e-9
"""Epsilon of a release, at least: it is never 0, however much noise there is."""


def new_accountant(what: str = "privacy=gaussian") -> Any:
    """Return an accountant without a history.

    Args:
        what: what needs it, for the message.

    Raises:
        ConfigError: the library is missing; how to install it.
    """
    with libraries_of("privacy", what):
        from opacus.accountants import RDPAccountant
    return RDPAccountant()


def epsilon(multipliers: Sequence[float], releases: int, delta: float) -> float:
    """Return epsilon of ``releases`` answers, each of Gaussian mechanisms with these noise multipliers.

    There is no subsampling.

    Args:
        multipliers: standard deviation over L2 sensitivity, of each mechanism that an answer holds.
        releases: answers, >= 0.
        delta: of the bound.

    Returns:
        An upper bound; 0 if nothing was released, infinite if a mechanism has no noise.
    """
    return composed([(multipliers, releases)], delta)


def composed(spent: Iterable[tuple[Sequence[float], int]], delta: float) -> float:
    """Return epsilon of several runs on the same data: of each, its noise multipliers and its number of answers.

    See :func:`epsilon`.
    """
    history = [(multiplier, 1.0, releases) for multipliers, releases in spent if releases for multiplier in multipliers]
    if not history:
        return 0.0
    if min(multiplier for multiplier, _, _ in history) <= 0:
        return math.inf
    accountant = new_accountant()
    accountant.history = history  # as many steps: no loop
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the smallest order is the best for what protects nothing
        return max(LEAST, float(accountant.get_epsilon(delta, alphas=ORDERS)))
