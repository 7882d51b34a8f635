"""FPL's released code (GitHub: WenkeHuang/RethinkFL) against Goldfinch: the same rounds of Office-Caltech on one core.

    GOLDFINCH_DATA=DATA python bench/released_fpl.py --code CLONE    # the clone needs scikit-learn, SciPy and tqdm
    python bench/released_fpl.py --dry-run    # our side alone, one round on a few glyphs; writes nothing

Ten clients (Caltech 3, Amazon 2, Webcam 1, DSLR 4), ResNet-10, batches of 64, nothing scored; processor seconds of a
round but the first, which has no prototypes, in processes that take turns. ``data`` is getting a batch, ``step`` the
rest of local training, ``rest`` what lies between. Of the clone three things are changed: where images and checkpoints
lie, and that an array of tensors is one of objects, since NumPy from 1.24 refuses ragged ones. Appends rows to
bench/results/system.csv.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

VARIANTS = {"goldfinch": [], "channels first": ["train.channels_last=false"]}
COUNTED = ("round", "train", "data", "steps", "images")
ROUNDS: list[dict[str, float]] = []
CLOCK: list[Callable[[], float]] = [time.process_time]


def main() -> None:
    """Measure, or play one variant for a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="our side alone, once at tiny sizes; writes nothing")
    parser.add_argument("--code", type=Path, help="a clone of the released code")
    parser.add_argument("--epochs", type=int, default=1, help="local epochs")
    parser.add_argument("--rounds", type=int, default=2, help="measured rounds of a process")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--wall", action="store_true", help="wall seconds, waiting for the GPU, instead of processor time"
    )
    parser.add_argument("--play", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.wall:
        CLOCK[:] = [wall_seconds]
    if options.dry_run:
        options.rounds, options.play = 1, "goldfinch"
    else:
        check_places(parser, options)
    if options.play:
        with tempfile.TemporaryDirectory() as folder:
            (released if options.play == "released" else goldfinch)(options, folder)
        print(json.dumps(ROUNDS[1:]))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the checkout; never next to the clone
    from bench.measuring import stopping

    with stopping():
        compare_both(options)


def check_places(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a message where the clone or the data set is missing."""
    if options.code is None:
        parser.error("--code names a clone of RethinkFL; without one there is only --dry-run")
    for place in (options.code / "models" / "fpl.py", Path(os.environ.get("GOLDFINCH_DATA", "")) / "office_caltech_10"):
        if not place.exists():
            parser.error(
                f"there is no {place}: --code names a clone of RethinkFL, GOLDFINCH_DATA the folder of data sets"
            )


def compare_both(options: argparse.Namespace) -> None:
    """Play all variants in turn, each in a process of its own, and append the rows."""
    from bench.ratios import append, compare

    seconds: dict[str, dict[str, list[float]]] = {}
    work = set()
    for _ in range(options.repeats):
        for variant in ["released", *VARIANTS]:
            played = [sys.executable, __file__, *sys.argv[1:], "--play", variant]
            found = subprocess.run(played, stdout=subprocess.PIPE, check=True)
            rounds = json.loads(found.stdout.splitlines()[-1])
            whole, train, data, steps, images = (sum(one[name] for one in rounds) for name in COUNTED)
            work.add((steps, images))
            for name, value in {"round": whole, "step": train - data, "data": data, "rest": whole - train}.items():
                seconds.setdefault(name, {}).setdefault(variant, []).append(value / len(rounds))
    if len(work) > 1:
        raise RuntimeError(f"the variants have not done the same work (steps, images): {sorted(work)}")
    shape = "epochs={} rounds={} steps={:.0f} images={:.0f}".format(options.epochs, options.rounds, *work.pop())
    for name, values in seconds.items():
        goals = {"goldfinch": 1.2} if name == "round" else {}
        append(compare("released FPL", f"resnet10 {shape} {name} cpu", "s", values, "released", goals))


def wall_seconds() -> float:
    """Return the time of a clock on the wall, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``function``, with its seconds added to ``name`` of the present round."""

    def call(*arguments: Any) -> Any:
        begin = CLOCK[0]()
        result = function(*arguments)
        ROUNDS[-1][name] += CLOCK[0]() - begin
        return result

    return call


def counted(function: Callable[..., Iterable[Any]]) -> Callable[..., Iterator[Any]]:
    """Return ``function``, with its batches timed and counted."""

    def call(*arguments: Any) -> Iterator[Any]:
        batches, following = iter(function(*arguments)), timed(next, "data")
        while (batch := following(batches, None)) is not None:
            ROUNDS[-1]["steps"] += 1
            ROUNDS[-1]["images"] += len(batch[1])
            yield batch

    return call


def released(options: argparse.Namespace, folder: str) -> None:
    """Rounds of the released code, in this process."""
    os.chdir(options.code)
    sys.path.insert(0, str(Path.cwd()))
    import datasets.officecaltech as office  # the clone's, like the next three
    from models import fpl
    from models.utils import federated_model
    from utils.best_args import best_args

    (Path(folder) / "Office_Caltech_10").symlink_to(Path(os.environ["GOLDFINCH_DATA"]) / "office_caltech_10")
    office.data_path = federated_model.checkpoint_path = lambda: f"{folder}/"
    arrays: dict[bool, Any] = {True: lambda items: np.fromiter(items, object), False: np.array}
    fpl.np = SimpleNamespace(**vars(np) | {"array": lambda items: arrays[isinstance(items[0], torch.Tensor)](items)})
    fpl.FPL._train_net = timed(fpl.FPL._train_net, "train")
    setattr(DataLoader, "__iter__", counted(DataLoader.__iter__))  # noqa: B010  # mypy knows no assignment to a method
    arguments = SimpleNamespace(
        dataset="fl_officecaltech", structure="homogeneity", parti_num=10, online_ratio=1.0, device_id=0,
        local_epoch=options.epochs, averaing="weight", infoNCET=0.02, **best_args["fl_officecaltech"]["fpl"],
    )  # fmt: skip
    data = office.FedLeaOfficeCaltech(arguments)
    loaders, _ = data.get_data_loaders(["caltech"] * 3 + ["amazon"] * 2 + ["webcam"] + ["dslr"] * 4)
    model = fpl.FPL(data.get_backbone(10, None), arguments, None)
    model.trainloaders = loaders
    model.ini()
    for _ in range(options.rounds + 1):
        ROUNDS.append(dict.fromkeys(COUNTED, 0.0))
        timed(model.loc_update, "round")(loaders)


def goldfinch(options: argparse.Namespace, folder: str) -> None:
    """Rounds of Goldfinch, in this process."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from client.trainer import LocalExchange
    from common.settings import load_settings
    from server.engines.inline import InlineEngine
    from server.run.conduct import prepare_output, run_federation

    def listen(event: str, _: Mapping[str, Any]) -> None:
        if event == "round":  # ends one and begins another; the last is left without an end
            now = CLOCK[0]()
            if ROUNDS:
                ROUNDS[-1]["round"] += now
            ROUNDS.append(dict.fromkeys(COUNTED, 0.0))
            ROUNDS[-1]["round"] -= now

    LocalExchange.batches = counted(LocalExchange.batches)  # type: ignore[method-assign]
    LocalExchange.run = timed(LocalExchange.run, "train")  # type: ignore[method-assign]
    own = [
        "experiment=fpl_office",
        "method=fpl",
        "tuned=none",
        "rounds.evaluate_every=100000",
        "rounds.test_samples=16",
    ]
    own += [f"train.epochs={options.epochs}", f"train.rounds={options.rounds + 2}", f"output={folder}/run"]
    if options.dry_run:
        own = ["method=fpl", "data=glyphs", "model=small", "tuned=none", "rounds.test_samples=8"]
        own += ["protocol.samples=24", "train.device=cpu", f"train.rounds={options.rounds + 2}", f"output={folder}/run"]
    settings = load_settings([*own, *VARIANTS[options.play]])
    prepare_output(settings)
    run_federation(settings, InlineEngine(settings), [listen])
    ROUNDS.pop()


if __name__ == "__main__":
    main()
