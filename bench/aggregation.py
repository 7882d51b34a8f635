"""The server's half of a round against Flower's: averaging the models and clustering the prototypes of many clients.

    python bench/aggregation.py                         # 10 and 30 clients, ResNet-18
    python bench/aggregation.py --clients 10 30 100     # 100 clients need 10 GiB: their models twice over
    python bench/aggregation.py --dry-run               # a small net, writes nothing

Opponent: ``flwr.server.strategy.aggregate.aggregate``, float32, with each client's class means as one more array. Ours
sums in float64 and clusters the class means with FINCH (FPL). Appends rows to bench/results/system.csv.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from flwr.common import NDArrays
from flwr.server.strategy.aggregate import aggregate as flower_aggregate

from bench.measuring import arguments, peak_kib, start
from bench.ratios import Ratio, append, compare, in_turn, quantity
from common.models.specs import Small, TorchvisionResNet
from common.numerics import generator
from common.prototypes import PrototypeSet, cluster_prototypes
from strategies.core.aggregation import Mean
from strategies.core.exchange import Client, Update

CLASSES, FEATURES = 10, 512


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 30])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.dry_run:
        options.clients, options.repeats = [3], 2
    for count in options.clients:
        rows = aggregation(count, options.repeats, Small() if options.dry_run else TorchvisionResNet(18))
        if not options.dry_run:
            append(rows)


def aggregation(count: int, repeats: int, spec: Small | TorchvisionResNet) -> list[Ratio]:
    """Seconds and peak memory of one aggregation of ``count`` clients."""
    updates, arrays = clients_of(count, spec)
    values = sum(tensor.numel() for tensor in updates[0].weights.values())
    shape = f"clients={count} values={values} prototypes={count * CLASSES}x{FEATURES}"

    def ours() -> object:
        return Mean().average(updates), prototypes(updates)

    def flower() -> object:
        return flower_aggregate(arrays)

    seconds = in_turn({"flower": flower, "goldfinch": ours}, repeats)
    rows = compare("aggregation", shape, "s", seconds, "flower", {"goldfinch": 4.0})
    model = values * 4 / 2**20
    held = peak_kib(lambda _: ours(), torch.device("cpu")) / 1024 / model
    return [*rows, quantity("aggregation peak", "goldfinch", shape, "models", [held], 3.0)]


def prototypes(updates: list[Update]) -> PrototypeSet:
    """FPL's global prototypes."""
    return cluster_prototypes(PrototypeSet.concatenate([update.prototypes for update in updates]))


def clients_of(count: int, spec: Small | TorchvisionResNet) -> tuple[list[Update], list[tuple[NDArrays, int]]]:
    """Updates as our server has them after the gate, and the same as Flower's strategies have them."""
    initial = spec.build(CLASSES, 32, 0).state_dict()
    updates, arrays = [], []
    for index in range(count):
        draws = generator(0, "aggregation", index)
        weights: dict[str, Tensor] = {
            name: tensor + 0.01 * torch.randn(tensor.shape, generator=draws) if tensor.is_floating_point() else tensor
            for name, tensor in initial.items()
        }
        means = torch.rand(CLASSES, FEATURES, generator=draws)
        samples = 100 + 7 * index
        client = Client(f"client-{index:04d}", "domain", samples, (samples // CLASSES,) * CLASSES)
        updates.append(Update(weights, PrototypeSet(means, torch.arange(CLASSES), torch.ones(CLASSES)), client=client))
        arrays.append(([tensor.numpy() for tensor in weights.values()] + [means.numpy()], samples))
    return updates, arrays


if __name__ == "__main__":
    start(main)
