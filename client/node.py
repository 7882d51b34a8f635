"""A node: the clients that one SuperNode hosts, whatever process does their work and whatever brings the messages.

The work is done where the message arrives (a Ray actor, a ClientApp), or in a resident trainer (:mod:`client.resident`)
that keeps torch, net and data from message to message.
"""

import os
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from client.device import Device
from client.local import local_device
from client.resident.frames import Question, Reply
from client.store import stores
from common.data.protocols import ClientSpec
from common.errors import ConfigError, nearest
from common.overrides import split_overrides
from common.settings import RunSettings, load_settings
from common.wire.messages import Answer, read_header
from common.wire.payload import encode
from strategies.core.codec import read_request, write_registrations

NODE_KEYS = ("domain", "index", "data-dir", "state-dir", "device", "resident", "partition-id", "num-partitions")
CACHED_DEVICES = 32
_DEVICES: OrderedDict[tuple[int, str, str, str], Device] = OrderedDict()
"""Devices of this process: they keep data and net from message to message."""


@lru_cache(maxsize=8)
def _settings_of(overrides: str) -> RunSettings:
    """Settings are frozen, and composing them for every message would cost more than a small model's exchange."""
    return load_settings(split_overrides(overrides))


def answer_question(question: Question) -> Reply:
    """What the node that is asked says; its own words if anything is not good: the server must learn what it was."""
    try:
        node = Node(question)
        return node.register() if question.kind == "register" else node.answer()
    except Exception as error:
        return Reply.of(error)


class Node:
    """The node that a question is for.

    Data and nets of another run than the question's are let go.
    """

    def __init__(self, question: Question) -> None:
        self.question, self.configuration = question, question.configuration

    def register(self) -> Reply:
        """The registrations of the clients that this node hosts."""
        settings = self._settings()
        found = [self._device(settings, spec).register() for spec in self._hosted(settings)]
        return Reply(ok=True, text=write_registrations(found))

    def answer(self) -> Reply:
        """The answer to a request."""
        asked = self.question
        request, message = read_request(asked.request, asked.tensor_type, asked.tensors)
        settings = self._settings()
        hosted = {spec.id: spec for spec in self._hosted(settings)}
        if request.client not in hosted:
            raise ConfigError(f"this node hosts {', '.join(hosted)}, not {request.client}")
        payload = self._device(settings, hosted[request.client]).answer(request, message)
        return Reply(ok=True, samples=read_header(Answer, payload.header).samples, tensors=[encode(payload)])

    def _settings(self) -> RunSettings:
        unknown = sorted(set(self.configuration) - set(NODE_KEYS))
        if unknown:
            raise ConfigError(f"--node-config: {unknown[0]} is unknown; {nearest(unknown[0], NODE_KEYS)}")
        settings = _settings_of(self.question.overrides)
        resident = self.configuration.get("resident", True)
        if not isinstance(resident, bool):
            raise ConfigError(f"--node-config: resident must be true or false; got {resident!r}")
        device = str(self.configuration.get("device", settings.train.device))
        return replace(settings, train=replace(settings.train, device=device))

    def _hosted(self, settings: RunSettings) -> list[ClientSpec]:
        node = self.configuration
        specs = sorted(settings.protocol.clients(settings.data), key=lambda spec: spec.id)
        if "domain" in node:
            wanted = ClientSpec(str(node["domain"]), int(str(node.get("index", 0))))
            if wanted not in specs:
                ids = [spec.id for spec in specs]
                raise ConfigError(f"--node-config: the protocol has no client {wanted.id}; {nearest(wanted.id, ids)}")
            return [wanted]
        if "partition-id" not in node or "num-partitions" not in node:
            raise ConfigError('a SuperNode needs --node-config \'domain="..." data-dir="..."\'')
        return specs[int(str(node["partition-id"])) :: int(str(node["num-partitions"]))]

    def _device(self, settings: RunSettings, spec: ClientSpec) -> Device:
        run, overrides = self.question.run, self.question.overrides
        key = (run, overrides, repr(sorted(self.configuration.items())), spec.id)
        for other in [other for other in _DEVICES if other[0] != run]:
            del _DEVICES[other]  # a resident trainer outlives runs; it holds one run's data, and reads them anew
        if key not in _DEVICES:
            _DEVICES[key] = self._new_device(settings, spec)
        _DEVICES.move_to_end(key)
        while len(_DEVICES) > CACHED_DEVICES:
            _DEVICES.popitem(last=False)
        return _DEVICES[key]

    def _new_device(self, settings: RunSettings, spec: ClientSpec) -> Device:
        if "domain" not in self.configuration:
            return local_device(settings, spec)
        data_root = self.configuration.get("data-dir")
        if data_root is not None and not Path(str(data_root)).is_dir():
            raise ConfigError(f"--node-config: data-dir {data_root} is not a folder on this device")
        home = os.environ.get("FLWR_HOME")
        usual = Path(home, "goldfinch-state") if home else Path.home() / ".goldfinch" / "state"
        folder = Path(str(self.configuration.get("state-dir", usual)))
        store = stores(folder, spec.id, len(settings.method.exchanges))
        return Device(settings, spec, store, None if data_root is None else str(data_root))
