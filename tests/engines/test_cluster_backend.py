"""How a simulation uses the machines of a Ray cluster. Ray is made up here, and real in test_ray_cluster.py."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp.client_app import ClientAppException
from flwr.common.constant import ErrorCode, MessageTypeLegacy
from flwr.compat.common.recorddict_compat import getpropertiesres_to_recorddict
from flwr.server.superlink.fleet.vce import vce_api
from flwr.supercore.task_identity import TaskIdentity
from ray.exceptions import RayActorError, RaySystemError
from support.toy import toy_settings

from common.errors import ConfigError
from common.wire.messages import Registration
from server.flower import simulation
from server.flower.cluster import ENDS_RUN, Machine, places_on
from server.flower.simulation import Actor, ClusterBackend
from server.flower.submit import run_on_ray
from strategies.core.flower import registrations_to_properties

CONTEXT = Context(1, 0, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})


class MadeUpRay:
    """Machines ``a``, ``b`` ... with an actor each. A call is made when its result is fetched."""

    def __init__(self, *names: str) -> None:
        self.alive = dict.fromkeys(names, True)

    def nodes(self) -> list[dict[str, Any]]:
        """As ``ray.nodes()``."""
        found = []
        for name, alive in self.alive.items():
            entry = {"NodeID": name, "Alive": alive, "NodeManagerHostname": name, "NodeManagerAddress": "10.0.0.1"}
            found.append({**entry, "Resources": {"CPU": 1.0}})
        return found

    def get_runtime_context(self) -> Any:
        """This process is on machine ``b``."""
        return SimpleNamespace(get_node_id=lambda: "b")

    def get(self, call: Callable[[], Any]) -> Any:
        """The result of a call."""
        return call()


def handle(run: Callable[[], Any], sees_folder: bool = True) -> Any:
    """An actor's handle: ``run`` answers messages."""
    return SimpleNamespace(
        run=SimpleNamespace(remote=lambda *_: run),
        __ray_call__=SimpleNamespace(remote=lambda *_: lambda: sees_folder),
    )


def backend_of(monkeypatch: pytest.MonkeyPatch, **handles: Any) -> tuple[ClusterBackend, MadeUpRay]:
    """A back end whose machines have these actors."""
    made_up = MadeUpRay(*handles)
    monkeypatch.setattr(simulation, "ray", made_up)
    monkeypatch.setattr(simulation, "free_places", lambda resources, wanted: wanted)
    monkeypatch.setattr(
        simulation, "start_actors", lambda *_: [Actor(each, name) for name, each in sorted(handles.items())]
    )
    backend = ClusterBackend.__new__(ClusterBackend)
    backend.client_resources, backend.wanted = {"num_cpus": 1}, len(handles)
    backend.build(lambda: None)  # type: ignore[arg-type,return-value]
    return backend, made_up


def message(kind: str = MessageType.TRAIN) -> Message:
    """A message to a node."""
    for name in ("task_id", "run_id", "node_id"):
        setattr(TaskIdentity, name, 1)
    return Message(RecordDict(), 7, kind)


def answer() -> tuple[str, str, str]:
    """What an actor gives back."""
    return "0", "the reply", "the context"


def fails(error: Exception) -> Callable[[], Any]:
    """A call that ends with an error."""

    def run() -> Any:
        raise error

    return run


