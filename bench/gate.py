"""The gate's share of a round's time: checking every upload, and comparing their lengths, against all of the round.

    python bench/gate.py              # the small net and ResNet-10 with prototypes (FPL), inline, one thread
    python bench/gate.py --rounds 9
    python bench/gate.py --dry-run  # two rounds of the small net, writes nothing

Both are measured in the same rounds, as this process's CPU time, which other processes cannot stretch. Clients train on
so few samples that the share is an upper bound: real rounds train longer behind the same gate. Appends rows to
bench/results/gate.csv; the goal is less than 3 %.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from bench.measuring import arguments, environment, start
from bench.rows import append_rows
from common.settings import load_settings
from server.engines.inline import InlineEngine
from server.run.conduct import prepare_output
from server.run.rounds import RoundLoop

RESULTS = Path(__file__).parent / "results" / "gate.csv"
SAMPLES = {"small": 100, "resnet10": 24}
GOAL = 3.0


def timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """``call``, with its CPU seconds added to the last entry of ``spent``."""

    def measured(*arguments: Any, **words: Any) -> Any:
        started = time.process_time()
        try:
            return call(*arguments, **words)
        finally:
            spent[-1] += time.process_time() - started

    return measured


def measure(model: str, rounds: int) -> dict[str, object]:
    """A run of ``rounds`` rounds after one that warms up; its row."""
    samples = SAMPLES[model]
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings(
            [
                "method=fpl", "data=glyphs", f"model={model}", "engine=inline", "train.device=cpu", "overwrite=true",
                f"protocol.samples={samples}", f"train.rounds={rounds + 1}", "rounds.test_samples=20",
                f"output={folder}", "rounds=guarded",
            ]
        )  # fmt: skip
        prepare_output(settings)
        engine = InlineEngine(settings)
        run = RoundLoop(settings, engine)
        gate: list[float] = []
        whole: list[float] = []
        run.federation.admit = timed(run.federation.admit, gate)  # type: ignore[method-assign]
        for applied in run.federation.filters:
            applied.apply = timed(applied.apply, gate)
        one_round = timed(run._round, whole)

        def next_round(number: int) -> bool:
            gate.append(0.0)
            whole.append(0.0)
            return bool(one_round(number))

        run._round = next_round  # type: ignore[method-assign]
        run.run()
        engine.close()
    gate, whole = gate[1 : rounds + 1], whole[1 : rounds + 1]
    shares = [100 * part / total for part, total in zip(gate, whole, strict=True)]
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive")
    where = environment(torch.device("cpu"))
    return {
        "model": model, "method": "fpl", "clients": len(run.registry.expected), "samples_per_client": samples,
        "rounds": rounds, "gate_ms": round(1e3 * statistics.median(gate), 3),
        "round_ms": round(1e3 * statistics.median(whole), 1), "share_percent": round(statistics.median(shares), 3),
        "quartile_1": round(low, 3), "quartile_3": round(high, 3), "worst": round(max(shares), 3),
        **{name: where[name] for name in ("device", "threads", "torch", "python", "commit", "when")},
    }  # fmt: skip


def main() -> None:
    """Measure both nets, append, and say whether the goal is met."""
    options = arguments(__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--models", nargs="+", default=list(SAMPLES), choices=list(SAMPLES))
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.dry_run:
        chosen.rounds, chosen.models = 2, ["small"]
    for model in chosen.models:
        row = measure(model, chosen.rounds)
        if not chosen.dry_run:
            append_rows(RESULTS, [row])
        verdict = "met" if float(str(row["share_percent"])) < GOAL else "MISSED"
        print(f"{model}: the gate takes {row['share_percent']} % of a round "
              f"({row['gate_ms']} of {row['round_ms']} ms); goal {GOAL} % {verdict}", flush=True)  # fmt: skip


if __name__ == "__main__":
    start(main)
