"""The server process and the SuperLink of a deployment killed in mid-run: words, and a resume that loses nothing."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from support.faults import PATIENCE, events, restart_until_admitted, started_by, trials, wait_until

from common.errors import EngineError
from common.settings import load_settings
from server.commands.deployment import LocalDeployment, Store, one_node_per_client
from server.engines.inline import InlineEngine
from server.flower.processes import STOP_SECONDS
from server.results.run import RunFolder
from server.run.conduct import prepare_output, run_federation

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(6 * 3600)]
ROUNDS = 3
TWO = (
    "method=moon",
    "tuned=none",
    "data.domains=[handwritten,signs]",
    "protocol.samples=24",
    f"train.rounds={ROUNDS}",
    "train.batch_size=8",
    "train.device=cpu",
    "rounds.registration=600",
    "rounds.deadline=300",
)


def whole(deployment: LocalDeployment, output: Path, *more: str) -> None:
    overrides = [*TWO, "engine=superlink", f"output={output}", *more]
    settings = load_settings(overrides)
    prepare_output(settings)
    deployment.run(settings)


def start(deployment: LocalDeployment, output: Path, *more: str) -> tuple[Thread, list[str]]:
    """A run that somebody watches; in the list will be what it ends with."""
    errors: list[str] = []

    def watch() -> None:
        try:
            whole(deployment, output, *more)
        except EngineError as error:
            errors.append(str(error))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    return thread, errors


def server_process(deployment: LocalDeployment) -> int:
    found = [pid for pid, words in started_by(deployment, "superlink").items() if "flwr-serverapp" in words]
    assert len(found) == 1
    return found[0]


def test_a_superlink_that_is_asked_to_end_in_a_round_ends_with_its_server_process(tmp_path: Path) -> None:
    """SIGTERM: it closes its port and waits for the server process, which cannot reach it any more."""
    settings = load_settings([*TWO, f"output={tmp_path / 'inline'}"])
    limits = ("rounds.deadline=20", "train.rounds=50")
    with LocalDeployment(tmp_path / "flower", one_node_per_client(settings), secure=False) as deployment:
        output = tmp_path / "run"
        thread, errors = start(deployment, output, *limits)
        wait_until(lambda: any(e["round"] == 2 for e in events(output, "round")), "round 2", 2 * PATIENCE)
        server = server_process(deployment)
        link = deployment.children["superlink"].process
        asked = time.monotonic()
        os.kill(link.pid, signal.SIGTERM)
        wait_until(lambda: not Path(f"/proc/{server}").exists(), "the end of the server process", 2 * PATIENCE)
        print(f"\nserver process gone after {time.monotonic() - asked:.0f} s", flush=True)
        link.wait(PATIENCE)
        print(f"SuperLink gone after {time.monotonic() - asked:.0f} s", flush=True)
        deployment.start_link()
        thread.join(PATIENCE)
        assert len(errors) == 1
        assert list((output / "checkpoint").iterdir())


def test_killed_servers_and_superlinks(tmp_path: Path) -> None:
    """Alternately the server process and the SuperLink, each at a random instant of a random round."""
    settings = load_settings([*TWO, f"output={tmp_path / 'inline'}"])
    prepare_output(settings)
    expected: Any = run_federation(settings, InlineEngine(settings))
    with LocalDeployment(tmp_path / "flower", one_node_per_client(settings), secure=False) as deployment:
        for trial in range(trials(2)):
            draw = random.Random(trial)
            output = tmp_path / f"run-{trial}"
            thread, errors = start(deployment, output)
            number = draw.randint(1, ROUNDS)
            wait_until(
                lambda output=output, number=number: any(e["round"] == number for e in events(output, "round")),
                f"round {number}",
                2 * PATIENCE,
            )
            time.sleep(draw.uniform(0, 5))
            server = server_process(deployment)
            link = deployment.children["superlink"].process
            victim = server if trial % 2 == 0 else link.pid
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            if victim == link.pid:
                link.wait()
                wait_until(
                    lambda path=Path(f"/proc/{server}"): not path.exists(), "the end of the orphaned server process"
                )
                orphaned = time.monotonic() - killed
                deployment.start_link()
            thread.join(PATIENCE)
            assert not thread.is_alive()
            told = time.monotonic() - killed
            assert len(errors) == 1, "the run went on as if nothing had happened"
            assert "resume=true goes on" in errors[0]
            whole(deployment, output, "resume=true")
            found = RunFolder.open(output).summary
            what = "server process" if victim == server else f"SuperLink, its server process gone in {orphaned:.1f} s"
            print(
                f"\n{what}, killed in round {number}: told after {told:.1f} s: {errors[0].splitlines()[0]}", flush=True
            )
            assert found["state_sha256"] == expected["state_sha256"]
            assert found["scores"] == expected["scores"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("store", ["sqlite", "memory"])
def test_a_run_resumes_to_the_same_state_after_its_superlink_restarted(
    tmp_path: Path, store: Store, number: signal.Signals
) -> None:
    """TLS and enrolled keys. A store in memory is lost; the devices are enrolled again, as the same clients."""
    settings = load_settings([*TWO, f"output={tmp_path / 'inline'}"])
    prepare_output(settings)
    expected: Any = run_federation(settings, InlineEngine(settings))
    nodes = one_node_per_client(settings)
    with LocalDeployment(tmp_path / "flower", nodes, store=store) as deployment:
        output = tmp_path / "run"
        thread, errors = start(deployment, output)
        wait_until(lambda: any(e["round"] == 2 for e in events(output, "round")), "round 2", 2 * PATIENCE)
        server = server_process(deployment)
        link = deployment.children["superlink"]
        began = time.monotonic()
        if number == signal.SIGTERM:
            link.stop()
        else:
            os.kill(link.process.pid, number)
            link.process.wait()
        stopped = time.monotonic() - began
        assert stopped < STOP_SECONDS + 10
        deployment.start_link()
        started = time.monotonic() - began
        if store == "memory":  # nodes end when a SuperLink does not know them; a restart policy starts them again
            for name in nodes:
                wait_until(lambda name=name: deployment.children[name].process.poll() is not None, f"the end of {name}")
                restart_until_admitted(deployment, name)
        back = time.monotonic() - began
        thread.join(PATIENCE)
        assert not thread.is_alive()
        wait_until(lambda: not Path(f"/proc/{server}").exists(), "the end of the orphaned server process")
        orphaned = time.monotonic() - began
        print(f"\nstopped {stopped:.1f} s, answers {started:.1f} s, nodes back {back:.1f} s, told {orphaned:.1f} s")
        print(errors[0])
        assert len(errors) == 1
        assert "resume=true goes on" in errors[0]
        assert ("no longer knows run" in errors[0]) == (store == "memory")
        whole(deployment, output, "resume=true")
        assert [deployment.children[name].process.poll() for name in nodes] == [None, None]
    found = RunFolder.open(output).summary
    assert found["state_sha256"] == expected["state_sha256"]
    assert found["scores"] == expected["scores"]
