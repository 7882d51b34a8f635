"""Lines of a log have a time and no colours, whichever process of a program writes them, up to the last."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from support.federation import ROOT
from support.logs import without_time

from client.supervision import end_processes
from common.log_lines import MAX_LINE, timed
from server.flower.processes import Processes

LOGGED = [sys.executable, "-P", "-m", "common.log_lines"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


NOW = "2026-11-27T16:56:22.250Z"

LINES = {
    "colours": ("\x1b[92mINFO \x1b[0m:      hello", f"{NOW} INFO :      hello"),
    "a title": ("\x1b]0;a title\x07named", f"{NOW} named"),
    "half a sequence": ("half\x1b", f"{NOW} half"),
    "control characters": ("a\tb\x08\x00\r", f"{NOW} a\tb"),
    "controls of eight bits": ("a\x9b31mb\x9d0;title\x9cc\x85d", f"{NOW} abcd"),
    "a title with signs": ("\x1b]0;§ 5 größer\x07named", f"{NOW} named"),
    "umlauts": ("größer", f"{NOW} größer"),
    "nothing": ("", NOW),
    "its own time": ("2025-01-02T03:04:05.678Z INFO up", "2025-01-02T03:04:05.678Z INFO up"),
    "its own offset": ("2025-01-02T03:04:05+00:00 up", "2025-01-02T03:04:05+00:00 up"),
    "a time of no zone": ("2025-01-02T03:04:05 up", f"{NOW} 2025-01-02T03:04:05 up"),
}


@pytest.mark.parametrize("case", LINES)
def test_a_line_is_plain_and_has_one_time(case: str) -> None:
    line, expected = LINES[case]
    assert timed(line.encode(), 1_795_798_582.25).decode() == expected


def test_bytes_that_are_no_text_stay() -> None:
    assert timed(b"\xff", 0.0) == b"1970-01-01T00:00:00.000Z \xff"


def test_lines_of_all_processes_arrive_and_the_last_one_too(tmp_path: Path) -> None:
    """The program's group is sent SIGTERM, as systemd and a terminal do, and it says a last word."""
    script = r"""
        trap 'printf "\033[91mlast word"; exit 3' TERM
        printf '\033[92mINFO \033[0m: first\n\n'
        (sh -c 'echo of a child of a child >&2')
        echo ready >ready
        while :; do sleep 0.1; done
    """
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen(
            [*LOGGED, "sh", "-c", textwrap.dedent(script)],
            env=ENVIRONMENT, cwd=tmp_path, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
    (copying,) = wait_for_children(process.pid, tmp_path / "ready")
    os.killpg(process.pid, signal.SIGTERM)
    copying.send_signal(signal.SIGTERM)
    assert process.wait(20) == 3
    psutil.wait_procs([copying], timeout=20)
    lines = (tmp_path / "out").read_text().splitlines()
    assert [line.partition(" ")[2] for line in lines] == ["INFO : first", "", "last word"]
    assert "Z of a child of a child\n" in (tmp_path / "err").read_text()
    assert without_time(lines) == []


def wait_for_children(pid: int, ready: Path) -> list[psutil.Process]:
    """Return the processes that copy lines for a program, once it is ready."""
    end = time.monotonic() + 20
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.02)
    children = psutil.Process(pid).children()
    return [child for child in children if "--copy" in child.cmdline()]


def test_a_program_in_a_program_adds_no_second_process_and_no_second_time(tmp_path: Path) -> None:
    count = "import psutil; print(sum('--copy' in ' '.join(p.cmdline()) for p in psutil.Process().children()))"
    command = [*LOGGED, *LOGGED, sys.executable, "-c", count]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split()[1:] == ["1"]
    assert without_time(done.stdout.splitlines()) == []


def test_a_terminal_is_left_alone() -> None:
    leader, follower = pty.openpty()
    command = [*LOGGED, "printf", r"\033[92mINFO\033[0m"]
    subprocess.run(command, env=ENVIRONMENT, stdout=follower, stderr=follower, check=True)
    assert os.read(leader, 100) == b"\x1b[92mINFO\x1b[0m"
    os.close(leader)
    os.close(follower)


def test_a_line_without_an_end_is_cut_and_a_full_disk_stops_no_program() -> None:
    code = f"print('x' * {MAX_LINE + 100}); print('end')"
    done = subprocess.run([*LOGGED, sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, check=True)
    lines = done.stdout.decode().splitlines()
    assert without_time(lines) == []
    assert "".join([line.partition(" ")[2] for line in lines]) == "x" * (MAX_LINE + 100) + "end"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*LOGGED, sys.executable, "-c", code], env=ENVIRONMENT, stdout=full, check=False)
    assert done.returncode == 0


def test_a_program_that_is_not_there_is_named() -> None:
    done = subprocess.run([*LOGGED, "no-such-program"], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no-such-program: No such file or directory" in done.stderr


def test_a_node_that_ends_ends_all_but_what_copies_its_last_words() -> None:
    stays, goes = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    try:
        end_processes(spared=stays.pid)
        assert goes.poll() is not None
        assert stays.poll() is None
    finally:
        stays.kill()
        stays.wait()


def test_a_child_that_ended_has_its_whole_log(tmp_path: Path) -> None:
    with Processes(tmp_path / "cwd", tmp_path) as processes:
        child = processes.start("one", ["sh", "-c", r"printf '\033[91mERROR\033[0m last'"], os.environ)
        child.process.wait(20)
        assert child.tail().endswith("Z ERROR last")
