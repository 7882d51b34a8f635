"""Combined: Rethinking Federated Learning with Domain Shift: A Prototype View.

Wenke Huang, Mang Ye, Zekun Shi, He Li, Bo Du. CVPR 2023. doi:10.1109/CVPR52729.2023.01565.

Federated Learning Based on Dynamic Regularization. Durmus Alp Emre Acar, Yue Zhao, Ramon Matas Navarro, Matthew
Mattina, Paul N. Whatmough, Venkatesh Saligrama. ICLR 2021. arXiv:2111.04263.

FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang,
Michael Kamp, Qi Dou. ICLR 2021. arXiv:2102.07623.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from torch import nn

from common.config import NonNegative, Positive, Search, checked
from common.storage import GlobalState
from strategies.core.method import ClientContext, Download, ServerContext, Trained, Update, Upload, Weighting
from strategies.core.readings import Point
from strategies.fedbn import FedBN
from strategies.feddyn import CLIENT_PREFIX, FedDyn
from strategies.fpl import FPL


@checked
class Combined(FedBN, FedDyn, FPL):
    """FPL's loss, FedDyn's correction and FedBN's local normalisation; each part can be switched off.

    With ``alpha=0 local_normalisation=false`` the method is FPL, and with ``contrast=consistency=0`` as well it is
    FedAvg, bit for bit. ``contrast=consistency=0 local_normalisation=false`` is FedDyn. FedDyn's linear term and h are
    those of the exchanged parameters only: a layer that stays on its device has no average that they could serve. Its
    quadratic pull acts on local batch norm too, towards the client's own values before the training of the round.

    Payload: that of FPL, and FedDyn's scored mean; without batch norm if it is local. Client state: FedDyn's lambda,
    and batch norm if it is local. Server state: FedDyn's h.

    Args:
        local_normalisation: keep batch norm on each device, as FedBN, and score each client's own model.
        alpha: FedDyn's alpha, >= 0; 0 switches the correction off.
        contrast: weight of FPL's contrast; 0 with ``consistency=0`` switches its loss off; class means are still sent.
        consistency: weight of FPL's consistency.
        layers, refresh_statistics: see :class:`~strategies.fedbn.FedBN`; no effect without local normalisation.
    """

    readings: ClassVar[tuple[Point, ...]] = ()

    capturable: ClassVar[bool] = True

    fedavg_at: ClassVar[Mapping[str, Any] | None] = {
        "alpha": 0.0,
        "contrast": 0.0,
        "consistency": 0.0,
        "local_normalisation": False,
        "weighting": "samples",
    }

    local_normalisation: bool = False
    refresh_statistics: bool = True
    weighting: Weighting = "uniform"
    temperature: Annotated[Positive, Search(0.02, 1.0)] = 0.1
    alpha: Annotated[NonNegative, Search(0.001, 1.0)] = 0.01
    # goldfinch compare searches three fields of a method
    contrast: NonNegative = 1.0
    consistency: NonNegative = 1.0

    @property
    def personal(self) -> bool:  # type: ignore[override]
        """Whether clients keep their own normalisation."""
        return self.local_normalisation

    @property
    def adapts(self) -> bool:
        """Whether the scored model differs from the received one."""
        return self.scores_mean or self.adapts_to_data

    @property
    def adapts_to_data(self) -> bool:
        """Whether the running statistics are estimated again before each score."""
        return self.local_normalisation and self.refresh_statistics

    @property
    def scores_own_training(self) -> bool:
        """Whether scores depend on the client's own training images."""
        return self.local_normalisation

    def shared_names(self, model: nn.Module) -> set[str]:
        """Return all names, or all except those of batch norm."""
        if self.local_normalisation:
            return FedBN.shared_names(self, model)
        return set(model.state_dict())

    def adapt(self, local: ClientContext) -> None:
        """Load FedDyn's mean; then estimate the running statistics for it if they are local."""
        FedDyn.adapt(self, local)
        if self.adapts_to_data:
            FedBN.adapt(self, local)

    def upload(self, local: ClientContext, trained: Trained) -> Upload:
        """Return the model and FPL's prototypes; the client keeps lambda of the exchanged parameters."""
        kept = {}
        for name, tensor in FedDyn.upload(self, local, trained).local.items():
            if name.removeprefix(CLIENT_PREFIX) in local.weights:
                kept[name] = tensor
        return Upload(prototypes=trained.prototypes, local=kept)

    def download(self, state: GlobalState, server: ServerContext) -> Download:
        """Return FedDyn's download and the prototypes."""
        return replace(FedDyn.download(self, state, server), prototypes=state.prototypes)

    def aggregate(self, state: GlobalState, updates: Sequence[Update], server: ServerContext) -> GlobalState:
        """Take FedDyn's step for the model, and cluster the prototypes as FPL does."""
        prototypes = self.aggregate_prototypes(state, updates, server)
        return replace(FedDyn.aggregate(self, state, updates, server), prototypes=prototypes)
