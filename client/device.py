"""A device: answers the server's requests for one client, on whatever engine brought them."""

from __future__ import annotations

import platform
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from client.ledger import Budget, Ledger, check_accountant
from client.privacy import Protection
from client.store import Store
from client.trainer import LocalExchange, choose_device, memory_format
from common.data.domain import Split
from common.data.protocols import ClientSpec, content_hash, public_split_hash, split_hash, test_subset
from common.errors import ConfigError, DataError, PayloadError, PrivacyError
from common.metrics import peak_bytes
from common.privacy import GaussianPrivacy
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from common.storage.state import MODEL_PREFIX
from common.versions import package_versions
from common.wire.messages import Answer, Registration, Request, header_of
from common.wire.payload import Payload, cast_down, cast_up
from strategies.core.method import Client, ClientContext, Method, Trained, Upload, build_model, feature_size
from strategies.core.protection import check_nothing_else, check_scores

_MODELS = threading.local()
"""The model of this thread with its initial state, so that a Ray actor or an inline worker builds its net once."""

MIN_VARIANCE = 1e-7
"""A hundredth of batch norm's epsilon; float16 still carries it."""

LOCAL_PREFIX = "local/"

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""A device keeps a run's state in a folder of this name, beside its ledger."""


class Device:
    """One client of a federation on this machine.

    Args:
        settings: the run's settings.
        spec: which client this is.
        store: gives, for a run's id, where the client keeps its own state.
        data_root: where this device's data are; ``None`` takes the configuration's.
        scores: domains whose test sets this device can score; ``None`` is its own.
        simulated: whether this machine plays other clients too, so that noise may be repeatable; see
            :class:`common.privacy.GaussianPrivacy`.
        ledger: what was released of the client's data, and the device's own budget; a private run needs it.
        allows_keyed: whether this device itself, and not only the server's settings, allows noise that whoever knows
            the run's seed can repeat.
    """

    def __init__(
        self,
        settings: RunSettings,
        spec: ClientSpec,
        store: Callable[[str], Store],
        data_root: str | None = None,
        scores: tuple[str, ...] | None = None,
        *,
        simulated: bool = False,
        ledger: Ledger | None = None,
        allows_keyed: bool = False,
    ) -> None:
        self.settings, self.spec, self.data_root, self.simulated = settings, spec, data_root, simulated
        self.method: Method = settings.method
        self.ledger, self.allows_keyed = ledger, allows_keyed
        self.private = isinstance(settings.privacy, GaussianPrivacy)
        self.torch_device = choose_device(settings.train.device)
        self.scores = scores if scores is not None else (spec.domain,)
        self._store = store
        self._own: tuple[Split, Split] | None = None
        self._split_sha256 = ""
        self._test_splits: dict[str, Split] = {}
        if settings.train.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=self.torch_device.type == "cpu")
            torch.backends.cudnn.benchmark = False

    # ---- registration ----------------------------------------------------------------------------------------------

    def register(self) -> Registration:
        """What the server needs to know before the first round; loads and checks the data.

        Raises:
            PrivacyError: this device's own configuration forbids what the run would send.
        """
        self._check_privacy()
        split, validation = self._own_data()
        counts = split.class_counts(self.settings.data.class_count).tolist()
        known, content = self._split_sha256, content_hash(split)
        if self.private and self.ledger is not None:  # a plain hash would confirm a guess of images or labels
            content = self.ledger.keyed_hash("content", self.spec.id, known, content)
            known = public_split_hash(self.settings.data.name, self.spec, counts, len(validation))
        return Registration(
            client=self.spec.id,
            domain=self.spec.domain,
            samples=len(split),
            class_counts=counts,
            scores=list(self.scores),
            split=known,
            identity=self.settings.identity,
            code=self.settings.code,
            device=describe_device(self.torch_device),
            versions=package_versions(),
            content=content,
            validation=len(validation),
        )

    def _own_data(self) -> tuple[Split, Split]:
        """What the client trains on, and what it validates with."""
        if self._own is None:
            domain = self.settings.data.load(self.spec.domain, self.data_root)
            trained, validated = self.settings.protocol.parts(domain, self.spec, self.settings.seed)
            held_out = [validated] if len(validated) else []
            self._split_sha256 = split_hash(self.settings.data.name, self.spec, trained, domain.train.labels, *held_out)
            train, validation = (domain.train.subset(part).to(self.torch_device) for part in (trained, validated))
            self._own = train, validation
        return self._own

    def _test_data(self, domain: str) -> Split:
        if domain not in self.scores:
            raise PayloadError(f"client {self.spec.id} cannot score {domain}; it can score {', '.join(self.scores)}")
        if domain not in self._test_splits:
            split = self.settings.protocol.test_split(self.settings.data.load(domain, self.data_root))
            if not len(split):
                raise DataError(f"domain {domain} has no test images; put some into its test split")
            self._test_splits[domain] = test_subset(split, self.settings.rounds.test_samples, domain).to(
                self.torch_device
            )
        return self._test_splits[domain]

    # ---- one exchange ----------------------------------------------------------------------------------------------

    def answer(self, request: Request, message: Payload) -> Payload:
        """Score what was received, take part in the exchange, keep the own state, and say what came out.

        Args:
            request: what the server asks of this client.
            message: the tensors every participant was sent.

        Returns:
            The update's tensors; the header is an :class:`~common.wire.messages.Answer`.

        Raises:
            PayloadError: the request is for another run, method, code or client.
            PrivacyError: the privacy budget is spent, or this device's own configuration forbids the update.
        """
        self._check(request)
        self._check_privacy()
        torch.set_num_threads(self.settings.train.threads)  # a setting of the calling thread
        clock = Clock()
        split, validation = self._own_data()
        for domain in request.score:
            self._test_data(domain)
        client = Client(
            self.spec.id,
            self.spec.domain,
            len(split),
            tuple(split.class_counts(self.settings.data.class_count).tolist()),
            request.client_index,
            request.client_count,
        )
        position = request.round * len(self.method.exchanges) + self.method.exchanges.index(request.exchange)
        store = self._store(request.run)
        kept = {name: tensor.to(self.torch_device) for name, tensor in store.load(position).items()}
        local = self._install(cast_up(message, self.settings.rounds.transport), request, client, split, kept)
        clock.lap("load")
        scores, validated = self._score(local, request, validation)
        clock.lap("score")
        upload, trained = Upload(weights={}), None
        protection = self._protection(local) if request.train else None
        if request.train:
            self._check_budget(local.model)
            upload, trained = self._take_part(local, request, protection)
        clock.lap("train")
        if request.train:
            self._keep(store, position, local, upload, (request.keep + 1) * len(self.method.exchanges))
        clock.lap("save")
        shared = self.method.shared_names(local.model)
        weights = upload.weights
        if weights is None:
            weights = {name: tensor.contiguous() for name, tensor in local.model.state_dict().items() if name in shared}
        if protection is not None:
            weights = protection.weights(weights)
        answer = Answer(
            run=request.run,
            method=request.method,
            round=request.round,
            exchange=request.exchange,
            client=request.client,
            samples=client.samples,
            class_counts=list(client.class_counts),
            trained=request.train,
            scores=scores,
            losses=dict(trained.losses) if trained and protection is None else {},  # they tell of the training data
            steps=trained.steps if trained else 0,
            seconds={} if self.private else clock.seconds,  # time and memory may depend on images
            peak_bytes=0 if self.private else peak_bytes(),
            device=describe_device(self.torch_device),
            releases=self._count_release(request, local.model) if request.train else 0,
            validation=validated,
            randomness=protection.randomness if protection is not None else "",
        )
        prototypes = upload.prototypes.to("cpu") if upload.prototypes is not None else None
        sent = Payload(header_of(answer), _on_cpu(weights), prototypes, _on_cpu(upload.extra))
        return cast_down(sent, self.settings.rounds.transport)

    # ---- what may leave --------------------------------------------------------------------------------------------

    def _check_privacy(self) -> None:
        """Refuse settings that this device does not allow, whatever the server asks for.

        Raises:
            PrivacyError: the noise would be one that the server can repeat, or a part of an update would carry none.
            ConfigError: a budget needs an accountant that is not installed, or there is no place for the ledger.
        """
        privacy, ledger = self.settings.privacy, self.ledger
        if isinstance(privacy, GaussianPrivacy):
            if ledger is None:
                raise ConfigError("privacy=gaussian: this device has no place for its ledger; pass Device a ledger")
            if privacy.randomness == "keyed" and not self.simulated and not self.allows_keyed:
                raise PrivacyError(
                    "privacy.randomness=keyed: whoever knows the run's seed could subtract this device's noise; choose "
                    "privacy.randomness=auto, or allow it on the device by --node-config 'privacy-randomness=\"keyed\"'"
                )
        check_accountant(self._budgets)
        limits = [budget for budget in self._budgets if budget.max_epsilon is not None]
        if not limits:
            return
        clients = len(self.settings.protocol.clients(self.settings.data))
        bare = [part for part, noise in self._multipliers(self._model(clients)[0]).items() if not noise]
        if bare:
            raise PrivacyError(
                f"{limits[0].epsilon_key}={limits[0].max_epsilon:g} allows no update without noise, and this run's "
                f"would have: {', '.join(bare)}. Choose privacy=gaussian with privacy.update_clip and both noise "
                "multipliers above 0, and privacy.randomness=auto"
            )

    @property
    def _budgets(self) -> list[Budget]:
        """The device's own budget and the run's."""
        privacy = self.settings.privacy
        found = [self.ledger.budget] if self.ledger is not None else []
        if isinstance(privacy, GaussianPrivacy):
            found.append(Budget(privacy.max_releases, privacy.max_epsilon, privacy.delta))
        return found

    @property
    def _counts(self) -> bool:
        """Whether updates are counted: those of private runs, and all where the device has a budget of its own."""
        return self.ledger is not None and (self.private or bool(self.ledger.budget))

    def _multipliers(self, model: nn.Module) -> dict[str, float]:
        """The noise multiplier of each part of an update; 0 for a part whose noise is none, or known to the server."""
        privacy = self.settings.privacy
        if not isinstance(privacy, GaussianPrivacy):
            return {"everything": 0.0}
        prototypes, weights = self.method.prototypes_from != "none", bool(self.method.shared_names(model))
        noised = privacy.noised(prototypes=prototypes, weights=weights)
        if privacy.randomness == "keyed" and not self.simulated:
            noised = {}
        return {
            part: noised.get(part, 0.0) for part, sent in (("prototypes", prototypes), ("weights", weights)) if sent
        }

    def _check_budget(self, model: nn.Module) -> None:
        """Refuse before the work what would not be sent after it."""
        if self._counts and self.ledger is not None:
            self.ledger.check(self._multipliers(model), self._budgets)

    def _count_release(self, request: Request, model: nn.Module) -> int:
        """Count an update before it is sent; how many there are of this client in this run, if they carry noise."""
        if not self._counts or self.ledger is None:
            return 0
        count = self.ledger.spend(request.run, self.spec.id, self._multipliers(model), self._budgets)
        return count if self.private else 0

    def _check(self, request: Request) -> None:
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
        if not RUN_ID.fullmatch(request.run):
            raise PayloadError(f"the run's id {request.run[:50]!r} cannot name a folder")
        if request.client != self.spec.id:
            raise PayloadError(f"the request is for {request.client}; this is {self.spec.id}")
        if request.exchange not in self.method.exchanges:
            raise PayloadError(f"{self.method.name} has no exchange {request.exchange!r}: {self.method.exchanges}")
        if self.private and request.train and request.exchange != "train":
            raise PayloadError(
                f"privacy=gaussian covers the exchange train; {self.method.name}'s {request.exchange} would send what "
                "carries no noise, and nothing was sent"
            )

    def _install(
        self, message: Payload, request: Request, client: Client, split: Split, kept: Mapping[str, Tensor]
    ) -> LocalExchange:
        """The model with the received shared state and the kept own state."""
        model, initial = self._model(client.client_count)
        shared = self.method.shared_names(model)
        if message.weights and set(message.weights) != shared:
            difference = sorted(set(message.weights) ^ shared)[:3]
            raise PayloadError(f"the received model does not fit {type(model).__name__}: {', '.join(difference)} ...")
        order = [name for name in model.state_dict() if name in message.weights]  # a message's is not the model's
        weights = {name: message.weights[name].to(self.torch_device) for name in order}
        own = {name[len(MODEL_PREFIX) :]: kept[name] for name in kept if name.startswith(MODEL_PREFIX)}
        model.train().requires_grad_(True)  # whatever a client of this thread left that failed half-way
        model.zero_grad(set_to_none=True)
        try:
            model.load_state_dict({**initial, **own, **weights})
        except RuntimeError as error:
            raise PayloadError(f"the received model does not fit: {error}") from error
        prototypes = message.prototypes
        if prototypes is None:
            prototypes = PrototypeSet.empty(feature_size(model))
        return LocalExchange(
            self.settings,
            self.method,
            model,
            client,
            split,
            weights=weights,
            prototypes=prototypes.to(self.torch_device),
            extra={name: message.extra[name].to(self.torch_device) for name in sorted(message.extra)},
            kept={name[len(LOCAL_PREFIX) :]: kept[name] for name in kept if name.startswith(LOCAL_PREFIX)},
            round_number=request.round,
            exchange=request.exchange,
            device=self.torch_device,
            data_root=self.data_root,
        )

    def _model(self, client_count: int) -> tuple[nn.Module, dict[str, Tensor]]:
        key = (self.settings.identity, self.settings.seed, client_count, str(self.torch_device))
        if getattr(_MODELS, "key", None) != key:
            model = build_model(self.settings, client_count).to(self.torch_device)
            model = model.to(memory_format=memory_format(self.settings))
            _MODELS.key, _MODELS.model = key, model
            _MODELS.initial = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        return _MODELS.model, _MODELS.initial

    def _score(self, local: LocalExchange, request: Request, validation: Split) -> tuple[list[Any], Any]:
        """The scores that were asked for, of the model as it was received or as the method adapts it.

        Raises:
            ConfigError: the run is private, and a score would tell of the client's own images.
        """
        if request.score or request.validate:
            check_scores(self.settings.privacy, self.method, validates=request.validate)
        adapts = self.method.adapts and (bool(request.score) or request.validate)
        before = {name: tensor.clone() for name, tensor in local.model.state_dict().items()} if adapts else {}
        if adapts:
            self.method.adapt(local)
        scores = [{"domain": domain, **local.score(self._test_data(domain))} for domain in request.score]
        validated = {"domain": self.spec.domain, **local.score(validation)} if request.validate else None
        if adapts:
            local.model.load_state_dict(before)
        return scores, validated

    def _protection(self, local: LocalExchange) -> Protection | None:
        privacy = self.settings.privacy
        return Protection(privacy, local, simulated=self.simulated) if isinstance(privacy, GaussianPrivacy) else None

    def _take_part(
        self, local: LocalExchange, request: Request, protection: Protection | None
    ) -> tuple[Upload, Trained | None]:
        typed: ClientContext = local
        if request.exchange != "train":
            return self.method.respond(typed), None
        if protection is not None:
            protection.before_training()
        self.method.begin(typed)
        trained = local.run()
        if protection is not None:
            trained = replace(trained, prototypes=protection.prototypes(trained.prototypes))
        upload = self.method.upload(typed, trained)
        if protection is not None:
            check_nothing_else(upload, trained.prototypes, local.weights)
        return upload, trained

    def _keep(self, store: Store, position: int, local: LocalExchange, upload: Upload, best_before: int) -> None:
        """Write what must outlive the exchange; the last step, so that a failed one leaves no trace."""
        shared = self.method.shared_names(local.model)
        state = {MODEL_PREFIX + name: value for name, value in local.model.state_dict().items() if name not in shared}
        state |= {LOCAL_PREFIX + name: tensor for name, tensor in {**local.kept, **upload.local}.items()}
        if state:
            store.save(position, state, best_before)


class Clock:
    """Wall seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """The time since the last lap belongs to ``phase``."""
        now = time.perf_counter()
        self.seconds[phase] = round(now - self._last, 4)
        self._last = now


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU: the model's own tensors change with the next client that uses it.

    The variance of a channel that is dead for hundreds of steps decays to 0, which the gate refuses as malformed.
    """
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    for name, tensor in copies.items():
        if name.endswith("running_var"):
            tensor.clamp_min_(MIN_VARIANCE)
    return copies


def describe_device(device: torch.device) -> str:
    """The device as a person would say it."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
