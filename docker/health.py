"""Container health: exit 0 if URL answers 200. Usage: health.py URL [CA.CRT].

It runs every few seconds in every container, so it imports as little as it can: http.client, and ssl for https only.
"""

from __future__ import annotations

import http.client
import sys


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
    sys.exit(not healthy(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
