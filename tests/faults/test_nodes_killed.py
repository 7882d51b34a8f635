"""SuperNodes killed with SIGKILL in every phase of their work, and restarted as a restart policy does.

Every third round five of six nodes are killed, one in each phase, as the marks and logs of each show it to be there. In
the round after, the sixth waits until they are all back. In the round after that all train, and each must find the
state of its own that counted last, as its disk has it.
"""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support.faults import events, kill_node, node_log, restart_until_admitted, started_by, trials, wait_until
from support.paced import digest

from common.client_state import ClientStore
from common.settings import load_settings
from common.wire.messages import update_was_used
from goldfinch.commands.deployment import LocalDeployment, one_node_per_client
from server.run.conduct import prepare_output
from server.run.schema import read_lines

PHASES = ("before receiving", "evaluating", "training", "uploading", "idle")
DEADLINE = float(os.environ.get("GOLDFINCH_DEADLINE", "240"))
"""Seconds; an idle machine needs half of it."""
SURVIVOR = "handwritten-1"

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(6 * 3600)]


@dataclass
class Watch:
    """A run of six nodes on a deployment, and hands on its clients."""

    deployment: LocalDeployment
    output: Path
    orders: Path
    state: Path
    offsets: dict[str, int] = field(default_factory=dict)

    def pause(self, client: str, phase: str, number: int) -> None:
        path = self.orders / f"{client}.pause"
        path.with_suffix(".tmp").write_text(f"{phase}@{number}")
        path.with_suffix(".tmp").rename(path)

    def release(self, client: str) -> None:
        (self.orders / f"{client}.pause").unlink(missing_ok=True)

    def began(self, number: int) -> Any:
        return next((entry for entry in events(self.output, "round") if entry["round"] == number), None)

    def closed(self, number: int) -> Any:
        ends = events(self.output, "round done", "round skipped")
        return next((entry for entry in ends if entry["round"] == number), None)

    def reached(self, client: str, mark: str, number: int) -> bool:
        return (self.orders / f"{client}.{mark}.{number}").exists()

    def forget_logs(self) -> None:
        """From here on, :meth:`train_log` is of what comes."""
        self.offsets = {client: len(node_log(self.deployment, client)) for client in self.deployment.nodes}

    def train_log(self, client: str) -> str:
        """What its node has logged of training since; a registration may come before it."""
        text = node_log(self.deployment, client)[self.offsets.get(client, 0) :]
        place = text.find("Receiving: train")
        return text[place:] if place >= 0 else ""

    def kept(self, client: str, before: int) -> tuple[int, str]:
        """Round and digest of what the client must find in round ``before``: the last that counted, from its files."""
        counted = [0]
        for row in read_lines(self.output / "replies.jsonl"):
            if row["client"] == client and update_was_used(row["status"]) and int(row["round"]) < before:
                counted.append(int(row["round"]))
        (folder,) = (self.state / client / "state").glob(f"*/{client}")
        store = ClientStore(folder)
        own = {}
        for version in store.versions():
            if version.position == counted[-1]:
                found = store.load(version).tensors
                own = {name.removeprefix("local/"): found[name] for name in found if name.startswith("local/")}
        return counted[-1], digest(own)

    def identities(self, client: str) -> set[str]:
        """The ids under which the SuperLink has known its node."""
        return set(re.findall(r"SuperNode ID: (\d+)", node_log(self.deployment, client)))


def kill_in(watch: Watch, client: str, phase: str, number: int) -> bool:
    """Kill the client's node in ``phase`` of round ``number``; whether its log agrees that it was there."""
    if phase == "before receiving":
        wait_until(lambda: watch.began(number), f"round {number}")
    elif phase in ("evaluating", "training"):
        wait_until(lambda: watch.reached(client, phase, number), f"{client} {phase}")
    else:
        line = "Sending: train" if phase == "uploading" else "Sent successfully"
        wait_until(lambda: line in watch.train_log(client), f"{client} {phase}")
    kill_node(watch.deployment, client)
    log = watch.train_log(client)
    met = {
        "before receiving": not log,
        "evaluating": bool(log) and "Sending" not in log,
        "training": bool(log) and "Sending" not in log,
        "uploading": "Sending" in log and "Sent" not in log,
        "idle": "Sent successfully" in log,
    }
    return met[phase]


def killed_and_restarted(watch: Watch, client: str, phase: str, number: int) -> dict[str, Any]:
    met = kill_in(watch, client, phase, number)
    orphans = set(started_by(watch.deployment, client))
    killed = time.time()
    starts = restart_until_admitted(watch.deployment, client)
    back = round(time.time() - killed, 1)
    watch.release(client)
    left = [words for pid, words in started_by(watch.deployment, client).items() if pid in orphans]
    entry = {"round": number, "client": client, "phase": phase, "met": met, "starts": starts, "back_after": back}
    return {**entry, "orphans": len(left), "trainers_orphaned": sum("client.resident" in words for words in left)}


