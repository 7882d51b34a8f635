"""The resident trainer and the ClientApp in front of it: real trainer processes that train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.common import Code, FitIns, GetPropertiesIns, Parameters
from support.trainers import Asked, gone, in_thread, wait_for, wait_until_busy

from client import app as client_app
from client import node as client_node
from client.resident import caller as caller_module
from client.resident import messages
from client.resident.caller import Caller
from client.resident.messages import TrainerReply
from client.resident.place import Process, of_node, peer
from common.errors import EngineError
from common.versions import CODE
from common.wire.payload import decode
from strategies.core.codec import read_registrations

ROOT = Path(__file__).resolve().parents[2]
LONG = ("train.epochs=40", "protocol.samples=96")

pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.fixture(autouse=True)
def no_devices_of_other_tests() -> None:
    client_node._DEVICES.clear()


def tensors_of(reply: TrainerReply) -> dict[str, list[Any]]:
    assert reply.ok, reply.text
    return {name: tensor.tolist() for name, tensor in decode(reply.tensors[0]).tensors().items()}


# ---- what it is for --------------------------------------------------------------------------------------------------


def test_the_thin_process_imports_no_torch() -> None:
    heavy = (
        "torch",
        "torchvision",
        "pydantic",
        "safetensors",
        "hydra",
        "omegaconf",
        "common.settings",
        "client.device",
    )
    code = f"import sys, client.app; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_it_starts_on_demand_and_answers_as_the_process_itself_would(asked: Asked) -> None:
    assert asked.trainer() is None
    registered = asked.caller.ask(asked.registration())
    assert [item.client for item in read_registrations(registered.text)] == ["sketch-0"]
    pid = asked.trainer()
    assert pid not in (None, os.getpid())
    trained = asked.caller.ask(asked.training())
    assert asked.trainer() == pid, "the second question went to the same process"
    here = client_node.answer_question(asked.training())
    assert trained.samples == here.samples == 24
    assert tensors_of(trained) == tensors_of(here)


def test_two_at_once_get_one_trainer(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    start = Caller._start

    def counted(self: Caller) -> Connection:
        connection = start(self)
        started.append(peer(connection)[0])
        return connection

    monkeypatch.setattr(Caller, "_start", counted)
    replies: list[TrainerReply] = []
    callers = [Caller(asked.caller.node, asked.configuration) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda one=one: replies.append(one.ask(asked.registration()))) for one in callers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.ok for reply in replies] == [True] * 4
    assert len(started) == 1


def test_a_later_run_reads_its_data_again(asked: Asked) -> None:
    for number in (1, 2):
        assert client_node.answer_question(replace(asked.registration(), run=number)).ok
        assert [key[0] for key in client_node._DEVICES] == [number]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_killed_over_a_message_it_is_asked_again_once(asked: Asked) -> None:
    long = Asked(asked.supernode, asked.folder, *LONG)
    question = long.training()
    long.caller.ask(long.registration())  # torch is imported
    first = long.start()
    thread, outcome = in_thread(lambda: long.caller.ask(question))
    wait_until_busy(first, 0.3)
    long.kill(first)
    thread.join()
    assert long.trainer() not in (None, first)
    assert tensors_of(outcome[0]) == tensors_of(client_node.answer_question(question))


def test_killed_again_it_is_an_error_that_names_the_way_out(asked: Asked) -> None:
    long = Asked(asked.supernode, asked.folder, *LONG)
    question = long.training()
    first = long.start()
    thread, outcome = in_thread(lambda: long.caller.ask(question))
    wait_until_busy(first, 0.5)  # it has the question, and is importing torch
    long.kill(first)
    wait_for(lambda: long.trainer() is not None)
    second = long.start()
    wait_until_busy(second, 0.5)
    long.kill(second)
    thread.join()
    assert isinstance(outcome[0], EngineError)
    assert "died 2 times over one message" in str(outcome[0])
    assert "resident=false" in str(outcome[0])


def test_it_leaves_when_the_caller_it_works_for_is_gone(asked: Asked) -> None:
    long = Asked(asked.supernode, asked.folder, "method=moon", *LONG)
    long.caller.ask(long.registration())
    pid, question = long.start(), long.training()
    with long.caller._connection() as connection:
        messages.send(connection, question)
        wait_until_busy(pid, 0.3)
    wait_for(lambda: gone(pid))
    assert not list((long.folder / "state").rglob("*.safetensors"))


def test_other_code_is_replaced_and_its_own_code_is_what_runs(asked: Asked, tmp_path: Path) -> None:
    """Both ways: a trainer of the copy gives way to one of this checkout, and the other way round."""
    copy = tmp_path / "copy"
    for package in CODE:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "common" / "errors.py").open("a") as stream:
        stream.write("# another version\n")

    def ask_from(root: Path) -> str:
        code = (
            "import sys; from client.resident.caller import Caller; from client.resident.messages import Question\n"
            "from client.resident.place import running_process; from common.versions import code_sha256\n"
            "node, overrides, state = sys.argv[1:]; configuration = {'domain': 'sketch', 'state-dir': state}\n"
            "question = Question('register', 7, {'overrides': overrides}, configuration)\n"
            "reply = Caller(running_process(int(node)), configuration).ask(question)\n"
            "print(reply.ok, code_sha256(), code_sha256() in reply.text)"
        )
        arguments = [str(asked.caller.node.pid), " ".join(asked.chosen), asked.configuration["state-dir"]]
        output = tmp_path / "output.txt"  # a file: a trainer inherits its starter's output, and would hold a pipe open
        with output.open("w") as stream:
            environment = {**os.environ, "PYTHONPATH": str(root)}
            command = [sys.executable, "-P", "-c", code, *arguments]
            subprocess.run(command, cwd=ROOT, stdout=stream, check=True, env=environment, timeout=500)
        return output.read_text().strip()

    answers, pids = [], []
    for root in (copy, ROOT, copy):
        answers.append(ask_from(root).split())
        pids.append(asked.trainer() or 0)
    assert [(ok, own) for ok, _, own in answers] == [("True", "True")] * 3
    assert answers[0][1] == answers[2][1] != answers[1][1]
    assert len(set(pids)) == 3
    assert [gone(pid) for pid in pids] == [True, True, False]


def test_an_error_arrives_with_its_traceback(asked: Asked) -> None:
    """The same words as without a trainer."""
    wrong = replace(asked.training(), tensors=[b"no blob"])
    reply, here = asked.caller.ask(wrong), client_node.answer_question(wrong)
    assert (reply.ok, reply.text) == (False, "PayloadError: the message is truncated: 7 bytes") == (here.ok, here.text)
    assert "Traceback (most recent call last)" in reply.traceback
    assert "in read_request" in reply.traceback
    assert asked.caller.ask(asked.registration()).ok, "an error does not end the trainer"


# ---- the ClientApp in front of it ------------------------------------------------------------------------------------


def flower_client(asked: Asked, **configuration: Any) -> client_app.FlowerClient:
    node: Mapping[str, Any] = {**asked.configuration, **configuration}
    context = Context(7, 1, dict(node), RecordDict(), {"overrides": " ".join(asked.chosen)})
    return client_app.FlowerClient(context)


def test_a_process_that_no_superexec_started_does_its_work_itself(asked: Asked) -> None:
    assert of_node() is None
    assert flower_client(asked)._caller() is None


@pytest.mark.parametrize(("value", "used"), [(True, True), (False, False), ("false", False)])
def test_the_switch(value: Any, used: bool, asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_app, "of_node", lambda: asked.caller.node)
    result = flower_client(asked, resident=value).get_properties(GetPropertiesIns({}))
    assert (asked.trainer() is not None) == used
    if isinstance(value, bool):
        assert result.status.code == Code.OK
        assert "sketch-0" in str(result.properties["registrations"])
    else:
        assert "resident must be true or false; got 'false'" in result.status.message


def test_errors_of_trainer_and_caller_reach_flower(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_app, "of_node", lambda: asked.caller.node)
    instruction = FitIns(Parameters([b"x"], "safetensors"), {"request": str(asked.training().request)})
    result = flower_client(asked).fit(instruction)
    assert result.status.code != Code.OK
    assert result.status.message.startswith("PayloadError: the message is truncated")
    assert "read_request" in str(result.metrics["traceback"])
    # not 0: the socket of a trainer that is just dying would then not block at all
    monkeypatch.setattr(caller_module, "START_SECONDS", 0.001)
    asked.kill(asked.trainer())
    late = flower_client(asked).fit(instruction)
    assert "did not answer within 0.001 s" in late.status.message


def test_without_a_private_folder_the_process_works_itself(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(node: Process) -> Path:
        raise OSError("nowhere to go")

    monkeypatch.setattr(client_app, "of_node", lambda: asked.caller.node)
    monkeypatch.setattr(caller_module, "socket_of", refuse)
    assert flower_client(asked).get_properties(GetPropertiesIns({})).status.code == Code.OK
    assert "nowhere to go" in capfd.readouterr().err


SUPEREXEC = """#!{python}
import os, subprocess, sys
code = "from client.resident.place import of_node; print(of_node().pid)"
print(subprocess.run([sys.executable, "-c", code], cwd={root!r}, capture_output=True, text=True).stdout.strip())
print(os.getpid())
"""


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_node_is_found_above_flower_s_superexec(by_hand: bool, tmp_path: Path) -> None:
    script = tmp_path / "flower-superexec"
    script.write_text(SUPEREXEC.format(python=sys.executable, root=str(ROOT)))
    script.chmod(0o755)
    arguments = ["--insecure"] if by_hand else ["--insecure", "--parent-pid", str(os.getpid())]
    done = subprocess.run([str(script), *arguments], capture_output=True, text=True, check=True)
    found, superexec = (int(line) for line in done.stdout.split())
    assert found == (superexec if by_hand else os.getpid())
