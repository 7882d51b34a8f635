"""The variables of the environment that keep requests to this machine from going through a proxy."""

from collections.abc import Mapping

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine, which no proxy can reach."""


def no_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that exempt this machine from a proxy, besides what ``environment`` exempts already."""
    upper = environment.get("NO_PROXY")
    lower = environment.get("no_proxy") or upper  # where both are set, Python reads this one alone
    variables: dict[str, str] = {}
    for name, exempt in (("no_proxy", lower), ("NO_PROXY", upper)):
        variables[name] = ",".join(filter(None, [exempt, *LOOPBACK]))
    return variables
