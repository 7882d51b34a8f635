"""Several SuperLinks under one server, in one process: real frames, real TLS, and SuperLinks that are only state."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from flwr.app import Message
from flwr.common import Code, FitRes, Parameters, Status
from grpc._cython import cygrpc
from hypothesis import given
from hypothesis import strategies as st
from support.engines import REFUSAL, asked, registered
from support.federation import ROOT
from support.grids import scripted
from support.nodes import OVERRIDES, deployment, through
from support.relays import LocalRelay, Relayed, SharedDeployment, relayed

from client import node as client_node
from common.errors import ConfigError, EngineError
from common.settings import load_settings
from common.wire.payload import TENSOR_TYPE, Payload
from server.engines.flower import FlowerEngine
from server.engines.inline import InlineEngine
from server.flower.submit import SuperLinkSettings
from server.relay import coordinator as coordinator_module
from server.relay import worker as worker_module
from server.relay.coordinator import Coordinator, Received, Shard
from server.relay.frames import BEARER, CHANNEL_OPTIONS, MAX_BODY_BYTES, NAME, STREAM, TOKEN, Frame, FrameError, decode
from server.relay.supervisor import TOKEN as PRINTED_TOKEN
from server.relay.supervisor import check_connections, has_enrolled_nodes
from server.relay.worker import MAX_WAITING_FRAMES, RelayWorker

LONG = "rounds.registration=120"
"""The machine of a test may be busy."""

METHODS = ("fpl", pytest.param("moon", marks=pytest.mark.slow))


@pytest.fixture(autouse=True)
def no_devices_of_other_tests() -> None:
    client_node._DEVICES.clear()


@pytest.fixture(autouse=True)
def quick_reconnection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.relay.app.PAUSE_SECONDS", 0.05)
    monkeypatch.setattr("server.relay.app.LAST_WORDS_SECONDS", 0.2)


# ---- one state -------------------------------------------------------------------------------------------------------


def grids_of(folder: Path, overrides: list[str], count: int) -> list[SharedDeployment]:
    """The three clients' nodes, spread over ``count`` SuperLinks, each with an enrolled key."""
    nodes = list(deployment(folder, overrides).nodes.values())
    grids = [SharedDeployment() for _ in range(count)]
    for place, node in enumerate(nodes):
        grids[place % count].world.join(node, f"{node.context.node_config['domain']}-0")
    return grids


@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_superlinks_gives_the_inline_state(method: str, tmp_path: Path) -> None:
    overrides = [*OVERRIDES, LONG, f"method={method}"]
    expected = through(InlineEngine, overrides, tmp_path / "inline")
    for count in (1, 2, 4):
        output = tmp_path / str(count)
        grids = grids_of(tmp_path / f"state-{count}", [*overrides, f"output={output}"], count)
        with relayed(*grids) as there:
            engine = FlowerEngine(there.grid, enrolled=True, describe=there.grid.describe)
            found = through(lambda _, engine=engine: engine, overrides, output)
        assert found["state_sha256"] == expected["state_sha256"], count
        assert found["scores"] == expected["scores"], count
        assert found["bytes"]["up"] > 0


def test_connections_that_break_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few frames, in both directions: what was not confirmed is sent again."""
    overrides = [*OVERRIDES, LONG, "method=fpl"]
    expected = through(InlineEngine, overrides, tmp_path / "inline")
    output = tmp_path / "run"
    cuts = 0
    with relayed(*grids_of(tmp_path / "state", [*overrides, f"output={output}"], 2)) as there:
        handle = Shard.handle
        frames = 0

        def breaking(self: Shard, connection: Any, frame: Frame) -> None:
            nonlocal frames, cuts
            frames += 1
            if frames % 7 == 0 and cuts < 25:
                cuts += 1
                connection.close()  # the frame, and all that is on its way, is gone
                return
            handle(self, connection, frame)

        monkeypatch.setattr(Shard, "handle", breaking)
        engine = FlowerEngine(there.grid, enrolled=True, describe=there.grid.describe)
        found = through(lambda _: engine, overrides, output)
    assert cuts >= 5
    assert found["state_sha256"] == expected["state_sha256"]
    assert found["answers"]["lost"] == 0


def test_a_relay_connects_again_if_the_connection_breaks_while_its_reader_waits_to_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads the stream fills the queue after the stream has ended, and cannot read of the end."""
    closed = threading.Event()
    answer = RelayWorker._list

    def fill(self: RelayWorker, frame: Frame) -> None:
        if not closed.is_set():
            shard._connection.close()  # type: ignore[union-attr]  # it has just sent this frame
            closed.set()
            for _ in range(MAX_WAITING_FRAMES + 4):
                time.sleep(0.3)  # gRPC has noticed the end when the queue is full
                self._out.put(Frame("nodes", {"number": 0, "last": False}))
        answer(self, frame)

    monkeypatch.setattr(RelayWorker, "_list", fill)
    with relayed(
        *grids_of(tmp_path / "state", [*OVERRIDES, "method=fedavg", f"output={tmp_path / 'run'}"], 1)
    ) as there:
        shard = there.shards[0]
        first = shard._connection
        number = shard.ask_for_nodes()
        assert len(shard.nodes(number, time.monotonic() + 30)) == 3
        assert closed.is_set()
        assert shard._connection is not first


