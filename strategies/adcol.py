"""ADCOL: Adversarial Collaborative Learning on Non-IID Features.

Qinbin Li, Bingsheng He, Dawn Song. ICML 2023. PMLR:v202/li23j.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from common.config import NonNegative, Search, checked
from common.losses import uniform_divergence
from common.prototypes import PrototypeSet
from common.storage import GlobalState
from strategies.core.method import (
    Batch,
    Bound,
    ClientContext,
    Download,
    Losses,
    ServerContext,
    Trained,
    Update,
    Upload,
    UploadSpec,
)
from strategies.core.readings import Point
from strategies.parts.server_nets import (
    NetTraining,
    initial_net,
    new_discriminator,
    received_discriminator,
    retrain,
    sent_net,
    sent_rows,
)
from strategies.single_set import SingleSet

NET = "discriminator"


def feature_pass(local: ClientContext, mode: Literal["train", "eval"]) -> tuple[Tensor, Tensor]:
    """Return features and labels of the training split: augmented with batch statistics, or in evaluation mode."""
    if mode == "train":
        return local.features(augmented=1, training_mode=True)
    return local.features()


@checked
class ADCOL(SingleSet):
    """Clients keep their models and learn features from which no discriminator can tell the client.

    The loss is cross-entropy + ``divergence * KL(uniform || softmax D(z))``; the server trains D to name the client of
    a feature. ``divergence=0`` is SingleSet.

    No released code of the paper was found; this method follows FedPall's table. (FL-bench's port collects features
    during the last epoch, keeps D in evaluation mode and averages the models as well.)

    Payload: up, all features ``[N_k, D]``; down, the discriminator. Client state: the model. Scored on each client's
    own model. **Privacy: one raw feature vector per training sample leaves the device every round.** The server knows
    which client sent them; labels stay.

    Args:
        divergence: m, >= 0 (FedPall's table: 0.1 on Office-10 and PACS, 0.3 on Digits).
        feature_mode: the pass that collects features after training: augmented batches with their own batch-norm
            statistics (``train``, as in FedPall's code), or plain images in evaluation mode.
        server_training: how the server trains D (FedPall's table: 3 epochs on Office-10 and PACS, 1 on Digits).
    """

    readings: ClassVar[tuple[Point, ...]] = (Point("features that are sent", setting="feature_mode"),)

    capturable: ClassVar[bool] = True

    bound: ClassVar[Bound | None] = None

    divergence: Annotated[NonNegative, Search(0.01, 1.0)] = 0.1
    feature_mode: Literal["train", "eval"] = "train"
    server_training: NetTraining = field(default_factory=NetTraining)

    @property
    def takes_single(self) -> bool:
        """Return whether there is no discriminator, whose batch normalisation needs two features or more."""
        return not self.divergence

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy, and how far D is from uniform on the batch's features."""
        terms = {"cross_entropy": batch.cross_entropy()}
        if self.divergence:
            net = received_discriminator(NET, local)
            terms["divergence"] = self.divergence * uniform_divergence(net(batch.features))
        return Losses(terms)

    def upload(self, local: ClientContext, trained: Trained) -> Upload:  # noqa: ARG002
        """Return the features of the whole training split."""
        return Upload(extra={"features": feature_pass(local, self.feature_mode)[0]})

    def initial_state(self, weights: Mapping[str, Tensor], server: ServerContext) -> GlobalState:
        """Return the initial state with a discriminator. The discriminator's weights depend on the seed."""
        net = initial_net(NET, new_discriminator(NET, server))
        return GlobalState(weights, PrototypeSet.empty(server.feature_size), net, round=0)

    def download(self, state: GlobalState, server: ServerContext) -> Download:  # noqa: ARG002
        """Return the discriminator."""
        return Download(extra=sent_net(NET, state.extra))

    def expects(self, server: ServerContext) -> UploadSpec:
        """Expect one feature vector per training sample."""
        return UploadSpec(weights=False, extra={"features": (torch.float32, ("samples", server.feature_size))})

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Train the discriminator on features and the indices of their clients."""
        features, owners = sent_rows(updates, "features"), owners_of(updates)
        net = retrain(NET, new_discriminator(NET, server), state.extra, features, owners, self.server_training, server)
        return GlobalState(state.weights, state.prototypes, net, round=state.round)


def owners_of(updates: Sequence[Update]) -> Tensor:
    """Return ``[N]`` int64: index of the client of each row of :func:`strategies.parts.server_nets.sent_rows`."""
    return torch.cat([torch.full((update.samples,), update.client.index) for update in updates])
