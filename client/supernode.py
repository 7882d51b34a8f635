"""Flower's SuperNode, which ends when it fails, supervises the ClientApps that it starts, and shows its condition.

``goldfinch-supernode`` takes the arguments of ``flower-supernode``, and ``--metrics FILE``. An error in the main thread
of the pinned Flower's SuperNode, such as a TLS handshake that a restarting server cut, ends that thread alone. The
thread of the local interface goes on and answers ``/health`` with 200. No message is fetched any more, and neither
systemd nor Docker starts the node again. :mod:`client.supervision` says what else Flower leaves undone,
:mod:`client.condition` what the file is for, and :mod:`common.log_lines` how the log's lines get their time.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import Popen
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import click
import httpx
from flwr.cli.config_utils import get_fab_metadata
from flwr.common.config import get_project_dir, parse_config_args
from flwr.supercore.exit import add_exit_handler
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.nodestate import NodeStateFactory

from client.condition import Condition, condition_of
from client.installed import InstalledCode
from client.resident.place import remove_files, running_process
from client.supervision import Supervisor, end_processes
from common.errors import ConfigError
from common.log_lines import copy_own_lines, wait_for_lines
from common.proxies import no_proxy

FAILED = 1
"""Exit status after an error."""

PROGRAM = "flwr.supernode.cli.flower_supernode"
"""Module of Flower's program, which makes the factory of its node state."""

CONNECTION = "flwr.supernode.fleet_http_connection"
"""Module of Flower's connection to the server, which makes the client of its HTTP calls."""

NODE = "flwr.supernode.start_client_internal"
"""Module of Flower's node itself, which takes the signals that end it."""

METRICS, CONFIGURATION = "--metrics", "--node-config"
"""Goldfinch's own option, and Flower's, which holds a device's limits."""

PAIR = re.compile(r"""\S+?=('[^']*'|"[^"]*"|\S+)""")
"""What Flower takes for a key and its value. It passes over all else, such as ``key = value``, without a word."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
"""Signals that end Flower's node in order."""

LOST = signal.SIGUSR1
"""Signal to the main thread that the SuperExec has ended."""

ANSWER_SECONDS, SLOWEST_LINK = 30.0, 1000.0
"""Seconds that a call has, as in Flower, and the bytes a second for which it has more, by its size."""


def main() -> None:
    """Run a SuperNode until it is stopped.

    Flower's function raises an error of its own start, and returns after a later one, which it has logged; a SuperNode
    that is stopped signs off and raises ``SystemExit``. After an error the process ends with exit status 1, although
    other threads still run. Either way, the processes that it started end first, except the one that copies their last
    lines.

    Each of Flower's threads that is answered 401 sends SIGINT, and only the first is meant (:func:`_once`).
    """
    os.environ |= no_proxy(os.environ)  # its own processes call it
    copying = copy_own_lines()
    atexit.register(wait_for_lines, copying)
    supervisor = Supervisor(_note_state(), _give_up)
    condition = _condition()
    condition.slowest_start = lambda: supervisor.slowest_start
    _note_calls("SendNodeHeartbeat", lambda *_: condition.note_heartbeat())
    _note_calls("PullMessages", partial(_note_requests, condition))
    _note_calls("PushMessages", partial(_note_replies, condition))
    _note_code(InstalledCode())
    vars(importlib.import_module(CONNECTION))["FleetHttpClient"] = PatientClient
    node = vars(importlib.import_module(NODE))
    node["register_signal_handlers"] = _once(node["register_signal_handlers"])
    node["subprocess"] = SimpleNamespace(Popen=supervisor.start_superexec)
    signal.signal(LOST, _interrupt)
    supervisor.start()
    condition.start()
    end = partial(_end_all, copying)
    add_exit_handler(end, run_before_force_exit=True)
    ending = "the SuperNode failed, see above, and ends; start it again"
    try:
        flower_supernode()
    except KeyboardInterrupt:
        ending = "the SuperNode was interrupted, and ends; start it again"
    except Exception as error:
        problem = " ".join(str(error).split()).rstrip(".") or repr(error)
        ending = f"the SuperNode cannot begin: {problem}; correct the command line, a file that it names, or the PATH"
    print(f"goldfinch-supernode: {ending}", file=sys.stderr, flush=True)
    end()
    wait_for_lines(copying)
    os._exit(FAILED)


