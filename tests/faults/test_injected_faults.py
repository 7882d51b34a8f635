"""A soak: nodes, server and network of a real deployment fail again and again while one run goes on.

``make soak MINUTES=30 METHOD=fpl STORE=sqlite SEED=0``. Every fault is drawn from the seed and printed. At the end the
run's state must be that of an inline run in which exactly those clients are asked whose replies the record says to
have counted, and every reply that did not count must have a fault and a reason that fits it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
from support.cables import Cable
from support.faults import (
    PATIENCE,
    events,
    kill_node,
    restart_until_admitted,
    small_disk,
    started_by,
    wait_until,
)
from support.runs import TouchedEngine, run

from common.errors import EngineError
from common.settings import load_settings
from common.wire.messages import Request, update_was_used
from goldfinch.commands.deployment import LocalDeployment, Store, one_node_per_client
from goldfinch.record import RunRecord
from server.flower.processes import Child
from server.run.conduct import prepare_output
from server.run.schema import read_lines

MINUTES = float(os.environ.get("GOLDFINCH_SOAK_MINUTES", "4"))
METHOD = os.environ.get("GOLDFINCH_SOAK_METHOD", "fpl")
STORE: Store = "memory" if os.environ.get("GOLDFINCH_SOAK_STORE") == "memory" else "sqlite"
SEED = int(os.environ.get("GOLDFINCH_SOAK_SEED", "0"))
DEADLINE = int(os.environ.get("GOLDFINCH_DEADLINE", "60"))
"""Seconds; an idle machine needs half of it."""
QUIET_ROUNDS = 2
"""Rounds without a fault after each, so that what it left is seen, and at the end."""
LATE_SHARE = 0.05
"""The largest share of replies that may be late without a fault, on a crowded machine."""
SMALL_DISK = "sketch-0"
"""The client whose states are on a small disk of their own."""
FOUR = [
    f"method={METHOD}",
    "tuned=none",
    "protocol.samples=24",
    "train.local_steps=4",
    "train.batch_size=8",
    "train.device=cpu",
    "rounds.quorum=0.1",
    f"rounds.deadline={DEADLINE}",
    "rounds.registration=600",
    "rounds.evaluate_every=20",
]

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(6 * 3600)]


class Cabled(LocalDeployment):
    """A deployment whose nodes are each connected by a cable."""

    cables: dict[str, Cable]

    def start_node(self, name: str) -> Child:
        self.node_address = self.cables[name].address
        return super().start_node(name)


@dataclass
class Injected:
    """One fault: whom it met, from when to when, and in which rounds."""

    fault: str
    client: str
    began: float
    ended: float = inf
    rounds: tuple[int, int] = (0, 0)


@dataclass
class Soak:
    """A run on a deployment, and hands on its processes, its network and a disk."""

    deployment: Cabled
    output: Path
    draw: random.Random
    disk: Callable[[str], None]
    running: Thread | None = None
    ends: list[str] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    growth: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    # ---- the run ----

    def go_on(self, rounds: int) -> Thread:
        """Start the run, or resume it."""
        more = ["resume=true"] if (self.output / "events.jsonl").exists() else []
        settings = load_settings([*FOUR, "engine=superlink", f"output={self.output}", f"train.rounds={rounds}", *more])

        def follow() -> None:
            try:
                self.deployment.run(settings)
            except EngineError as error:
                self.ends.append(str(error).splitlines()[0])

        prepare_output(settings)
        self.running = Thread(target=follow, daemon=True)
        self.running.start()
        return self.running

    def alive(self) -> bool:
        return self.running is not None and self.running.is_alive()

    def done(self) -> int:
        return max((entry["round"] for entry in events(self.output, "round done", "round skipped")), default=0)

    def begun(self) -> int:
        return max((entry["round"] for entry in events(self.output, "round")), default=0)

    def later_round(self, number: int) -> bool:
        """Whether round ``number`` has been done; the end of the run ends the wait, too.

        Nodes that ended start again, as they do under systemd.
        """
        time.sleep(0.3)
        for name in self.deployment.nodes:
            back(self, name)
        return self.done() >= number or not self.alive()

    # ---- processes ----

    def server_process(self) -> list[int]:
        return [pid for pid, words in started_by(self.deployment, "superlink").items() if "flwr-serverapp" in words]

    def clientapps(self, client: str) -> list[int]:
        return [pid for pid, words in started_by(self.deployment, client).items() if "flwr-clientapp" in words]

    def trainers(self, client: str) -> list[int]:
        return [pid for pid, words in started_by(self.deployment, client).items() if "client.resident" in words]

    def note_growth(self) -> None:
        """Megabytes of files and of resident memory, for the growth table."""
        folders = {"run folder": self.output, "nodes": self.deployment.folder / "nodes"}
        folders["logs"] = self.deployment.folder / "logs"
        found = {name: size(folder) for name, folder in folders.items()}
        database = self.deployment.folder / "link.db"
        found["SuperLink's database"] = database.stat().st_size / 1e6 if database.exists() else 0.0
        for name in ("superlink", *self.deployment.nodes):
            pid = self.deployment.children[name].process.pid
            if psutil.pid_exists(pid):
                found[f"memory of {name}"] = psutil.Process(pid).memory_info().rss / 1e6
        self.growth.append((self.done(), found))


def size(folder: Path) -> float:
    """Megabytes of the files below a folder, some of which may go while they are counted."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total / 1e6


