"""Rounds of many participants through a real SuperLink: seconds, processor time and memory of its processes.

    python bench/light_nodes.py --nodes 200                              # five rounds that count
    python bench/light_nodes.py --nodes 100 500 --secure                 # TLS, signed calls, enrolled keys
    python bench/light_nodes.py --nodes 100 500 --proxy                  # and through nginx, as docker/ has it
    python bench/light_nodes.py --nodes 100 --store memory               # the SuperLink's store, sqlite by default
    python bench/light_nodes.py --nodes 500 --proxy --polls 80           # GOLDFINCH_POLLS of the proxy
    python bench/light_nodes.py --nodes 30 --vanish 0.1                  # a tenth of the nodes leaves in every round
    python bench/light_nodes.py --nodes 200 --against ../earlier         # this checkout and another one, in turn
    python bench/light_nodes.py --dry-run                                # three nodes, writes nothing

The nodes are light: threads of one process that speak Flower's Fleet API as SuperNodes do. Each activates with a key
of its own, signs its calls, sends heartbeats, polls for messages every three seconds in a thread of its own, pulls
every part of a message and pushes every part of its answer. But it answers at once, with the model it was sent, and
starts no process. Server and SuperLink are those of a deployment. FedAvg with the small net of 136,730 parameters. All
nodes have one address, which gets half of the polls that a proxy passes on.

A round is from the end of the one before to its own end; the first two do not count, unless ``--skip`` says otherwise.
Nodes register before the first.
Processor seconds are those of the SuperLink, the server process, the proxy and all nodes over these rounds, memory is
the most they held. ``faults`` are calls of nodes that failed and were made again; what the logs say of them is printed.

With ``--vanish`` nodes stop without a farewell when a round begins, as devices do that lose power, and two rounds later
other nodes play their clients. With ``--secure`` those have the same keys, which the SuperLink refuses until their last
connection has expired: ``refusals``. ``skipped`` counts rounds without a quorum, ``lines`` those that the run prints in
a round, ``activity`` the bytes that replies.jsonl grows by in a round.
Appends rows to bench/results/light_nodes.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ.get("CHECKOUT") or str(Path(__file__).resolve().parent.parent))  # not what is installed
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))  # for the proxy
sys.path.insert(2, str(Path(__file__).resolve().parent))  # for the meter, which an earlier checkout may lack

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import MessageTypeLegacy
from flwr.common.serde import message_to_proto
from flwr.compat.common.recorddict_compat import (
    fitres_to_recorddict,
    getpropertiesres_to_recorddict,
    recorddict_to_fitins,
)
from flwr.proto import fleet_pb2, heartbeat_pb2, message_pb2
from flwr.proto.control_pb2 import RegisterNodeRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from measuring import arguments, start
from meter import Meter, wrong
from support.federation import start_proxy

from common.settings import RunSettings, load_settings
from common.versions import code_sha256
from common.wire.messages import Answer, Registration, header_of
from common.wire.payload import Payload
from goldfinch.commands.deployment import LocalDeployment
from server.run.conduct import prepare_output
from server.run.events import plain_lines
from strategies.core.flower import answer_to_fit_res, fit_ins_to_request, registrations_to_properties

CHECKOUT = Path(sys.path[0])
RESULTS = Path(__file__).parent / "results" / "light_nodes.csv"
EVERY = 3.0
"""Seconds between two polls of a SuperNode."""

BEAT_EVERY = 24.0
"""Seconds between two heartbeats of a SuperNode: it draws from 21 to 27."""

SKIPPED = 2
UNITS = dict.fromkeys(("lost", "faults", "skipped", "vanished", "refusals", "lines"), "") | {"activity": "B"}
ENDS = ("round done", "round skipped")
SAMPLES = 32
Key = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]


class LightNode:
    """One node.

    Args:
        address: the SuperLink's ``host:port``, or that of the proxy before it.
        certificate: the certificate of who signed its; ``None`` without TLS.
        key: the node's own.
        registered: whether the key is enrolled; otherwise the node registers itself.
        client: the client that it plays.
    """

    def __init__(
        self, address: str, certificate: str | None, key: Key, client: Registration, *, registered: bool
    ) -> None:
        self.client, public = client, public_key_to_bytes(key[1])
        interceptors: list[Any] = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(*key),
        ]
        self.link = FleetHttpClient.from_server_address(
            address, certificate is None, certificate, interceptors, retry_invoker=make_simple_http_retry_invoker()
        )
        if not registered:
            self.link.RegisterNode(fleet_pb2.RegisterNodeFleetRequest(public_key=public))
        request = fleet_pb2.ActivateNodeRequest(public_key=public, heartbeat_interval=30.0)
        self.node = Node(node_id=self.link.ActivateNode(request).node_id)
        self.beat = time.monotonic()
        self.answered = 0
        self.gone = False
        """Whether the node has vanished: it no longer calls the SuperLink."""

    def heartbeat(self) -> None:
        """Tell the SuperLink that the node is there."""
        self.link.SendNodeHeartbeat(heartbeat_pb2.SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=30.0))
        self.beat = time.monotonic()

    def poll(self, working: threading.Semaphore) -> bool:
        """Poll for messages once and answer them; return whether there were any.

        Args:
            working: held while messages are answered.
        """
        pulled = self.link.PullMessages(fleet_pb2.PullMessagesRequest(node=self.node))
        for head, tree in zip(pulled.messages_list, pulled.message_object_trees, strict=True):
            with working:
                reply = self._reply(self._receive(head, tree))
                if self.gone:
                    return False
                self._send(reply)
            self.answered += 1
        return bool(pulled.messages_list)

    def _receive(self, head: Any, tree: Any) -> Message:
        identity, run = head.metadata.message_id, head.metadata.run_id
        parts: dict[str, bytes] = {}
        for name in dict.fromkeys(part.object_id for part in iterate_object_tree(tree)):
            request = message_pb2.PullObjectRequest(node=self.node, run_id=run, object_id=name)
            while not (found := self.link.PullObject(request)).object_available:
                time.sleep(1.0)  # as Flower's own first wait
            parts[name] = found.object_content
        received = message_pb2.ConfirmMessageReceivedRequest(node=self.node, run_id=run, message_object_id=identity)
        self.link.ConfirmMessageReceived(received)
        message = inflate_object_from_contents(identity, parts)
        assert isinstance(message, Message)
        message.metadata.__dict__["_message_id"] = identity
        return message

    def _reply(self, message: Message) -> Message:
        if message.metadata.message_type == MessageTypeLegacy.GET_PROPERTIES:
            return Message(getpropertiesres_to_recorddict(registrations_to_properties([self.client])), reply_to=message)
        request, payload = fit_ins_to_request(recorddict_to_fitins(message.content, keep_input=False))
        scores: list[Any] = [{"domain": domain, "count": 1, "correct": 0, "loss": 1.0} for domain in request.score]
        answer = Answer(
            request.run, request.method, request.round, request.exchange, request.client,
            SAMPLES, self.client.class_counts, request.train, scores, {}, 1, {}, 0, "light", 0,
            attempt=request.attempt,
        )  # fmt: skip
        weights = payload.weights if request.train else {}
        result = answer_to_fit_res(Payload(weights, header=header_of(answer)))
        return Message(fitres_to_recorddict(result, keep_input=True), reply_to=message)

    def _send(self, reply: Message) -> None:
        run = reply.metadata.run_id
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            tree, parts = get_object_tree(reply), get_all_nested_objects(reply)
            head = message_to_proto(remove_content_from_message(reply))
        pushed = self.link.PushMessages(
            fleet_pb2.PushMessagesRequest(
                node=self.node, messages_list=[head], message_object_trees=[tree], clientapp_runtime_list=[0.0]
            )
        )
        for name in pushed.objects_to_push:
            self.link.PushObject(
                message_pb2.PushObjectRequest(
                    node=self.node,
                    run_id=run,
                    object_id=name,
                    object_content=parts[name].deflate(),
                    session_id=pushed.session_id,
                )
            )


class LightNodes:
    """Many nodes, each with a thread, since a poll may wait at the proxy.

    Args:
        nodes: all of them.
        threads: that many answer messages at the same time.
    """

    def __init__(self, nodes: list[LightNode], threads: int) -> None:
        self.nodes = nodes
        self._lock, self._end = threading.Lock(), threading.Event()
        self._working = threading.Semaphore(threads)
        self._beats = 4 + len(nodes) // 50  # threads: a call of a busy SuperLink takes seconds
        self._threads = [threading.Thread(target=self._beat, args=(at,), daemon=True) for at in range(self._beats)]
        for place, node in enumerate(nodes):
            self._threads.append(self._thread(node, EVERY * place / len(nodes)))
        self.faults = 0

    def _thread(self, node: LightNode, pause: float) -> threading.Thread:
        return threading.Thread(target=self._work, args=(node, pause), daemon=True)

    def __enter__(self) -> LightNodes:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()

    def add(self, node: LightNode) -> None:
        """Serve one more node."""
        with self._lock:
            self.nodes.append(node)
            self._threads.append(self._thread(node, 0.0))
            self._threads[-1].start()

    def remove(self, node: LightNode) -> None:
        """Let a node vanish without telling the SuperLink."""
        with self._lock:
            node.gone = True
            self.nodes.remove(node)

    def _work(self, node: LightNode, pause: float) -> None:
        """Poll for a node after ``pause`` seconds, then every three seconds and at once after a message."""
        while not self._end.wait(pause) and not node.gone:
            pause = EVERY
            try:
                if node.poll(self._working):
                    pause = 0.0
            except RunNotRunningException:  # no Exception; a SuperNode drops the message of a run that has ended
                continue
            except Exception as error:  # a call that failed is made again, as a SuperNode does
                print(f"{node.client.client}: {error!r}", file=sys.stderr)
                self.faults += 1

    def _beat(self, place: int) -> None:
        while not self._end.wait(1.0):  # next to the work, as a SuperNode's own thread does
            with self._lock:
                nodes = self.nodes[place :: self._beats]
            for node in nodes:
                if not node.gone and time.monotonic() - node.beat > BEAT_EVERY:
                    try:
                        node.heartbeat()
                    except Exception as error:  # repeated in the next turn
                        print(f"{node.client.client}, heartbeat: {error!r}", file=sys.stderr)
                        self.faults += 1


class Vanishing:
    """Lets a share of the nodes vanish at the begin of each round, and others play their clients two rounds later.

    Args:
        nodes: the nodes that are connected.
        events: the run's ``events.jsonl``.
        share: of the nodes, in [0, 1).
        connect: connects a new node that plays a client.
    """

    def __init__(
        self, nodes: LightNodes, events: Path, share: float, connect: Callable[[Registration], LightNode]
    ) -> None:
        self.nodes, self.events, self.share, self.connect = nodes, events, share, connect
        self.vanished = 0
        self.refusals: list[str] = []
        self._draw = random.Random(0)  # noqa: S311  # not for secrets
        self._absent: list[tuple[int, Registration]] = []  # with the round in which each comes back
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Vanishing:
        if self.share:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self.share:
            self._thread.join()

    def _run(self) -> None:
        seen = SKIPPED
        while not self._end.wait(0.2):
            number = self._round()
            if number > seen:
                seen = number
                self._vanish(number)
            self._bring_back(number)

    def _round(self) -> int:
        """Return the number of the round that goes on; 0 before the first."""
        if not self.events.exists():
            return 0
        number = 0
        for line in self.events.read_text().splitlines(keepends=True):
            if line.endswith("\n") and '"event": "round"' in line:
                number = int(json.loads(line)["round"])
        return number

    def _vanish(self, number: int) -> None:
        chosen = self._draw.sample(self.nodes.nodes, round(self.share * len(self.nodes.nodes)))
        for node in chosen:
            self.nodes.remove(node)
            self._absent.append((number + 2, node.client))
        self.vanished += len(chosen)

    def _bring_back(self, number: int) -> None:
        for due, client in list(self._absent):
            if due > number:
                continue
            try:
                node = self.connect(client)
            except Exception as error:  # a key is refused until its last connection has expired
                self.refusals.append(repr(error))
                continue
            self._absent.remove((due, client))
            self.nodes.add(node)


class LightDeployment(LocalDeployment):
    """A SuperLink with the keys of its nodes, but no node's process."""

    def start_node(self, name: str) -> Any:
        """Nothing."""

    @property
    def enrolment(self) -> Any:
        """In this process: Flower's command line takes seconds for each node."""
        return self

    def restore(self) -> None:
        """Nothing: the SuperLink of a measurement is not restarted."""

    def enrol(self, names: list[str]) -> None:
        """As ``goldfinch devices enrol`` does."""
        authority, version = self.certificates.operator / "ca.crt", RuntimeVersionHttpInterceptor(component_name="flwr")
        link = ControlHttpClient.from_server_address(self.address, False, str(authority), [version])
        for name in names:
            key: Any = load_ssh_public_key(self.certificates.node_public_key(name).read_bytes())
            link.RegisterNode(RegisterNodeRequest(public_key=public_key_to_bytes(key), name=name))