def _give_up() -> None:
    """Interrupt the main thread, which waits for a reply that nothing will give; so Flower signs the node off."""
    signal.pthread_kill(threading.main_thread().ident or 0, LOST)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _once(register: Callable[..., None]) -> Callable[..., None]:
    """Return Flower's ``register_signal_handlers``, whose handlers are interrupted by no further signal.

    A second signal in its handler would wait for the lock that the first holds, and a later one would raise
    ``KeyboardInterrupt`` in the ending. Either way the process would stay, take no message, and be started by nobody.
    """

    def registered(*arguments: Any, **named: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what Flower's handler puts back
        register(*arguments, **named)
        handlers = {number: signal.getsignal(number) for number in ENDING}

        def first(number: int, frame: FrameType | None) -> None:
            for each in (*ENDING, LOST):
                signal.signal(each, signal.SIG_IGN)
            handler = handlers[signal.Signals(number)]
            if callable(handler):
                handler(number, frame)

        for number in ENDING:
            signal.signal(number, first)

    return registered


def _end_all(copying: Popen[bytes] | None) -> None:
    """End all that this process started, but for the process that copies lines, and remove what they leave."""
    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGINT, LOST):
            signal.signal(each, signal.SIG_IGN)
    end_processes(spared=copying.pid if copying else None)
    own = running_process(os.getpid())
    if own is not None:
        remove_files(own)


def _condition() -> Condition:
    """Return the condition that the command line describes, and take Goldfinch's own option from it.

    Raises:
        SystemExit: the node configuration cannot be read, or the option names no file.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(METRICS, type=Path)
    own, sys.argv[1:] = parser.parse_known_args(sys.argv[1:])
    if own.metrics is not None and not own.metrics.name:
        sys.exit(f"error: {METRICS} {own.metrics}: name a file")
    parser = argparse.ArgumentParser(add_help=False)  # which takes abbreviations, as Flower's does
    for name in ("--superlink", "--root-certificates"):
        parser.add_argument(name, default="")
    parser.add_argument(CONFIGURATION, action="append", default=[])
    given, _ = parser.parse_known_args(sys.argv[1:])
    try:
        configuration = _configuration(given.node_config)
        return condition_of(configuration, own.metrics, given.superlink, given.root_certificates)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    except (click.ClickException, OSError, ValueError) as error:
        sys.exit(f"error: {CONFIGURATION} {' '.join(given.node_config)}: {error}")


def _configuration(given: list[str]) -> dict[str, Any]:
    """Return the node configuration; a key of it that Flower would pass over could be a limit of this device.

    Raises:
        ValueError: part of it would be passed over.
    """
    if len(given) > 1:
        raise ValueError(f"Flower takes the last of several {CONFIGURATION}: write all keys into one")
    for text in given:
        rest = PAIR.sub("", text).split()
        if rest and not text.endswith(".toml"):
            raise ValueError(f"{' '.join(rest)!r} is no key=value: write each without blanks beside =, texts in quotes")
    return dict(parse_config_args(given))


def _note_requests(condition: Condition, _: Any, answer: Any) -> None:
    for _message in answer.messages_list:
        condition.note_request()


def _note_replies(condition: Condition, request: Any, _: Any) -> None:
    for message in request.messages_list:
        condition.note_reply(failed=message.HasField("error"))


def _note_code(installed: InstalledCode) -> None:
    """Check the copy of a run's code as the code comes, and after each message that failed."""

    def note(_: Any, answer: Any) -> None:
        bundle = answer.fab.content
        name, version = get_fab_metadata(bundle)
        installed.note(get_project_dir(name, version, hashlib.sha256(bundle).hexdigest()), bundle)

    def check(request: Any, _: Any) -> None:
        if any(message.HasField("error") for message in request.messages_list):
            installed.check()

    _note_calls("GetFab", note)
    _note_calls("PushMessages", check)


def _note_calls(name: str, called: Callable[[Any, Any], None]) -> None:
    """Let a method of Flower's connection to the server call ``called`` with each request and its answer."""
    method = getattr(FleetHttpClient, name)

    def noted(client: FleetHttpClient, request: Any) -> Any:
        answer = method(client, request)
        called(request, answer)
        return answer

    setattr(FleetHttpClient, name, noted)


class PatientClient(FleetHttpClient):
    """Flower's connection to the server, which gives each call the time that its own bytes take on a slow link.

    Flower's 30 seconds begin when the bytes are in the socket's buffer. Where the link takes longer to empty it, the
    server has the reply, and the node sends it again, without limit, and takes no further message.
    """

    def _unary_unary(self, *, request: Any, timeout: Any = None, **named: Any) -> Any:
        if timeout is None:
            seconds = ANSWER_SECONDS + request.ByteSize() / SLOWEST_LINK
            timeout = httpx.Timeout(ANSWER_SECONDS, read=seconds, write=seconds)
        return super()._unary_unary(request=request, timeout=timeout, **named)


def _note_state() -> Callable[[], Any]:
    """Let Flower's program use a factory that is noted; return a function that returns its node state."""
    factories: list[NodeStateFactory] = []

    class NotedFactory(NodeStateFactory):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            factories.append(self)

    vars(importlib.import_module(PROGRAM))["NodeStateFactory"] = NotedFactory
    return lambda: factories[0].state_instance if factories else None


if __name__ == "__main__":
    main()
