"""A trainer that stops in the middle of its identity does not hold up the node for ever."""

import subprocess
import sys
from pathlib import Path

import pytest

import client.resident.caller as caller_module
from client.resident.caller import Caller
from client.resident.place import running_process, socket_of

STOPS = """
import os, socket, sys, time
place = socket.socket(socket.AF_UNIX)
place.bind(sys.argv[1])
place.listen()
print("ready", flush=True)
connection, _ = place.accept()
connection.sendall(bytes.fromhex(sys.argv[2]))
time.sleep(600)
"""


@pytest.mark.parametrize("sent", ["", "00", "0000004f", "0000004f7b22"], ids=["nothing", "a byte", "length", "a part"])
def test_a_trainer_that_stops_in_its_identity_is_ended(sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_module, "START_SECONDS", 0.5)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # stands for the node
    node = running_process(child.pid)
    assert node is not None
    path = socket_of(node)
    trainer = subprocess.Popen(  # a fixed command, no shell
        [sys.executable, "-c", STOPS, str(path), sent], stdout=subprocess.PIPE
    )
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"ready\n"
        assert Caller(node, {})._reach() is None
        assert trainer.wait(timeout=60) != 0
    finally:
        for started in (trainer, child):
            started.kill()
            started.wait()
        Path(path).unlink(missing_ok=True)
