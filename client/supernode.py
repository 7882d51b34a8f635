"""Flower's SuperNode, which ends when it fails.

``goldfinch-supernode`` takes the arguments of ``flower-supernode``. An error in the main thread of the pinned Flower's
SuperNode, such as a TLS handshake that a restarting server cut, ends that thread alone. The thread of the local
interface goes on and answers ``/health`` with 200. No message is fetched any more, and neither systemd nor Docker
starts the node again.
"""

from __future__ import annotations

import os
import sys
import traceback

from flwr.supernode.cli import flower_supernode

FAILED = 1
"""Exit status after an error."""


def main() -> None:
    """Run a SuperNode until it is stopped.

    Flower's function returns only after an error, which it has logged; a SuperNode that is stopped signs off and raises
    ``SystemExit``. After an error the process ends with exit status 1, although other threads still run.
    """
    try:
        flower_supernode()
    except Exception:
        traceback.print_exc()
    print("goldfinch-supernode: the SuperNode failed and ends; start it again", file=sys.stderr, flush=True)
    os._exit(FAILED)


if __name__ == "__main__":
    main()
