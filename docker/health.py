"""Container health: exit 0 if URL answers 200. Usage: health.py URL [CA.CRT]. Standard library only, so it is cheap."""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request


def healthy(url: str, authority: str | None) -> bool:
    """Whether ``url`` answers 200; https is verified against ``authority``."""
    context = ssl.create_default_context(cafile=authority) if authority else None
    try:
        with urllib.request.urlopen(url, timeout=4, context=context) as answer:  # noqa: S310  # our own address
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return False


if __name__ == "__main__":
    sys.exit(not healthy(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
