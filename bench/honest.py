"""No honest client is refused: every method, undisturbed, under four instruction sets, and how often the bound cuts.

    python bench/honest.py                    # every run that bench/results/honest.csv does not hold yet
    python bench/honest.py --methods fpl      # a part of it
    python bench/honest.py --dry-run          # FedAvg on toy, under this environment's instruction set; writes nothing

glyphs: four domains, 40 images each, small net, four rounds. toy: the conformance suite's three domains of 16x16
images, eight rounds of two epochs, on which honest clients differ most. Each instruction set runs in a process of its
own, since torch reads the variables when it starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # for the toy domains
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout, before an installed copy

from support.runs import run
from support.toy import composed, toy_settings

from bench.measuring import arguments, start
from bench.rows import append_rows, read_all
from common.choices import CONF
from common.settings import RunSettings, load_settings
from common.wire.messages import SCALED
from server.run.events import SCALED_EVENT
from server.run.schema import REPLIES, read_lines

RESULTS = Path(__file__).parent / "results" / "honest.csv"
METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
SETS = [
    {"ATEN_CPU_CAPABILITY": torch_set, "ONEDNN_MAX_CPU_ISA": dnn_set}
    for torch_set, dnn_set in product(("default", "avx2"), ("SSE41", "AVX2"))
]


def settings_of(method: str, data: str, folder: Path) -> RunSettings:
    """The settings of one run."""
    if data == "toy":
        return toy_settings(method, folder, train={"rounds": 8, "epochs": 2})
    views = ["views=randconv"] if composed(f"method={method}", "engine=inline").method.multi_view else []
    public = ["method.public.samples=64", "method.public_batch=32"] if method == "fccl_plus" else []
    return load_settings(
        [
            f"method={method}", "data=glyphs", "model=small", "tuned=none", "engine=inline", "train.device=cpu",
            "train.rounds=4", "train.batch_size=16", "train.learning_rate=0.05", "protocol.samples=40",
            "rounds.test_samples=20", "rounds.evaluate_every=1000", f"output={folder}", *views, *public,
        ]
    )  # fmt: skip


def row_of(method: str, data: str) -> dict[str, object]:
    """Answers by what became of them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = run(settings_of(method, data, folder))
        rows = read_lines(folder / REPLIES)
    statuses = Counter(row["status"] for row in rows)
    parts = Counter(part for kind, entry in done.events if kind == SCALED_EVENT for part in entry["factors"])
    return {
        **{name: os.environ.get(name, "") for name in SETS[0]},
        "method": method, "data": data, "answers": len(rows), "clipped": statuses[SCALED],
        "parameters_clipped": parts["parameters"], "refused": statuses["refused"],
        "failed": statuses["failed"] + statuses["lost"], "accuracy": round(done.averages()[-1], 2),
        "sha256": done.sha256[:16],
    }  # fmt: skip


def main() -> None:
    """Run what is missing, each instruction set in a process of its own; exit 1 if anybody was refused."""
    options = arguments(__doc__)
    options.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    options.add_argument("--here", action="store_true", help="only under the instruction set of this environment")
    chosen = options.parse_args()
    if chosen.dry_run:
        torch.set_num_threads(1)
        print(row_of("fedavg", "toy"))
        return
    if not chosen.here:
        for variables in SETS:
            command = [sys.executable, __file__, "--here", "--methods", *chosen.methods]
            subprocess.run(command, env={**os.environ, **variables}, check=False)
        rows = read_all(RESULTS)
        refused, clipped = (sum(int(row[name]) for row in rows) for name in ("refused", "clipped"))
        answers = sum(int(row["answers"]) for row in rows)
        print(f"{len(rows)} runs, {answers} answers: {refused} refused, {clipped} clipped")
        sys.exit(1 if refused else 0)
    torch.set_num_threads(1)
    mine = [os.environ.get(name, "") for name in SETS[0]]
    done = {(row["method"], row["data"]) for row in read_all(RESULTS) if [row[name] for name in SETS[0]] == mine}
    for data, method in product(("toy", "glyphs"), chosen.methods):
        if (method, data) not in done:
            row = row_of(method, data)
            append_rows(RESULTS, [row])
            print(row, flush=True)


if __name__ == "__main__":
    start(main)
