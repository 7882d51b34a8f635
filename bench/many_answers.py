"""Memory of the server while it holds the answers of many clients: what is beyond ``rounds.memory`` lies in files.

    python bench/many_answers.py --clients 1000                  # 20 GB of answers, 1.5 GiB of them in memory
    python bench/many_answers.py --memory 0.3 100                # of 60 clients: the same hash with and without files
    python bench/many_answers.py --dry-run                       # four clients, writes nothing

Each answer is ResNet-10's state, 19.6 MB, moved by one of seven noises and by a distance of its own; one in fifty moved
five times as far, and is scaled. Answers come as Flower messages and go the whole way: decoded by the engine, checked
by the gate, measured against the bounds, averaged. Only nodes and SuperLink are missing: a message is made when the
engine polls for it.

Printed is, for each limit in a process of its own, the most *anonymous* memory (RssAnon of /proc/self/status: what the
kernel cannot take back by reading a file again, and what a limit on a container must leave room for), ru_maxrss next to
it, in which mapped pages of the files count until another process needs them, seconds, and the state's SHA-256.
Appends rows to bench/results/many_answers.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity

from bench.measuring import arguments, start
from common.numerics import generator
from common.settings import RunSettings, load_settings
from common.versions import code_sha256
from common.wire.messages import Answer, Registration, Request, header_of, read_header
from common.wire.payload import Payload
from server.engines.flower import FlowerEngine
from strategies.core.federation import Federation
from strategies.core.flower import answer_to_fit_res

RESULTS = Path(__file__).parent / "results" / "many_answers.csv"
SAMPLES = 100
OUTLIERS = 50


class Grid:
    """Flower's grid, where every node answers a poll, one at a time.

    Args:
        count: nodes.
        sent: the state that all are sent.
    """

    def __init__(self, count: int, sent: Mapping[str, torch.Tensor]) -> None:
        self.sent = sent
        self.nodes = [NodeInfo(node_id=number + 1, name="") for number in range(count)]
        self.messages: list[Message] = []

    def get_nodes(self) -> list[NodeInfo]:
        """All nodes."""
        return self.nodes

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take them."""
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid4().hex
            self.messages.append(message)
        return [message.metadata.message_id for message in self.messages]

    def pull_messages(self, identities: set[str]) -> Iterator[Message]:  # noqa: ARG002
        """The next answer, if there is one left."""
        if self.messages:
            yield answered(self.messages.pop(), self.sent)


def answered(message: Message, sent: Mapping[str, torch.Tensor]) -> Message:
    """What the node makes of it; it was ``sent`` a state."""
    request = read_header(Request, json.loads(str(message.content.config_records["fitins.config"]["request"])))
    place, far = request.client_index, 5.0 if request.client_index % OUTLIERS == 1 else 1.0
    weights = {
        name: torch.add(tensor, noise(tensor.shape, place % 7), alpha=far * (0.01 + 1e-6 * place))
        if moves(name, tensor)
        else tensor
        for name, tensor in sent.items()
    }
    answer = Answer(
        request.run, request.method, request.round, request.exchange, request.client,
        SAMPLES, counts(10), True, [], {}, 1, {}, 0, "bench", 0, attempt=request.attempt,
    )  # fmt: skip
    result = answer_to_fit_res(Payload(weights, header=header_of(answer)))
    return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)


@cache
def noise(shape: torch.Size, number: int) -> torch.Tensor:
    """One of a few, so that clients are made quickly."""
    return torch.randn(shape, generator=generator(0, "noise", number, str(tuple(shape))))


def moves(name: str, tensor: torch.Tensor) -> bool:
    """Whether training moves it, for this bench."""
    return tensor.is_floating_point() and not name.endswith("running_var")


