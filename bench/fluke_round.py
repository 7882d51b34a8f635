"""A federated round beside fluke's (the package fluke-fl): the same images, network, optimiser and steps, one thread.

    pip install fluke-fl                     # in an environment of its own; it brings about forty packages
    python bench/fluke_round.py              # minutes
    python bench/fluke_round.py --dry-run    # two rounds, writes nothing

Both train four clients of the glyphs on the small network, round by round in turn in this process; images are neither
augmented nor scored. Each is as it comes: Goldfinch normalises every batch and trains this network channels last, fluke
does neither. Of Goldfinch everything from one round to the next is counted, its checkpoint and records
included; of fluke the steps of its own loop: choose and send, train, receive, aggregate. FedProto is its authors' form,
which averages prototypes and no weights. Processor time counts, so that other programs disturb little. Appends rows to
bench/results/system.csv.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.efficiency import QUIET, Alternation, training_splits
from bench.measuring import arguments, start
from bench.ratios import Ratio, append, compare
from common.settings import RunSettings, load_settings
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

METHODS = {"fedavg": ["method=fedavg"], "fedproto": ["method=fedproto", "method.aggregate_models=false"]}
PLAIN = ["data.augmentation.crop_padding=0", "data.augmentation.flip=false"]


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if importlib.util.find_spec("fluke") is None:
        print("fluke is missing: pip install fluke-fl, in an environment of its own; nothing was measured")
        sys.exit(0 if options.dry_run else 1)
    if options.dry_run:
        options.rounds = 2
    for method in options.methods:
        rows = measure(method, options)
        if not options.dry_run:
            append(rows)


def measure(method: str, options: argparse.Namespace) -> list[Ratio]:
    """Rounds of both in turn."""
    with tempfile.TemporaryDirectory() as folder:
        rounds = [f"train.rounds={options.rounds + 2}", f"output={folder}"]
        settings = load_settings([*METHODS[method], *QUIET, *PLAIN, "model=small", "train.batch_size=32", *rounds])
        prepare_output(settings)
        torch.set_num_threads(settings.train.threads)
        alternation = Alternation(Fluke(settings, method), "fluke")
        run_federation(settings, InlineEngine(settings), [alternation])
    return compare("round beside fluke", f"small {method} clients=4 cpu", "s", alternation.cpu, "fluke")


class Logits(nn.Module):
    """A network of Goldfinch as fluke calls it: it returns logits, and has its two halves by name.

    Args:
        network: returns features and logits.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    @property
    def encoder(self) -> Any:
        """From images to features."""
        return self.network.features

    @property
    def head(self) -> Any:
        """From features to logits."""
        return self.network.classify

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.network(images)[1]
        return logits


class Fluke:
    """The opponent: an algorithm of fluke, with the data of a run of Goldfinch.

    Args:
        settings: the run's settings.
        method: ``fedavg`` or ``fedproto``.
    """

    def __init__(self, settings: RunSettings, method: str) -> None:
        from fluke import DDict, FlukeENV
        from fluke.algorithms.fedavg import FedAVG
        from fluke.algorithms.fedproto import FedProto

        FlukeENV().set_seed(settings.seed)
        FlukeENV().set_device("cpu")
        FlukeENV().set_inmemory(True)
        FlukeENV().set_eval_cfg(locals=False, server=False, pre_fit=False, post_fit=False)
        train = settings.train
        optimizer = DDict(name="SGD", lr=train.learning_rate, momentum=train.momentum, weight_decay=train.weight_decay)
        client = DDict(
            batch_size=train.batch_size,
            local_epochs=train.epochs,
            loss="CrossEntropyLoss",
            optimizer=optimizer,
            scheduler=DDict(name="StepLR", step_size=1, gamma=1),
        )
        model = Logits(settings.model.build(settings.data.class_count, settings.data.image_size, settings.seed))
        algorithm = FedAVG
        if method == "fedproto":
            algorithm = FedProto
            client.update(n_protos=settings.data.class_count, lam=1.0, model=model)
        self.settings, self.splits = settings, training_splits(settings)
        hyper_params = DDict(client=client, server=DDict(weighted=True), model=model)
        self.algorithm = algorithm(len(self.splits), self, hyper_params)
        if method == "fedproto":
            for member in self.algorithm.clients:
                member.model = deepcopy(model)  # fluke gives all clients the network that it was handed
        self.rounds = 0

    def assign(self, clients: int, batch_size: int) -> tuple[tuple[Sequence[Any], Sequence[None]], None]:
        """Return the clients' batches, as fluke's own splitter does; nothing is scored."""
        from fluke.data import FastDataLoader

        loaders = []
        classes = self.settings.data.class_count
        for split in self.splits:
            images = self.settings.data.augmentation.test(split.images)  # normalised
            loader = FastDataLoader(images, split.labels, num_labels=classes, batch_size=batch_size, shuffle=True)
            loaders.append(loader)
        return (loaders, [None] * clients), None

    def round(self) -> None:
        """One round, by the steps of ``CentralizedFL.run``."""
        server = self.algorithm.server
        self.rounds += 1
        eligible = server.get_eligible_clients(1.0)
        server.broadcast_model(eligible)
        for client in eligible:
            client.local_update(self.rounds)
        server.aggregate(eligible, server.receive_client_models(eligible, state_dict=False))


if __name__ == "__main__":
    start(main)