# ---- a SuperLink that is lost ----------------------------------------------------------------------------------------


def silent(_: Message) -> None:
    """A node that does not reply."""


def relayed_engine(there: Relayed, *clients: str) -> FlowerEngine:
    """An engine that knows each client's node, one after the other over all SuperLinks."""
    there.wait_for_nodes()
    engine = FlowerEngine(there.grid, describe=there.grid.describe)
    nodes = [node for grid in there.grids for node in grid.world.nodes]
    engine._nodes = dict(zip(clients, nodes, strict=True))
    return engine


def test_a_lost_superlink_loses_only_its_own_replies() -> None:
    with relayed(SharedDeployment(scripted(REFUSAL)), SharedDeployment(silent)) as there:
        engine = relayed_engine(there, "here", "there")

        def lose() -> None:
            lost = there.grids[1]
            Relayed.wait(lambda: lost.world.link.message_ins_store and not lost.missing)  # the upload is complete
            there.relays[1].kill()
            there.shards[1].lose("SuperLink b was lost: it burns")

        threading.Thread(target=lose).start()
        deadline = 3600.0  # beyond the test's own
        _, failures = engine.exchange(Payload({"w": torch.ones(9)}), asked("here", "there"), deadline)
        assert {failure.client: failure.status for failure in failures} == {"here": "failed", "there": "lost"}
        assert "it burns" in next(failure.reason for failure in failures if failure.client == "there")
        _, failures = engine.exchange(Payload(), asked("here", "there"), 60.0)
        told = {failure.client: failure.reason for failure in failures}
        assert told["there"] == "its node is offline"
        there.relays.append(LocalRelay(there.coordinator, there.shards[1], there.grids[1]))
        there.wait_for_nodes()
        there.grids[1].world.nodes = dict.fromkeys(there.grids[1].world.nodes, scripted(REFUSAL))
        _, failures = engine.exchange(Payload(), asked("here", "there"), 60.0)
        assert {failure.client: failure.status for failure in failures} == {"here": "failed", "there": "failed"}


def test_an_earlier_relay_is_not_accepted_after_a_later_one() -> None:
    with relayed(SharedDeployment(scripted(REFUSAL))) as there:
        earlier = there.relays[0]
        later = LocalRelay(there.coordinator, there.shards[0], there.grids[0])
        there.relays.append(later)
        Relayed.wait(lambda: later.worker.heard > 0)
        heard = earlier.worker.heard
        time.sleep(0.3)
        assert earlier.worker.heard == heard


def test_a_relay_ends_when_its_coordinator_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.relay.app.PATIENCE_SECONDS", 0.5)
    there = Relayed(SharedDeployment(scripted(REFUSAL)))
    there.coordinator._server.stop(None).wait()
    Relayed.wait(lambda: there.relays[0].errors)
    assert "cannot be reached" in there.relays[0].errors[0]
    there.close()


def test_the_closed_port_of_a_superlink_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "PROBE_SECONDS", 0.05)
    gone = threading.Event()
    worker_module.watch_superlink("127.0.0.1:1", threading.Event(), gone.set)
    assert gone.is_set()


