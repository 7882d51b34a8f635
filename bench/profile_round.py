"""Where the time of a federated round goes: the functions that take the largest share of it.

    python bench/profile_round.py                        # FPL with ResNet-10: every function over 2 %
    python bench/profile_round.py --min-share 0.5 model=small train.local_steps=null
    python bench/profile_round.py --dry-run              # one round of the small net

The rounds run in one thread under cProfile with that thread's own processor time as its clock, which other processes
cannot stretch. Shares are of the time inside each function itself (a call of PyTorch counts as a function); the first
round, which loads the data and scores, is left out. What follows the options overrides the run's settings.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.efficiency import QUIET, ROOT
from bench.measuring import arguments, start
from common.settings import load_settings
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output, run_federation

DEFAULTS = ["method=fpl", "model=resnet10", "train.batch_size=64", "train.local_steps=2"]


def main() -> None:
    """Profile what the command line asks for."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--min-share", type=float, default=2.0, help="smallest share that is printed, per cent")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.dry_run:
        options.rounds = 1
        options.overrides = ["model=small", "protocol.samples=24", *options.overrides]
    profile = cProfile.Profile(time.thread_time)
    taken: list[float] = []

    def listen(event: str, content: Mapping[str, Any]) -> None:
        if event == "round" and content["round"] == 2:
            taken.append(time.thread_time())
            profile.enable()
        if event == "round" and content["round"] == options.rounds + 2:
            profile.disable()
            taken.append(time.thread_time())

    with tempfile.TemporaryDirectory() as folder:
        rounds = options.rounds + 2
        settings = load_settings(
            [*DEFAULTS, *QUIET, *options.overrides, f"train.rounds={rounds}", f"output={folder}/run"]
        )
        prepare_output(settings)
        torch.set_num_threads(settings.train.threads)
        engine = InlineEngine(settings)
        run_federation(settings, engine, [listen])
    print_shares(pstats.Stats(profile), (taken[1] - taken[0]) / options.rounds, options.min_share)


def print_shares(stats: pstats.Stats, seconds: float, min_share: float) -> None:
    """Print the functions with an own share of ``min_share`` per cent or more, and the share of the rest."""
    entries = stats.stats  # type: ignore[attr-defined]  # the profile's table: (file, line, name) -> numbers
    total = sum(numbers[2] for numbers in entries.values())
    print(f"{seconds:.3f} s of processor time a round, under the profiler\n\n share   calls  function")
    rest = 0.0
    for (file, line, name), numbers in sorted(entries.items(), key=lambda item: -item[1][2]):
        share = 100 * numbers[2] / total
        if share < min_share:
            rest += share
            continue
        place = file.replace(str(ROOT) + "/", "").rpartition("site-packages/")[2]
        where = f"{place}:{line} " if line else ""
        print(f"{share:5.1f} % {numbers[1]:7}  {where}{name}")
    print(f"{rest:5.1f} %          {len(entries)} functions below {min_share:g} % each, together")


if __name__ == "__main__":
    start(main)
