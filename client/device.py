"""A device: registers one client and answers the server's requests for it, on every engine."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from client.feature_cache import FeatureCache
from client.ledger import Ledger
from client.model_state import ModelState
from client.privacy import DevicePrivacy, GaussianDevicePrivacy, Unprotected
from client.trainer import LocalExchange, choose_device, memory_format
from client.transfer import check_unchanged, copied_to_cpu, moved, own_stream, received
from client.watched import captured_steps
from common.client_state import ClientStore, Version
from common.contract import Contract
from common.data.batches import Split, union_of
from common.data.inspection import inspect_own
from common.data.protocols import ClientSpec, scored_split, test_hash, test_subset
from common.data.splits import content_hash, split_hash
from common.errors import ConfigError, PayloadError, some_of
from common.metrics import peak_bytes
from common.models.mixed import Mixed
from common.numerics import seeded_globals
from common.privacy import GaussianPrivacy
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from common.storage import LOCAL_PREFIX, MODEL_PREFIX, check_run_id, under_prefix, with_prefix
from common.versions import combined_hash, package_versions
from common.wire.messages import Answer, Registration, Request, header_of
from common.wire.payload import Payload, cast_down
from strategies.core.method import Client, ClientContext, Method, Trained, Upload, build_model, feature_size_of

_MODELS = threading.local()
"""The model of each thread with its initial state, so that a Ray actor or an inline worker builds its model once."""


class Device:
    """One client of a federation on this machine.

    Args:
        settings: the run's settings.
        spec: the client.
        store: returns the client's own state for a run's id.
        data_root: folder of this device's data; ``None`` takes the configured one.
        scores: domains whose test sets this device can score; ``None`` is its own.
        contract: what the owner of this device allows; by default that of a device of which nobody fixed anything.
        ledger: the record of what was released of the client's data, and the device's own budget; a private run
            needs it.
    """

    def __init__(
        self,
        settings: RunSettings,
        spec: ClientSpec,
        store: Callable[[str], ClientStore],
        data_root: str | None = None,
        scores: tuple[str, ...] | None = None,
        *,
        contract: Contract | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.settings, self.spec, self.data_root = settings, spec, data_root
        self.method: Method = settings.method
        self.contract, self.ledger = contract or Contract(), ledger
        self.privacy = device_privacy(settings, ledger, self.contract)
        self.torch_device = choose_device(settings.train.device)
        self.scores = (spec.domain,) if scores is None else scores
        self._store = store
        self._network = settings.model.of(spec.domain)
        self._network_remark = ""
        if isinstance(settings.model, Mixed):
            self._network_remark = f", {settings.model.name_of(spec.domain)}"
        self._own: tuple[Split, Split] | None = None
        self._split_sha256 = ""
        self._class_counts: tuple[int, ...] = ()
        self._test_splits: dict[str, Split] = {}
        self._features = FeatureCache()
        if settings.train.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=self.torch_device.type == "cpu")
            torch.backends.cudnn.benchmark = False

    # ---- registration ----------------------------------------------------------------------------------------------

    def register(self) -> Registration:
        """Load and check the data; return the client's registration.

        Raises:
            PrivacyError: this device's own configuration forbids what the run would send.
            ConfigError: differential privacy does not cover it.
        """
        if self.privacy.counts:
            self.privacy.check_request(self._new_model(), len(self.settings.clients))
        split, validation = self._own_data()
        counts = list(self._class_counts)
        validated = content_hash(validation, str(validation.labels.tolist()))
        tested = [test_hash(self.settings.data.load(spec.domain, self.data_root)) for spec in self.spec.holds]
        known, content = self.privacy.registered_hashes(
            self.spec, self._split_sha256, content_hash(split, validated, *tested), counts, len(validation)
        )
        return Registration(
            client=self.spec.id,
            domain=self.spec.domain,
            samples=len(split),
            class_counts=counts,
            scores=list(self.scores),
            split=known,
            classes=self.settings.data.classes_sha256,
            identity=self.settings.identity,
            code=self.settings.code,
            device=describe_device(self.torch_device) + self._network_remark,
            versions=package_versions(),
            content=content,
            validation=len(validation),
        )

    def _own_data(self) -> tuple[Split, Split]:
        """Return the client's training split and its validation split."""
        if self._own is None:
            training: list[Split] = []
            validation: list[Split] = []
            hashes: dict[str, str] = {}
            for spec in self.spec.holds:
                train, validated, hashes[spec.id] = self._read(spec)
                training.append(train)
                validation.append(validated)
            self._split_sha256 = hashes.get(self.spec.id) or combined_hash(hashes)
            train = union_of(training)
            if self.contract.simulated and self.spec.id in self.settings.attack.clients:
                with seeded_globals(self.settings.seed, "attack", self.spec.id):
                    train = self.settings.attack.data(train, self.settings.data.class_count)
            self._class_counts = tuple(train.class_counts(self.settings.data.class_count).tolist())
            self._own = train.to(self.torch_device), union_of(validation).to(self.torch_device)
        return self._own

    def _read(self, spec: ClientSpec) -> tuple[Split, Split, str]:
        """Return the training split and the validation split of a client of the protocol, and the hash of both."""
        domain = self.settings.data.load(spec.domain, self.data_root)
        if not self.contract.simulated:
            settings = self.settings
            inspect_own(settings.data, settings.protocol, settings.seed, domain, private=self.privacy.counts)
        trained, validated = self.settings.protocol.parts(domain, spec, self.settings.seed)
        self.privacy.note_training(domain, trained, self.scores)
        hashed = [trained, domain.train.labels]
        if len(validated):
            hashed.append(validated)
        sha256 = split_hash(self.settings.data.name, spec.id, *hashed)
        return domain.train.subset(trained), domain.train.subset(validated), sha256

    def _test_data(self, domain: str) -> Split:
        if domain not in self.scores:
            known = ", ".join(self.scores) or "nothing"
            raise PayloadError(f"client {self.spec.id} cannot score {domain}; it can score {known}")
        if domain not in self._test_splits:
            loaded = self.settings.data.load(domain, self.data_root, own=domain == self.spec.domain)
            split = scored_split(self.settings.protocol, loaded)
            self.privacy.note_test(loaded, split)
            chosen = test_subset(split, self.settings.rounds.test_samples, domain)
            self._test_splits[domain] = chosen.to(self.torch_device)
        return self._test_splits[domain]

    # ---- one exchange ----------------------------------------------------------------------------------------------

    def answer(self, request: Request, message: Payload) -> Payload:
        """Score the received model, take part in the exchange, keep the client's own state, and return the update.

        The client starts from the version of its own state that the request names, the last that the server counted.

        Args:
            request: the server's request to this client.
            message: the tensors that all participants receive.

        Returns:
            The update's tensors; the header is an :class:`~common.wire.messages.Answer`.

        Raises:
            PayloadError: the request is for another run, method, code or client, or was overtaken by a later one.
            DataError: the client's own state that the request names is missing or damaged, or cannot be written.
            PrivacyError: the privacy budget is spent, or this device's own configuration forbids the update.
        """
        beside_others = threading.current_thread() is not threading.main_thread()
        with seeded_globals(self.settings.seed, "global", request.round, request.exchange, self.spec.id):
            if beside_others and self.torch_device.type == "cuda":
                with own_stream(self.torch_device):
                    return self._answer(request, message)
            return self._answer(request, message)

    def _answer(self, request: Request, message: Payload) -> Payload:
        self._check(request, message.prototypes)
        if self.privacy.counts:
            self.privacy.check_request(self._new_model(), len(self.settings.clients), request)
        torch.set_num_threads(self.settings.train.threads)  # a setting of the calling thread
        clock = Clock()
        split, validation = self._own_data()
        for domain in request.score:
            self._test_data(domain)
        self.privacy.keep_sides(request)
        store = self._store(request.run)
        version = Version.of(header_of(request), self.method.exchanges)
        past = Version.of(request.own, self.method.exchanges) if request.own is not None else None
        own = store.load(past, before=version if request.train else None)
        install = partial(self._install, message, request, split, validation)
        local = self.privacy.received(install, own.tensors, request)
        clock.lap("load")
        scores, validated = self._score(local, request, validation)
        clock.lap("score")
        protection = Unprotected()
        upload, trained = Upload(weights={}), Trained(local.prototypes, 0, {})
        if request.train:
            self.privacy.check_budget(local.model)
            local, protection = self.privacy.protected(install, own.tensors, local)
            upload, trained = self._take_part(local, request, protection)
        clock.lap("train")
        kept = request.train and self._keep(store, version, past, local, upload, best=request.keep)
        clock.lap("save")
        weights = protection.weights(upload.weights or {})
        releases = 0
        if request.train:
            releases = self.privacy.count_release(request.run, self.spec.id, local.model)
        seconds, memory = self.privacy.measurements(clock.seconds, peak_bytes())
        answer = Answer(
            run=request.run,
            method=request.method,
            round=request.round,
            exchange=request.exchange,
            client=request.client,
            samples=local.client.samples,
            class_counts=list(local.client.class_counts),
            trained=request.train,
            scores=scores,
            losses=protection.losses(trained.losses),
            steps=trained.steps,
            seconds=seconds,
            peak_bytes=memory,
            device=describe_device(self.torch_device) + self._network_remark,
            releases=releases,
            validation=validated,
            randomness=protection.randomness,
            attempt=request.attempt,
            kept=kept,
            lost=own.lost,
        )
        prototypes = upload.prototypes
        if prototypes is not None:
            prototypes = prototypes.to("cpu")
        sent = Payload(copied_to_cpu(weights), prototypes, copied_to_cpu(upload.extra), header=header_of(answer))
        return cast_down(sent, self.settings.rounds.transport)

    def _check(self, request: Request, prototypes: PrototypeSet | None) -> None:
        if request.code != self.settings.code:
            raise PayloadError(
                f"the server runs code {request.code}, this device {self.settings.code}: install "
                f"{self.settings.software} on both; in simulation, stop the local SuperLink so that it forgets the "
                "other checkout"
            )
        if request.method != self.method.name or request.identity != self.settings.identity:
            raise PayloadError(
                f"the server runs {request.method} with settings {request.identity}, this device {self.method.name} "
                f"with {self.settings.identity}: give both the same overrides"
            )
        try:
            check_run_id(request.run)
        except ValueError as error:
            raise PayloadError(str(error)) from error
        if request.client != self.spec.id:
            raise PayloadError(f"the request is for {request.client}; this is {self.spec.id}")
        if request.exchange not in self.method.exchanges:
            raise PayloadError(f"{self.method.name} has no exchange {request.exchange!r}: {self.method.exchanges}")
        count = len(self.settings.clients)
        if not 0 <= request.client_index < request.client_count <= count:
            raise PayloadError(
                f"the server says that this is client {request.client_index} of {request.client_count}; the run has "
                f"{count}, counted from 0"
            )
        if prototypes is not None and len(prototypes) and prototypes.classes[-1] >= self.settings.data.class_count:
            raise PayloadError(
                f"the server sent a prototype of class {prototypes.classes[-1]}; the run has "
                f"{self.settings.data.class_count}, counted from 0"
            )

    def _install(
        self, message: Payload, request: Request, split: Split, validation: Split, own: Mapping[str, Tensor]
    ) -> LocalExchange:
        """Load the received shared state and the client's own state into the model."""
        message = received(message, self.settings.rounds.transport, self.torch_device)
        kept = moved(dict(sorted(own.items())), self.torch_device)
        client = Client(
            self.spec.id, self.spec.domain, len(split), self._class_counts, request.client_index, request.client_count
        )
        state = self._model(client.client_count)
        model = state.model
        if message.weights and set(message.weights) != state.shared:
            difference = sorted(set(message.weights) ^ state.shared)[:3]
            raise PayloadError(f"the received model does not fit {type(model).__name__}: {', '.join(difference)} ...")
        # in the model's order, which may differ from the message's
        weights = {name: message.weights[name] for name in state.tensors() if name in message.weights}
        # what another run kept of the parts that this one shares is not its own
        model_part = under_prefix(MODEL_PREFIX, kept)
        own_part = {name: tensor for name, tensor in model_part.items() if name not in state.shared}
        state.reset()  # an earlier client of this thread may have failed half-way
        try:
            state.install({**state.initial, **own_part, **weights})
        except RuntimeError as error:
            raise PayloadError(f"the received model does not fit: {error}") from error
        prototypes = message.prototypes
        if prototypes is None:
            prototypes = PrototypeSet.empty(feature_size_of(model), self.torch_device)
        elif len(prototypes) and prototypes.feature_size != feature_size_of(model):
            raise PayloadError(
                f"the server sent prototypes of {prototypes.feature_size} features; the model has "
                f"{feature_size_of(model)}"
            )
        return LocalExchange(
            self.settings,
            self.method,
            state,
            client,
            split,
            weights=weights,
            prototypes=prototypes,
            extra=dict(sorted(message.extra.items())),
            kept=under_prefix(LOCAL_PREFIX, kept),
            round_number=request.round,
            exchange=request.exchange,
            device=self.torch_device,
            data_root=self.data_root,
            cache=self._feature_cache(state),
            validation=validation if self.scores else None,
            steps=_MODELS.steps,
        )

    def _feature_cache(self, state: ModelState) -> FeatureCache | None:
        """Return the device's features if the backbone is frozen and was received as it was built."""
        if not getattr(state.model, "frozen", False):
            return None
        for name, tensor in state.tensors().items():
            if name.startswith("backbone.") and not torch.equal(tensor, state.initial[name]):
                return None
        return self._features

    def _new_model(self) -> nn.Module:
        """Return the run's model as it is before the first round."""
        return self._model(len(self.settings.clients)).model

    def _model(self, client_count: int) -> ModelState:
        key = (
            self.settings.identity,
            self.settings.seed,
            self.settings.train.capture,
            self.method,
            client_count,
            str(self.torch_device),
            self._network,
        )
        if getattr(_MODELS, "key", None) != key:
            model = build_model(self.settings, client_count, self.spec.domain).to(self.torch_device)
            model = model.to(memory_format=memory_format(self.settings))
            _MODELS.key, _MODELS.state = key, ModelState(model, self.method.shared_names(model))
            _MODELS.steps = captured_steps(self.settings, model, self.torch_device)
        state: ModelState = _MODELS.state
        return state

    def _score(self, local: LocalExchange, request: Request, validation: Split) -> tuple[list[Any], Any]:
        """Score the received model, adapted if the method adapts it.

        Returns:
            The score of each requested domain; the score of the validation split, ``None`` if it was not requested.
        """
        adapts = self.method.adapts and (bool(request.score) or request.validate)
        before: dict[str, Tensor] = {}
        if adapts:
            before = local.state.copy()
            self.method.adapt(local)
        scores = [{"domain": domain, **local.score(self._test_data(domain))} for domain in request.score]
        validated = None
        if request.validate:
            validated = {"domain": self.spec.domain, **local.score(validation)}
        if adapts:
            local.state.install(before)
        return scores, validated

    def _take_part(self, local: LocalExchange, request: Request, protection: Unprotected) -> tuple[Upload, Trained]:
        """Train, or reply to a later exchange; return the method's upload and the results of training."""
        context: ClientContext = local
        trained = Trained(local.prototypes, 0, {})
        if request.exchange == "train":
            self.method.begin(context)
            trained = local.run()
            trained = replace(trained, prototypes=protection.prototypes(trained.prototypes))
            upload = self.method.upload(context, trained)
            protection.check_upload(upload)
        else:
            upload = self.method.respond(context)
        if local.steps is None:  # a captured step writes back what it read
            check_unchanged(self.method.name)
        if upload.weights is None:
            state = local.state
            shared = {name: tensor.contiguous() for name, tensor in state.tensors().items() if name in state.shared}
            upload = replace(upload, weights=shared)
        return upload, trained

    def _keep(
        self,
        store: ClientStore,
        version: Version,
        past: Version | None,
        local: LocalExchange,
        upload: Upload,
        *,
        best: int,
    ) -> bool:
        """Write what the client keeps: the method's own tensors, and the part of the model that is not shared.

        The device writes last, so that a failed exchange changes nothing.

        Args:
            store: the client's versions.
            version: the version to write.
            past: the version that it was made from.
            local: the exchange.
            upload: what the method made of it.
            best: the best round so far, of which the version stays.

        Returns:
            Whether the client keeps anything.

        Raises:
            ConfigError: the method keeps tensors that it does not declare, and the server may change updates.
        """
        if upload.local and self.method.keeps_step is None and self.settings.alters_updates:
            altering = self.settings.alters_updates
            raise ConfigError(
                f"method={self.method.name} keeps tensors on the device ({some_of(sorted(upload.local), 3)}) and does "
                f"not declare whether they must equal what the server made of its update, which "
                f"{' and '.join(altering)} may change; nothing was sent. Give the method the property keeps_step "
                f"(docs/add-a-method.md), or set {' '.join(altering.values())}"
            )
        kept = with_prefix(LOCAL_PREFIX, {**local.kept, **upload.local})
        for name, tensor in local.state.tensors().items():
            if name not in local.state.shared:
                kept[MODEL_PREFIX + name] = tensor
        return store.save(version, kept, past, best_before=(best + 1) * len(self.method.exchanges))


class Clock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Record the time since the last lap as that of ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = round(now - self._last, 4)
        self._last = now


def kept_versions(settings: RunSettings) -> int:
    """Return how many versions of a client's own state a device keeps.

    A run goes on from any of its last ``rounds.checkpoints`` checkpoints, and each may name another version. The reply
    after them may count or not, so its version is one more. In each round every exchange makes a version.
    """
    return (settings.rounds.checkpoints + 1) * len(settings.method.exchanges)


def device_privacy(settings: RunSettings, ledger: Ledger | None, contract: Contract) -> DevicePrivacy:
    """Return the privacy rules of this device in a run with ``settings``; see :class:`Device` for the arguments."""
    if isinstance(settings.privacy, GaussianPrivacy):
        return GaussianDevicePrivacy(settings, settings.privacy, ledger, contract)
    return DevicePrivacy(settings, ledger, contract)


def describe_device(device: torch.device) -> str:
    """Return the name of the processor, for the record."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