def test_grpc_knows_the_options_of_a_connection() -> None:
    """A name that it does not know is ignored in silence."""
    library = Path(cygrpc.__file__).read_bytes()
    for name, _ in CHANNEL_OPTIONS:
        assert name.encode() + b"\0" in library, name


@pytest.mark.slow
def test_a_connection_without_messages_stays_open() -> None:
    """The coordinator must allow the pings of its relays; gRPC's default closes the connection after 40 seconds."""
    with relayed(SharedDeployment(scripted(REFUSAL)), SharedDeployment(scripted(REFUSAL))) as there:
        connections = [shard._connection for shard in there.shards]
        time.sleep(60)
        assert [shard._connection for shard in there.shards] == connections
        assert not any(connection.closed for connection in connections if connection)


# ---- who may connect -------------------------------------------------------------------------------------------------


def call_with(coordinator: Coordinator, certificate: bytes, metadata: Any, frames: list[bytes]) -> list[bytes]:
    """What the coordinator sends to whoever opens the stream."""
    credentials = grpc.ssl_channel_credentials(certificate)
    options = [("grpc.ssl_target_name_override", NAME)]
    with grpc.secure_channel(coordinator.address, credentials, options) as channel:
        return list(channel.stream_stream(STREAM)(iter(frames), metadata=metadata, timeout=10))


@pytest.mark.parametrize(
    "metadata",
    [(), ((TOKEN, BEARER + "guessed"),), ((TOKEN, BEARER + hashlib.sha256(b"right").hexdigest()),)],
    ids=["no token", "another token", "the token's hash, which is in the log"],
)
def test_a_relay_without_the_right_token_is_refused_before_a_frame_is_read(metadata: Any) -> None:
    shard = Shard("a")
    coordinator = Coordinator([shard], "127.0.0.1:0")
    try:
        coordinator.accept(hashlib.sha256(b"right").hexdigest(), shard)
        hello = Frame("hello", {"code": "x", "run": 1, "task": 1, "insecure": False}).encode()
        with pytest.raises(grpc.RpcError) as caught:
            call_with(coordinator, coordinator.certificate, metadata, [hello])
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert not shard.ready
        assert shard._connection is None
    finally:
        coordinator.close()


def test_another_coordinator_gets_no_token() -> None:
    """The certificate of a run is the only one that its relays trust."""
    right, other = Coordinator([], "127.0.0.1:0"), Coordinator([], "127.0.0.1:0")
    try:
        with pytest.raises(grpc.RpcError) as caught:
            call_with(other, right.certificate, ((TOKEN, BEARER + "secret"),), [])
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    finally:
        right.close()
        other.close()


def test_a_relay_of_other_code_is_refused_with_both_versions() -> None:
    shard = Shard("a")
    coordinator = Coordinator([shard], "127.0.0.1:0")
    relay = LocalRelay(coordinator, shard, SharedDeployment(scripted(REFUSAL)), code="f" * 16)
    Relayed.wait(lambda: relay.errors)
    assert "install the same Goldfinch on both" in relay.errors[0]
    assert relay.errors[0] == shard.problem
    assert not shard.ready
    coordinator.close()
    relay.kill()


def test_frames_before_hello_end_the_connection() -> None:
    shard = Shard("a")
    coordinator = Coordinator([shard], "127.0.0.1:0")
    try:
        coordinator.accept(hashlib.sha256(b"right").hexdigest(), shard)
        frames = [Frame("reply", {"message": "m", "reply": "r"}).encode()]
        sent = call_with(coordinator, coordinator.certificate, ((TOKEN, BEARER + "right"),), frames)
        assert [decode(content).kind for content in sent] == ["welcome", "end"]
    finally:
        coordinator.close()


def test_the_token_s_hash_is_found_in_a_log() -> None:
    digest = hashlib.sha256(b"right").hexdigest()
    found = PRINTED_TOKEN.search(f"INFO: x\ngoldfinch relay sha256:{digest}\nmore")
    assert found is not None
    assert found[1] == digest
    assert PRINTED_TOKEN.search(f"goldfinch relay sha256:{digest[:60]}") is None, "a line that is not complete"


# ---- nodes -----------------------------------------------------------------------------------------------------------


