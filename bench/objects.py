"""Flower objects of a request and of a reply, and what the SuperLink's two stores need to pass them on.

    python bench/objects.py
    python bench/objects.py --dry-run      # one small size, writes nothing

Flower divides a message into objects. Each is stored, transferred and deleted on its own: a call of the node and a call
of the server for every object. A store is called as the SuperLink does: all objects of a request and of its reply are
announced, put, read and deleted. Seconds are the calling thread's processor seconds, without the wait for the disk.
*own metrics* is a reply with its metrics as an object of their own, as it was before they equalled Flower's record of
an OK status. Appends rows to bench/results/objects.csv.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

import torch
from flwr.app import Message
from flwr.common import Code, FitRes, Parameters, Scalar, Status
from flwr.compat.common.recorddict_compat import fitins_to_recorddict, fitres_to_recorddict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStore, ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity

from bench.measuring import arguments, start
from bench.ratios import append, compare, in_turn, quantity
from common.wire.messages import Request
from common.wire.payload import TENSOR_TYPE
from goldfinch.commands.deployment import IN_MEMORY
from strategies.core.flower import OK_METRICS, request_to_fit_ins

RESULTS = Path(__file__).parent / "results" / "objects.csv"
SIZES = {"small, 0.55 MB": 550_000, "resnet10, 19.6 MB": 19_600_000}
"""Bytes of a model's tensors by its name."""

METRICS: dict[str, dict[str, Scalar]] = {"own metrics": {}, "this": dict(OK_METRICS)}
TINY = 1_000


def messages(size: int, metrics: dict[str, Scalar]) -> tuple[Message, Message]:
    """Return a request and its reply with ``size`` random bytes each, so that no other message shares an object."""
    request = Request("run", "id", "fedavg", 1, "train", "webcam-0", 20, 0, train=True, score=[], code="0" * 16)
    sent = Message(fitins_to_recorddict(request_to_fit_ins(os.urandom(size), request), keep_input=True), 1, "train")
    sent.metadata.__dict__["_message_id"] = sent.object_id
    result = FitRes(Status(Code.OK, ""), Parameters([os.urandom(size)], TENSOR_TYPE), 32, metrics)
    reply = Message(fitres_to_recorddict(result, keep_input=True), reply_to=sent)
    return sent, reply


def pass_on(store: ObjectStore, size: int, metrics: dict[str, Scalar]) -> None:
    """Announce, put, read and delete every object of a request and of its reply."""
    for message in messages(size, metrics):
        objects = get_all_nested_objects(message)
        for identity in store.preregister(1, get_object_tree(message)):
            store.put(identity, objects[identity].deflate())
        for identity in objects:
            assert store.get(identity)
        store.delete(message.object_id)


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    sizes = SIZES
    if options.dry_run:
        sizes = {"tiny": TINY}
        options.repeats = 1
    torch.set_num_threads(1)  # the thread's own time, which other processes cannot stretch
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    rows = []
    with tempfile.TemporaryDirectory(prefix="objects-") as folder:
        stores = {
            "sqlite": ObjectStoreFactory(str(Path(folder) / "link.db")).store(),
            "memory": ObjectStoreFactory(IN_MEMORY).store(),
        }
        for name, size in sizes.items():
            for kind, metrics in METRICS.items():
                for what, message in zip(("request", "reply"), messages(size, metrics), strict=True):
                    count = len(get_all_nested_objects(message))
                    rows.append(quantity(f"flower objects, {what}", kind, name, "", [count]))
            variants: dict[str, Callable[[], object]] = {}
            for place, store in stores.items():
                for kind, metrics in METRICS.items():
                    variants[f"{place}, {kind}"] = partial(pass_on, store, size, metrics)
            seconds = in_turn(variants, options.repeats)
            rows += compare("request and reply through the store", name, "s", seconds, "sqlite, this")
    if not options.dry_run:
        append(rows, RESULTS)


if __name__ == "__main__":
    start(main)
