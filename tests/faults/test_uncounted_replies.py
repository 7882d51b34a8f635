"""Real nodes that lose a reply after they trained and kept their state: it leaves nothing behind.

In three rounds, clients are held after their training. What would carry the reply is killed, stopped or cut
off; then the client keeps its state. The final state must be that of an inline run in which exactly those clients are
asked whose replies the record says to have counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import pytest
from support.cables import Cable
from support.faults import events, kill_node, restart_until_admitted, started_by, wait_until
from support.runs import TouchedEngine, run

from common.settings import load_settings
from common.wire.messages import Request, update_was_used
from goldfinch.commands.deployment import LocalDeployment, one_node_per_client
from goldfinch.record import RunRecord
from server.flower.processes import Child
from server.run.conduct import prepare_output
from server.run.schema import read_lines

DEADLINE = float(os.environ.get("GOLDFINCH_DEADLINE", "120"))
"""Seconds; an idle machine needs a quarter of it."""
ROUNDS = 8
CUT, OTHER = "handwritten-0", "printed-0"
THREE = [
    "tuned=none",
    "data.domains=[handwritten,printed,sketch]",
    "protocol.samples=24",
    f"train.rounds={ROUNDS}",
    "train.local_steps=2",
    "train.batch_size=8",
    "train.device=cpu",
    "rounds.quorum=0.1",
    f"rounds.deadline={DEADLINE:g}",
    "rounds.registration=900",
]

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(6 * 3600)]


class Cabled(LocalDeployment):
    """A deployment in which the node of ``CUT`` is connected by a cable that can be cut."""

    cable: Cable

    def start_node(self, name: str) -> Child:
        self.node_address = self.cable.address if name == CUT else None
        return super().start_node(name)


@dataclass
class Stage:
    """A run on a deployment whose clients can be held."""

    deployment: Cabled
    output: Path
    orders: Path

    def held(self, client: str, number: int) -> bool:
        return (self.orders / f"{client}.held.{number}").exists()

    def let_it_keep(self, client: str, number: int) -> None:
        """Let the client go on, until the state that it made in round ``number`` is on its disk."""
        (self.orders / f"{client}.hold.{number}").unlink()
        folder = self.deployment.folder / "nodes" / client / "state"
        pattern = f"*/{client}/state-*-{number:06d}.safetensors"
        wait_until(lambda: list(folder.glob(pattern)), f"the state of {client} after round {number}")

    def closed(self, number: int) -> bool:
        return any(entry["round"] == number for entry in events(self.output, "round done", "round skipped"))

    def clientapps(self, client: str) -> list[int]:
        return [pid for pid, words in started_by(self.deployment, client).items() if "flwr-clientapp" in words]


def kill_clientapp(stage: Stage, client: str, number: int) -> None:
    found = stage.clientapps(client)
    assert found
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    stage.let_it_keep(client, number)
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def kill_the_node(stage: Stage, client: str, number: int) -> None:
    os.kill(stage.deployment.children[client].process.pid, signal.SIGSTOP)
    stage.let_it_keep(client, number)
    kill_node(stage.deployment, client)
    restart_until_admitted(stage.deployment, client)


def stop_the_node(stage: Stage, client: str, number: int) -> None:
    """Until the deadline has passed."""
    pid = stage.deployment.children[client].process.pid
    os.kill(pid, signal.SIGSTOP)
    stage.let_it_keep(client, number)
    wait_until(lambda: stage.closed(number), f"the end of round {number}")
    os.kill(pid, signal.SIGCONT)


def cut_the_cable(stage: Stage, client: str, number: int) -> None:
    """Until the deadline has passed."""
    stage.deployment.cable.cut()
    stage.let_it_keep(client, number)
    wait_until(lambda: stage.closed(number), f"the end of round {number}")
    stage.deployment.cable.mend()
    if stage.deployment.children[client].process.poll() is not None:  # Flower takes some errors of TLS for final
        restart_until_admitted(stage.deployment, client)


Fault = Callable[[Stage, str, int], None]
FAULTS: dict[tuple[int, str], Fault] = {
    (2, CUT): cut_the_cable,
    (2, OTHER): kill_clientapp,
    (3, OTHER): stop_the_node,
    (4, OTHER): kill_the_node,
}


def carry_out(stage: Stage, place: tuple[int, str], running: Thread) -> str:
    """Carry out the fault at ``place``; return what was met."""
    number, client = place
    wait_until(lambda: stage.held(client, number) or stage.closed(number) or not running.is_alive(), f"{place}")
    if not stage.held(client, number):
        return "missed"
    FAULTS[place](stage, client, number)
    return "met"


@pytest.mark.parametrize(("method", "held"), [("fedrep", "HeldFedRep"), ("scaffold", "HeldSCAFFOLD")])
def test_what_did_not_count_leaves_nothing_on_a_device(
    method: str, held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, orders, output = tmp_path / "module", tmp_path / "orders", tmp_path / "run"
    module.mkdir()
    orders.mkdir()
    source = Path(__file__).resolve().parents[1] / "support" / "held.py"
    (module / "held.py").write_bytes(source.read_bytes())
    monkeypatch.syspath_prepend(module)
    monkeypatch.setenv("PYTHONPATH", str(module))
    monkeypatch.setenv("HELD_ORDERS", str(orders))
    chosen = [f"method={method}", *THREE, f"method._target_=held.{held}"]
    for number, client in FAULTS:
        (orders / f"{client}.hold.{number}").touch()
    settings = load_settings([*chosen, "engine=superlink", f"output={output}"])
    prepare_output(settings)
    deployment = Cabled(tmp_path / "flower", one_node_per_client(settings))
    deployment.cable = Cable(deployment.address)
    with contextlib.closing(deployment.cable), deployment:
        met = on_nodes(Stage(deployment, output, orders), settings)
    rows = read_lines(output / "replies.jsonl")
    statuses = {(row["round"], row["client"]): row["status"] for row in rows}
    print(method, met, statuses, sep="\n", flush=True)
    assert list(met.values()).count("met") >= 3, "too few clients were held where they were meant to be"
    for place, how in met.items():
        assert how == "missed" or statuses[place] not in ("trained", "scaled")
    for client in (CUT, OTHER):
        assert any(statuses.get((number, client)) == "trained" for number in range(5, ROUNDS + 1)), "it came back"
    skipped = {entry["round"] for entry in events(output, "round skipped")}
    counted = {place for place, status in statuses.items() if update_was_used(status) and place[0] not in skipped}

    def unasked(request: Request) -> bool:
        return request.train and (request.round, request.client) not in counted

    again = load_settings([*chosen, "engine=inline", f"output={tmp_path / 'inline'}"])
    replayed = run(again, TouchedEngine(again, unasked=unasked))
    assert RunRecord.open(output).summary["state_sha256"] == replayed.sha256


def on_nodes(stage: Stage, settings: object) -> dict[tuple[int, str], str]:
    """Run on nodes with all faults; what was met of each."""
    running = Thread(target=stage.deployment.run, args=(settings,), daemon=True)
    running.start()
    with ThreadPoolExecutor(len(FAULTS)) as pool:
        met = dict(zip(FAULTS, pool.map(lambda place: carry_out(stage, place, running), FAULTS), strict=True))
    end = time.monotonic() + ROUNDS * (DEADLINE + 60)
    while running.is_alive() and time.monotonic() < end:
        time.sleep(0.5)
    assert not running.is_alive()
    return met
