"""The Flower ClientApp: a thin skin around :class:`client.device.Device`.

In a deployment, a SuperNode's ``--node-config`` says which client it is::

    --node-config 'domain="webcam" data-dir="/data" state-dir="/var/lib/goldfinch"'

with ``index`` (0) where several devices hold one domain, and ``device`` ("cuda:0") where the run's choice is not this
node's. In a simulation, a node hosts the clients whose position among all clients, modulo the number of nodes, is its
``partition-id``; so a plain ``flwr run .`` works with any number of nodes.
"""

from __future__ import annotations

import os
import traceback
from collections import OrderedDict
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp
from flwr.common import Code, FitIns, FitRes, GetPropertiesIns, GetPropertiesRes

from client.device import Device
from client.local import local_device
from client.store import FileStore, Store
from common.config import split_overrides
from common.data.protocols import ClientSpec
from common.errors import ConfigError, nearest
from common.settings import RunSettings, load_settings
from strategies.flower import (
    answer_to_fit_res,
    failure_to_fit_res,
    fit_ins_to_request,
    refusal_to_properties,
    registrations_to_properties,
)

NODE_KEYS = ("domain", "index", "data-dir", "state-dir", "device", "partition-id", "num-partitions")
CACHED_DEVICES = 32
_DEVICES: OrderedDict[tuple[str, str, str], Device] = OrderedDict()
"""Devices of this process: a Ray actor keeps data and net from round to round."""


@lru_cache(maxsize=8)
def _settings_of(overrides: str) -> RunSettings:
    """Settings are frozen, and composing them for every message would cost more than a small model's exchange."""
    return load_settings(split_overrides(overrides))


class FlowerClient(Client):
    """One node: registers the clients it hosts, and answers requests for them.

    Args:
        context: Flower's context: the run's overrides and the node's configuration.
    """

    def __init__(self, context: Context) -> None:
        self.node = dict(context.node_config)
        self.overrides = str(context.run_config.get("overrides", ""))

    def get_properties(self, ins: GetPropertiesIns) -> GetPropertiesRes:  # noqa: ARG002
        """The registrations of the clients that this node hosts; its own words if its data or settings are not good."""
        try:
            settings = self._settings()
            return registrations_to_properties(
                [self._device(settings, spec).register() for spec in self._hosted(settings)]
            )
        except Exception as error:  # the server must learn why, whatever it was
            traceback.print_exc()
            return refusal_to_properties(f"{type(error).__name__}: {error}")

    def fit(self, ins: FitIns) -> FitRes:
        """The answer to a request; errors go back with their traceback, since only so they carry who failed."""
        try:
            request, message = fit_ins_to_request(ins)
            settings = self._settings()
            hosted = {spec.id: spec for spec in self._hosted(settings)}
            if request.client not in hosted:
                raise ConfigError(f"this node hosts {', '.join(hosted)}, not {request.client}")
            return answer_to_fit_res(self._device(settings, hosted[request.client]).answer(request, message))
        except Exception as error:  # see above
            traceback.print_exc()
            return failure_to_fit_res(
                Code.FIT_NOT_IMPLEMENTED, f"{type(error).__name__}: {error}", traceback.format_exc()
            )

    def _settings(self) -> RunSettings:
        unknown = sorted(set(self.node) - set(NODE_KEYS))
        if unknown:
            raise ConfigError(f"--node-config: {unknown[0]} is unknown; {nearest(unknown[0], NODE_KEYS)}")
        settings = _settings_of(self.overrides)
        device = str(self.node.get("device", settings.train.device))
        return replace(settings, train=replace(settings.train, device=device))

    def _hosted(self, settings: RunSettings) -> list[ClientSpec]:
        specs = sorted(settings.protocol.clients(settings.data), key=lambda spec: spec.id)
        if "domain" in self.node:
            wanted = ClientSpec(str(self.node["domain"]), int(self.node.get("index", 0)))
            if wanted not in specs:
                ids = [spec.id for spec in specs]
                raise ConfigError(f"--node-config: the protocol has no client {wanted.id}; {nearest(wanted.id, ids)}")
            return [wanted]
        if "partition-id" not in self.node or "num-partitions" not in self.node:
            raise ConfigError('a SuperNode needs --node-config \'domain="..." data-dir="..."\'')
        return specs[int(self.node["partition-id"]) :: int(self.node["num-partitions"])]

    def _device(self, settings: RunSettings, spec: ClientSpec) -> Device:
        key = (self.overrides, repr(sorted(self.node.items())), spec.id)
        if key not in _DEVICES:
            _DEVICES[key] = self._new_device(settings, spec)
        _DEVICES.move_to_end(key)
        while len(_DEVICES) > CACHED_DEVICES:
            _DEVICES.popitem(last=False)
        return _DEVICES[key]

    def _new_device(self, settings: RunSettings, spec: ClientSpec) -> Device:
        if "domain" not in self.node:
            return local_device(settings, spec)
        data_root = self.node.get("data-dir")
        if data_root is not None and not Path(str(data_root)).is_dir():
            raise ConfigError(f"--node-config: data-dir {data_root} is not a folder on this device")
        folder = Path(str(self.node.get("state-dir", _default_state_folder())))

        def store(run: str) -> Store:
            return FileStore(folder / run / spec.id, per_round=len(settings.method.exchanges))

        return Device(settings, spec, store, None if data_root is None else str(data_root))


def _default_state_folder() -> Path:
    home = os.environ.get("FLWR_HOME")
    return Path(home) / "goldfinch-state" if home else Path.home() / ".goldfinch" / "state"


def client_fn(context: Context) -> Client:
    """Flower asks for a client per message."""
    return FlowerClient(context)


app = ClientApp(client_fn=client_fn)
