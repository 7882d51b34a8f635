"""FedProc: Prototypical Contrastive Federated Learning on Non-IID Data.

Xutong Mu, Yulong Shen, Ke Cheng, Xueli Geng, Jiaxuan Fu, Tao Zhang, Zhiwei Zhang. FGCS 2023. arXiv:2109.12273.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from common.config import Positive, Search, checked
from common.losses import prototype_contrast
from common.prototypes import PrototypeSet
from common.storage import GlobalState
from strategies.core.method import (
    Averaging,
    Batch,
    ClientContext,
    Losses,
    PrototypeMode,
    ServerContext,
    Update,
    Weighting,
)
from strategies.core.readings import Point
from strategies.parts.sent_prototypes import carry_over, class_means_of


@checked
class FedProc(Averaging):
    """``a_t CE + (1 - a_t) PCL`` with the global class means; the weight moves from contrast to cross-entropy.

    PCL contrasts a feature with its class's mean against all classes' (cosine). In round 0, before there are
    means, the loss is cross-entropy. There is no setting at which this is FedAvg, since ``a_t`` also scales the
    cross-entropy.

    Payload: the model's state, and one vector and count per class, both ways (mean and count carry the paper's sum and
    count). Client state: none.

    Args:
        temperature: tau of the contrast, > 0 (the authors: 1).
        schedule: ``official``: ``a_t = t / T`` with t from 0; ``rethinkfl``, FPL's code behind its table: ``t / (T -
            1)``, and cross-entropy has weight 0 in round 0 too, in which only weight decay then changes the model.
        prototype_mode: a pass after training (the authors', in training mode; here in evaluation mode), or running
            means over the last epoch (FPL's code).
        prototype_weighting: global mean over all ``samples`` of a class (the authors), or ``uniform`` over the clients'
            means (FPL's code).
        keep_missing: keep the last mean of a class that no client sent (the authors; FPL's code drops it).
    """

    readings: ClassVar[tuple[Point, ...]] = (
        Point("weight of cross-entropy", "official", "official", setting="schedule", tables={"fpl": "rethinkfl"}),
        Point("T of the weight", "the run's rounds", "100", "paper"),
        Point("local prototypes", setting="prototype_mode", tables={"fpl": "last_epoch_running"}),
        Point(
            "pass after training",
            released="augmented, in training mode, without a short last batch",
            ours="plain, in evaluation mode",
        ),
        Point("global prototypes", "samples", "samples", setting="prototype_weighting", tables={"fpl": "uniform"}),
        Point("class that no client sent", released=True, setting="keep_missing", tables={"fpl": False}),
        Point("similarity", released="cosine", ours="released"),
        Point("features", released="unit vectors behind a projection head of 256", ours="the network's own"),
    )

    capturable: ClassVar[bool] = True

    temperature: Annotated[Positive, Search(0.05, 5.0)] = 1.0
    schedule: Literal["official", "rethinkfl"] = "official"
    prototype_mode: Literal["post_eval", "last_epoch_running"] = "post_eval"
    prototype_weighting: Weighting = "samples"
    keep_missing: bool = True

    @property
    def scheduled(self) -> bool:
        """Return True: the weight ``a_t`` depends on the number of rounds."""
        return True

    @property
    def prototypes_from(self) -> PrototypeMode:
        """Return the pass in which prototypes are made, as ``prototype_mode`` names it."""
        return self.prototype_mode

    def cross_entropy_weight(self, round_number: int, rounds: int, any_prototypes: bool) -> float:
        """Return ``a_t`` of the 1-based ``round_number``, in [0, 1]."""
        if self.schedule == "rethinkfl":
            return (round_number - 1) / max(rounds - 1, 1)
        if not any_prototypes:
            return 1.0
        return (round_number - 1) / rounds

    def loss(self, batch: Batch, local: ClientContext) -> Losses:
        """Return cross-entropy and contrast, weighted by the round."""
        share = self.cross_entropy_weight(local.round, local.rounds, len(local.prototypes) > 0)
        terms = {"cross_entropy": share * batch.cross_entropy()}
        if len(local.prototypes):
            contrast = prototype_contrast(batch.features, batch.labels, local.prototypes, temperature=self.temperature)
            terms["contrast"] = (1 - share) * contrast
        return Losses(terms)

    def aggregate_prototypes(
        self, state: GlobalState, updates: Sequence[Update], server: ServerContext
    ) -> PrototypeSet:
        """Return the mean over all reported samples of each class."""
        means = class_means_of(updates, server, sample_weighted=self.prototype_weighting == "samples")
        if self.keep_missing:
            return carry_over(means, state.prototypes)
        return means
