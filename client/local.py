"""Devices that share one machine: inline and Ray simulation, where every client's data and state are at hand."""

from client.device import Device
from client.store import stores
from common.data.protocols import ClientSpec
from common.settings import RunSettings


def local_device(settings: RunSettings, spec: ClientSpec) -> Device:
    """The device of ``spec``, keeping its state under the run's output folder, able to score every test domain."""
    store = stores(settings.output_folder / "clients", spec.id, len(settings.method.exchanges))
    return Device(settings, spec, store, scores=tuple(settings.protocol.test_domains(settings.data)), simulated=True)
