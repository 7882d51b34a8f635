"""Devices that share one machine: inline and Ray simulation, where every client's data and state are at hand."""

from client.device import Device
from client.ledger import FOLDER, Ledger
from client.store import stores
from common.data.protocols import ClientSpec
from common.settings import RunSettings
from common.storage.files import folder_name


def local_device(settings: RunSettings, spec: ClientSpec) -> Device:
    """The device of ``spec``, keeping its state under the run's output folder, able to score every test domain.

    Its ledger and its secret are there too: who reads a simulation's folder reads the clients' data anyway.
    """
    folder = settings.output_folder / "clients"
    store = stores(folder, spec.id, len(settings.method.exchanges))
    scores = tuple(settings.protocol.test_domains(settings.data))
    return Device(
        settings, spec, store, scores=scores, simulated=True, ledger=Ledger(folder / FOLDER / folder_name(spec.id))
    )
