"""How large the gradient of each loss term is compared with cross-entropy's, while a federation trains.

    python bench/gradients.py 4 fpl contrast,consistency experiment=fpl_office model=small
    python bench/gradients.py --dry-run    # FPL on a few glyphs, two rounds

The third word names the method's fields that weigh its terms. At every client's first batch of each round after the
first, a term's loss is taken with the other fields at 0. Printed are medians over clients: the L2 norm of its gradient
over all parameters, in norms of cross-entropy's, and the cosine between both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, start
from common.settings import load_settings
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation


def gradient(loss: Tensor, parameters: list[Tensor]) -> Tensor:
    """The whole gradient as one vector."""
    parts = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


def main() -> None:
    """Measure what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("rounds", nargs="?", help="rounds of the run, at least 2")
    parser.add_argument("method", nargs="?")
    parser.add_argument("fields", nargs="?", help="the method's fields that weigh its terms, separated by commas")
    parser.add_argument("overrides", nargs="*", help="the run's settings, as in goldfinch run")
    options = parser.parse_args()
    if options.dry_run:
        tiny = ["model=small", "protocol.samples=24", "train.local_steps=1", "train.device=cpu"]
        measure("2", "fpl", ["contrast", "consistency"], tiny)
        return
    if options.fields is None:
        parser.error("name the rounds, the method and its fields, such as: 4 fpl contrast,consistency")
    measure(options.rounds, options.method, options.fields.split(","), options.overrides)


def measure(rounds: str, name: str, fields: list[str], overrides: list[str]) -> None:
    """Run the federation and print a line per round and term."""
    found = dict[tuple[int, str], list[tuple[float, float]]]()
    seen = set[tuple[int, str]]()
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["rounds.evaluate_every=100000", "rounds.test_samples=16", "tuned=none", f"output={folder}/run"]
        settings = load_settings([*overrides, f"method={name}", f"train.rounds={rounds}", *quiet])
        kind = type(settings.method)
        loss = kind.loss

        def watched(method: Any, batch: Any, local: Any) -> Any:
            if local.round > 1 and (local.round, local.client.id) not in seen:
                seen.add((local.round, local.client.id))
                parameters = [each for each in local.model.parameters() if each.requires_grad]
                plain = gradient(torch.nn.functional.cross_entropy(batch.logits, batch.labels), parameters)
                for field in fields:
                    alone = replace(method, **dict.fromkeys(set(fields) - {field}, 0.0))
                    term = gradient(loss(alone, batch, local).total, parameters) - plain
                    cosine = torch.cosine_similarity(term, plain, dim=0)
                    found.setdefault((local.round, field), []).append(
                        (float(term.norm() / plain.norm()), float(cosine))
                    )
            return loss(method, batch, local)

        kind.loss = watched
        prepare_output(settings)
        run_federation(settings, InlineEngine(settings))
    for (number, field), values in sorted(found.items()):
        ratio, cosine = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"round {number}, {field}: {ratio:.2g} of cross-entropy's gradient, cosine {cosine:.2f}")


if __name__ == "__main__":
    start(main)
