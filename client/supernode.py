"""Flower's SuperNode, which ends when it fails, and which supervises the ClientApps that it starts.

``goldfinch-supernode`` takes the arguments of ``flower-supernode``. An error in the main thread of the pinned Flower's
SuperNode, such as a TLS handshake that a restarting server cut, ends that thread alone. The thread of the local
interface goes on and answers ``/health`` with 200. No message is fetched any more, and neither systemd nor Docker
starts the node again. :mod:`client.supervision` says what else Flower leaves undone.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from flwr.supercore.exit import add_exit_handler
from flwr.supernode.cli import flower_supernode
from flwr.supernode.nodestate import NodeStateFactory

from client.supervision import Supervisor, end_processes

FAILED = 1
"""Exit status after an error."""

PROGRAM = "flwr.supernode.cli.flower_supernode"
"""Module of Flower's program, which makes the factory of its node state."""


def main() -> None:
    """Run a SuperNode until it is stopped.

    Flower's function returns only after an error, which it has logged; a SuperNode that is stopped signs off and raises
    ``SystemExit``. After an error the process ends with exit status 1, although other threads still run. Either way, the
    processes that it started end first.
    """
    Supervisor(_note_state()).start()
    add_exit_handler(end_processes, run_before_force_exit=True)
    try:
        flower_supernode()
    except Exception:
        traceback.print_exc()
    print("goldfinch-supernode: the SuperNode failed and ends; start it again", file=sys.stderr, flush=True)
    end_processes()
    os._exit(FAILED)


def _note_state() -> Any:
    """Let Flower's program use a factory that is noted; return a function that returns its node state, if it has one."""
    factories: list[NodeStateFactory] = []

    class NotedFactory(NodeStateFactory):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            factories.append(self)

    vars(importlib.import_module(PROGRAM))["NodeStateFactory"] = NotedFactory
    return lambda: factories[0].state_instance if factories else None


if __name__ == "__main__":
    main()
