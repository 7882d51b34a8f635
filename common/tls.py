"""How long the certificate of a server is valid."""

import socket
import ssl
import time
from pathlib import Path

SECONDS = 20.0
"""Time that a connection may take."""

WARNING_DAYS = 30
"""A certificate with fewer days left is reported. The operator's command renews it from then on."""


def certificate_days(server: str, authority: Path) -> float:
    """Return the days until the certificate of ``server`` ends.

    Args:
        server: ``host:port``.
        authority: certificate of the authority that the server's is verified with.

    Raises:
        OSError: the server cannot be reached, or its certificate is not valid.
        ValueError: ``server`` has no port.
    """
    host, _, port = server.rpartition(":")
    name = host.strip("[]")
    context = ssl.create_default_context(cafile=str(authority))
    with (
        socket.create_connection((name, int(port)), timeout=SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        certificate = secure.getpeercert() or {}
    return (ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()) / 86_400
