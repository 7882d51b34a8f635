"""Devices that share one machine: inline and Ray simulation, where every client's data and state are at hand."""

from __future__ import annotations

from client.device import Device
from client.store import FileStore, Store
from common.data.protocols import ClientSpec
from common.settings import RunSettings


def local_device(settings: RunSettings, spec: ClientSpec) -> Device:
    """The device of ``spec``, keeping its state under the run's output folder, able to score every test domain."""

    def store(run: str) -> Store:
        folder = settings.output_folder / "clients" / run / spec.id
        return FileStore(folder, per_round=len(settings.method.exchanges))

    return Device(settings, spec, store, scores=tuple(settings.protocol.test_domains(settings.data)), simulated=True)
