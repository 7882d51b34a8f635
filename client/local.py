"""Devices that share one machine, in inline and Ray simulation, with the data and state of every client."""

from client.device import Device, kept_versions
from client.ledger import FOLDER, Ledger
from common.client_state import client_stores
from common.contract import Contract
from common.data.protocols import ClientSpec
from common.settings import RunSettings
from common.storage import folder_name


def local_device(settings: RunSettings, spec: ClientSpec) -> Device:
    """Return the device of ``spec``, which keeps its state under the run's output folder and scores all test domains.

    The device's ledger and secret are in the same folder: anyone who can read a simulation's folder can read the
    clients' data.
    """
    folder = settings.output_folder / "clients"
    store = client_stores(folder, spec.id, kept_versions(settings))
    scores = tuple(settings.protocol.test_domains(settings.data))
    ledger = Ledger(folder / FOLDER / folder_name(spec.id))
    return Device(settings, spec, store, scores=scores, contract=Contract(simulated=True), ledger=ledger)
