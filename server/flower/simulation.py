"""The ClientApp of a simulation, and Flower's Ray back end on an existing cluster.

Flower's process of a simulation imports this module before it makes the back end, because the bundle's
``pyproject.toml`` names :data:`app`. With ``RAY_ADDRESS`` in its environment it then makes :class:`ClusterBackend`,
since Flower's own one cannot use a cluster:

- it makes an actor for every CPU of every machine, also for those that other programs use; these actors never start,
  and their clients are waited for;
- it gives an actor that has died all further messages, which are lost.

Ray's actors import ``client.app``, and not this module. Torch is imported only by functions, because Ray starts in the
meantime.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import ClientAppException, LoadClientAppError
from flwr.common.constant import PARTITION_ID_KEY, ErrorCode, MessageTypeLegacy
from flwr.compat.common.recorddict_compat import recorddict_to_getpropertiesres
from flwr.server.superlink.fleet.vce import vce_api
from flwr.server.superlink.fleet.vce.backend import raybackend
from flwr.simulation.ray_transport.ray_actor import ClientAppActor
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError, RaySystemError

from common.errors import EngineError
from server.flower.cluster import ENDS_RUN, machine_of

if TYPE_CHECKING:
    from common.settings import RunSettings
    from common.wire.messages import Registration

MAX_ACTORS = 1000
"""Most messages that a simulation works on at once. Flower's own limit is this machine's CPUs and four, at most 32."""

START_SECONDS = 120.0
"""Seconds in which an actor must have started; one that has not is given up."""

FREE_SECONDS = 10.0
"""Seconds in which the actors of a run that has just ended leave the cluster."""

LOOK_SECONDS = 5.0
"""Seconds after which a message that waits for an actor looks again whether the machines are alive."""

CLIENTS = (ClientAppException, LoadClientAppError)
"""The errors of a client. All others are Ray's: the actor, its machine or its reply is gone."""

app = import_module("client.app").app
"""By its name, because ``server`` does not import ``client``."""


class ActorLostError(Exception):
    """An actor that ended without a reply, or the machine that it ran on."""


@dataclass(eq=False)
class Actor:
    """An actor in the cluster.

    Args:
        handle: Ray's.
        node: Ray's id of the machine that it runs on.
    """

    handle: Any
    node: str


class Actors:
    """The actors of a simulation, on the machines of a cluster.

    Args:
        resources: what each actor takes, in Ray's names: ``num_cpus`` and ``num_gpus``.
        wanted: how many to start. Fewer start if other programs use the machines.

    Attributes:
        machines: names of the machines that have or had actors, by Ray's id; this machine is the first.

    Raises:
        EngineError: no actor started.
    """

    def __init__(self, resources: Mapping[str, float], wanted: int) -> None:
        self._changed = threading.Condition()
        self._all = start_actors(resources, free_places(resources, wanted))
        self._idle = list(self._all)
        here = ray.get_runtime_context().get_node_id()
        names = {entry["NodeID"]: machine_of(entry).name for entry in ray.nodes()}
        used = {actor.node for actor in self._all}
        self.machines = {node: names[node] for node in sorted(used, key=lambda node: (node != here, names[node], node))}

    @property
    def count(self) -> int:
        """The actors that have not died."""
        return len(self._all)

    def nodes(self) -> list[str]:
        """Return Ray's ids of the machines that have actors, in the order of :attr:`machines`."""
        used = {actor.node for actor in self._all}
        return [node for node in self.machines if node in used]

    @contextmanager
    def taken(self, node: str = "") -> Iterator[Actor]:
        """Take an idle actor for the block, and wait until there is one.

        Args:
            node: Ray's id of its machine; empty for any.

        Raises:
            ActorLostError: the actor or its machine died.
            EngineError: all actors have died.
        """
        actor = self._take(node)
        try:
            yield actor
        except CLIENTS:
            raise
        except RayError as error:
            self._remove([actor])
            raise self._lost(actor.node) from error
        finally:
            with self._changed:
                if actor in self._all:
                    self._idle.append(actor)
                self._changed.notify_all()

    def _take(self, node: str) -> Actor:
        while True:
            gone = {entry["NodeID"] for entry in ray.nodes() if not entry["Alive"]}
            self._remove([actor for actor in self._all if actor.node in gone])
            with self._changed:
                if not self._all:
                    raise EngineError(
                        "all actors in the Ray cluster have died, or the machines that they ran on: ray status shows "
                        "what is left of it. Complete rounds are kept: resume=true goes on"
                    )
                if node and node not in self.nodes():
                    raise self._lost(node)
                for actor in self._idle:
                    if node in ("", actor.node):
                        self._idle.remove(actor)
                        return actor
                self._changed.wait(LOOK_SECONDS)

    def _remove(self, dead: Sequence[Actor]) -> None:
        """Forget actors."""
        with self._changed:
            self._all = [actor for actor in self._all if actor not in dead]
            self._idle = [actor for actor in self._idle if actor not in dead]

    def _lost(self, node: str) -> ActorLostError:
        return ActorLostError(f"the actor on {self.machines[node]} ended without a reply, or its machine did")


