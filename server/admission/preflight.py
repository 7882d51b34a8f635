"""What a device can learn of its server before it joins: whether it answers, who it is, how far their clocks differ."""

import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path

import httpx

from common.errors import EngineError

MOST_AHEAD, MOST_BEHIND = 5.0, 300.0
"""Seconds by which Flower lets a device's clock differ from the SuperLink's; beyond, it turns the device away."""

RESOLUTION = 1.0
"""Seconds: HTTP's ``Date`` leaves fractions out."""


def clock_difference(entrance: str, authority: Path | None, now: Callable[[], datetime] | None = None) -> float:
    """Seconds by which this machine's clock is ahead of the server's, to about a second.

    Args:
        entrance: ``host:port`` of the SuperLink, or of the proxy before it.
        authority: certificate of the authority that the server's is verified with; ``None``: the server speaks no TLS.
        now: this machine's time.

    Raises:
        EngineError: the server cannot be reached, is another, or does not say what time it is.
    """
    now = now or partial(datetime.now, UTC)
    verify: ssl.SSLContext | bool = True
    if authority is not None:
        try:
            verify = ssl.create_default_context(cafile=str(authority))
        except OSError as error:
            raise EngineError(f"ca={authority}: no certificate can be read from there ({error})") from error
    url = f"{'https' if authority else 'http'}://{entrance}/health"
    try:
        before = now()
        response = httpx.get(url, timeout=20.0, verify=verify)
        after = now()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        clock = f"; this machine's clock says {now():%Y-%m-%d %H:%M} UTC" if "CERTIFICATE_VERIFY" in str(error) else ""
        raise EngineError(f"{url}: {error}{clock}") from error
    if not response.is_success:
        raise EngineError(f"{url} answers {response.status_code}: is this the SuperLink or its proxy?")
    try:
        theirs = parsedate_to_datetime(response.headers["date"])
    except (KeyError, ValueError) as error:
        raise EngineError(f"{url} does not say what time it is") from error
    return (before + (after - before) / 2 - theirs).total_seconds() - RESOLUTION / 2


def what_is_wrong(ahead: float) -> str | None:
    """Why a clock ``ahead`` seconds ahead of the server's keeps a device out; ``None`` if it does not."""
    if -MOST_BEHIND <= ahead <= MOST_AHEAD:
        return None
    words = f"{abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's clock"
    return f"{words}; the server turns away devices more than {MOST_AHEAD:g} s ahead or {MOST_BEHIND:g} s behind"