def settings_of(nodes: int, rounds: int, output: Path, more: list[str]) -> RunSettings:
    """A run with a number of clients."""
    domains = ("handwritten", "printed", "signs", "sketch")
    counts = ", ".join(f"{name}: {len(range(place, nodes, 4))}" for place, name in enumerate(domains))
    shares = ", ".join(f"{name}: {1 / nodes}" for name in domains if name != "signs")
    return load_settings([
        "method=fedavg", "model=small", "tuned=none", "engine=superlink", "protocol=glyphs_uneven",
        f"protocol.counts={{{counts}}}", f"protocol.fractions={{{shares}}}", f"protocol.fraction={1 / nodes}",
        "rounds.evaluate_every=100000", f"train.rounds={rounds}", f"rounds.registration={max(600, 4 * nodes)}",
        f"rounds.deadline={max(600, 4 * nodes)}", "train.device=cpu", f"output={output}",
        *more,
    ])  # fmt: skip


def registration_of(settings: RunSettings, client: str, domain: str) -> Registration:
    """What a light node registers of its client."""
    classes = settings.data.class_count
    counts = [SAMPLES // classes] * classes
    counts[0] += SAMPLES - sum(counts)
    return Registration(
        client, domain, SAMPLES, counts, [domain], "0" * 64, settings.data.classes_sha256, settings.identity,
        code_sha256(), "light", {},
    )  # fmt: skip


class Place:
    """The SuperLink of the measurement, with its proxy.

    Args:
        folder: everything of its processes.
        clients: the clients' ids.
        options: those of the command line.
    """

    def __init__(self, folder: Path, clients: list[str], options: argparse.Namespace) -> None:
        self.secure, self.proxied = options.secure, options.proxy
        self.limits = {} if options.polls is None else {"GOLDFINCH_POLLS": str(options.polls)}
        names: dict[str, dict[str, object]] = {client: {} for client in clients} if options.secure else {}
        self.deployment = LightDeployment(folder, names, secure=options.secure, **store_of(options))
        self.proxy: int | None = None
        self.address = ""

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start the SuperLink, and the proxy if there is one; ``stack`` stops them."""
        stack.enter_context(self.deployment)
        self.address = self.deployment.address
        if self.proxied:
            child, self.address = start_proxy(self.deployment, CHECKOUT, **self.limits)
            self.proxy = child.process.pid

    @property
    def link(self) -> int:
        """The SuperLink's process."""
        return self.deployment.children["superlink"].process.pid

    def connect(self, client: Registration) -> LightNode:
        """A new node that plays a client."""
        if not self.secure:
            return LightNode(self.address, None, generate_key_pairs(), client, registered=False)
        files = self.deployment.certificates
        private: Any = load_ssh_private_key(files.node_key(client.client).read_bytes(), None)
        key = (private, private.public_key())
        return LightNode(self.address, str(files.operator / "ca.crt"), key, client, registered=True)


def one(nodes: int, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    """A run of ``rounds`` rounds that count."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="light-nodes-")))
        output = folder / "run"
        settings = settings_of(nodes, rounds + options.skip, output, options.override)
        specs = settings.protocol.clients(settings.data)
        place = Place(folder / "link", [spec.id for spec in specs], options)
        place.start(stack)
        light = [place.connect(registration_of(settings, spec.id, spec.domain)) for spec in specs]
        printed = io.StringIO()
        there = stack.enter_context(LightNodes(light, options.threads))
        vanishing = stack.enter_context(Vanishing(there, output / "events.jsonl", options.vanish, place.connect))
        prepare_output(settings)
        with Meter(place.link, place.proxy) as meter, contextlib.redirect_stdout(printed):
            place.deployment.run(settings, [plain_lines(settings)])
        print(printed.getvalue(), *wrong(place.deployment.folder / "logs"), sep="\n", file=sys.stderr)
        found = found_in(output, meter, rounds, options.skip)
        found["faults"] = there.faults
        if options.vanish:
            found["refusals"] = len(vanishing.refusals)
            found["vanished"] = vanishing.vanished / rounds
            found["lines"] = len(printed.getvalue().splitlines()) / (rounds + options.skip)
            found["activity"] = (output / "replies.jsonl").stat().st_size / (rounds + options.skip)
        return found


def store_of(options: argparse.Namespace) -> dict[str, Any]:
    """The argument of a deployment that chooses its store; an earlier checkout knows SQLite only."""
    if options.store == "sqlite":
        return {}
    return {"store": options.store}


def found_in(output: Path, meter: Meter, rounds: int, skip: int) -> dict[str, Any]:
    """What was measured in the rounds that count."""
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    starts = [event["time"] for event in events if event["event"] == "start"]
    ends = [event["time"] for event in events if event["event"] in ENDS]
    ends = [*starts, *ends][skip:]
    lost = sum(event["event"] in ("client lost", "client failed", "client refused") for event in events)
    skipped = sum(event["event"] == "round skipped" for event in events)
    found = {}
    for name, value in sorted(meter.between(ends[0], ends[-1]).items()):
        found[name] = value if name.endswith("memory") else value / rounds
    seconds = [after - before for before, after in pairwise(ends)]
    return {"seconds": seconds, "lost": lost, "skipped": skipped, **found}


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[200])
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each variant, in turn")
    parser.add_argument("--threads", type=int, default=8, help="nodes at work at the same time")
    parser.add_argument("--store", choices=("sqlite", "memory"), default="sqlite", help="of the SuperLink")
    parser.add_argument("--skip", type=int, default=SKIPPED, help="first rounds that do not count")
    parser.add_argument("--vanish", type=float, default=0.0, help="share of the nodes that vanishes in every round")
    parser.add_argument("--override", action="append", default=[], help="of the run, such as rounds.oversample=1.3")
    parser.add_argument("--secure", action="store_true")
    parser.add_argument("--proxy", action="store_true", help="through nginx; secure")
    parser.add_argument("--polls", type=int, help="GOLDFINCH_POLLS of the proxy")
    parser.add_argument(
        "--against", type=Path, help="another checkout; its server and proxy are measured in turn with this one's"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.secure = options.secure or options.proxy
    if options.one:
        print(json.dumps(one(options.one, options.rounds, options)), flush=True)
        return
    if options.dry_run:
        options.nodes, options.rounds = [3], 2
    from bench.ratios import append, compare, quantity, wait_until_quiet

    if not options.dry_run:
        wait_until_quiet()
    checkouts = {"this": CHECKOUT} | ({"against": options.against.resolve()} if options.against else {})
    for nodes in options.nodes:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
        for _ in range(options.repeats):
            for name, checkout in checkouts.items():
                found[name].append(run(nodes, checkout, options))
                print(f"{nodes} nodes, {name}: {found[name][-1]}; load {os.getloadavg()[0]:.1f}", flush=True)
        shape = f"nodes={nodes} secure={options.secure} proxy={options.proxy}"
        if options.store != "sqlite":
            shape += f" store={options.store}"
        if options.polls is not None:
            shape += f" polls={options.polls}"
        if options.vanish:
            shape += f" vanish={options.vanish:g}"
        shape = " ".join([shape, *options.override])
        seconds = {name: [second for one in runs for second in one["seconds"]] for name, runs in found.items()}
        least = min(map(len, seconds.values()))
        opponent = "against" if options.against else "this"
        rows = compare("light nodes, round", shape, "s", {k: v[:least] for k, v in seconds.items()}, opponent)
        for name, runs in found.items():
            for what in [key for key in runs[0] if key != "seconds"]:
                unit = UNITS.get(what, "MiB" if what.endswith("memory") else "s")
                rows.append(quantity(f"light nodes, {what}", name, shape, unit, [one[what] for one in runs]))
        if not options.dry_run:
            append(rows, RESULTS)


def run(nodes: int, checkout: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One run in a process of its own that imports from ``checkout``."""
    command = [sys.executable, __file__, "--one", str(nodes), "--rounds", str(options.rounds)]
    command += ["--threads", str(options.threads), "--store", options.store, "--vanish", str(options.vanish)]
    command += ["--skip", str(options.skip)]
    if options.polls is not None:
        command += ["--polls", str(options.polls)]
    for override in options.override:
        command += ["--override", override]
    command += [f"--{name}" for name in ("secure", "proxy") if getattr(options, name)]
    environment = {**os.environ, "CHECKOUT": str(checkout), "PYTHONPATH": str(checkout)}
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return dict(json.loads(printed.splitlines()[-1]))


if __name__ == "__main__":
    start(main)