def counts(classes: int) -> list[int]:
    """Samples per class."""
    return [SAMPLES // classes] * classes


def settings_of(clients: int, memory: float, output: Path) -> RunSettings:
    """A run with a number of clients."""
    domains = ("handwritten", "printed", "signs", "sketch")
    each = ", ".join(f"{name}: {len(range(place, clients, 4))}" for place, name in enumerate(domains))
    shares = ", ".join(f"{name}: {1 / clients}" for name in domains if name != "signs")
    return load_settings(
        ["method=fedavg", "model=resnet10", "tuned=none", "protocol=glyphs_uneven", f"protocol.counts={{{each}}}",
         f"protocol.fractions={{{shares}}}", f"protocol.fraction={1 / clients}", f"rounds.memory={memory}",
         "train.device=cpu", f"output={output}"]
    )  # fmt: skip


class Watch(threading.Thread):
    """The most anonymous memory, twenty times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.end = 0, threading.Event()

    def run(self) -> None:
        """Measure until :attr:`end` is set."""
        while not self.end.wait(0.05):
            self.most = max(self.most, anonymous())


def anonymous() -> int:
    """Bytes of this process that no file holds."""
    return int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def one(clients: int, memory: float, folder: Path) -> dict[str, Any]:
    """One exchange."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID
    settings = settings_of(clients, memory, folder)
    federation = Federation(settings)
    state = federation.initial_state()
    grid = Grid(clients, state.weights)
    engine = FlowerEngine(grid)  # type: ignore[arg-type]
    classes = settings.data.class_count
    for place, spec in enumerate(settings.protocol.clients(settings.data)):
        registration = Registration(
            spec.id,
            spec.domain,
            SAMPLES,
            counts(classes),
            [],
            "0" * 64,
            settings.data.classes_sha256,
            settings.identity,
            code_sha256(),
            "bench",
            {},
        )
        assert not federation.registry.admit(registration)
        engine._nodes[spec.id] = grid.nodes[place].node_id
    federation.begin(1, "train", score=False)
    requests = federation.requests("bench", federation.registry.clients())
    start, watch, began = anonymous(), Watch(), time.perf_counter()
    watch.start()
    replies, failures = engine.exchange(federation.message(state), requests, 1e6, keep=federation.answer_store.keep)
    came = time.perf_counter()
    closed = federation.close(state, replies)
    done = time.perf_counter()
    watch.end.set()
    assert (failures, closed.refused, len(closed.updates)) == ([], [], clients)
    return {
        "anonymous": max(watch.most, anonymous()) / 1e9, "before": start / 1e9,
        "maxrss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "answers": sum(reply.bytes_up for reply in replies) / 1e9, "clipped": len(closed.scaled),
        "receive": came - began, "close": done - came, "sha256": closed.state.sha256(),
    }  # fmt: skip


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--memory", type=float, nargs="+", default=[1.5], help="rounds.memory, GiB")
    parser.add_argument("--folder", type=Path, help="where the files go: on a disk")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.clients, options.memory[0], options.folder)))
        return
    if options.dry_run:
        options.clients, options.memory = 4, [0.0, 2.0]
    from bench.ratios import append, quantity, wait_until_quiet

    if not options.dry_run:
        wait_until_quiet()
    rows, hashes = [], set()
    for memory in options.memory:
        with tempfile.TemporaryDirectory(prefix=".many-answers-", dir=options.folder or Path.cwd()) as folder:
            command = [sys.executable, __file__, "--one", "--clients", str(options.clients), "--memory", str(memory)]
            printed = subprocess.run(
                [*command, "--folder", folder], stdout=subprocess.PIPE, text=True, check=True
            ).stdout
        found = json.loads(printed.splitlines()[-1])
        print(
            f"{options.clients} clients, rounds.memory={memory:g}: {found}; load {os.getloadavg()[0]:.1f}", flush=True
        )
        hashes.add(found.pop("sha256"))
        for what, value in found.items():
            unit = "s" if what in ("receive", "close") else "" if what == "clipped" else "GB"
            shape = f"clients={options.clients} memory={memory:g}"
            rows.append(quantity(f"many answers, {what}", "this", shape, unit, [value]))
    assert len(hashes) == 1, "files changed the result"
    if not options.dry_run:
        append(rows, RESULTS)


if __name__ == "__main__":
    start(main)