@pytest.mark.parametrize("error", [RayActorError(), RaySystemError(OSError("Broken pipe"))], ids=["actor", "store"])
def test_a_lost_machine_costs_its_reply_and_gets_no_other_message(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is what an actor sends whose machine's object store is gone before the actor is."""
    backend, _ = backend_of(monkeypatch, a=handle(fails(error)), b=handle(answer))
    assert backend.num_workers == 2
    lost, context = backend.process_message(message(), CONTEXT)
    assert context is CONTEXT
    assert (lost.error.code, lost.error.reason) == (
        ErrorCode.CLIENT_APP_CRASHED,
        "the actor on a (10.0.0.1) ended without a reply, or its machine did",
    )
    for _ in range(3):
        assert backend.process_message(message(), CONTEXT) == ("the reply", "the context")
    assert backend.num_workers == 1


def test_a_machine_that_is_known_to_be_gone_is_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, ray = backend_of(monkeypatch, a=handle(fails(AssertionError("it was asked"))), b=handle(answer))
    ray.alive["a"] = False
    assert backend.process_message(message(), CONTEXT) == ("the reply", "the context")


def test_the_run_ends_when_no_machine_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, ray = backend_of(monkeypatch, a=handle(answer), b=handle(answer))
    ray.alive = dict.fromkeys(ray.alive, False)
    ended, _ = backend.process_message(message(), CONTEXT)
    assert ended.error.code == ENDS_RUN == ErrorCode.MOD_FAILED_PRECONDITION
    assert "all actors in the Ray cluster have died" in ended.error.reason
    assert "resume=true goes on" in ended.error.reason


def test_a_client_s_own_error_costs_no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's worker reports it as the client's."""
    backend, _ = backend_of(monkeypatch, a=handle(fails(ClientAppException("boom"))))
    for _ in range(2):
        with pytest.raises(ClientAppException):
            backend.process_message(message(), CONTEXT)
    assert backend.num_workers == 1


def test_a_message_waits_for_an_idle_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = backend_of(monkeypatch, a=handle(answer))
    with backend.actors.taken():
        waiting = threading.Thread(target=backend.process_message, args=(message(), CONTEXT))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive()


# ---- registration ----------------------------------------------------------------------------------------------------


def registering(found: Registration) -> Any:
    """A handle whose actor registers a client."""
    content = getpropertiesres_to_recorddict(registrations_to_properties([found]))
    reply = SimpleNamespace(content=content, has_content=lambda: True)
    return handle(lambda: ("0", reply, CONTEXT))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"code": "0123"}, r"a \(10.0.0.1\) runs code 0123, the server .*install .* on both"),
        ({"split": "t"}, r"a \(10.0.0.1\) has other data of bright-0 than b .*data\.root"),
        ({"content": "d"}, r"a \(10.0.0.1\) has other data of bright-0 than b .*data\.root"),
    ],
    ids=["code", "split", "content"],
)
def test_a_machine_with_other_code_or_data_is_named(
    changes: dict[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = toy_settings("fedavg", tmp_path)
    (tmp_path / "config.yaml").touch()
    monkeypatch.setattr("common.settings.settings_in", lambda _: settings)
    counts = [7, 6, 6, 6]
    here = Registration("bright-0", "bright", 25, counts, ["bright"], "s", "c", "i", settings.code, "cpu", {}, "c")
    asked = message(MessageTypeLegacy.GET_PROPERTIES)
    alike, _ = backend_of(monkeypatch, a=registering(here), b=registering(here))
    assert alike.process_message(asked, CONTEXT)[0].has_content()
    other = replace(here, **changes)  # type: ignore[arg-type]
    backend, _ = backend_of(monkeypatch, a=registering(other), b=registering(here))
    assert re.search(told, backend.process_message(asked, CONTEXT)[0].error.reason)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (handle(answer, sees_folder=False), r"a \(10.0.0.1\) does not see the run's folder .*output= on a file system"),
        (
            handle(fails(RaySystemError(ImportError("No module named 'client'")))),
            r"a \(10.0.0.1\) cannot play clients: .*No module named 'client'\. Install .* there",
        ),
    ],
    ids=["folder", "package"],
)
def test_a_machine_that_cannot_play_clients_ends_the_run(
    other: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, _ = backend_of(monkeypatch, a=other, b=handle(answer))
    assert list(backend.actors.machines) == ["b", "a"], "this machine is compared with, so it is the first"
    settings = toy_settings("fedavg", tmp_path)
    monkeypatch.setattr("common.settings.settings_in", lambda _: settings)
    ended, _ = backend.process_message(message(MessageTypeLegacy.GET_PROPERTIES), CONTEXT)
    assert ended.error.code == ENDS_RUN
    assert re.search(told, ended.error.reason)


# ---- how many --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "places"), [(0.0, 96), (1.0, 16), (0.5, 32), (0.3, 48)], ids=["no GPU", "one each", "half", "0.3"]
)
def test_actors_fit_gpu_by_gpu(gpus: float, places: int) -> None:
    """Flower counts 26 shares of 0.3 on eight GPUs. The last two fit on none, and their clients would wait for ever."""
    machines = (Machine("head", 0, 0), *[Machine(name, 48, 8) for name in "ab"])
    assert places_on(machines, gpus) == places


def test_without_a_gpu_nothing_is_started(tmp_path: Path) -> None:
    settings = toy_settings("fedavg", tmp_path, overrides=("engine=ray", "engine.gpus=0.5", "engine.actors=4"))
    with pytest.raises(ConfigError, match=r"engine\.gpus=0.5 GPU, but this machine has 4 CPU and 0 GPU"):
        run_on_ray(settings, [])


def test_room_that_other_programs_take_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "ray", MadeUpRay("a", "b"))
    monkeypatch.setattr(simulation, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(simulation, "available_resources_per_node", lambda: {"a": {"CPU": 3.0}, "b": {}})
    assert simulation.free_places({"num_cpus": 1}, 2) == 2
    assert simulation.free_places({"num_cpus": 1}, 8) == 3


def test_forty_actors_work_at_the_same_time() -> None:
    """Flower alone works on as many messages as this machine has CPUs and four more, at most on 32."""
    together = threading.Barrier(40, timeout=60)

    class Backend:
        num_workers = 40

        def build(self, _: Any) -> None: ...

        def terminate(self) -> None: ...

        def process_message(self, message: Any, context: Any) -> Any:
            together.wait()
            stop.set()
            return message, context

    stop = threading.Event()
    sent = [SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node, run_id=1)) for node in range(40)]
    state = SimpleNamespace(
        get_message_ins=lambda node_id, limit: [sent.pop()] if sent else [], store_message_res=lambda _: None
    )
    info = SimpleNamespace(retrieve_context=lambda run_id: None, update_context=lambda *_, **__: None)
    vce_api.run_api(
        lambda: None,  # type: ignore[arg-type,return-value]
        Backend,  # type: ignore[arg-type]
        {node: node for node in range(40)},
        SimpleNamespace(state=lambda: state),  # type: ignore[arg-type]
        dict.fromkeys(range(40), info),  # type: ignore[arg-type]
        stop,
        SimpleNamespace(add_clientapp_runtime=lambda _: None),  # type: ignore[arg-type]
    )
    assert not together.broken