def kill_round(watch: Watch, number: int, phases: dict[str, str]) -> list[dict[str, Any]]:
    """Kill and restart all at once; what came of it, with the seconds the round took."""
    with ThreadPoolExecutor(len(phases)) as pool:
        found = list(pool.map(lambda item: killed_and_restarted(watch, *item, number), phases.items()))
    end = wait_until(lambda: watch.closed(number), f"the end of round {number}")
    for entry in found:
        entry["closed_after"] = round(end["time"] - watch.began(number)["time"], 1)
    return found


def everyone_trains(watch: Watch, number: int, victims: list[str], record: list[dict[str, Any]]) -> None:
    """Wait until all have trained in round ``number``; each must have found the state that its disk had."""
    for client in victims:
        wait_until(lambda client=client: watch.reached(client, "kept", number), f"{client} in round {number}")
        wait_until(lambda client=client: "Sent successfully" in watch.train_log(client), f"{client}'s answer")
        found = (watch.orders / f"{client}.kept.{number}").read_text()
        newest, expected = watch.kept(client, number)
        for entry in record:
            if entry["client"] == client and entry["round"] == number - 2:
                entry["found_own_state"] = found == expected
                entry["state_of_round"] = newest


SIX = [
    "method=moon",
    "tuned=none",
    "protocol=glyphs_uneven",
    "protocol.counts={handwritten:2,printed:2,signs:1,sketch:1}",
    "train.local_steps=2",
    "train.batch_size=8",
    "train.device=cpu",
    "rounds.quorum=0.1",
    f"rounds.deadline={DEADLINE:g}",
    "rounds.registration=900",
]


def submit(deployment: LocalDeployment, output: Path, rounds: int) -> Thread:
    paced = "method._target_=paced.Paced"
    overrides = [*SIX, paced, "engine=superlink", f"train.rounds={rounds}", f"output={output}"]
    settings = load_settings(overrides)
    prepare_output(settings)
    thread = Thread(target=deployment.run, args=(settings,), daemon=True)
    thread.start()
    return thread


def test_killed_nodes_come_back_with_their_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cycles = trials(2)
    module, orders, output = tmp_path / "module", tmp_path / "orders", tmp_path / "run"
    module.mkdir()
    orders.mkdir()
    source = Path(__file__).resolve().parents[1] / "support" / "paced.py"
    (module / "paced.py").write_bytes(source.read_bytes())
    monkeypatch.syspath_prepend(module)
    monkeypatch.setenv("PYTHONPATH", str(module))
    monkeypatch.setenv("PACED_ORDERS", str(orders))
    record: list[dict[str, Any]] = []
    with LocalDeployment(tmp_path / "flower", one_node_per_client(load_settings(SIX))) as deployment:
        watch = Watch(deployment, output, orders, deployment.folder / "nodes")
        victims = sorted(set(deployment.nodes) - {SURVIVOR})
        running = submit(deployment, output, 3 * cycles + 1)
        watch.pause(SURVIVOR, "training", 1)
        for cycle in range(cycles):
            check, kill, back = 3 * cycle + 1, 3 * cycle + 2, 3 * cycle + 3
            phases = {client: PHASES[(index + cycle) % len(PHASES)] for index, client in enumerate(victims)}
            everyone_trains(watch, check, victims, record)
            watch.forget_logs()
            for client, phase in phases.items():
                watch.pause(client, phase, kill)
            watch.pause(SURVIVOR, "training", back)  # which lets it go in this round, so that the next begins
            record += kill_round(watch, kill, phases)
            print(*record[-len(victims) :], sep="\n", flush=True)
            watch.forget_logs()
            watch.pause(SURVIVOR, "training", back + 1)
        everyone_trains(watch, 3 * cycles + 1, victims, record)
        watch.release(SURVIVOR)
        running.join(DEADLINE + 60)
        assert not running.is_alive()
        assert [len(watch.identities(client)) for client in victims] == [1] * len(victims)
    assert events(output, "finish"), "the run did not finish"
    rows = read_lines(output / "replies.jsonl")
    for entry in record:
        mine = (row for row in rows if row["client"] == entry["client"] and int(row["round"]) == entry["round"])
        entry["server"] = next(mine)["status"]
    Path(os.environ.get("GOLDFINCH_TRIALS_RECORD", tmp_path / "trials.json")).write_text(json.dumps(record, indent=1))
    print(*record, sep="\n")
    for entry in record:
        assert entry["closed_after"] <= DEADLINE + 10
        assert entry["found_own_state"]
        assert not entry["trainers_orphaned"]
        if entry["server"] == "trained":
            assert entry["phase"] in ("uploading", "idle")
            assert entry["state_of_round"] >= entry["round"]
        else:  # while it was uploading, it had saved a state, which did not count
            assert entry["phase"] != "idle"
            assert entry["server"] == "lost"
            assert entry["state_of_round"] != entry["round"]
    assert sum(entry["met"] for entry in record) >= 0.8 * len(record), "too many were killed elsewhere than meant"