def free_places(resources: Mapping[str, float], wanted: int) -> int:
    """Return how many of ``wanted`` actors fit on the machines, now or when an earlier run has ended."""
    end = time.monotonic() + FREE_SECONDS
    while True:
        free = available_resources_per_node()
        places = 0
        for node in ray.nodes():
            if node["Alive"]:
                machine = machine_of({**node, "Resources": free.get(node["NodeID"], {})})
                places += machine.places(resources.get("num_gpus", 0.0))
        if places >= wanted or time.monotonic() > end:
            return min(places, wanted)
        time.sleep(0.5)


def start_actors(resources: Mapping[str, float], count: int) -> list[Actor]:
    """Return ``count`` new actors; fewer if some do not start in time.

    Raises:
        EngineError: no actor started, or Ray reports an error.
    """
    options = ClientAppActor.options(**resources, scheduling_strategy="SPREAD")  # type: ignore[attr-defined]
    handles: dict[Any, Any] = {}
    for _ in range(count):
        handle = options.remote()
        handles[handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())] = handle
    ready: Sequence[Any] = ()
    if handles:
        ready, late = ray.wait(list(handles), num_returns=count, timeout=START_SECONDS)
        for reference in late:
            ray.kill(handles[reference])
    try:
        actors = [Actor(handles[reference], ray.get(reference)) for reference in ready]
    except RayError as error:
        raise EngineError(
            f"an actor could not start in the Ray cluster: {last_line(error)}. Each machine needs this Python's "
            "packages, in the same versions"
        ) from error
    if not actors:
        raise EngineError(
            f"no actor started in the Ray cluster: it has {ray.cluster_resources()}, and free are "
            f"{ray.available_resources()}. Wait until the programs that use it have ended (ray status shows them), or "
            "leave out engine.address"
        )
    return actors


def last_line(error: Exception) -> str:
    """Return the last line of an error of Ray's, which is the actor's own error."""
    return str(error).strip().splitlines()[-1].strip()


