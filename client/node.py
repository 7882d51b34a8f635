"""A node: the clients that one SuperNode hosts.

The work is done in the process that receives the message (a Ray actor, a ClientApp), or in a resident trainer
(:mod:`client.resident`) that keeps torch, model and data between messages.
"""

import json
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from client.border import FOLDER as BORDER_FOLDER
from client.border import Border
from client.condition import state_folder
from client.contract import FOLDER as CONTRACT_FOLDER
from client.contract import KeptTerms, NewTerms, asked_terms, contract_of, settled_terms, undecided_terms
from client.device import Device, kept_versions
from client.idle_runs import forget_runs
from client.ledger import FOLDER, Budget, Ledger
from client.local import local_device
from client.reasons import says_private
from client.resident.messages import Question, TrainerReply
from common.accounting import DELTA
from common.client_state import client_stores
from common.contract import CLIENTS, PINS, Contract, is_pin
from common.data.domain import DATA_VARIABLE
from common.data.protocols import ClientSpec
from common.errors import ConfigError, ContractError, nearest
from common.models.mixed import Mixed
from common.models.specs import ModelSpec
from common.privacy import GaussianPrivacy
from common.settings import RunSettings, check_deployable, settings_in, takes_class_defaults
from common.storage import folder_name
from common.text import printable, warn_once
from common.versions import code_files
from common.wire.messages import Answer, Registration, read_header
from common.wire.payload import encode
from strategies.core.codec import read_request, write_registrations

LOG = logging.getLogger("goldfinch.node")

STATE_KEEP, NETWORK = "state-keep", "model"
RANDOMNESS, SCORES = "privacy-randomness", "privacy-scores"
EPSILON_KEY, DELTA_KEY, RELEASES_KEY = "privacy-max-epsilon", "privacy-delta", "privacy-max-releases"
NODE_KEYS = (
    "domain",
    "index",
    "data-dir",
    "state-dir",
    STATE_KEEP,
    "device",
    NETWORK,
    "resident",
    "partition-id",
    "num-partitions",
    RANDOMNESS,
    SCORES,
    EPSILON_KEY,
    DELTA_KEY,
    RELEASES_KEY,
    *PINS,
)
"""Keys of ``--node-config``, besides ``data-SETTING`` for the settings of a data set."""

CACHED_DEVICES = 32
_DEVICES: OrderedDict[tuple[int, str, str, str], tuple[Device, NewTerms]] = OrderedDict()
"""Devices of this process, which keep data and model between messages, each with what its first request decides."""


@lru_cache(maxsize=8)
def _settings_of(run_config: str) -> RunSettings:
    """Return the settings of a run configuration, cached, because they take longer than a small model's exchange."""
    return settings_in(json.loads(run_config))


def answer_question(question: Question, *, simulated: bool = False) -> TrainerReply:
    """Return the node's reply to a question, or its error, so that the server can record it.

    The error is one of :data:`client.reasons.REASONS` if the node is private, or if data were opened and not all of
    what is read is pinned or kept: its text may hold cells and names of files that nobody has allowed. The rest of it
    is in the node's own log.

    Args:
        question: the question.
        simulated: whether this process is an actor of Flower's simulation. The engine decides this, and neither the
            question nor the node's configuration, since a SuperNode may have a partition id too.
    """
    node: Node | None = None
    try:
        node = Node(question, simulated=simulated)
        if question.kind == "register":
            return node.register()
        return node.answer()
    except Exception as error:
        opened = node is not None and node.opened
        return TrainerReply.of(error, private=not simulated and (opened or is_private(question)))


def is_private(question: Question) -> bool:
    """Return whether the run or this node is private, so that the server gets no text of an error."""
    if says_private(question.run_config, question.configuration):
        return True
    try:
        settings = _settings_of(run_config_text(question))
    except Exception:  # the run's settings are wrong: no run of them begins, private or not
        return False
    return is_gaussian(settings)