def kill(pids: list[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# ---- faults of one client --------------------------------------------------------------------------------------------


def client_app_killed(soak: Soak, client: str) -> None:
    kill(soak.clientapps(client))


def trainer_killed(soak: Soak, client: str) -> None:
    kill(soak.trainers(client))


def node_killed(soak: Soak, client: str) -> None:
    kill_node(soak.deployment, client)
    restart_until_admitted(soak.deployment, client)


def node_signed_off(soak: Soak, client: str) -> None:
    soak.deployment.children[client].stop()
    time.sleep(soak.draw.uniform(2, 10))
    restart_until_admitted(soak.deployment, client)


def node_stopped(soak: Soak, client: str) -> None:
    pid = soak.deployment.children[client].process.pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(soak.draw.choice([5, DEADLINE + 10]))
    os.kill(pid, signal.SIGCONT)


def slow_processor(soak: Soak, client: str) -> None:
    """The node and all that it started work a tenth of the time."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        pids = list(started_by(soak.deployment, client))
        for number, seconds in ((signal.SIGSTOP, 0.9), (signal.SIGCONT, 0.1)):
            kill(pids, number)
            time.sleep(seconds)


def network_cut(soak: Soak, client: str) -> None:
    cable = soak.deployment.cables[client]
    cable.cut()
    time.sleep(soak.draw.choice([20, 90]))
    cable.mend()


def network_slow(soak: Soak, client: str) -> None:
    cable = soak.deployment.cables[client]
    cable.delay = 0.3
    time.sleep(20)
    cable.delay = 0.0


def twin(soak: Soak, client: str) -> None:
    """A second node with the same key."""
    child = soak.deployment.children[client]
    port = soak.deployment.ports[client]
    second = soak.deployment.start_node(client)
    time.sleep(15)
    second.stop()
    soak.deployment.children[client] = child
    soak.deployment.ports[client] = port


def clock_behind(soak: Soak, client: str) -> None:
    """The node starts again with a clock ten minutes behind, is not let in, and starts again with the right one."""
    soak.deployment.children[client].stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKEWED_BY", "-600")
        node = soak.deployment.start_node(client)
    time.sleep(20)
    node.stop()
    restart_until_admitted(soak.deployment, client)


def disk_full(soak: Soak, client: str) -> None:
    assert client == SMALL_DISK
    place = soak.deployment.folder / "nodes" / client / "state"
    used = shutil.disk_usage(place).used
    soak.disk(f"size={max(used // 1024, 4)}k")
    time.sleep(10)
    soak.disk("size=64m")


def back(soak: Soak, client: str) -> None:
    """Start the node again if it ended: Flower takes some errors for final."""
    if soak.deployment.children[client].process.poll() is not None:
        restart_until_admitted(soak.deployment, client)


Fault = Callable[[Soak, str], None]
NO_REPLY = r"no reply \d+ s after it was asked; its node is (online|offline)"
LATE = rf"no complete answer within {DEADLINE} s|still at an earlier round"
OFFLINE = "its node is offline"
OF_A_CLIENT: dict[str, tuple[Fault, str]] = {
    "ClientApp killed": (client_app_killed, NO_REPLY),
    "trainer killed": (trainer_killed, rf"{NO_REPLY}|training process"),
    "node killed": (node_killed, rf"{NO_REPLY}|{OFFLINE}|{LATE}"),
    "node signed off": (node_signed_off, rf"{NO_REPLY}|{OFFLINE}|{LATE}"),
    "node stopped": (node_stopped, rf"{NO_REPLY}|{OFFLINE}|{LATE}"),
    "processor slow": (slow_processor, rf"{NO_REPLY}|{OFFLINE}|{LATE}"),
    "network cut": (network_cut, rf"{NO_REPLY}|{OFFLINE}|{LATE}"),
    "network slow": (network_slow, rf"{NO_REPLY}|{OFFLINE}|{LATE}"),
    "twin": (twin, rf"{NO_REPLY}|{OFFLINE}|{LATE}"),
    "clock behind": (clock_behind, rf"{NO_REPLY}|{OFFLINE}|{LATE}"),
    "disk full": (disk_full, "No space left on device|disk"),
}
"""Each fault, and the reasons that are true of it."""

# ---- faults of the server --------------------------------------------------------------------------------------------


def server_killed(soak: Soak, _: str) -> None:
    kill(soak.server_process())
    assert soak.running is not None
    soak.running.join(PATIENCE)


def link_killed(soak: Soak, _: str) -> None:
    link = soak.deployment.children["superlink"].process
    servers = soak.server_process()
    link.kill()
    link.wait()
    wait_until(lambda: not any(map(psutil.pid_exists, servers)), "the end of the orphaned server process")
    soak.deployment.start_link()
    assert soak.running is not None
    soak.running.join(PATIENCE)
    if STORE == "memory":
        for name in soak.deployment.nodes:
            node = soak.deployment.children[name].process
            wait_until(lambda node=node: node.poll() is not None, f"the end of {name}")
            restart_until_admitted(soak.deployment, name)


OF_THE_SERVER: dict[str, Fault] = {"ServerApp killed": server_killed, "SuperLink killed": link_killed}


def inject(soak: Soak, name: str, client: str) -> None:
    """Carry out one fault in the round that has begun; what it met is noted."""
    fault = OF_THE_SERVER.get(name) or OF_A_CLIENT[name][0]
    first = soak.begun()
    found = Injected(name, client, time.time())
    soak.injected.append(found)
    fault(soak, client)
    if not soak.alive():
        target = soak.done() + 1
        soak.go_on(10**6)
        wait_until(lambda: soak.later_round(target), "a round after the resume")
    found.ended = time.time()
    found.rounds = (first, soak.begun() + 1)
    print(f"{name}: {client or 'server'}, rounds {first} to {found.rounds[1]}, {found.ended - found.began:.0f} s")


def soaked(soak: Soak) -> int:
    """Inject faults until the time is up, then end the run; return how many rounds it has."""
    end = time.monotonic() + 60 * MINUTES
    names: list[str] = []
    soak.go_on(10**6)
    while time.monotonic() < end:
        if not names:
            names = [*OF_A_CLIENT, *OF_THE_SERVER]
            soak.draw.shuffle(names)
        name = names.pop()
        client = "" if name in OF_THE_SERVER else soak.draw.choice(sorted(soak.deployment.nodes))
        if name == "disk full":
            client = SMALL_DISK
        number = soak.begun()
        wait_until(lambda number=number: soak.begun() > number or not soak.alive(), "the next round")
        time.sleep(soak.draw.uniform(0, 1))
        inject(soak, name, client)
        target = soak.done() + QUIET_ROUNDS
        wait_until(lambda target=target: soak.later_round(target), "the rounds after it")
        assert soak.alive(), soak.ends
        soak.note_growth()
    kill(soak.server_process())
    assert soak.running is not None
    soak.running.join(PATIENCE)
    rounds = soak.done() + QUIET_ROUNDS
    soak.go_on(rounds).join(2 * PATIENCE)
    assert not soak.alive()
    return rounds


@contextmanager
def deployed(folder: Path, output: Path) -> Iterator[Soak]:
    """A deployment with TLS and enrolled keys, a cable to each node, and a small disk for one of them."""
    deployment = Cabled(folder, one_node_per_client(load_settings(FOUR)), store=STORE)
    deployment.cables = {}
    node = folder / "nodes" / SMALL_DISK
    node.mkdir(parents=True)
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(node / "state", "64m"))
        for name in deployment.nodes:
            deployment.cables[name] = Cable(deployment.address)
            stack.callback(deployment.cables[name].close)
        stack.enter_context(deployment)
        yield Soak(deployment, output, random.Random(SEED), disk)


def untrue(soak: Soak, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replies that did not count although nothing happened, or for another reason than what happened.

    On a crowded machine a few replies are also late without a fault, and are recorded so.
    """
    found = []
    unprovoked = 0
    for row in rows:
        if update_was_used(row["status"]) or row["status"] == "scored":
            continue
        late = row.get("reason", "").startswith("no complete answer within")
        fits = False
        for fault in soak.injected:
            met = fault.rounds[0] <= row["round"] <= fault.rounds[1]
            if met and fault.fault in OF_THE_SERVER:
                fits = True
            elif met and fault.client == row["client"]:
                fits = fits or re.search(OF_A_CLIENT[fault.fault][1], row.get("reason", "")) is not None
        if late and not fits:
            unprovoked += 1
        elif not fits:
            found.append(row)
    assert unprovoked <= LATE_SHARE * len(rows)
    return found


def print_tables(soak: Soak, rows: list[dict[str, Any]], rounds: int) -> None:
    """What was injected and recorded, and what grew."""
    print(f"\n{METHOD}, {STORE}, seed {SEED}: {rounds} rounds, {len(soak.injected)} faults")
    print("| fault | times | replies that did not count | reasons |\n|---|---:|---:|---|")
    for name in [*OF_A_CLIENT, *OF_THE_SERVER]:
        reasons: list[str] = []
        times = [fault for fault in soak.injected if fault.fault == name]
        for fault in times:
            for row in rows:
                met = fault.rounds[0] <= row["round"] <= fault.rounds[1] and fault.client in ("", row["client"])
                if met and not update_was_used(row["status"]) and row["status"] != "scored":
                    reasons.append(f"{row['status']}: {row.get('reason', '')[:90]}")
        print(f"| {name} | {len(times)} | {len(reasons)} | {'; '.join(sorted(set(reasons)))} |")
    print("| MB | first | last |\n|---|---:|---:|")
    (_, first), (_, last) = soak.growth[0], soak.growth[-1]
    for name in last:
        print(f"| {name} | {first.get(name, 0):.2f} | {last[name]:.2f} |")
    print("the run ended in between with:", *sorted(set(soak.ends)), sep="\n  ")
    print("recorded:", *[entry["reason"] for entry in events(soak.output, "interrupted")], sep="\n  ")


def test_server_and_devices_agree_after_every_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, output = tmp_path / "module", tmp_path / "run"
    module.mkdir()
    clock = Path(__file__).resolve().parents[1] / "support" / "skewed_clock.py"
    (module / "sitecustomize.py").write_bytes(clock.read_bytes())
    monkeypatch.setenv("PYTHONPATH", str(module))
    with deployed(tmp_path / "flower", output) as soak:
        rounds = soaked(soak)
    rows = read_lines(output / "replies.jsonl")
    print_tables(soak, rows, rounds)
    summary = RunRecord.open(output).summary
    assert summary["rounds"] == rounds
    skipped = {entry["round"] for entry in events(output, "round skipped")}
    counted = {
        (row["round"], row["client"]) for row in rows if update_was_used(row["status"]) and row["round"] not in skipped
    }

    def unasked(request: Request) -> bool:
        return request.train and (request.round, request.client) not in counted

    again = load_settings([*FOUR, "engine=inline", f"train.rounds={rounds}", f"output={tmp_path / 'inline'}"])
    assert summary["state_sha256"] == run(again, TouchedEngine(again, unasked=unasked)).sha256
    assert untrue(soak, rows) == []