class ClusterBackend(raybackend.RayBackend):
    """Flower's Ray back end on the cluster that ``RAY_ADDRESS`` names.

    The back end has as many actors as a run on this machine alone would have (``init_args.num_cpus``). If a machine
    dies, the replies of its clients are lost, and the other machines go on.
    """

    def init_ray(self, backend_config: dict[str, Any]) -> None:
        """Join the cluster. Ray joins none if it is told a number of CPUs or GPUs."""
        arguments = backend_config["init_args"]
        self.wanted = int(arguments.pop("num_cpus"))
        arguments.pop("num_gpus", None)
        super().init_ray(backend_config)

    @property
    def num_workers(self) -> int:
        """How many messages are worked on at once."""
        return self.actors.count

    def build(self, app_fn: Callable[[], ClientApp]) -> None:
        """Start the actors, which end when this process leaves the cluster."""
        self.app_fn = app_fn
        self.actors = Actors(self.client_resources, self.wanted)
        print(f"{self.actors.count} actors on {', '.join(self.actors.machines.values())}", flush=True)

    def process_message(self, message: Message, context: Context) -> tuple[Message, Context]:
        """Return a client's reply and its context; the reply is an error if its machine died.

        A node registers on every machine, because each of them may play its clients.
        """
        try:
            if message.metadata.message_type == MessageTypeLegacy.GET_PROPERTIES:
                return self._register(message, context), context
            with self.actors.taken() as actor:
                return self._ask(actor, message, context)
        except ActorLostError as error:
            return Message(Error(ErrorCode.CLIENT_APP_CRASHED, str(error)), reply_to=message), context
        except EngineError as error:
            return Message(Error(ENDS_RUN, str(error)), reply_to=message), context

    def _ask(self, actor: Actor, message: Message, context: Context) -> tuple[Message, Context]:
        node = str(context.node_config[PARTITION_ID_KEY])
        _, reply, updated = ray.get(actor.handle.run.remote(self.app_fn, message, node, context))
        return reply, updated

    def _register(self, message: Message, context: Context) -> Message:
        """Return a node's registration, which must be the same on every machine.

        Raises:
            ActorLostError: a machine died.
            EngineError: a machine has other code or data, lacks them, or does not see the run's folder.
        """
        from common.settings import settings_in

        settings = settings_in(context.run_config)
        replies: list[tuple[str, Message]] = []
        for node in self.actors.nodes():
            machine = self.actors.machines[node]
            with self.actors.taken(node) as actor:
                check_sees_folder(actor, settings, machine)
                try:
                    replies.append((machine, self._ask(actor, message, context)[0]))
                except RaySystemError as error:  # the actor cannot import Goldfinch, or what it needs
                    raise EngineError(
                        f"{machine} cannot play clients: {last_line(error)}. Install {settings.software} there, for "
                        "the Python that ray start runs on"
                    ) from error
        check_registrations([(machine, registrations_of(machine, reply)) for machine, reply in replies], settings)
        return replies[0][1]


def check_sees_folder(actor: Actor, settings: RunSettings, machine: str) -> None:
    """Check that an actor's machine sees the run's folder, where clients keep their own state between rounds.

    Raises:
        EngineError: the machine does not see the folder.
    """
    path = settings.output_folder / "config.yaml"
    if not ray.get(actor.handle.__ray_call__.remote(lambda _, path: path.is_file(), path)):
        raise EngineError(
            f"{machine} does not see the run's folder {settings.output_folder}, where clients keep their state: choose "
            "output= on a file system that all machines of the Ray cluster share"
        )


def registrations_of(machine: str, reply: Message) -> list[Registration]:
    """Return the clients that a node registered on a machine.

    Raises:
        EngineError: the node did not register; the message has the client's reason.
    """
    from common.errors import PayloadError
    from strategies.core.flower import properties_to_registrations

    try:
        return properties_to_registrations(recorddict_to_getpropertiesres(reply.content))
    except PayloadError as error:
        raise EngineError(f"{machine}: {error}") from error


def check_registrations(by_machine: Sequence[tuple[str, Sequence[Registration]]], settings: RunSettings) -> None:
    """Check that all machines have the run's code, and the same data.

    Args:
        by_machine: machines, each with its registrations of the same clients.
        settings: the run's settings.

    Raises:
        EngineError: a machine has other code or data; the message names the machine.
    """
    from strategies.core.participants import code_text

    first, expected = by_machine[0]
    for machine, registrations in by_machine:
        for registration, other in zip(registrations, expected, strict=True):
            if registration.code != settings.code:
                raise EngineError(
                    f"{machine} runs {code_text(registration, settings)}: install {settings.software} on both"
                )
            if (registration.split, registration.content) != (other.split, other.content):
                raise EngineError(
                    f"{machine} has other data of {registration.client} than {first} in the folder that data.root or "
                    "GOLDFINCH_DATA names there: copy the data, or name a folder that all machines share"
                )


def use_in_flower() -> None:
    """Let Flower work on as many messages as there are actors, and use the cluster if the environment names one."""
    vce_api.ThreadPoolExecutor = partial(ThreadPoolExecutor, MAX_ACTORS)  # type: ignore[assignment,misc]
    if "RAY_ADDRESS" in os.environ:
        raybackend.RayBackend = ClusterBackend  # type: ignore[misc]


use_in_flower()
