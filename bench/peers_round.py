"""A federated round beside fluke's and BlazeFL's: the same images, network, optimiser and steps.

    pip install fluke-fl "blazefl[contrib,reproducibility]"  # in an environment of its own; BlazeFL needs Python 3.12
    python bench/peers_round.py                              # minutes
    python bench/peers_round.py --peers blazefl              # one of them; a peer that is missing is named and left out
    python bench/peers_round.py --dry-run                    # two rounds, writes nothing

All train four clients of the glyphs on the small network, round by round in turn in this process; images are neither
augmented nor scored. Each is as it comes: Goldfinch normalises every batch and trains this network channels last, the
others do neither. Of Goldfinch everything from one round to the next is counted, its checkpoint and records
included; of a peer the steps of its own loop: choose and send, train, receive, aggregate. fluke's FedProto is its
authors' form, which averages prototypes and no weights. BlazeFL's FedAvg is the one that it brings, without progress
bars, on images in memory; it has no FedProto. One thread each, by processor time, so that other programs disturb
little; then BlazeFL's pool of threads, which trains by plain SGD, beside our workers, two of each, by the wall clock.
Appends rows to bench/results/system.csv.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.efficiency import QUIET, Alternation, Opponent, training_splits
from bench.measuring import arguments, start
from bench.ratios import Ratio, append, compare, wait_until_quiet
from common.settings import RunSettings, load_settings
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

METHODS = {"fedavg": ["method=fedavg"], "fedproto": ["method=fedproto", "method.aggregate_models=false"]}
PEERS = {"fluke": list(METHODS), "blazefl": ["fedavg"]}
PACKAGES = {"fluke": "fluke-fl", "blazefl": "'blazefl[contrib,reproducibility]'"}
PLAIN = ["data.augmentation.crop_padding=0", "data.augmentation.flip=false"]
WORKERS = 2


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    peers = [peer for peer in options.peers if importlib.util.find_spec(peer)]
    for peer in options.peers:
        if peer not in peers:
            print(f"{peer} is missing and was not measured: pip install {PACKAGES[peer]}, in an environment of its own")
    if not peers and not options.dry_run:
        sys.exit(1)
    if options.dry_run:
        options.rounds = 2
    for peer in peers:
        for method in options.methods:
            if method in PEERS[peer]:
                report(one_thread(peer, method, options.rounds), options)
    if "blazefl" in peers:
        if not options.dry_run:
            wait_until_quiet()
        report(two_workers(options.rounds), options)


def report(rows: list[Ratio], options: argparse.Namespace) -> None:
    """Append the rows, unless the run is dry."""
    if not options.dry_run:
        append(rows)


def one_thread(peer: str, method: str, rounds: int) -> list[Ratio]:
    """Rounds of both in turn, processor time."""
    alternation = alternate(peer, method, rounds)
    return compare(f"round beside {peer}", f"small {method} clients=4 cpu", "s", alternation.cpu, peer)


def two_workers(rounds: int) -> list[Ratio]:
    """Rounds in turn with BlazeFL, two clients at a time each, by the wall clock."""
    alternation = alternate("blazefl", "fedavg", rounds, workers=WORKERS)
    shape = f"small fedavg clients=4 workers={WORKERS} wall"
    return compare("round beside blazefl", shape, "s", alternation.seconds, "blazefl")


def alternate(peer: str, method: str, rounds: int, workers: int = 1) -> Alternation:
    """Run Goldfinch and a peer, a round each in turn."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = [f"train.rounds={rounds + 2}", f"engine.workers={workers}", f"output={folder}"]
        settings = load_settings([*METHODS[method], *QUIET, *PLAIN, "model=small", "train.batch_size=32", *chosen])
        prepare_output(settings)
        torch.set_num_threads(settings.train.threads)
        opponent: Opponent = Fluke(settings, method) if peer == "fluke" else BlazeFL(settings, workers)
        alternation = Alternation(opponent, peer)
        run_federation(settings, InlineEngine(settings), [alternation])
    return alternation


class Logits(nn.Module):
    """A network of Goldfinch as the peers call it: it returns logits, and has its two halves by name.

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
    """An algorithm of fluke, with the data of a run of Goldfinch.

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


class BlazeFL:
    """BlazeFL's FedAvg, with the data of a run of Goldfinch.

    Args:
        settings: the run's settings.
        workers: clients that train at once; one: its trainer without a pool.
    """

    def __init__(self, settings: RunSettings, workers: int) -> None:
        from blazefl.contrib import fedavg

        fedavg.tqdm = partial(fedavg.tqdm, disable=True)
        train = settings.train
        images = Images(settings)
        clients = len(images.splits)
        shared: dict[str, Any] = {"model_selector": self, "model_name": "small", "dataset": images, "device": "cpu"}
        shared |= {"num_clients": clients, "batch_size": train.batch_size, "seed": settings.seed}
        local = {"epochs": train.epochs, "lr": train.learning_rate}
        self.settings = settings
        self.server = fedavg.FedAvgBaseServerHandler(global_round=1_000_000, sample_ratio=1.0, **shared)
        if workers > 1:
            self.trainer = fedavg.FedAvgThreadPoolClientTrainer(num_parallels=workers, **shared, **local)
        else:
            self.trainer = fedavg.FedAvgBaseClientTrainer(**shared, **local)
            # It brings plain SGD; momentum and weight decay cost a step something.
            self.trainer.optimizer = torch.optim.SGD(
                self.trainer.model.parameters(),
                train.learning_rate,
                momentum=train.momentum,
                weight_decay=train.weight_decay,
            )

    def select_model(self, _: str) -> nn.Module:
        """Build the network, as BlazeFL asks for it."""
        settings = self.settings
        return Logits(settings.model.build(settings.data.class_count, settings.data.image_size, settings.seed))

    def round(self) -> None:
        """One round, by the steps of the loop in BlazeFL's own example."""
        self.trainer.local_process(self.server.downlink_package(), self.server.sample_clients())
        for package in self.trainer.uplink_package():
            self.server.load(package)


class Images:
    """The clients' images as BlazeFL asks for them: loaders that take a whole batch from memory at once.

    Args:
        settings: the run's settings.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.splits = training_splits(settings)
        normalise = settings.data.augmentation.test
        self.data = [TensorDataset(normalise(split.images), split.labels) for split in self.splits]

    def get_dataloader(self, *, cid: int, batch_size: int, generator: torch.Generator, **_: object) -> DataLoader[Any]:
        """Return a client's loader."""
        order = RandomSampler(self.data[cid], generator=generator)
        return DataLoader(self.data[cid], sampler=BatchSampler(order, batch_size, drop_last=False), batch_size=None)


if __name__ == "__main__":
    start(main)
