"""The variables of the environment that keep requests to this machine from going through a proxy."""

from collections.abc import Mapping

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, which no proxy can reach."""


def no_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that exempt this machine from a proxy, besides what ``environment`` exempts already."""
    variables: dict[str, str] = {}
    for name in ("no_proxy", "NO_PROXY"):
        variables[name] = ",".join(filter(None, [environment.get(name), *LOOPBACK]))
    return variables
