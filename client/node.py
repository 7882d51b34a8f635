"""A node: the clients that one SuperNode hosts, whatever process does their work and whatever brings the messages.

The work is done where the message arrives (a Ray actor, a ClientApp), or in a resident trainer (:mod:`client.resident`)
that keeps torch, net and data from message to message.
"""

import math
import os
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from client.device import Device
from client.ledger import FOLDER, Budget, Ledger
from client.local import local_device
from client.resident.messages import Question, Reply
from client.store import stores
from common.data.protocols import ClientSpec
from common.errors import ConfigError, nearest
from common.overrides import split_overrides
from common.settings import RunSettings, load_settings
from common.storage.files import folder_name
from common.wire.messages import Answer, read_header
from common.wire.payload import encode
from strategies.core.codec import read_request, write_registrations

RANDOMNESS = "privacy-randomness"
BUDGET_KEYS = ("privacy-max-epsilon", "privacy-delta", "privacy-max-releases")
NODE_KEYS = (
    *("domain", "index", "data-dir", "state-dir", "device", "resident", "partition-id", "num-partitions"),
    *(RANDOMNESS, *BUDGET_KEYS),
)
DELTA = 1e-5
"""Of the device's own budget, where its configuration has none: the server's delta could be any."""

CACHED_DEVICES = 32
_DEVICES: OrderedDict[tuple[int, str, str, str], Device] = OrderedDict()
"""Devices of this process: they keep data and net from message to message."""


@lru_cache(maxsize=8)
def _settings_of(overrides: str) -> RunSettings:
    """Settings are frozen, and composing them for every message would cost more than a small model's exchange."""
    return load_settings(split_overrides(overrides))


def answer_question(question: Question, *, simulated: bool = False) -> Reply:
    """What the node that is asked says; its own words if anything is not good: the server must learn what it was.

    Args:
        question: what it is asked.
        simulated: whether this process is an actor of Flower's simulation. The engine says so; neither the question nor
            the node's configuration does, since a SuperNode may have a partition's number too.
    """
    try:
        node = Node(question, simulated=simulated)
        return node.register() if question.kind == "register" else node.answer()
    except Exception as error:
        return Reply.of(error)


class Node:
    """The node that a question is for.

    Data and nets of another run than the question's are let go.
    """

    def __init__(self, question: Question, *, simulated: bool = False) -> None:
        self.question, self.configuration, self.simulated = question, question.configuration, simulated

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
        if self.simulated:
            return local_device(settings, spec)
        data_root = self.configuration.get("data-dir")
        if data_root is not None and not Path(str(data_root)).is_dir():
            raise ConfigError(f"--node-config: data-dir {data_root} is not a folder on this device")
        home = os.environ.get("FLWR_HOME")
        usual = Path(home, "goldfinch-state") if home else Path.home() / ".goldfinch" / "state"
        folder = Path(str(self.configuration.get("state-dir", usual)))
        return Device(
            settings,
            spec,
            stores(folder, spec.id, len(settings.method.exchanges)),
            None if data_root is None else str(data_root),
            None if "domain" in self.configuration else tuple(settings.protocol.test_domains(settings.data)),
            ledger=Ledger(
                folder / FOLDER / folder_name(spec.domain), self._budget()
            ),  # a server may split a domain in other ways
            allows_keyed=self._allows_keyed(),
        )

    def _allows_keyed(self) -> bool:
        chosen = self.configuration.get(RANDOMNESS, "system")
        if chosen not in ("system", "keyed"):
            raise ConfigError(f'--node-config: {RANDOMNESS} must be "system" or "keyed"; got {chosen!r}')
        return chosen == "keyed"

    def _budget(self) -> Budget:
        """The device's own budget, which holds whatever settings a server sends."""
        epsilon, delta, releases = (self.configuration.get(key) for key in BUDGET_KEYS)
        if epsilon is not None and not (_is_number(epsilon) and 0 < epsilon < math.inf):
            raise ConfigError(f"--node-config: {BUDGET_KEYS[0]} must be a number above 0; got {epsilon!r}")
        if delta is not None and not (_is_number(delta) and 0 < delta < 1):
            raise ConfigError(f"--node-config: {BUDGET_KEYS[1]} must be a number between 0 and 1; got {delta!r}")
        if releases is not None and not (type(releases) is int and releases >= 1):
            raise ConfigError(f"--node-config: {BUDGET_KEYS[2]} must be a whole number, at least 1; got {releases!r}")
        return Budget(
            releases,
            None if epsilon is None else float(epsilon),
            DELTA if delta is None else float(delta),
            releases_key=f"--node-config {BUDGET_KEYS[2]}",
            epsilon_key=f"--node-config {BUDGET_KEYS[0]}",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
