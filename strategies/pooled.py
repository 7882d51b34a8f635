"""Pooled: one model is trained on all clients' images in one place, the upper line of a table.

Centralized or joint training, as of the baseline of FedAvg's paper that runs SGD on the full training set:
Communication-Efficient Learning of Deep Networks from Decentralized Data. H. Brendan McMahan, Eider Moore, Daniel
Ramage, Seth Hampson, Blaise Agüera y Arcas. AISTATS 2017. arXiv:1602.05629.
"""

from typing import ClassVar

from common.config import checked
from strategies.core.method import Bound, Method


@checked
class Pooled(Method):
    """One client holds the training samples of all clients, and trains one model on them by cross-entropy.

    **Same steps:** an epoch passes once over all samples, so each sample is seen ``train.rounds * train.epochs`` times,
    as in a federation in which every client takes part in every round. The number of steps of the same batch size is
    that of all clients together; clients' short last batches are joined. With ``train.local_steps`` an epoch has that
    number of steps for each client of the protocol. As on every client, each round begins with a new optimiser.

    Scored on the test images of all domains, as every row of the table. Validation samples are those of all clients,
    scored as one set. Payload and bytes mean nothing. Simulated only, and refused under differential privacy: no image
    leaves a device.
    """

    bound: ClassVar[Bound | None] = "upper"
    pools: ClassVar[bool] = True
