"""The message of a failed run's error, out of all that Flower prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import EngineError
from server.flower.submit import LOST, MAX_LINES, cause_of, entry_of, how_it_ended

TRACE = """\
Traceback (most recent call last):
  File "rounds.py", line 147, in run
common.errors.EngineError: only 0 of 2 clients registered within 400 s; missing: a-0, b-0
  a-0: it runs code 1234, the server 5678: install the same Goldfinch on both
  b-0: it runs code 1234, the server 5678: install the same Goldfinch on both
ERROR :     Exit Code: 700
For more information, visit: the documentation
"""


def test_an_error_keeps_the_lines_that_belong_to_it(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    log.write_text(TRACE)
    found = cause_of(log).splitlines()
    assert found[0] == "only 0 of 2 clients registered within 400 s; missing: a-0, b-0"
    assert [line.split(":")[0].strip() for line in found[1:]] == ["a-0", "b-0"]


def test_an_error_inside_a_message_is_not_taken_for_the_message(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    log.write_text("common.errors.EngineError: only 0 of 4 clients registered\n  node 9: ConfigError: no client x\n")
    assert cause_of(log) == "only 0 of 4 clients registered\n  node 9: ConfigError: no client x"


def test_a_message_of_a_thousand_clients_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    log.write_text("common.errors.EngineError: none registered\n" + "  x: away\n" * 1000)
    assert len(cause_of(log).splitlines()) == 1 + MAX_LINES


@pytest.mark.parametrize("text", ["", "all is well\n"], ids=["empty", "no error"])
def test_what_holds_no_error_has_no_cause(tmp_path: Path, text: str) -> None:
    log = tmp_path / "flower.log"
    log.write_text(text)
    assert cause_of(log) == ""
    assert cause_of(tmp_path / "nowhere.log") == ""


def test_ray_that_did_not_start_in_time_is_told_with_remedies(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    late = "Exception: The current node timed out during startup. This could happen because some of the raylet failed\n"
    crashed = "RuntimeError: Simulation Runtime crashed.\n"
    log.write_text(late + crashed)
    found = cause_of(log)
    assert "Ray did not start" in found
    assert "engine=inline" in found
    log.write_text(late + TRACE)
    assert cause_of(log).startswith("only 0 of 2 clients registered"), "Goldfinch's own error tells more"
    log.write_text(crashed)
    assert cause_of(log) == crashed.strip()


def test_other_programs_errors_are_one_line(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    log.write_text("ValueError: no such thing\nbye\n")
    assert cause_of(log) == "ValueError: no such thing"


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

SOCKET = "OSError: validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /long/plasma_store"


def test_the_first_error_is_the_cause_and_not_what_wraps_it(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    log.write_text(WRAPPED)
    assert cause_of(log) == SOCKET
    assert SOCKET in how_it_ended("finished:failed", "Simulation Runtime crashed.", log)


def test_an_error_of_an_earlier_run_in_the_folder_is_not_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    log.write_text(TRACE + "ValueError: long ago\n")
    start = log.stat().st_size
    with log.open("a") as stream:
        stream.write(WRAPPED)
    assert cause_of(log, start) == SOCKET
    assert SOCKET in how_it_ended("finished:failed", "", log, start)


@pytest.mark.parametrize(
    "line",
    [
        "(ClientAppActor pid=2461) ValueError: no such thing",
        "(raylet, ip=10.0.0.1) ray.exceptions.RayActorError: The actor died",
        "ERROR :     flwr.common.exceptions.AppExitException: it is over",
    ],
    ids=["actor", "raylet", "Flower"],
)
def test_an_error_behind_the_name_of_a_process_is_found(line: str, tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    log.write_text(f"{line}\nRuntimeError: Simulation Runtime crashed.\n")
    assert line.endswith(cause_of(log))
    assert cause_of(log)


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
    assert stopped == "the run was stopped, as flwr stop does; the last complete round is kept: resume=true goes on"
    assert LOST in how_it_ended("finished:failed", details, log)
