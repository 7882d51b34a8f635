"""Life and death of a resident trainer's process, and who may speak to it. None of these trains."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support.trainers import Asked, gone, identity_of, wait_for

from client import app as client_app
from client.reasons import REASONS
from client.resident import messages
from client.resident.caller import Caller
from client.resident.place import peer, remove_files, remove_left_overs, socket_of
from common.errors import PayloadError
from common.wire import payload

pytestmark = pytest.mark.processes


def started_by(caller: Caller) -> int:
    with caller._connection() as connection:
        return peer(connection)[0]


def test_it_is_started_once_and_again_when_it_died(asked: Asked) -> None:
    assert asked.trainer() is None
    first = asked.start()
    assert asked.start() == first
    asked.kill(first)
    assert asked.caller.path.exists(), "a killed process leaves its socket behind"
    assert asked.start() != first


def test_it_ends_with_its_node(asked: Asked) -> None:
    pid = asked.start()
    assert asked.caller.path.with_suffix(".lock").exists()
    asked.supernode.kill()  # not waited for: the node is a zombie until its parent waits for it
    wait_for(lambda: gone(pid))
    assert not list(asked.caller.path.parent.glob(f"{asked.supernode.pid}-*")), "neither socket nor lock"


def test_a_signal_to_the_node_s_group_ends_it_cleanly(asked: Asked) -> None:
    pid = asked.start()
    assert os.getpgid(pid) == os.getpgid(os.getpid()), "it is stopped with all that the node started"
    os.kill(pid, 15)
    wait_for(lambda: gone(pid))
    assert not asked.caller.path.exists()


def test_it_ends_without_questions(asked: Asked) -> None:
    caller = Caller(asked.caller.node, asked.configuration, idle_seconds=0.5)
    pid = started_by(caller)
    wait_for(lambda: gone(pid))
    assert not asked.caller.path.exists()
    assert started_by(caller) != pid


def test_another_configuration_is_replaced(asked: Asked) -> None:
    first = asked.start()
    other = Caller(asked.caller.node, {**asked.configuration, "index": 0})
    second = started_by(other)
    assert second != first
    wait_for(lambda: gone(first))
    assert started_by(other) == second


def test_two_nodes_have_two_trainers(asked: Asked, tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "3600"])
    try:
        assert Asked(other, tmp_path).start() != asked.start()
        assert asked.trainer() is not None
    finally:
        other.kill()
        other.wait()


# ---- who may speak to it ---------------------------------------------------------------------------------------------


def test_only_its_owner_can_reach_it(asked: Asked) -> None:
    asked.start()
    path = asked.caller.path
    for found, mode in ((path.parent, 0o700), (path, 0o600)):
        assert stat.S_IMODE(found.stat().st_mode) == mode
        assert found.stat().st_uid == os.getuid()
    if os.getuid() != 0:
        pytest.skip("only root can try as another user")
    path.chmod(0o777)  # even where the file system does not protect it: the trainer asks the kernel who it is
    for folder in path.parents:
        if folder == Path(tempfile.gettempdir()):
            break
        folder.chmod(0o777)
    code = f"import os, socket; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect({str(path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(s.recv(1))"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "b''", "it hangs up without a word"


@pytest.mark.parametrize("wrong", ["open to others", "a link", "a file", "too long"])
def test_a_folder_that_is_not_private_is_not_used(
    wrong: str, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / ("x" * 100 if wrong == "too long" else "base")
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    monkeypatch.setattr("tempfile.tempdir", str(base))
    folder = base / f"goldfinch-{os.getuid()}"
    if wrong == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    elif wrong == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o755)
    assert socket_of(identity_of(asked.supernode.pid)).parent.parent == Path("/tmp")


def test_what_dead_nodes_left_is_removed(asked: Asked) -> None:
    folder = asked.caller.path.parent
    dead, other = folder / "1-999999999.sock", folder / "notes.txt"
    for path in (dead, other, asked.caller.path):
        path.touch()
    remove_left_overs(folder)
    assert (dead.exists(), other.exists(), asked.caller.path.exists()) == (False, True, True)
    asked.caller.path.with_suffix(".lock").touch()
    remove_files(asked.caller.node)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def length(size: int) -> bytes:
    """The four bytes with which a connection announces a byte string of this size."""
    return struct.pack("!i", size)


SPOILT: dict[str, tuple[list[bytes], str]] = {
    "another protocol": ([b"HTTP"], "the limit is"),
    "a header too large": ([length(messages.MAX_HEADER_BYTES + 1)], "the limit is"),
    "tensors too large": (
        [b'{"sizes":[1,%d]}' % messages.MAX_TENSOR_BYTES],
        "the limit is",
    ),
    "no JSON": ([b"{{"], "not JSON"),
    "no UTF-8": ([b"\xff{}"], "not JSON"),
    "no object": ([b"[]"], "not a JSON object"),
    "no question": ([b"{}"], "lengths of its tensors"),
    "an unknown field": ([b'{"sizes":[],"x":1}'], "cannot be read"),
    "a tensor too short": ([b'{"sizes":[9]}', b"x"], "9 bytes and sends 1"),
    "a tensor too long": ([b'{"sizes":[1]}', b"12345"], "the limit is 1 bytes"),
}
RAW = ("another protocol", "a header too large")
"""What is sent without a length before it."""


def test_what_is_no_question_is_refused(asked: Asked) -> None:
    pid = asked.start()
    for case, (parts, reason) in SPOILT.items():
        with asked.caller._connection() as connection:
            write(connection, case, parts)
            reply = messages.receive(connection, messages.TrainerReply)
        assert not reply.ok, case
        assert reply.text == REASONS[PayloadError], case  # what cannot be read may be a private run's
        left, right = Pipe()
        with left, right:
            write(left, case, parts)
            with pytest.raises(PayloadError) as caught:
                messages.receive(right, messages.Question)
        assert reason in str(caught.value), case
    assert asked.start() == pid


def write(connection: Connection, case: str, parts: list[bytes]) -> None:
    """Write the parts of a case of :data:`SPOILT`."""
    for part in parts:
        os.write(connection.fileno(), part if case in RAW else length(len(part)) + part)


def test_a_connection_that_ends_within_a_message_is_a_connection_error() -> None:
    left, right = Pipe()
    with left:
        with right:
            os.write(right.fileno(), length(100) + b"{")
        with pytest.raises(ConnectionError):
            messages.receive(left, messages.TrainerReply)


def test_the_limits_are_the_wire_s() -> None:
    assert messages.MAX_TENSOR_BYTES == payload.MAX_BYTES
    assert client_app.TENSOR_TYPE == payload.TENSOR_TYPE
    left, right = Pipe()
    with left, right, pytest.raises(PayloadError, match="the limit is"):
        messages.send_header(left, {"text": "x" * messages.MAX_HEADER_BYTES})
