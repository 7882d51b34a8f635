"""The Flower engine: clients behind SuperNodes, simulated by Ray or deployed, through Flower's legacy Server."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from flwr.common import Code
from flwr.server import History as FlowerHistory
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.server import Server

from common.errors import EngineError, PayloadError
from common.settings import RunSettings
from common.wire.messages import Registration, Request
from common.wire.payload import Payload, encode
from server.engines.prompt_grid import promptly
from server.run.conduct import conduct
from server.run.engine import Failure, Reply
from server.trackers.events import Listener
from strategies.core.flower import FlowerStrategy, ask_registrations, fit_res_to_answer, request_to_fit_ins

POLL_SECONDS = 2.0
LOOK_SECONDS = 0.2
GRACE_SECONDS = 5.0
"""What an answer may be late: Flower looks for answers every three seconds."""

DEAD_ACTOR = ("ActorDiedError", "ActorUnavailableError", "actor died", "ActorPool is empty")
Item = TypeVar("Item")
Result = TypeVar("Result")


def no_answer(seconds: float, *_: object) -> Exception:
    """What became of a node that did not answer in time."""
    return TimeoutError(f"no complete answer within {seconds:.0f} s")


def each(
    items: Sequence[Item], work: Callable[[Item], Result], seconds: float, late: Callable[[Item], Result]
) -> list[Result]:
    """What ``work`` gives for every item, or ``late`` where that takes longer than ``seconds``.

    All items are worked on at once: Flower's own pool has cpu + 4 threads, so few clients would block the rest. Flower
    heeds its own timeout only between two looks for answers: the parts of one whose sender died over it are waited for
    up to two hours. Such a thread is left behind, and does not keep the process from ending.

    Raises:
        Exception: what ``work`` raised first.
    """
    ended: SimpleQueue[tuple[int, Future[Result]]] = SimpleQueue()

    def one(index: int, item: Item) -> None:
        future: Future[Result] = Future()
        try:
            future.set_result(work(item))
        except BaseException as error:  # raised again where it is waited for
            future.set_exception(error)
        ended.put((index, future))

    for index, item in enumerate(items):
        Thread(target=one, args=(index, item), name=f"node-{index}", daemon=True).start()
    end = time.monotonic() + seconds
    found: dict[int, Result] = {}
    while len(found) < len(items) and time.monotonic() < end:
        # in short waits: a signal that a thread of Flower's raises when the SuperLink is gone is seen only between them
        with contextlib.suppress(Empty):
            index, future = ended.get(timeout=LOOK_SECONDS)
            found[index] = future.result()
    return [found[index] if index in found else late(item) for index, item in enumerate(items)]


class FlowerEngine:
    """Reaches the clients that Flower's nodes host.

    Args:
        manager: Flower's client manager, whose ``all()`` asks the SuperLink for the nodes that are online.
    """

    def __init__(self, manager: ClientManager) -> None:
        self.manager = manager
        self._nodes: dict[str, str] = {}
        self._asked: set[str] = set()

    # ---- registration ----------------------------------------------------------------------------------------------

    def register(self, expected: Sequence[str], seconds: float) -> tuple[list[Registration], list[Failure]]:
        """See :class:`server.run.engine.Engine`. Nodes answer once; a node that restarts is a new one.

        A node whose answer got lost is asked again. Waiting ends early when so many nodes refused that no client is
        left to wait for.
        """
        found: dict[str, Registration] = {}
        failures: dict[str, Failure] = {}
        refused: set[str] = set()
        end = time.monotonic() + seconds
        while True:
            online = self.manager.all()
            self._asked &= set(online)
            fresh = sorted(set(online) - self._asked)
            left = max(end - time.monotonic(), POLL_SECONDS * 10)
            proxies = [promptly(online[node], len(fresh)) for node in fresh]
            outcomes = each(proxies, partial(self._ask, seconds=left), left + GRACE_SECONDS, partial(no_answer, left))
            for node, outcome in zip(fresh, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    failures[node] = Failure(f"node {node}", "lost", str(outcome))
                    continue
                self._asked.add(node)
                failures.pop(node, None)
                if isinstance(outcome, str):
                    refused.add(node)
                    failures[node] = Failure(f"node {node}", "refused", outcome)
                    continue
                for registration in outcome:
                    other = self._nodes.get(registration.client)
                    if other is not None and other != node and other in online:
                        reason = f"nodes {other} and {node} both claim to be it"
                        failures[node] = Failure(registration.client, "refused", reason)
                        continue
                    self._nodes[registration.client] = node
                    found[registration.client] = registration
            complete = set(expected) <= set(found) or len(refused) >= len(set(expected) - set(found))
            if complete or time.monotonic() >= end:
                return list(found.values()), list(failures.values())
            time.sleep(min(POLL_SECONDS, max(0.0, end - time.monotonic())))

    def _ask(self, proxy: ClientProxy, seconds: float) -> list[Registration] | str | Exception:
        """A node's registrations, its own refusal, or how Flower lost it."""
        try:
            return ask_registrations(proxy, seconds)
        except PayloadError as error:
            return str(error)
        except Exception as error:  # whatever Flower raises when a message does not come back
            return error

    # ---- exchanges -------------------------------------------------------------------------------------------------

    def exchange(
        self, message: Payload, requests: Mapping[str, Request], seconds: float
    ) -> tuple[list[Reply], list[Failure]]:
        """See :class:`server.run.engine.Engine`.

        Raises:
            EngineError: a Ray actor died; Flower does not replace it, so every later round would lose clients.
        """
        blob = encode(message)
        online = {node: promptly(proxy, len(requests)) for node, proxy in self.manager.all().items()}
        send = partial(self._send, blob=blob, online=online, seconds=seconds)
        asked = [requests[client] for client in sorted(requests)]
        outcomes = each(
            asked, send, seconds + GRACE_SECONDS, lambda late: Failure(late.client, "lost", str(no_answer(seconds)))
        )
        replies = [outcome for outcome in outcomes if isinstance(outcome, Reply)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        for failure in failures:
            if any(sign in failure.reason + failure.traceback for sign in DEAD_ACTOR):
                raise EngineError(
                    f"the Ray actor that trained {failure.client} died, most likely for want of memory; "
                    "go on with resume=true and fewer actors (engine.actors=1)"
                )
        return replies, failures

    def _send(
        self, request: Request, *, blob: bytes, online: Mapping[str, ClientProxy], seconds: float
    ) -> Reply | Failure:
        client = request.client
        proxy = online.get(self._nodes.get(client, ""))
        if proxy is None:
            return Failure(client, "lost", "its node is offline", sent=False)
        instruction = request_to_fit_ins(blob, request)
        try:
            result = proxy.fit(instruction, timeout=seconds, group_id=request.round)
        except Exception as error:  # Flower's errors carry no client, so they are caught where it is known
            return Failure(client, "lost", str(error))
        if result.status.code != Code.OK:
            return Failure(client, "failed", result.status.message, str(result.metrics.get("traceback", "")))
        try:
            answer, payload, size = fit_res_to_answer(result)
        except PayloadError as error:
            size = sum(len(tensor) for tensor in result.parameters.tensors)
            return Failure(client, "refused", str(error), bytes_up=size)
        down = len(blob) + len(str(instruction.config["request"]))
        return Reply(client, answer, payload, down, size)

    def close(self) -> None:
        """Nothing to release: the nodes are Flower's."""


class RoundServer(Server):
    """Flower's Server with Goldfinch's round loop in place of its own.

    Args:
        settings: the run's settings.
        client_manager: Flower's client manager.
        listeners: told of every event.
    """

    def __init__(self, settings: RunSettings, client_manager: ClientManager, listeners: Sequence[Listener]) -> None:
        super().__init__(client_manager=client_manager, strategy=FlowerStrategy(settings.method, settings))
        self.settings, self.listeners = settings, listeners

    def fit(self, num_rounds: int, timeout: float | None) -> tuple[FlowerHistory, float]:  # noqa: ARG002
        """All rounds; the settings say how many and how long, so Flower's arguments are not used."""
        started = time.perf_counter()
        summary = conduct(self.settings, FlowerEngine(self.client_manager()), self.listeners)
        history = FlowerHistory()
        for name, value in summary["accuracy"].items():
            history.add_metrics_distributed_fit(summary["rounds"], {f"accuracy {name}": value})
        return history, time.perf_counter() - started

    def disconnect_all_clients(self, timeout: float | None) -> None:
        """Nothing: nodes outlive a run."""
