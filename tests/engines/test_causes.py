"""The message of a failed run's error, out of all that Flower prints."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.errors import EngineError
from server.flower import submit
from server.flower.processes import NOT_REACHED
from server.flower.submit import LOST, MAX_LINES, cause_of, entry_of, how_it_ended

REGISTERED = """\
only 0 of 2 clients registered within 400 s; missing: a-0, b-0
  a-0: it runs code 1234, the server 5678: install the same Goldfinch on both
  b-0: it runs code 1234, the server 5678: install the same Goldfinch on both"""
TRACE = f"""\
Traceback (most recent call last):
  File "rounds.py", line 147, in run
common.errors.EngineError: {REGISTERED}
ERROR :     Exit Code: 700
For more information, visit: the documentation
"""


WRAPPED = """\
\x1b[92mINFO \x1b[0m:      Starting logstream for run_id `14004949408560021492`
\x1b[91mERROR \x1b[0m:     An exception occured!! validate_socket_filename failed: AF_UNIX path length cannot exceed 107
\x1b[91mERROR \x1b[0m:     Traceback (most recent call last):
  File "ray/_private/utils.py", line 1715, in validate_socket_filepath
    raise OSError(
OSError: validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /long/plasma_store

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "flwr/server/superlink/fleet/vce/vce_api.py", line 267, in run_api
    raise RuntimeError("Simulation Runtime crashed.") from ex
RuntimeError: Simulation Runtime crashed.

RuntimeError: An error was encountered. Ending simulation.
\x1b[91mERROR \x1b[0m:     Exit Code: 700
"""
"""What Flower 1.41 printed with a ``RAY_TMPDIR`` of 120 letters, shortened."""

ACTOR_DIED = "ray.exceptions.RayActorError: The actor died"
EXIT = "flwr.common.exceptions.AppExitException: it is over"
SOCKET = "OSError: validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /long/plasma_store"
LATE = "Exception: The current node timed out during startup. This could happen because some of the raylet failed\n"
CRASHED = "RuntimeError: Simulation Runtime crashed.\n"
NONE_REGISTERED = "common.errors.EngineError: none registered\n"

CAUSES = {
    "the lines that belong to an error": (TRACE, REGISTERED),
    "an error inside a message": (
        NONE_REGISTERED + "  node 9: ConfigError: x\n",
        "none registered\n  node 9: ConfigError: x",
    ),
    "a thousand clients": (NONE_REGISTERED + "  x: away\n" * 1000, "none registered" + "\n  x: away" * MAX_LINES),
    "an empty log": ("", ""),
    "no error": ("all is well\n", ""),
    "another program's": ("ValueError: no such thing\nbye\n", "ValueError: no such thing"),
    "the first, not what wraps it": (WRAPPED, SOCKET),
    "Goldfinch's own, not that Ray did not start": (LATE + TRACE, REGISTERED),
    "only that it crashed": (CRASHED, CRASHED.strip()),
    "an actor's": ("(ClientAppActor pid=2461) ValueError: no such thing\n" + CRASHED, "ValueError: no such thing"),
    "a raylet's": (f"(raylet, ip=10.0.0.1) {ACTOR_DIED}\n" + CRASHED, ACTOR_DIED),
    "Flower's": (f"ERROR :     {EXIT}\n" + CRASHED, EXIT),
}
"""What a log holds, and the cause that is told."""


@pytest.mark.parametrize("case", CAUSES)
def test_the_cause_in_a_log(case: str, tmp_path: Path) -> None:
    text, expected = CAUSES[case]
    log = tmp_path / "flower.log"
    log.write_text(text)
    assert cause_of(log) == expected


def test_ray_that_did_not_start_in_time_is_told_with_remedies(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    log.write_text(LATE + CRASHED)
    found = cause_of(log)
    assert "Ray did not start" in found
    assert "engine=inline" in found


def test_an_error_of_an_earlier_run_in_the_folder_is_not_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    assert cause_of(log) == ""
    log.write_text(TRACE + "ValueError: long ago\n")
    start = log.stat().st_size
    with log.open("a") as stream:
        stream.write(WRAPPED)
    assert cause_of(log, start) == SOCKET
    assert SOCKET in how_it_ended("finished:failed", "Simulation Runtime crashed.", log, start)


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ('{"success": false, "error-message": "no such run"}', "no such run"),
        ('{"success": true, "runs": []}', '"runs": \\[\\]'),
        ("gone", "without JSON"),
    ],
)
def test_a_list_of_runs_without_the_run_is_an_error_with_a_message(printed: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        entry_of(printed)


def test_the_entry_of_the_run_is_found_behind_notices() -> None:
    assert entry_of('A notice.\n{"success": true, "runs": [{"status": "running"}]}') == {"status": "running"}


@pytest.mark.parametrize("details", ["", "N/A", "Task failed with unknown error."])
def test_a_run_that_was_stopped_or_killed_says_so(details: str, tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    stopped = how_it_ended("finished:stopped", details, log)
    assert stopped == "the run was stopped, as flwr stop does; complete rounds are kept: resume=true goes on"
    assert LOST in how_it_ended("finished:failed", details, log)


def test_a_slow_link_a_link_that_fails_and_a_refusal_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"success": False, "error-message": f"{NOT_REACHED}. Please check your network connection"}
    clock = [100.0]
    took = 31.0

    def call(*_: object) -> str:
        clock[0] += took
        return json.dumps(said)

    monkeypatch.setattr(submit, "_call", call)
    monkeypatch.setattr(submit, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def submitted() -> None:
        submit.start_run(tmp_path / "app", "{}", None, {}, tmp_path, {})

    with pytest.raises(EngineError, match=r"slow.* took longer than Flower's 30 s.* flwr list shows whether it took"):
        submitted()
    took = 2.0
    with pytest.raises(EngineError, match=r"was not reached, after 2 s: is it running, .*submit the run again"):
        submitted()
    said["error-message"] = "the FAB is too large"
    with pytest.raises(EngineError, match="flwr run was refused: the FAB is too large"):
        submitted()