def test_a_client_at_two_superlinks_is_named_with_both(tmp_path: Path) -> None:
    overrides = [*OVERRIDES, "method=fpl", f"output={tmp_path / 'run'}"]
    nodes = deployment(tmp_path / "state", overrides).nodes.values()
    node = next(iter(nodes))
    client = f"{node.context.node_config['domain']}-0"
    first, second = SharedDeployment(), SharedDeployment()
    first.world.join(node, client)
    second.world.join(node, client)
    with relayed(first, second) as there:
        engine = FlowerEngine(there.grid, enrolled=True, describe=there.grid.describe)
        found, failures = registered(engine, [client], 20.0)
        for _ in range(50):
            if failures:
                break
            more, failures = registered(engine, [client], 0.0)
            found += more
            time.sleep(0.1)
    assert found == [client]
    assert "at SuperLink a" in failures[0].reason
    assert "at SuperLink b" in failures[0].reason
    assert "both claim to be it" in failures[0].reason


def test_a_node_in_two_registries_is_used_once_and_told() -> None:
    """The second SuperLink has a copy of the first one's database, and the node's key is used twice."""
    first, second = SharedDeployment(scripted(REFUSAL)), SharedDeployment()
    second.world = first.world
    with relayed(first, second) as there:
        assert len(list(there.grid.get_nodes())) == 1
        assert len(list(there.grid.get_node_ids())) == 1
        assert len(there.notices) == 1
        assert "enrol each device at one SuperLink" in there.notices[0]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def big_reply(size: int) -> Callable[[Message], Message | None]:
    result = FitRes(Status(Code.OK, ""), Parameters([bytes(size)], TENSOR_TYPE), 1, {})
    return scripted(result)


def test_replies_wait_at_the_superlink_when_the_engine_does_not_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    count, size, limit = 12, 4 * 2**20, 10 * 2**20
    monkeypatch.setattr(coordinator_module, "MAX_STORED_BYTES", limit)
    with relayed(SharedDeployment(*[big_reply(size)] * count)) as there:
        shard = there.shards[0]
        names = [f"c{place:02}" for place in range(count)]
        engine = relayed_engine(there, *names)
        engine._update_nodes()
        sent = engine._send(b"x", list(asked(*names).values()), 60.0)
        assert len(sent) == count
        Relayed.wait(lambda: shard._stored > limit - size)
        time.sleep(1.0)
        assert shard._stored <= limit
        fetched = there.grids[0].calls.count("ConfirmMessageReceived")
        assert fetched < count / 2, "replies that the engine does not read have left the SuperLink"
        deadline = time.monotonic() + 30
        left = set(sent)
        while left and time.monotonic() < deadline:
            for identity, message in engine._inbox.pull(left):
                assert message is not None
                assert message.has_content()
                left.discard(identity)
        assert not left
        assert shard._stored == 0


def test_a_part_that_is_too_large_is_lost_and_the_others_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "MAX_BODY_BYTES", 100_000)
    with relayed(SharedDeployment(big_reply(500_000), scripted(REFUSAL))) as there:
        engine = relayed_engine(there, "large", "small")
        _, failures = engine.exchange(Payload(), asked("large", "small"), 30.0)
    told = {failure.client: (failure.status, failure.reason) for failure in failures}
    assert told["large"] == ("lost", "its reply is too large")
    assert told["small"][0] == "failed"


def test_objects_that_messages_share_cross_the_connection_once() -> None:
    names = ("a", "b", "c")
    with relayed(SharedDeployment(*[scripted(REFUSAL)] * 3)) as there:
        relayed_engine(there, *names).exchange(Payload({"w": torch.ones(1000)}), asked(*names), 20)
        shared, own = 3, 3  # chunk, array and their record; the request, the content, and the message
        assert there.grids[0].calls.count("PushObject") == shared + own * len(names)


