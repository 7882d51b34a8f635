"""The contract of a method: a frozen dataclass of hyper-parameters with two pure halves, device and server.

State is data. The server's is a :class:`~common.storage.GlobalState`; a client's is a mapping of named tensors.
A method has no state, so the same object serves every engine, and saving a run is writing named tensors.

A logical round is the sequence of a method's ``exchanges``. In each, the server sends a download to every participant,
the device answers with an upload, and the server aggregates the uploads into the next global state.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from common.config import checked, returned
from common.errors import ConfigError, nearest
from common.models.base import Model, initialised
from common.models.mixed import Mixed
from common.privacy import GaussianPrivacy
from common.prototypes import PrototypeSet
from common.settings import RunSettings
from common.storage import GlobalState, check_contents
from common.wire.payload import CARRIED
from strategies.core.context import ClientContext, ServerContext
from strategies.core.exchange import (
    Batch,
    Client,
    Download,
    Losses,
    Measured,
    Phase,
    PrototypeMode,
    Shape,
    Trained,
    Update,
    Upload,
    UploadSpec,
    feature_size_of,
    tensor_specs,
)
from strategies.core.readings import Point

Weighting = Literal["samples", "uniform"]
"""How much each client counts when the server averages models."""

Bound = Literal["lower", "upper"]
"""The line of a table that a method is."""

NEEDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "predict": (("inference",), "an export knows nothing of predict"),
    "adapt": (("adapts",), "adapt is called only where adapts is True"),
    "scored_weights": (("adapt", "download"), "devices score what one of these gives them"),
    "respond": (("exchanges",), "respond answers an exchange that must be declared"),
}
"""Parts of a method that have no effect, or a wrong one, by themselves: what must be overridden, too, and why."""


@checked
class Method:
    """Base of every method. By itself it is FedAvg (McMahan et al., 2017): cross-entropy, average by samples."""

    exchanges: ClassVar[tuple[str, ...]] = ("train",)
    """The exchanges of one round; ``train`` among them runs local training."""

    fedavg_at: ClassVar[Mapping[str, Any] | None] = None
    """Hyper-parameters at which the method is FedAvg bit for bit; ``None`` if it never is."""

    averages: ClassVar[bool] = True
    """Whether the server only averages uploads, takes class means and clusters them, through ``server.aggregation``;
    otherwise a robust rule is refused, since it would not protect the method."""

    bound: ClassVar[Bound | None] = None
    """The bound that the method gives in a table: a table shows the row with the others and never ranks it. A bound is
    no federation, so a deployment refuses the method."""

    pools: ClassVar[bool] = False
    """Whether one client holds the samples of all clients of the protocol."""

    validates: ClassVar[bool] = False
    """Whether clients measure models by :meth:`ClientContext.validate`; a device that scores no image refuses it."""

    readings: ClassVar[tuple[Point, ...]] = ()
    """Where paper, released code and a plain run may differ, with the value of each."""

    capturable: ClassVar[bool] = False
    """Whether a GPU may replay a step that was captured in a graph (``train.capture``). A class that declares it
    promises that each step does the same work on the GPU: no wait for a number, no branch on one, no draw, and tensors
    that steps keep are changed in place. A subclass declares it anew."""

    @property
    def name(self) -> str:
        """The method's name: the stem of its file and of its YAML."""
        return type(self).__module__.rpartition(".")[2]

    @property
    def prototypes_from(self) -> PrototypeMode:
        """How :attr:`Trained.prototypes` are made."""
        return "none"

    @property
    def multi_view(self) -> bool:
        """Whether the loss needs more than one view per sample."""
        return False

    @property
    def augments(self) -> bool:
        """Whether training batches are augmented; otherwise their images are prepared as for testing."""
        return True

    @property
    def scheduled(self) -> bool:
        """Whether a round depends on the total number of rounds, so that a finished run cannot be continued."""
        return False

    @property
    def takes_single(self) -> bool:
        """Whether the loss is defined on a batch of one sample; otherwise a last batch of one joins the one before."""
        return True

    @property
    def keeps_step(self) -> bool | None:
        """Whether clients keep tensors that must equal what the server made of their updates, such as SCAFFOLD's c_k.

        ``True`` refuses the settings under which the server counts another update than the client sent
        (:attr:`common.settings.RunSettings.alters_updates`); ``False`` allows them. ``None`` is for methods that keep
        nothing by :attr:`Upload.local`; under such settings a device refuses to keep tensors that are not declared.
        """
        return None

    @property
    def trains(self) -> bool:
        """Whether there are rounds; otherwise a run only scores the initial state."""
        return True

    def check(self, settings: RunSettings) -> None:
        """Check the run's other settings against the method: here, against what its class declares.

        The server and every device call this function when they compose the settings. A method with conditions of its
        own overrides the function, and calls ``super().check(settings)`` first.

        Args:
            settings: the run's settings; their ``method`` is this one.

        Raises:
            ConfigError: the settings contradict the method; the message says what to set.
        """
        if self.scored_at not in self.exchanges:
            close = nearest(self.scored_at, self.exchanges)
            raise ConfigError(f"method={self.name}: scored_at is {self.scored_at!r}, none of its exchanges; {close}")
        keeps = type(self).aggregate_prototypes is Method.aggregate_prototypes
        if keeps != (self.prototypes_from == "none") and type(self).aggregate is Method.aggregate:
            raise ConfigError(f"method={self.name}: override both prototypes_from and aggregate_prototypes, or neither")
        for name, (needed, reason) in NEEDS.items():
            if self._overrides(name) and not any(self._overrides(each) for each in needed):
                raise ConfigError(f"method={self.name}: override {' or '.join(needed)}, too: {reason}")
        if self.personal and self.trains and settings.unseen_domains:
            raise ConfigError(
                f"method={self.name} has a model for each client and none for {', '.join(settings.unseen_domains)}, "
                f"where protocol={settings.choices['protocol']} has no client: choose a method with one model, such as "
                "fedavg, or protocol=one_per_domain"
            )
        if self.multi_view and settings.views.count < 1:
            raise ConfigError(
                f"method={settings.choices['method']} compares views of an image, and views="
                f"{settings.choices['views']} gives none besides the image; choose views=randconv, augmented or "
                "another of conf/views/, with views.count >= 1"
            )
        if self.pools and isinstance(settings.privacy, GaussianPrivacy):
            raise ConfigError(
                f"method={self.name} has all clients' images in one place, so there is nothing that privacy="
                f"{settings.choices['privacy']} could protect: set privacy=none"
            )
        altering = settings.alters_updates
        if self.keeps_step and altering:
            raise ConfigError(
                f"method={self.name}: each client keeps a correction that must equal what the server made of its "
                f"updates, and {' and '.join(altering)} may change them on the way, so that the two drift apart; set "
                f"{' '.join(altering.values())}, or choose a method that keeps no such correction (fedavg, fpl ...)"
            )
        if isinstance(settings.model, Mixed):
            self._check_exchanges_none(settings.model, settings.data.image_size)
            settings.model.check_domains({spec.domain for spec in settings.clients} | set(settings.test_scorers))

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(Method, name)

    def _check_exchanges_none(self, networks: Mixed, image_size: int) -> None:
        """Refuse networks that differ between clients if the method exchanges weights."""
        model = networks.build(2, image_size, 0)  # names depend neither on classes, nor on clients, nor on the seed
        shared = self.shared_names(self.extend(model, 2, 0))
        if shared:
            raise ConfigError(
                f"model=by_domain: method={self.name} exchanges {len(shared)} tensors of the model, which clients "
                "with different networks do not have in common. Choose a method that exchanges none: goldfinch list "
                "by_domain names them"
            )

    # ---- scores ----------------------------------------------------------------------------------------------------

    @property
    def scored_at(self) -> str:
        """The exchange in which devices score the model, before anything else.

        In the first exchange they score the state after the previous round; in a later one, the state of this round.
        """
        return "train"

    @property
    def scores_new_state(self) -> bool:
        """Whether a round scores the state that it makes itself, and not the state of the previous round."""
        return self.scored_at != self.exchanges[0]

    @property
    def personal(self) -> bool:
        """Whether a client's own model is scored on its own domain, instead of the global model on every domain."""
        return False

    @property
    def adapts(self) -> bool:
        """Whether :meth:`adapt` changes the model that is scored."""
        return False

    @property
    def scores_own_training(self) -> bool:
        """Whether scores depend on the device's own training data other than through the received model.

        Differential privacy refuses such a method: its scores would reveal the data without noise.
        """
        return self.personal or self.adapts

    def adapt(self, local: ClientContext) -> None:
        """Change the model for scoring only; the device restores it afterwards."""

    def own_weights(self, extra: Mapping[str, Tensor], kept: Mapping[str, Tensor], place: int) -> Mapping[str, Tensor]:  # noqa: ARG002
        """Return what :meth:`adapt` puts in the place of shared weights for a client, none by default.

        Args:
            extra: the state's further tensors.
            kept: the client's own tensors.
            place: the client's index.
        """
        return {}

    @property
    def adapts_to_data(self) -> bool:
        """Whether :meth:`adapt` uses the client's images, so that an exported model is not the scored one."""
        return self.adapts and type(self).scored_weights is Method.scored_weights

    def scored_weights(self, state: GlobalState) -> Mapping[str, Tensor]:
        """Return the shared weights that devices score, before :meth:`adapt`.

        Figures, exports and predictions of a finished run use these weights.
        """
        return state.weights

    def inference(self, model: nn.Module, prototypes: PrototypeSet, seed: int) -> nn.Module:  # noqa: ARG002
        """Return the module to use after training: from prepared images to features ``[B, D]`` and scores ``[B, K]``.

        The module's outputs are those of :meth:`compute` and :meth:`predict` in evaluation mode. The module needs no
        :class:`ClientContext`, and can be exported.
        """
        return model

    # ---- the model -------------------------------------------------------------------------------------------------

    def extend(self, model: nn.Module, client_count: int, seed: int) -> nn.Module:  # noqa: ARG002
        """Return the model with the nets that the method adds; their tensors are shared or kept like all others."""
        return model

    def shared_names(self, model: nn.Module) -> set[str]:
        """Return the names of the model's state that are exchanged; the rest stays on each device."""
        return set(model.state_dict())

    # ---- on the device ---------------------------------------------------------------------------------------------

    def compute(
        self,
        model: nn.Module,
        images: Tensor,
        local: ClientContext,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Run a forward pass; return features ``[B, D]``, logits ``[B, K]``, and further tensors for the loss by name.

        Training uses the function, and scoring in evaluation mode. ``model`` is the device's or a frozen copy.
        """
        features, logits = model(images)
        return features, logits, {}

    def phases(self, epochs: int) -> tuple[Phase, ...]:
        """Return the phases of local training; by default one, in which all parameters train."""
        return (Phase(epochs),)

    def local_epochs(self, epochs: int) -> int:
        """Return the passes that train in all exchanges of a round, over the client's data or what is made of them.

        ``max-epochs`` of a device bounds them. A method that trains outside :meth:`phases` adds those passes.
        """
        return sum(phase.epochs for phase in self.phases(epochs))

    def begin(self, local: ClientContext) -> None:
        """Prepare local training, after scoring: for example, install other received tensors."""

    def loss(self, batch: Batch, local: ClientContext) -> Losses:  # noqa: ARG002
        """Return the loss terms of one batch."""
        return Losses({"cross_entropy": batch.cross_entropy()})

    def edit_gradients(self, local: ClientContext) -> None:
        """Change gradients between the backward pass and the optimiser step (proximal terms)."""

    def step(self, local: ClientContext, images: Tensor, labels: Tensor) -> Losses:
        """Take one optimiser step on one batch; return its loss terms, none if the batch is kept for a later step."""
        batch = local.forward(images, labels)
        losses = self.loss(batch, local)
        where = f"{type(self).__name__}.loss"
        if not losses.terms:
            raise TypeError(f"{where} gave no term, so nothing would train; begin with batch.cross_entropy()")
        for name, term in losses.terms.items():
            if not isinstance(term, Tensor) or term.numel() != 1:
                found = f"{type(term).__name__} {list(getattr(term, 'shape', []))}"
                raise TypeError(f"{where}: the term {name} is a {found}, and must be a tensor of one element: a mean")
            learns = term.requires_grad or losses.fused is not None
            if not learns and batch.features.requires_grad:  # a frozen backbone's have none
                raise TypeError(
                    f"{where}: the term {name} has no gradient, so nothing would train on it; to weaken another "
                    "method's terms call its loss on dataclasses.replace(self, ...); leave out a term of 0"
                )
        local.backward(losses.total)
        self.edit_gradients(local)
        local.optimizer.step()
        return losses

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """Return what to send after local training, and what to keep."""
        if self.prototypes_from in ("none", "own"):
            return Upload()
        return Upload(prototypes=trained.prototypes)

    def predict(self, features: Tensor, logits: Tensor, local: ClientContext) -> Tensor:  # noqa: ARG002
        """Return scores ``[B, K]``, of which the largest is the prediction; by default the classifier's logits."""
        return logits

    def respond(self, local: ClientContext) -> Upload:
        """Return the upload of an exchange other than ``train``; the model is as the device kept it."""
        raise NotImplementedError(f"{self.name} declares the exchange {local.exchange!r} but does not answer it")

    # ---- on the server ---------------------------------------------------------------------------------------------

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the global state before the first round; ``weights`` is the shared part of the initial model."""
        return GlobalState(weights, PrototypeSet.empty(server.feature_size), round=0)

    def download(self, state: GlobalState, server: ServerContext) -> Download:  # noqa: ARG002
        """Return what the server sends to every participant of this exchange."""
        if self.prototypes_from == "none":
            return Download(state.weights)
        return Download(state.weights, state.prototypes)

    def expects(self, server: ServerContext) -> UploadSpec:  # noqa: ARG002
        """Return what the uploads of this exchange must contain."""
        return UploadSpec(prototypes=self.prototypes_from != "none")

    def inspect(self, update: Update, server: ServerContext) -> None:
        """Check an upload that has the expected form for values that are impossible.

        Raises:
            PayloadError: the upload has such values.
        """

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Return the next global state. ``updates`` are sorted by client id and never empty."""
        return GlobalState(
            self.average(updates, server),
            self.aggregate_prototypes(state, updates, server),
            state.extra,
            round=state.round,
        )

    def average(self, updates: Sequence[Update], server: ServerContext) -> dict[str, Tensor]:
        """Return the mean of the uploaded models, by samples; see also :class:`Averaging`."""
        return server.aggregation.average(updates)

    def aggregate_prototypes(
        self,
        state: GlobalState,
        updates: Sequence[Update],  # noqa: ARG002
        server: ServerContext,  # noqa: ARG002
    ) -> PrototypeSet:
        """Return the next global prototypes; by default they stay as they are."""
        return state.prototypes


@checked
class Averaging(Method):
    """A method whose server averages the clients' models.

    Args:
        weighting: by ``samples`` N_k (McMahan; printed by FPL and FedPall), or ``uniform``: every client counts the
            same (a switch of FPL's released code; FedBN's and FedPLVM's code).
    """

    weighting: Weighting = "samples"

    def average(self, updates: Sequence[Update], server: ServerContext) -> dict[str, Tensor]:
        """Return ``sum_k N_k w_k / sum_k N_k``, or the plain mean."""
        return server.aggregation.average(updates, uniform=self.weighting == "uniform")


def build_model(settings: RunSettings, client_count: int, domain: str | None = None) -> nn.Module:
    """Return the run's model, extended by its method, with initial weights that depend only on settings and clients.

    Args:
        settings: the run's settings.
        client_count: number of clients of the run.
        domain: the domain of the client that the model is for; ``None`` is the server.
    """
    data, seed, spec = settings.data, settings.seed, settings.model
    if domain is not None:
        spec = spec.of(domain)
    model = spec.build(data.class_count, data.image_size, seed, data.class_names)
    with initialised(seed, "extension"):
        extended = settings.method.extend(model, client_count, seed)
    extended = returned(extended, Model, f"{settings.method.name}.extend()")
    extended.hold_still()
    if model.frozen and not extended.frozen:
        raise ConfigError(
            f"model.freeze=backbone: {settings.method.name} adds layers of its own to the backbone, which must train; "
            "set model.freeze=none"
        )
    _check_phases(settings, extended, frozen=model.frozen)
    return extended


def _check_phases(settings: RunSettings, model: nn.Module, *, frozen: bool) -> None:
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    remedy = "set model.freeze=none" if frozen else "give it epochs, and names of parameters that train"
    for number, phase in enumerate(settings.method.phases(settings.train.epochs), 1):
        trained = [name for name in names if phase.trainable is None or phase.trainable(name)]
        if not trained or phase.epochs < 1:
            raise ConfigError(f"{settings.method.name} has nothing to train in phase {number} of a round: {remedy}")


def server_context(settings: RunSettings, model: nn.Module, client_count: int) -> ServerContext:
    """Return the context of a method's functions on the server, before the first round and without clients.

    A private device needs it as well, to ask the method what its uploads carry (:meth:`Method.expects`).

    Args:
        settings: the run's settings.
        model: the run's model with its initial weights, or one of the same architecture.
        client_count: number of clients of the run.

    Raises:
        ConfigError: the method exchanges a part of the model that messages cannot contain.
    """
    names, known = set(settings.method.shared_names(model)), model.state_dict().keys()
    if not names <= known:
        raise ConfigError(f"method={settings.method.name}: shared_names: the network has no {min(names - known)}")
    shared = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    try:
        check_contents("the network", shared, dtypes=CARRIED.values())
    except TypeError as error:
        raise ConfigError(f"{error}, or a buffer with persistent=False, which stays on each device") from error
    return ServerContext(
        rounds=settings.train.rounds,
        class_count=settings.data.class_count,
        feature_size=feature_size_of(model),
        client_count=client_count,
        train=settings.train,
        device=torch.device("cpu"),
        shared={name: tensor.clone() for name, tensor in shared.items()},
        parameters=frozenset(names & {name for name, _ in model.named_parameters()}),
        aggregation=settings.aggregation,
        seed=settings.seed,
        new_model=partial(build_model, settings, client_count),
        largest_share=settings.rounds.largest_share,
    )
