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
from goldfinch.commands.deployment import LocalDeployment, Store, one_node_per_client
from goldfinch.record import RunRecord
from server.engines.inline import InlineEngine
from server.flower.processes import STOP_SECONDS
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


def started(deployment: LocalDeployment, output: Path, number: int, *more: str) -> tuple[Thread, list[str]]:
    """A run that somebody watches, in round ``number``; in the list will be what it ends with."""
    errors: list[str] = []

    def watch() -> None:
        try:
            whole(deployment, output, *more)
        except EngineError as error:
            errors.append(str(error))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    wait_until(lambda: any(e["round"] == number for e in events(output, "round")), f"round {number}", 2 * PATIENCE)
    return thread, errors


def ended(thread: Thread, errors: list[str]) -> str:
    """Wait until the run has ended; return its error."""
    thread.join(PATIENCE)
    assert not thread.is_alive()
    (error,) = errors
    print(f"\n{error}", flush=True)
    assert "resume=true goes on" in error
    return error


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of the inline run."""
    settings = load_settings([*TWO, f"output={tmp_path_factory.mktemp('inline')}"])
    prepare_output(settings)
    return run_federation(settings, InlineEngine(settings))


def assert_resumes(deployment: LocalDeployment, output: Path, undisturbed: dict[str, Any]) -> None:
    """The run goes on to the state of the inline run."""
    whole(deployment, output, "resume=true")
    found = RunRecord.open(output).summary
    assert found["state_sha256"] == undisturbed["state_sha256"]
    assert found["scores"] == undisturbed["scores"]


def nodes() -> dict[str, dict[str, object]]:
    return one_node_per_client(load_settings(list(TWO)))


def server_process(deployment: LocalDeployment) -> int:
    found = [pid for pid, words in started_by(deployment, "superlink").items() if "flwr-serverapp" in words]
    assert len(found) == 1
    return found[0]


def gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


def test_a_superlink_that_is_asked_to_end_in_a_round_ends_with_its_server_process(tmp_path: Path) -> None:
    """SIGTERM: it closes its port and waits for the server process, which cannot reach it any more."""
    output = tmp_path / "run"
    with LocalDeployment(tmp_path / "flower", nodes(), secure=False) as deployment:
        thread, errors = started(deployment, output, 2, "rounds.deadline=20", "train.rounds=50")
        server = server_process(deployment)
        link = deployment.children["superlink"].process
        os.kill(link.pid, signal.SIGTERM)
        wait_until(lambda: gone(server), "the end of the server process", 2 * PATIENCE)
        link.wait(PATIENCE)
        deployment.start_link()
        ended(thread, errors)
        assert list((output / "checkpoint").iterdir())


@pytest.mark.parametrize("trial", range(trials(1)))
def test_a_killed_server_process_resumes_to_the_same_state(
    trial: int, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """At a random instant of a random round."""
    draw = random.Random(trial)
    output = tmp_path / "run"
    with LocalDeployment(tmp_path / "flower", nodes(), secure=False) as deployment:
        thread, errors = started(deployment, output, draw.randint(1, ROUNDS))
        time.sleep(draw.uniform(0, 5))
        os.kill(server_process(deployment), signal.SIGKILL)
        ended(thread, errors)
        assert_resumes(deployment, output, undisturbed)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("store", ["sqlite", "memory"])
def test_a_run_resumes_to_the_same_state_after_its_superlink_restarted(
    store: Store, number: signal.Signals, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    """TLS and enrolled keys. A store in memory is lost; the devices are enrolled again, as the same clients."""
    output = tmp_path / "run"
    with LocalDeployment(tmp_path / "flower", nodes(), store=store) as deployment:
        thread, errors = started(deployment, output, 2)
        time.sleep(random.Random(f"{store} {number}").uniform(0, 2))
        server = server_process(deployment)
        link = deployment.children["superlink"]
        began = time.monotonic()
        if number == signal.SIGTERM:
            link.stop()
        else:
            os.kill(link.process.pid, number)
            link.process.wait()
        assert time.monotonic() - began < STOP_SECONDS + 10
        deployment.start_link()
        if store == "memory":  # nodes end when a SuperLink does not know them; a restart policy starts them again
            for name in deployment.nodes:
                node = deployment.children[name].process
                wait_until(lambda node=node: node.poll() is not None, f"the end of {name}")
                restart_until_admitted(deployment, name)
        error = ended(thread, errors)
        wait_until(lambda: gone(server), "the end of the orphaned server process")
        assert ("no longer knows run" in error) == (store == "memory")
        assert_resumes(deployment, output, undisturbed)
        assert [deployment.children[name].process.poll() for name in deployment.nodes] == [None, None]