def test_batches_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower gives each upload three minutes, so the second begins when the first is confirmed."""
    monkeypatch.setattr("server.relay.grid.MAX_BATCH", 2)
    names = ("a", "b", "c", "d", "e")
    with relayed(SharedDeployment(*[scripted(REFUSAL)] * 5)) as there:
        _, failures = relayed_engine(there, *names).exchange(Payload({"w": torch.ones(9)}), asked(*names), 30)
        assert sorted(failure.status for failure in failures) == ["failed"] * 5
        pushes = [call for call in there.grids[0].calls if call in ("PushMessages", "PushObject")]
    shared, own = 3, 3
    first = pushes.index("PushMessages")
    second = pushes.index("PushMessages", first + 1)
    assert pushes.count("PushMessages") == 3
    assert second - first == 1 + shared + 2 * own, "the second upload began before the first was complete"


# ---- frames ----------------------------------------------------------------------------------------------------------


@given(st.text(max_size=20), st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5)), st.binary())
def test_a_frame_survives_the_wire(kind: str, fields: dict[str, Any], body: bytes) -> None:
    fields.pop("kind", None)
    assert decode(Frame(kind, fields, body).encode()) == Frame(kind, fields, body)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_are_refused(content: bytes) -> None:
    try:
        frame = decode(content)
    except FrameError:
        return
    assert frame.encode()


def test_a_frame_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(FrameError, match="too large"):
        Frame("part", {}, bytes(MAX_BODY_BYTES + 1)).encode()


def test_a_relay_imports_neither_torch_nor_methods() -> None:
    code = (
        "import sys, server.relay.app; print([m for m in ('torch', 'numpy.random', 'strategies') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "torch" not in found.stdout
    assert "strategies" not in found.stdout


# ---- settings --------------------------------------------------------------------------------------------------------

HOME = """
[superlink.a]
address = "127.0.0.1:8000"
[superlink.b]
address = "127.0.0.1:8001"
[superlink.copy]
address = "127.0.0.1:8000"
[superlink.far]
address = "fl.example.org:8000"
"""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"connections": ["a", "nowhere"]}, "'nowhere'.*names no SuperLink"),
        ({"connections": ["a", "a"]}, "names 'a' twice"),
        ({"connections": ["a", "copy"]}, "'a' and 'copy' are the same SuperLink"),
        ({"connections": []}, "is empty"),
        ({"connections": ["a"], "connection": "b"}, "both set"),
        ({"connections": ["a", "far"]}, "'far'.*cannot reach engine.listen"),
        ({"connections": ["a"], "listen": "here"}, "expected host:port"),
        ({"connections": ["a"], "advertised": "10.0.0.5:0"}, "expected host:port"),
    ],
    ids=["unknown", "twice", "one SuperLink", "none", "both settings", "far", "no port", "port 0"],
)
def test_connections_that_cannot_work_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(HOME)
    with pytest.raises(ConfigError, match=message):
        check_connections(path, SuperLinkSettings("superlink", **options))


@pytest.mark.parametrize(
    "options",
    [
        {"connections": ["a", "b"]},
        {"connections": ["a", "far"], "listen": "10.0.0.5:9300"},
        {"connections": ["a", "far"], "advertised": "tunnel.example.org:9300"},
    ],
    ids=["one machine", "an address of this machine", "an address of a tunnel"],
)
def test_connections_that_can_work_are_accepted(options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(HOME)
    check_connections(path, SuperLinkSettings("superlink", **options))


def test_an_address_that_cannot_be_listened_on_is_named() -> None:
    with pytest.raises(EngineError, match=r"engine\.listen=203\.0\.113\.1:9300"):
        Coordinator([], "203.0.113.1:9300")


def test_superlinks_with_and_without_keys_are_not_mixed() -> None:
    shards = [Shard("a"), Shard("b")]
    assert has_enrolled_nodes(shards)
    shards[1].insecure = True
    with pytest.raises(EngineError, match="'b' works without TLS"):
        has_enrolled_nodes(shards)
    shards[0].insecure = True
    assert not has_enrolled_nodes(shards)


def test_what_became_of_other_messages_is_forgotten() -> None:
    shard = Shard("a")
    shard._awaited |= {"wanted", "other"}
    with shard.changed:
        for identity in ("wanted", "other"):
            shard._finish(identity, Received("", problem="gone"))
    assert shard.take({"wanted"}) is not None
    assert shard.take({"wanted", "other"}) is None


def test_the_setting_is_part_of_the_configuration() -> None:
    settings = load_settings(["engine=superlink", "engine.connections=[a,b]"])
    assert list(settings.engine["connections"]) == ["a", "b"]