def is_gaussian(settings: RunSettings) -> bool:
    """Return whether the run asks for differential privacy."""
    return isinstance(settings.privacy, GaussianPrivacy)


def run_config_text(question: Question) -> str:
    """Return the run's configuration as text, by which its settings are cached."""
    return json.dumps(dict(question.run_config), sort_keys=True)


class Node:
    """The node of a question. Data and models of other runs than the question's are deleted.

    Attributes:
        opened: whether data are open of which not every term is pinned or kept, so that no error's text may leave.
    """

    def __init__(self, question: Question, *, simulated: bool = False) -> None:
        self.question, self.configuration, self.simulated = question, question.configuration, simulated
        self.run_config = run_config_text(question)
        self.opened = False

    def register(self) -> TrainerReply:
        """Return the registrations of the clients that this node hosts."""
        settings = self._settings()
        self._forget_old_runs()
        registrations: list[Registration] = []
        for spec in self._hosted(settings):
            device, new = self._device(settings, spec)
            registrations.append(device.register())
            new.keep()
        if self.question.request not in (None, "", settings.code):  # the server names the files that differ
            server = printable(str(self.question.request)[:16])
            warn_once(
                f"the server runs code {server}, this device {settings.code}: it takes no part until both have "
                f"{settings.software}"
            )
            registrations = [replace(registration, files=code_files()) for registration in registrations]
        return TrainerReply(ok=True, text=write_registrations(registrations))

    def answer(self) -> TrainerReply:
        """Return the answer to a request."""
        asked = self.question
        request, message = read_request(asked.request, asked.tensor_type, asked.tensors)
        settings = self._settings()
        hosted = {spec.id: spec for spec in self._hosted(settings)}
        if request.client not in hosted:
            raise ConfigError(f"this node hosts {', '.join(hosted)}, not {request.client}")
        device, new = self._device(settings, hosted[request.client])
        payload = device.answer(request, message)
        new.keep()
        return TrainerReply(ok=True, samples=read_header(Answer, payload.header).samples, tensors=[encode(payload)])

    def _settings(self) -> RunSettings:
        unknown = sorted(key for key in self.configuration if key not in NODE_KEYS and not is_pin(key))
        if unknown:
            raise ConfigError(f"--node-config: {unknown[0]} is unknown; {nearest(unknown[0], NODE_KEYS)}")
        self.opened = True  # settings that leave the names of domains or classes to the data open them
        settings = _settings_of(self.run_config)
        known = settings.raw["data"].get("domains") and not takes_class_defaults(settings.raw, "data")
        self.opened = settings.data.own_images and not known
        if not self.simulated:
            check_deployable(settings)
        resident = self.configuration.get("resident", True)
        if not isinstance(resident, bool):
            raise ConfigError(f"--node-config: resident must be true or false; got {resident!r}")
        device = str(self.configuration.get("device", settings.train.device))
        try:
            train = replace(settings.train, device=device)
        except ValueError as error:
            raise ConfigError(
                f"--node-config: device must be auto, cpu, cuda or cuda:N; got {printable(device)[:100]!r}"
            ) from error
        return replace(settings, train=train, model=self._network(settings.model))

    def _network(self, model: ModelSpec) -> ModelSpec:
        """Return the run's network, with the device's own choice for its domain if it has one."""
        if NETWORK not in self.configuration:
            return model
        if not isinstance(model, Mixed) or "domain" not in self.configuration:
            raise ConfigError(
                f"--node-config: {NETWORK} is for a device that names its domain, in a run with model=by_domain, whose "
                f"clients need not have one network; remove {NETWORK}"
            )
        return model.with_network(str(self.configuration["domain"]), str(self.configuration[NETWORK]))

    def _hosted(self, settings: RunSettings) -> list[ClientSpec]:
        node = self.configuration
        specs = sorted(settings.clients, key=lambda spec: spec.id)
        if "domain" in node:
            wanted = ClientSpec(str(node["domain"]), self._whole_number("index", default=0))
            if wanted not in specs:
                ids = [spec.id for spec in specs]
                raise ConfigError(f"--node-config: the protocol has no client {wanted.id}; {nearest(wanted.id, ids)}")
            return [wanted]
        if "partition-id" not in node or "num-partitions" not in node:
            raise ConfigError('a SuperNode needs --node-config \'domain="..." data-dir="..."\'')
        place, count = self._whole_number("partition-id"), self._whole_number("num-partitions")
        if place >= count:
            raise ConfigError(f"--node-config: partition-id counts from 0, below num-partitions={count}; got {place}")
        return specs[place::count]

    def _whole_number(self, key: str, *, default: int = 0) -> int:
        text = str(self.configuration.get(key, default))
        if not text.isdecimal():
            raise ConfigError(f"--node-config: {key} must be a whole number, at least 0; got {printable(text)[:100]!r}")
        return int(text)

    def _device(self, settings: RunSettings, spec: ClientSpec) -> tuple[Device, NewTerms]:
        run = self.question.run
        key = (run, self.run_config, repr(sorted(self.configuration.items())), spec.id)
        others = [other for other in _DEVICES if other[0] != run]
        for other in others:
            del _DEVICES[other]  # a resident trainer outlives runs; it keeps the data of one run
        if others:
            settings.data.forget()
        if key not in _DEVICES:
            _DEVICES[key] = self._new_device(settings, spec)
        _DEVICES.move_to_end(key)
        while len(_DEVICES) > CACHED_DEVICES:
            _DEVICES.popitem(last=False)
        self.opened = bool(_DEVICES[key][1].terms)
        return _DEVICES[key]

    def _new_device(self, settings: RunSettings, spec: ClientSpec) -> tuple[Device, NewTerms]:
        if self.simulated:
            return local_device(settings, spec), NewTerms(None, {})
        data_root = self.configuration.get("data-dir")
        if data_root is not None and not (data_root and Path(str(data_root)).is_dir()):
            raise ConfigError(f"--node-config: data-dir {data_root} is not a folder on this device")
        if data_root is None and settings.data.root is None:
            data_root = os.environ.get(DATA_VARIABLE)
        if data_root is not None:
            data_root = str(data_root)
        scores, budget = self._scores(settings), self._budget()
        folder = state_folder(self.configuration)
        served = [each.domain for each in self._hosted(settings)] + list(scores or ())
        private = bool(budget) or is_gaussian(settings)
        contract, new = self._contract(settings, spec, data_root, list(dict.fromkeys(served)), private=private)
        border = Border(folder / FOLDER / BORDER_FOLDER)
        device = Device(
            settings,
            spec,
            client_stores(folder, spec.id, kept_versions(settings)),
            data_root,
            scores,
            # by domain and not by client, because another server may split the domain in another way
            ledger=Ledger(folder / FOLDER / folder_name(spec.domain), budget, border),
            contract=contract,
        )
        return device, new

    def _contract(
        self, settings: RunSettings, spec: ClientSpec, root: str | None, served: Sequence[str], *, private: bool
    ) -> tuple[Contract, NewTerms]:
        """Return the device's contract, which allows the run, and the run's terms that are new.

        Args:
            settings: the run's settings.
            spec: the client.
            root: folder of the data that the owner named, or ``None``.
            served: the domains whose images the node trains on or scores.
            private: whether the run or the device is private, so that the server decides nothing of the data.

        Raises:
            ContractError: the contract does not allow the run.
        """
        kept = KeptTerms(state_folder(self.configuration) / FOLDER / CONTRACT_FOLDER)
        node = f"partition {self.configuration.get('partition-id')} of {self.configuration.get('num-partitions')}"
        names = [spec.domain]
        if "domain" not in self.configuration:
            names.append(f".{node}")
        contract = contract_of(self.configuration, kept, names, root, allows_keyed=self._allows_keyed())
        contract.check_terms(settled_terms(settings, spec.domain, root, served, contract))
        self.opened = True
        asked = asked_terms(settings, spec.domain, root, served)
        undecided = None
        if private:
            undecided = undecided_terms(settings.data, spec.domain, root, contract.pinned)
        contract.check_terms(asked, undecided)
        new = contract.to_keep(asked)
        clients: dict[str, str] = {}
        if CLIENTS in new:
            clients[CLIENTS] = new.pop(CLIENTS)
        warn_once(f"{spec.id} serves {contract.described(new)}")
        self.opened = False  # the settings are allowed, and the device reads nothing before it registers
        terms = {spec.domain: new}
        if private:
            terms[names[-1]] = {**terms.get(names[-1], {}), **clients}
        return contract, NewTerms(kept, {name: entry for name, entry in terms.items() if entry})

    def _forget_old_runs(self) -> None:
        """Remove the state of runs that have been idle for ``state-keep`` days; without that key, all is kept."""
        days = self.configuration.get(STATE_KEEP)
        if days is None:
            return
        if not (_is_number(days) and 0 < days < math.inf):
            raise ConfigError(f"--node-config: {STATE_KEEP} must be a number of days above 0; got {days!r}")
        for run in forget_runs(state_folder(self.configuration), float(days)):
            LOG.warning("the state of run %s was idle for more than %g days and is removed", run, days)

    def _scores(self, settings: RunSettings) -> tuple[str, ...] | None:
        """Return the domains whose test sets this node scores; ``None`` is each client's own.

        Raises:
            ContractError: the node scores no image, and the run's validation samples are images of this node, or its
                method measures models on images of this node.
            ConfigError: the key has another value.
        """
        chosen = self.configuration.get(SCORES, "test")
        if chosen not in ("test", "none"):
            raise ConfigError(f'--node-config: {SCORES} must be "test" or "none"; got {chosen!r}')
        if chosen == "none":
            asked = remedy = ""
            if settings.method.validates:
                asked, remedy = f"method={settings.method.name}", "choose another method"
            elif settings.protocol.validation:
                asked, remedy = f"protocol.validation={settings.protocol.validation:g}", "remove protocol.validation"
            if asked:
                raise ContractError(
                    f'this device scores no image, by its {SCORES}="none", and the run asks for {asked}, which scores '
                    f"images of the device; {remedy}, or the owner of the device removes {SCORES}"
                )
            return ()
        if "domain" in self.configuration:
            return None
        return tuple(settings.protocol.test_domains(settings.data))

    def _allows_keyed(self) -> bool:
        chosen = self.configuration.get(RANDOMNESS, "system")
        if chosen not in ("system", "keyed"):
            raise ConfigError(f'--node-config: {RANDOMNESS} must be "system" or "keyed"; got {chosen!r}')
        return chosen == "keyed"

    def _budget(self) -> Budget:
        """Return the device's own budget, which applies with any settings of a server."""
        epsilon = self.configuration.get(EPSILON_KEY)
        if epsilon is not None:
            if not (_is_number(epsilon) and 0 < epsilon < math.inf):
                raise ConfigError(f"--node-config: {EPSILON_KEY} must be a number above 0; got {epsilon!r}")
            epsilon = float(epsilon)
        delta = self.configuration.get(DELTA_KEY, DELTA)
        if not (_is_number(delta) and 0 < delta < 1):
            raise ConfigError(f"--node-config: {DELTA_KEY} must be a number between 0 and 1; got {delta!r}")
        releases = self.configuration.get(RELEASES_KEY)
        if releases is not None and not (type(releases) is int and releases >= 1):
            raise ConfigError(f"--node-config: {RELEASES_KEY} must be a whole number, at least 1; got {releases!r}")
        return Budget(
            releases,
            epsilon,
            float(delta),
            releases_key=f"--node-config {RELEASES_KEY}",
            epsilon_key=f"--node-config {EPSILON_KEY}",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
