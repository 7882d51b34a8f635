"""What Flower's middlewares cost its SuperLink: a request to ``/health`` with and without them.

    python bench/middlewares.py            # five repeats of 300 requests each, in turn
    python bench/middlewares.py --dry-run  # one repeat of a few requests; writes nothing

The SuperLink's HTTP application is called in this process, without sockets, TLS, signatures or a database, so all that
is left is the application's own work. Flower's middlewares derive from Starlette's ``BaseHTTPMiddleware``. Each runs
the rest of the application in a task of its own. Without them the same route runs in the same application.
Appends rows to bench/results/middlewares.csv.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed package

from flwr.superlink.main import create_app

from bench.measuring import arguments, start
from bench.ratios import append, compare

RESULTS = Path(__file__).parent / "results" / "middlewares.csv"
REQUESTS, REPEATS = 300, 5
SCOPE = {
    "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "https",
    "path": "/health", "raw_path": b"/health", "query_string": b"", "root_path": "", "headers": [],
    "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
}  # fmt: skip


async def call(app: Any) -> int:
    """Make one request; return its status."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await app({**SCOPE, "state": {}}, receive, send)
    return statuses[0]


async def milliseconds(app: Any, requests: int) -> float:
    """Return the processor milliseconds of a request.

    Raises:
        RuntimeError: a request was refused.
    """
    began = time.process_time()
    for _ in range(requests):
        status = await call(app)
        if status != 200:
            raise RuntimeError(f"/health returned {status}")
    return 1000 * (time.process_time() - began) / requests


def main() -> None:
    """Measure both in turn, print and append the rows."""
    options = arguments(__doc__).parse_args()
    shipped, bare = create_app(), create_app()
    count = len(shipped.user_middleware)
    bare.user_middleware = []
    found: dict[str, list[float]] = {f"{count} middlewares": [], "none": []}
    for _ in range(1 if options.dry_run else REPEATS):
        for name, app in zip(found, (shipped, bare), strict=True):
            asyncio.run(milliseconds(app, 3))
            found[name].append(asyncio.run(milliseconds(app, 3 if options.dry_run else REQUESTS)))
    rows = compare("SuperLink, a request to /health", "in this process", "ms", found, "none")
    if not options.dry_run:
        append(rows, RESULTS)


if __name__ == "__main__":
    start(main)
