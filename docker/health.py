"""Container health: exit 0 if URL answers 200, or if a SuperNode's last heartbeat is recent.

Usage: health.py URL [CA.CRT], or health.py FILE with the file of goldfinch-supernode --metrics. It runs every few
seconds in every container, so it imports as little as it can: http.client, and ssl for https only.
"""

from __future__ import annotations

import http.client
import sys
import time
from pathlib import Path

HEARTBEAT, SECONDS, AHEAD = "goldfinch_last_heartbeat_timestamp_seconds", 60.0, 5.0
"""The number in the file, how old a heartbeat may be, and how far in the future: then the clock was set back since."""


def has_contact(path: str) -> bool:
    """Whether the last heartbeat in the file at ``path`` is recent."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        print(f"{path}: {error.strerror}", file=sys.stderr)
        return False
    for line in lines:
        name, _, number = line.partition(" ")
        if name == HEARTBEAT:
            seconds = time.time() - float(number)
            print(f"last heartbeat {seconds:.0f} s ago", file=sys.stderr)
            return -AHEAD <= seconds < SECONDS
    print(f"{path}: no heartbeat yet", file=sys.stderr)
    return False


def healthy(url: str, authority: str | None) -> bool:
    """Whether ``url`` answers 200; https is verified against ``authority``."""
    scheme, _, rest = url.partition("://")
    address, _, path = rest.partition("/")
    connection: http.client.HTTPConnection
    if scheme == "https":
        import ssl

        context = ssl.create_default_context(cafile=authority)
        connection = http.client.HTTPSConnection(address, timeout=20, context=context)
    else:
        connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request("GET", f"/{path}")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    if "://" in sys.argv[1]:
        sys.exit(not healthy(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
    sys.exit(not has_contact(sys.argv[1]))
